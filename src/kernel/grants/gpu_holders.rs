//! Who holds a GPU, how much of its memory is granted, and what the processes of each pod use of it.

use crate::evidence::attribution::{Attribution, Attributions};
use crate::grants::allocation::Holder;
use crate::hardware::gpu::Part;
use crate::ids::names::{AllocationId, DeviceId, GpuId};
use crate::node::ledger::Ledger;
use crate::sharing::offer::Consumes;
use std::collections::{BTreeMap, BTreeSet};

/// A pod's namespace and name.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PodName {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub pod: String,
}

impl PodName {
    /// The pod of a holder; `None` until a source has shown its names.
    #[must_use]
    pub fn of(holder: &Holder) -> Option<Self> {
        Some(Self { namespace: holder.namespace.clone()?, pod: holder.pod.clone()? })
    }
}

/// The live allocations of one GPU, summed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GpuHolders {
    /// Memory that the held devices take, MiB; `None` if the memory of the GPU, or of a held instance of it, is
    /// unknown.
    pub memory_granted_mib: Option<u64>,
    /// The pods that are known to hold devices, those with most devices first, then those with most memory.
    pub pods: Vec<PodHolding>,
}

/// The devices that one pod holds on one GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodHolding {
    /// The pod.
    pub name: PodName,
    /// The number of its devices on the GPU and on its instances.
    pub devices: u32,
    /// Memory that they take, MiB; unknown memory counts as none.
    pub memory_mib: u64,
}

/// What the processes of one pod use of one GPU.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PodUse {
    /// Memory of its processes, MiB; `None` if that of one of them is unknown.
    pub memory_mib: Option<u64>,
    /// Ids of its processes.
    pub pids: BTreeSet<u32>,
}

/// The holders of each GPU.
#[must_use]
pub fn gpu_holders(ledger: &Ledger) -> BTreeMap<GpuId, GpuHolders> {
    let mut all: BTreeMap<GpuId, GpuHolders> = BTreeMap::new();
    for (gpu, memory_mib) in memory_granted(ledger) {
        all.entry(gpu).or_default().memory_granted_mib = memory_mib;
    }
    let mut devices: BTreeMap<(GpuId, PodName), BTreeSet<&DeviceId>> = BTreeMap::new();
    let mut memory: BTreeMap<(GpuId, PodName), u64> = BTreeMap::new();
    for (allocation, holder) in
        ledger.live.values().flat_map(|one| one.holders().map(move |holder| (one, holder)))
    {
        let Some(name) = PodName::of(&holder) else { continue };
        for id in &allocation.devices {
            let key = (ledger.gpu_id_of(&id.part), name.clone());
            // An overlapped allocation names devices of a newer one.
            if devices.entry(key.clone()).or_default().insert(id) {
                let taken = ledger.part(&id.part).and_then(|part| {
                    memory_of(&part.part, part.device(&allocation.resource, id.share)?.consumes)
                });
                *memory.entry(key).or_default() += taken.unwrap_or(0);
            }
        }
    }
    for ((gpu, name), held) in devices {
        let memory_mib = memory.get(&(gpu.clone(), name.clone())).copied().unwrap_or(0);
        let devices = u32::try_from(held.len()).unwrap_or(u32::MAX);
        all.entry(gpu).or_default().pods.push(PodHolding { name, devices, memory_mib });
    }
    for holders in all.values_mut() {
        // Stable: pods that hold as much stay in the order of their names.
        holders.pods.sort_by_key(|pod| std::cmp::Reverse((pod.devices, pod.memory_mib)));
    }
    all
}

/// The memory that held devices take of each GPU, MiB; `None` where it is unknown.
fn memory_granted(ledger: &Ledger) -> BTreeMap<GpuId, Option<u64>> {
    let mut all: BTreeMap<GpuId, Option<u64>> = BTreeMap::new();
    for part in ledger.parts.values() {
        let mut held = part.devices.values().filter(|device| device.held());
        let of_part = held
            .try_fold(0_u64, |sum, device| Some(sum.saturating_add(memory_of(&part.part, device.consumes)?)));
        let is_known = !part.part.is_whole_gpu() || part.part.memory_mib > 0;
        let of_part = of_part.filter(|_| is_known);
        let sum = all.entry(part.part.gpu.clone()).or_insert(Some(0));
        *sum = sum.zip(of_part).map(|(sum, of_part)| sum.saturating_add(of_part));
    }
    all
}

/// The memory that a device takes of its part, MiB; `None` if it is the whole part, whose memory is unknown.
fn memory_of(part: &Part, consumes: Consumes) -> Option<u64> {
    match consumes {
        Consumes::Whole => Some(part.memory_mib).filter(|memory_mib| *memory_mib > 0),
        Consumes::Slice { memory_mib, .. } => Some(memory_mib),
    }
}

/// What the processes of each pod use, by GPU. Processes whose pod is not known, and those of GPUs that do not list
/// theirs, are left out.
#[must_use]
pub fn pod_uses(ledger: &Ledger) -> BTreeMap<GpuId, BTreeMap<PodName, PodUse>> {
    let owners = Attributions::new(ledger);
    let mut all: BTreeMap<GpuId, BTreeMap<PodName, PodUse>> = BTreeMap::new();
    for gpu in ledger.processes.by_gpu.keys() {
        for (seen, attribution) in owners.on(gpu).into_iter().flatten() {
            let process = &seen.process;
            let of_pod = || {
                let uid = &process.identity.owner.pod()?.uid;
                PodName::of(&ledger.pod_by_uid(uid)?)
            };
            let Some(name) = of_pod().or_else(|| pod_of(ledger, attribution)) else { continue };
            let used = all
                .entry(gpu.clone())
                .or_default()
                .entry(name)
                .or_insert_with(|| PodUse { memory_mib: Some(0), pids: BTreeSet::new() });
            used.memory_mib = used
                .memory_mib
                .zip(process.memory_mib)
                .map(|(sum, memory_mib)| sum.saturating_add(memory_mib));
            used.pids.insert(process.pid);
        }
    }
    all
}

/// The one pod that holds the allocations of a process.
fn pod_of(ledger: &Ledger, attribution: &Attribution) -> Option<PodName> {
    let holder = |id: &AllocationId| PodName::of(&ledger.live.get(id)?.holder);
    let ids = match attribution {
        Attribution::To(id) => std::slice::from_ref(id),
        Attribution::OneOf(ids) => ids.as_slice(),
        Attribution::Possibly(_) | Attribution::Ignored | Attribution::Unexplained(_) => return None,
    };
    holder(ids.first()?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hardware::process::Owner;
    use crate::node::test_node::{Node, gpu_id, of_pod, part, process, shared};
    use std::sync::Arc;

    /// Grants a device to a pod whose names are known, and sets what the device takes.
    fn grant(node: &mut Node, on: &str, share: Option<u32>, pod: &str, consumes: Consumes) -> AllocationId {
        let id = node.grant(on, share, &format!("uid-{pod}"), "main");
        let state = Arc::make_mut(node.ledger.parts.get_mut(&part(on)).unwrap());
        state.devices.get_mut(&(shared(), share)).unwrap().consumes = consumes;
        let allocation = Arc::make_mut(Arc::make_mut(&mut node.ledger.live).get_mut(&id).unwrap());
        allocation.holder.namespace = Some("default".into());
        allocation.holder.pod = Some(pod.into());
        id
    }

    fn slice(memory_mib: u64) -> Consumes {
        Consumes::Slice { memory_mib, compute_percent: 10 }
    }

    fn name(pod: &str) -> PodName {
        PodName { namespace: "default".into(), pod: pod.into() }
    }

    #[test]
    fn the_pod_with_most_devices_comes_first_and_then_the_one_with_most_memory() {
        let mut node = Node::new();
        grant(&mut node, "GPU-0", Some(0), "b", slice(1_000));
        grant(&mut node, "GPU-0", Some(1), "a", slice(2_000));
        grant(&mut node, "GPU-0", Some(2), "c", slice(500));
        grant(&mut node, "GPU-0", Some(3), "c", slice(500));
        node.grant("GPU-0", Some(4), "not-known-yet", "main");
        let holders = &gpu_holders(&node.ledger)[&gpu_id("GPU-0")];
        let pods: Vec<_> =
            holders.pods.iter().map(|p| (p.name.pod.as_str(), p.devices, p.memory_mib)).collect();
        assert_eq!(pods, [("c", 2, 1_000), ("a", 1, 2_000), ("b", 1, 1_000)]);
        assert_eq!(holders.memory_granted_mib, Some(4_000), "an adopted share takes none");
    }

    #[test]
    fn a_gpu_has_the_memory_of_its_held_instances_and_a_device_counts_once() {
        let mut node = Node::new();
        assert_eq!(gpu_holders(&node.ledger)[&gpu_id("GPU-1")].memory_granted_mib, Some(0));
        grant(&mut node, "MIG-a", None, "a", Consumes::Whole);
        grant(&mut node, "MIG-a", None, "a", Consumes::Whole);
        let holders = &gpu_holders(&node.ledger)[&gpu_id("GPU-1")];
        assert_eq!(holders.memory_granted_mib, Some(10_240));
        assert_eq!((holders.pods[0].devices, holders.pods[0].memory_mib), (1, 10_240), "granted twice");
        let instance = Arc::make_mut(node.ledger.parts.get_mut(&part("MIG-a")).unwrap());
        instance.part.memory_mib = 0;
        assert_eq!(gpu_holders(&node.ledger)[&gpu_id("GPU-1")].memory_granted_mib, None);
    }

    #[test]
    fn processes_count_for_their_pods_and_unknown_memory_makes_the_sum_unknown() {
        let mut node = Node::new();
        grant(&mut node, "GPU-0", Some(0), "a", slice(0));
        grant(&mut node, "GPU-0", Some(1), "b", slice(0));
        let hidden = crate::hardware::process::Process {
            memory_mib: None,
            ..process(4, "GPU-0", of_pod("uid-b", "main"))
        };
        node.look(&[
            ("GPU-0", process(1, "GPU-0", of_pod("uid-a", "main"))),
            ("GPU-0", process(2, "GPU-0", of_pod("uid-a", "main"))),
            ("GPU-0", process(3, "GPU-0", of_pod("uid-b", "main"))),
            ("GPU-0", hidden),
            // Without an allocation, but the pod is known by another one.
            ("GPU-1", process(5, "GPU-1", of_pod("uid-a", "main"))),
            ("GPU-1", process(6, "GPU-1", Owner::NoPod { container_id: None })),
        ]);
        let uses = pod_uses(&node.ledger);
        let on_gpu_0 = &uses[&gpu_id("GPU-0")];
        assert_eq!(on_gpu_0[&name("a")], PodUse { memory_mib: Some(200), pids: BTreeSet::from([1, 2]) });
        assert_eq!(on_gpu_0[&name("b")], PodUse { memory_mib: None, pids: BTreeSet::from([3, 4]) });
        let on_gpu_1: Vec<_> = uses[&gpu_id("GPU-1")].keys().collect();
        assert_eq!(on_gpu_1, [&name("a")]);
    }
}
