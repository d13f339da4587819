//! Device counts of a snapshot: computed once for all requests that show it.

use berth_api::ResourceUse;
use berth_core::KernelHandle;
use berth_core::keeper::Snapshot;
use berth_kernel::attribution::Attributions;
use berth_kernel::names::{DeviceKey, PartId, Resource};
use berth_kernel::part_state::PartState;
use parking_lot::Mutex;
use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;

/// Counts that depend on a snapshot only.
pub(crate) struct Survey {
    pub(crate) ledger: Snapshot,
    /// Devices that are listed Healthy.
    pub(crate) healthy: HashSet<DeviceKey>,
    /// Uses without an allocation, by GPU.
    pub(crate) bypasses: BTreeMap<PartId, u32>,
    /// Listed and held devices, by GPU.
    pub(crate) uses: BTreeMap<PartId, Vec<ResourceUse>>,
    /// Listed and held devices of the whole node.
    pub(crate) of_node: Vec<ResourceUse>,
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
        let survey = Arc::new(Survey::of(kernel, ledger));
        let old = self.0.lock().replace(Arc::clone(&survey));
        // Outside the lock, too: this may free a whole snapshot.
        drop(old);
        survey
    }
}

impl Survey {
    fn of(kernel: &KernelHandle, ledger: Snapshot) -> Self {
        let mut healthy = HashSet::new();
        for resource in ledger.resources() {
            let listed = kernel.listing(&ledger, &resource).into_iter().filter(|l| l.healthy);
            healthy.extend(listed.map(|l| DeviceKey { resource: resource.clone(), id: l.id }));
        }
        let mut bypasses = BTreeMap::new();
        for bypass in Attributions::new(&ledger).bypasses() {
            *bypasses.entry(bypass.gpu).or_insert(0) += 1;
        }
        let (mut by_gpu, mut all) = (BTreeMap::<&PartId, Counts<'_>>::new(), Counts::default());
        for part in ledger.parts.values() {
            let of_gpu = by_gpu.entry(part.part.gpu()).or_default();
            for counts in [of_gpu, &mut all] {
                count(part, &healthy, counts);
            }
        }
        let uses = by_gpu.into_iter().map(|(gpu, counts)| (gpu.clone(), counts.into_values().collect()));
        let (uses, of_node) = (uses.collect(), all.into_values().collect());
        Self { healthy, bypasses, uses, of_node, ledger }
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
