//! The labels of MIG, by its strategy.

use super::{Facts, GPU, Sharing, present, product, sharing};
use berth_kernel::gpu::Part;
use berth_kernel::ledger::Ledger;
use berth_kernel::mig::MigStrategy;
use berth_kernel::part_state::PartState;
use std::collections::BTreeMap;

/// The attributes of an instance that are labels, behind `mig.`.
const ATTRIBUTES: [&str; 8] = [
    "multiprocessors",
    "slices.gi",
    "slices.ci",
    "engines.copy",
    "engines.decoder",
    "engines.encoder",
    "engines.jpeg",
    "engines.ofa",
];

/// The resource of instances of this profile: `nvidia.com/mig-1g.10gb`.
pub(super) fn resource(profile: &str) -> String {
    format!("nvidia.com/mig-{}", name(profile))
}

/// `1g.10gb.me` of `1g.10gb+me`.
fn name(profile: &str) -> String {
    profile.replace('+', ".")
}

/// `main` is the GPU that stands for all.
pub(super) fn tell(
    ledger: &Ledger,
    gpus: &[&PartState],
    main: &PartState,
    facts: &Facts,
    put: &mut impl FnMut(&str, String),
) {
    let mut instances: Vec<&PartState> = present(ledger).filter(|p| p.part.mig.is_some()).collect();
    instances.sort_by_key(|p| (p.part.gpu_index, p.part.mig_index()));
    // A policy may offer instances by their profiles whatever the strategy.
    let named = |p: &&PartState| p.lines.iter().any(|l| l.resource.as_str().starts_with("nvidia.com/mig-"));
    match facts.mig {
        MigStrategy::Single => {
            put("nvidia.com/mig.strategy", "single".into());
            single(gpus, &instances, main, facts, put);
        }
        MigStrategy::None if !instances.iter().any(named) => {}
        MigStrategy::None | MigStrategy::Mixed => {
            put("nvidia.com/mig.strategy", "mixed".into());
            let mut profiles: BTreeMap<String, Vec<&PartState>> = BTreeMap::new();
            for instance in instances {
                if let Some(mig) = &instance.part.mig {
                    profiles.entry(mig.profile.clone()).or_default().push(instance);
                }
            }
            for (profile, alike) in profiles {
                told_as(&resource(&profile), &profile, &alike, gpus, facts, put);
            }
        }
    }
}

/// All instances are one resource, called as whole GPUs are; a node that breaks that rule is told so.
fn single(
    gpus: &[&PartState],
    instances: &[&PartState],
    main: &PartState,
    facts: &Facts,
    put: &mut impl FnMut(&str, String),
) {
    if gpus.iter().all(|gpu| !gpu.part.mig_enabled) {
        return;
    }
    let full = |gpu: &&PartState| {
        gpu.part.mig_enabled && instances.iter().any(|i| i.part.parent.as_ref() == Some(&gpu.part.id))
    };
    let profile = |p: &PartState| p.part.mig.as_ref().map(|mig| mig.profile.clone());
    let first = instances.first().and_then(|p| profile(p));
    let one = first.filter(|first| {
        gpus.iter().all(full) && instances.iter().all(|p| profile(p).as_ref() == Some(first))
    });
    if let Some(profile) = one {
        return told_as(GPU, &profile, instances, gpus, facts, put);
    }
    let not_shared = Sharing { replicas: 0, strategy: "", marked: false };
    put("nvidia.com/gpu.product", product(&[&main.part.model, "MIG INVALID"], &not_shared));
    for (suffix, value) in [("count", "0"), ("replicas", "0"), ("sharing-strategy", ""), ("memory", "0")] {
        put(&format!("{GPU}.{suffix}"), value.into());
    }
}

/// Instances of one profile under this resource.
fn told_as(
    resource: &str,
    profile: &str,
    alike: &[&PartState],
    gpus: &[&PartState],
    facts: &Facts,
    put: &mut impl FnMut(&str, String),
) {
    let Some(first) = alike.first() else { return };
    let shared = alike.iter().map(|p| sharing(p, facts)).max_by_key(|sharing| sharing.replicas);
    let mut sharing = shared.unwrap_or(Sharing { replicas: 1, strategy: "none", marked: false });
    sharing.marked |= sharing.replicas > 1
        && alike.iter().flat_map(|p| &p.lines).any(|l| l.count > 1 && l.resource.as_str() == resource);
    let mut tell = |suffix: &str, value: String| put(&format!("{resource}.{suffix}"), value);
    tell("product", product(&[model(&first.part, gpus), "MIG", &name(profile)], &sharing));
    tell("count", alike.len().to_string());
    tell("replicas", sharing.replicas.to_string());
    tell("sharing-strategy", sharing.strategy.into());
    tell("memory", first.part.memory_mib.to_string());
    for attribute in ATTRIBUTES {
        if let Some(value) = first.part.attributes.get(&format!("mig.{attribute}")) {
            tell(attribute, super::safe(value));
        }
    }
}

/// The model of the instance's GPU.
fn model<'p>(instance: &'p Part, gpus: &[&'p PartState]) -> &'p str {
    let gpu = gpus.iter().find(|gpu| Some(&gpu.part.id) == instance.parent.as_ref());
    let own = || instance.model.split(" MIG ").next().unwrap_or_default();
    gpu.map_or_else(own, |gpu| gpu.part.model.as_str())
}
