//! Device counts of a snapshot: computed once for all requests that show it.

use berth_api::{NotFree, ResourceUse};
use berth_core::KernelHandle;
use berth_core::keeper::Snapshot;
use berth_kernel::evidence::attribution::Attributions;
use berth_kernel::grants::gpu_holders::{GpuHolders, gpu_holders};
use berth_kernel::ids::names::{DeviceKey, GpuId, Resource};
use berth_kernel::sharing::capacity::{self, why_not_free};
use berth_kernel::sharing::listing::listing;
use berth_kernel::sharing::part_state::PartState;
use parking_lot::Mutex;
use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;

/// Counts that depend on a snapshot only.
pub(crate) struct Survey {
    pub(crate) ledger: Snapshot,
    /// Devices that are listed Healthy.
    pub(crate) healthy: HashSet<DeviceKey>,
    /// Uses without an allocation, by GPU.
    pub(crate) bypasses: BTreeMap<GpuId, u32>,
    /// Listed and held devices, by GPU.
    pub(crate) uses: BTreeMap<GpuId, Vec<ResourceUse>>,
    /// Listed and held devices of the whole node.
    pub(crate) of_node: Vec<ResourceUse>,
    /// Why devices of a resource are neither held nor free, the worst first.
    pub(crate) not_free: BTreeMap<String, Vec<NotFree>>,
    /// Pods and granted memory, by GPU.
    pub(crate) holders: BTreeMap<GpuId, GpuHolders>,
}

/// The counts of the newest requested snapshot. A page, its requests and a scraper mostly read the same one, and
/// counting it visits all devices.
#[derive(Default)]
pub(crate) struct Surveys(Mutex<Option<Arc<Survey>>>);

impl Surveys {
    /// The counts of the kernel's newest snapshot. Computed outside the lock: two requests may compute the same, and
    /// none waits.
    pub(crate) fn newest(&self, kernel: &KernelHandle) -> Arc<Survey> {
        let ledger = kernel.snapshot();
        let last = self.0.lock().clone();
        // Both snapshots are alive, so equal addresses mean the same snapshot.
        if let Some(survey) = last.filter(|survey| Arc::ptr_eq(&survey.ledger, &ledger)) {
            return survey;
        }
        let survey = Arc::new(Survey::of(ledger));
        let old = self.0.lock().replace(Arc::clone(&survey));
        // Outside the lock, too: this may free a whole snapshot.
        drop(old);
        survey
    }
}

impl Survey {
    fn of(ledger: Snapshot) -> Self {
        let mut healthy = HashSet::new();
        for resource in ledger.resources() {
            let listed = listing(&ledger, &resource).into_iter().filter(|l| l.healthy);
            healthy.extend(listed.map(|l| DeviceKey { resource: resource.clone(), id: l.id }));
        }
        let mut bypasses = BTreeMap::new();
        for bypass in Attributions::new(&ledger).bypasses() {
            *bypasses.entry(bypass.gpu).or_insert(0) += 1;
        }
        let (mut by_gpu, mut all) = (BTreeMap::<&GpuId, Counts<'_>>::new(), Counts::default());
        for part in ledger.parts.values() {
            let of_gpu = by_gpu.entry(&part.part.gpu).or_default();
            for counts in [of_gpu, &mut all] {
                count(part, &healthy, counts);
            }
        }
        let uses = by_gpu.into_iter().map(|(gpu, counts)| (gpu.clone(), counts.into_values().collect()));
        let (uses, of_node) = (uses.collect(), all.into_values().collect());
        let not_free = not_free(&ledger, &healthy);
        let holders = gpu_holders(&ledger);
        Self { healthy, bypasses, uses, of_node, not_free, holders, ledger }
    }
}

/// The devices of each resource.
type Counts<'s> = BTreeMap<&'s Resource, ResourceUse>;

fn count<'s>(part: &'s PartState, healthy: &HashSet<DeviceKey>, counts: &mut Counts<'s>) {
    for ((resource, share), device) in &part.devices {
        let none = || ResourceUse { resource: resource.to_string(), devices: 0, held: 0, free: 0 };
        let count = counts.entry(resource).or_insert_with(none);
        count.devices += 1;
        count.held += u32::from(device.held());
        count.free += u32::from(!device.held() && healthy.contains(&part.key(resource, *share)));
    }
}

/// The devices of each resource that are neither held nor free, by state, GPU and reason.
fn not_free(ledger: &Snapshot, healthy: &HashSet<DeviceKey>) -> BTreeMap<String, Vec<NotFree>> {
    let mut counts: BTreeMap<&Resource, BTreeMap<(u32, capacity::NotFree), u32>> = BTreeMap::new();
    for part in ledger.parts.values() {
        for ((resource, share), device) in &part.devices {
            if !device.held() && !healthy.contains(&part.key(resource, *share)) {
                let why = why_not_free(ledger, part, resource, device);
                let key = (why.gpu.as_ref().map_or(u32::MAX, |_| part.part.gpu_index), why);
                *counts.entry(resource).or_default().entry(key).or_default() += 1;
            }
        }
    }
    let items = |counts: BTreeMap<(u32, capacity::NotFree), u32>| {
        let mut items: Vec<_> = counts.into_iter().collect();
        items.sort_by_key(|((_, why), _)| why.state);
        let item = |((_, why), devices): ((u32, capacity::NotFree), u32)| NotFree {
            state: (&why.state).into(),
            devices,
            reason: why.reason,
            gpu: why.gpu.map(|gpu| gpu.to_string()),
        };
        items.into_iter().map(item).collect()
    };
    counts.into_iter().map(|(resource, counts)| (resource.to_string(), items(counts))).collect()
}
