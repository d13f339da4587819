//! The labels of MIG, by its strategy.

use super::{Facts, GPU, Sharing, present, product, sharing};
use berth_kernel::gpu::Part;
use berth_kernel::ledger::Ledger;
use berth_kernel::mig::MigStrategy;
use berth_kernel::part_state::PartState;
use std::collections::BTreeMap;

/// The attributes of an instance that become labels; in the part's attributes they have the prefix `mig.`.
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

/// The resource name of instances of this profile: `nvidia.com/mig-1g.10gb`.
pub(super) fn resource(profile: &str) -> String {
    format!("nvidia.com/mig-{}", name(profile))
}

/// The profile as part of a resource name: `1g.10gb.me` for `1g.10gb+me`.
fn name(profile: &str) -> String {
    profile.replace('+', ".")
}

/// Adds the labels of MIG. `main` is the GPU whose model the labels describe.
pub(super) fn put_labels(
    ledger: &Ledger,
    gpus: &[&PartState],
    main: &PartState,
    facts: &Facts,
    put: &mut impl FnMut(&str, String),
) {
    let mut instances: Vec<&PartState> = present(ledger).filter(|p| p.part.mig.is_some()).collect();
    instances.sort_by_key(|p| (p.part.gpu_index, p.part.mig_index()));
    // A policy can offer instances by their profiles with every strategy.
    let by_profile =
        |p: &&PartState| p.lines.iter().any(|l| l.resource.as_str().starts_with("nvidia.com/mig-"));
    match facts.mig {
        MigStrategy::Single => {
            put("nvidia.com/mig.strategy", "single".into());
            single(gpus, &instances, main, facts, put);
        }
        MigStrategy::None if !instances.iter().any(by_profile) => {}
        MigStrategy::None | MigStrategy::Mixed => {
            put("nvidia.com/mig.strategy", "mixed".into());
            let mut profiles: BTreeMap<String, Vec<&PartState>> = BTreeMap::new();
            for instance in instances {
                if let Some(mig) = &instance.part.mig {
                    profiles.entry(mig.profile.clone()).or_default().push(instance);
                }
            }
            for (profile, instances) in profiles {
                put_instances(&resource(&profile), &profile, &instances, gpus, facts, put);
            }
        }
    }
}

/// The labels of strategy `single`: all instances are one resource with the name of whole GPUs. On a node that breaks
/// this rule the product label ends in `MIG-INVALID`.
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
    let has_instances = |gpu: &&PartState| {
        gpu.part.mig_enabled && instances.iter().any(|i| i.part.parent.as_ref() == Some(&gpu.part.id))
    };
    let profile = |p: &PartState| p.part.mig.as_ref().map(|mig| mig.profile.clone());
    let first = instances.first().and_then(|p| profile(p));
    let only_profile = first.filter(|first| {
        gpus.iter().all(has_instances) && instances.iter().all(|p| profile(p).as_ref() == Some(first))
    });
    if let Some(profile) = only_profile {
        return put_instances(GPU, &profile, instances, gpus, facts, put);
    }
    let not_shared = Sharing { replicas: 0, strategy: "", marked: false };
    put("nvidia.com/gpu.product", product(&[&main.part.model, "MIG INVALID"], &not_shared));
    for (suffix, value) in [("count", "0"), ("replicas", "0"), ("sharing-strategy", ""), ("memory", "0")] {
        put(&format!("{GPU}.{suffix}"), value.into());
    }
}

/// Adds the labels of the instances of one profile under this resource name.
fn put_instances(
    resource: &str,
    profile: &str,
    instances: &[&PartState],
    gpus: &[&PartState],
    facts: &Facts,
    put: &mut impl FnMut(&str, String),
) {
    let Some(first) = instances.first() else { return };
    let shared = instances.iter().map(|p| sharing(p, facts)).max_by_key(|sharing| sharing.replicas);
    let mut sharing = shared.unwrap_or(Sharing { replicas: 1, strategy: "none", marked: false });
    sharing.marked |= sharing.replicas > 1
        && instances.iter().flat_map(|p| &p.lines).any(|l| l.count > 1 && l.resource.as_str() == resource);
    let mut put_suffix = |suffix: &str, value: String| put(&format!("{resource}.{suffix}"), value);
    put_suffix("product", product(&[model(&first.part, gpus), "MIG", &name(profile)], &sharing));
    put_suffix("count", instances.len().to_string());
    put_suffix("replicas", sharing.replicas.to_string());
    put_suffix("sharing-strategy", sharing.strategy.into());
    put_suffix("memory", first.part.memory_mib.to_string());
    for attribute in ATTRIBUTES {
        if let Some(value) = first.part.attributes.get(&format!("mig.{attribute}")) {
            put_suffix(attribute, super::label_value(value));
        }
    }
}

/// The model of the instance's GPU.
fn model<'p>(instance: &'p Part, gpus: &[&'p PartState]) -> &'p str {
    let gpu = gpus.iter().find(|gpu| Some(&gpu.part.id) == instance.parent.as_ref());
    let own = || instance.model.split(" MIG ").next().unwrap_or_default();
    gpu.map_or_else(own, |gpu| gpu.part.model.as_str())
}
