//! Offers MIG devices where no policy does, by the three strategies of NVIDIA's device plugin and under
//! its resource names.
//!
//! One deliberate difference: if the strategy cannot be applied to the node, running pods keep their
//! devices and a message names the GPUs that conflict. A GPU in MIG mode without instances offers
//! nothing and does not affect other GPUs.

use crate::hardware::gpu::Part;
use crate::ids::names::{GpuId, PartId, Resource};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

/// `MIG_STRATEGY`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MigStrategy {
    /// MIG is ignored: every GPU is one device, in MIG mode or not.
    #[default]
    None,
    /// Every instance is a device of the resource of whole GPUs. All must have one profile and no GPU
    /// may be outside of MIG mode, so that the resource names one kind of device.
    Single,
    /// Every instance is a device of its profile's own resource; GPUs outside of MIG mode are whole.
    Mixed,
}

impl MigStrategy {
    /// The keyword in configurations.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Single => "single",
            Self::Mixed => "mixed",
        }
    }

    /// The strategy with this keyword.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        [Self::None, Self::Single, Self::Mixed].into_iter().find(|s| s.as_str() == text)
    }
}

impl fmt::Display for MigStrategy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

/// The resource of a profile as NVIDIA's device plugin spells it: a resource name allows no `+`, so
/// `1g.10gb+me` becomes `nvidia.com/mig-1g.10gb.me`, while `1g.10gb-me` is unchanged. `None` for a
/// profile without a resource there: compute instances on a part of a GPU instance (`1c.3g.40gb`).
#[must_use]
pub fn resource_of_profile(profile: &str) -> Option<Resource> {
    let slices = profile.split('.').next().unwrap_or_default();
    let whole = slices.strip_suffix('g').is_some_and(|n| n.bytes().all(|b| b.is_ascii_digit()));
    let name = format!("nvidia.com/mig-{}", profile.replace('+', "."));
    whole.then(|| Resource::parse(&name).ok()).flatten()
}

/// Messages about a plan, for operators.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PlanMessages {
    /// Why nothing new is offered, and how to fix it.
    pub refusal: Option<String>,
    /// Warnings, one sentence each.
    pub notes: Vec<String>,
}

/// The resource that each part is offered under.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    resources: BTreeMap<PartId, Resource>,
    /// Messages for operators.
    pub messages: PlanMessages,
}

impl Plan {
    /// The resource of which this part is one device; `None` if it is not offered.
    #[must_use]
    pub fn resource(&self, part: &PartId) -> Option<&Resource> {
        self.resources.get(part)
    }

    /// The number of devices of each resource.
    #[must_use]
    pub fn counts(&self) -> BTreeMap<&Resource, usize> {
        let mut counts = BTreeMap::new();
        for resource in self.resources.values() {
            *counts.entry(resource).or_default() += 1;
        }
        counts
    }
}

/// Whether a part may be offered. With `none` any may; otherwise GPUs in MIG mode offer only their
/// instances.
#[must_use]
pub fn may_offer(strategy: MigStrategy, part: &Part) -> bool {
    strategy == MigStrategy::None || !part.mig_enabled
}

/// With `single`, the resources under which several kinds of parts are offered, each with the reason why
/// it is withheld: MIG instances of several profiles, or instances and GPUs outside of MIG mode. Such a
/// name would be ambiguous to pods, whichever policy offers it.
#[must_use]
pub fn ambiguous_names<'a>(
    strategy: MigStrategy,
    offered: impl IntoIterator<Item = (&'a Part, &'a Resource)>,
) -> BTreeMap<Resource, String> {
    if strategy != MigStrategy::Single {
        return BTreeMap::new();
    }
    let mut names: BTreeMap<&Resource, Kinds<'_>> = BTreeMap::new();
    for (part, resource) in offered {
        names.entry(resource).or_default().add(part);
    }
    let ambiguous = names.into_iter().filter(|(_, kinds)| kinds.are_several());
    let describe = |(resource, kinds): (&Resource, Kinds<'_>)| {
        let refusal = format!(
            "migStrategy single: {resource} would name several kinds of devices ({kinds}): rename the shares, give all \
             GPUs the same MIG layout, or set migStrategy to mixed. Until then no further {resource} devices are \
             offered; running pods keep theirs"
        );
        (resource.clone(), refusal)
    };
    ambiguous.map(describe).collect()
}

/// Plans the offers of the parts that are present. The baseline offers only parts that are `open`, that
/// is, not offered by a policy; `whole` is the resource of whole GPUs.
#[must_use]
pub fn plan<'a>(
    strategy: MigStrategy,
    whole: &Resource,
    parts: impl IntoIterator<Item = &'a Part>,
    open: impl Fn(&PartId) -> bool,
) -> Plan {
    let (mut gpus, mut instances): (Vec<_>, Vec<_>) = parts.into_iter().partition(|part| part.is_whole_gpu());
    gpus.retain(|gpu| open(&gpu.id));
    gpus.sort_by_key(|gpu| gpu.gpu_index);
    instances.sort_by(|a, b| a.gpu.cmp(&b.gpu));
    if strategy == MigStrategy::None {
        // A policy that offers an instance takes the decision for its GPU.
        let not_open = instances.iter().filter(|instance| !open(&instance.id));
        let decided: BTreeSet<&GpuId> = not_open.map(|instance| &instance.gpu).collect();
        return plan_whole_gpus(whole, gpus.into_iter().filter(|gpu| !decided.contains(&gpu.gpu)));
    }
    let mut plan = Plan::default();
    let split: BTreeSet<&GpuId> = instances.iter().map(|instance| &instance.gpu).collect();
    for gpu in gpus.iter().filter(|gpu| gpu.mig_enabled && !split.contains(&gpu.gpu)) {
        plan.messages.notes.push(format!(
            "{} is in MIG mode and has no instance, so it offers nothing: create instances (nvidia-smi mig -cgi \
             PROFILE -C), or disable its MIG mode",
            gpu_name(gpu)
        ));
    }
    gpus.retain(|gpu| !gpu.mig_enabled);
    instances.retain(|instance| open(&instance.id));
    let mut kinds = Kinds::default();
    gpus.iter().chain(&instances).for_each(|part| kinds.add(part));
    if strategy == MigStrategy::Single && kinds.are_several() {
        plan.messages.refusal = Some(format!(
            "migStrategy single lists every MIG instance as {whole}, so all GPUs must be in MIG mode with \
             instances of one profile, but this node has {kinds}: give them the same layout, or set migStrategy \
             to mixed. Until then nothing new is offered; running pods keep their devices"
        ));
        return plan;
    }
    plan.resources = gpus.iter().map(|gpu| (gpu.id.clone(), whole.clone())).collect();
    for instance in instances {
        let profile = profile_of(instance);
        let single = (strategy == MigStrategy::Single).then(|| whole.clone());
        match single.or_else(|| resource_of_profile(profile)) {
            Some(resource) => drop(plan.resources.insert(instance.id.clone(), resource)),
            None => plan.messages.notes.push(format!(
                "{} of GPU {} is not offered: there is no resource name for its profile {profile:?}",
                instance.id, instance.gpu_index
            )),
        }
    }
    plan
}

fn plan_whole_gpus<'a>(whole: &Resource, gpus: impl Iterator<Item = &'a Part>) -> Plan {
    let mut plan = Plan::default();
    for gpu in gpus {
        plan.resources.insert(gpu.id.clone(), whole.clone());
        if gpu.mig_enabled {
            plan.messages.notes.push(format!(
                "{} is in MIG mode and offered as one whole GPU; migStrategy single or mixed offers its instances",
                gpu_name(gpu)
            ));
        }
    }
    plan
}

/// The kinds of parts that one resource names, each with its GPU indices.
#[derive(Default)]
struct Kinds<'a> {
    profiles: BTreeMap<&'a str, BTreeSet<u32>>,
    outside: BTreeSet<u32>,
}

impl<'a> Kinds<'a> {
    fn add(&mut self, part: &'a Part) {
        let gpus = match part.is_whole_gpu() {
            true => &mut self.outside,
            false => self.profiles.entry(profile_of(part)).or_default(),
        };
        gpus.insert(part.gpu_index);
    }

    fn are_several(&self) -> bool {
        self.profiles.len() + usize::from(!self.outside.is_empty()) > 1
    }
}

impl fmt::Display for Kinds<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let profiles = self.profiles.iter().map(|(profile, gpus)| format!("{profile} on {}", indices(gpus)));
        let outside =
            (!self.outside.is_empty()).then(|| format!("no MIG mode on {}", indices(&self.outside)));
        f.write_str(&profiles.chain(outside).collect::<Vec<_>>().join(", "))
    }
}

fn profile_of(instance: &Part) -> &str {
    instance.mig.as_ref().map_or("", |mig| mig.profile.as_str())
}

fn gpu_name(gpu: &Part) -> String {
    format!("GPU {} ({})", gpu.gpu_index, gpu.id)
}

fn indices(gpus: &BTreeSet<u32>) -> String {
    let indices: Vec<String> = gpus.iter().map(u32::to_string).collect();
    format!("GPU {}", indices.join(", "))
}

#[cfg(test)]
mod tests;
