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
    healthy: HashSet<DeviceKey>,
    /// Uses without an allocation, by GPU.
    bypasses: BTreeMap<PartId, u32>,
    /// Listed and held devices, by GPU.
    uses: BTreeMap<PartId, Vec<ResourceUse>>,
    /// Listed and held devices of the whole node.
    of_node: Vec<ResourceUse>,
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
        let uses = by_gpu.into_iter().map(|(gpu, counts)| (gpu.clone(), shown(counts))).collect();
        let of_node = shown(all);
        Self { healthy, bypasses, uses, of_node, ledger }
    }

    pub(crate) fn is_healthy(&self, device: &DeviceKey) -> bool {
        self.healthy.contains(device)
    }

    /// Number of uses of a GPU without an allocation.
    pub(crate) fn bypasses_on(&self, gpu: &PartId) -> u32 {
        self.bypasses.get(gpu).copied().unwrap_or(0)
    }

    /// Number of uses of all GPUs without an allocation.
    pub(crate) fn bypasses(&self) -> usize {
        self.bypasses.values().map(|n| *n as usize).sum()
    }

    /// Listed and held devices of a GPU.
    pub(crate) fn uses_on(&self, gpu: &PartId) -> &[ResourceUse] {
        self.uses.get(gpu).map_or(&[], Vec::as_slice)
    }

    /// Listed and held devices of the whole node.
    pub(crate) fn uses(&self) -> &[ResourceUse] {
        &self.of_node
    }
}

/// All devices, held ones and free ones.
type Counts<'s> = BTreeMap<&'s Resource, (u32, u32, u32)>;

fn count<'s>(part: &'s PartState, healthy: &HashSet<DeviceKey>, counts: &mut Counts<'s>) {
    for ((resource, share), device) in &part.devices {
        let free = !device.held() && healthy.contains(&part.key(resource, *share));
        let (devices, held, free_ones) = counts.entry(resource).or_default();
        *devices += 1;
        *held += u32::from(device.held());
        *free_ones += u32::from(free);
    }
}

fn shown(counts: Counts<'_>) -> Vec<ResourceUse> {
    let line = |(resource, (devices, held, free)): (&Resource, (u32, u32, u32))| ResourceUse {
        resource: resource.to_string(),
        devices,
        held,
        free,
    };
    counts.into_iter().map(line).collect()
}
