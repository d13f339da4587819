//! The order of the devices in the slices. A scheduler gives a claim the first devices of a slice that fit (kubernetes
//! `dynamic-resource-allocation/structured`), so the devices come in the order in which the policies would choose them.

use berth_core::KernelHandle;
use berth_kernel::grants::allocation::Allocation;
use berth_kernel::ids::names::{AllocationId, DeviceId, PartId, Resource};
use berth_kernel::node::ledger::Ledger;
use berth_kernel::sharing::publish::{Capacity, PublishedDevice, Versions, publication};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;

/// The shortest time between two changes of the order: each one writes a slice, even if nothing else has changed.
const INTERVAL: Duration = Duration::from_secs(30);

/// The order of the devices, and what it follows from.
#[derive(Debug, Default)]
pub(crate) struct SliceOrder {
    /// The place of each device, by its name; devices without a place come last.
    places: BTreeMap<String, usize>,
    /// When the order was last evaluated, and from what.
    evaluated: Option<(Instant, Basis)>,
}

/// What has the order evaluated again when it changes. The load of the GPUs does not: it changes all the time, so each node
/// would keep writing slices.
#[derive(Clone, Debug)]
struct Basis {
    live: Arc<BTreeMap<AllocationId, Arc<Allocation>>>,
    stack_revision: u64,
    /// The devices that are published.
    names: Vec<String>,
}

impl Basis {
    fn of(ledger: &Ledger) -> Self {
        let names = publication(ledger, &Versions::default()).into_iter().map(|device| device.name).collect();
        Self { live: Arc::clone(&ledger.live), stack_revision: ledger.stack.revision, names }
    }

    fn is_of(&self, ledger: &Ledger) -> bool {
        let now = Self::of(ledger);
        let is_same = Arc::ptr_eq(&self.live, &now.live) || self.live.keys().eq(now.live.keys());
        is_same && (self.stack_revision, &self.names) == (now.stack_revision, &now.names)
    }
}

impl SliceOrder {
    /// Sorts the devices. Those without a place keep their order.
    pub(crate) fn sort(&self, devices: &mut [PublishedDevice]) {
        devices.sort_by_key(|device| self.places.get(&device.name).copied().unwrap_or(usize::MAX));
    }

    /// When the order is to be evaluated for this ledger; `None` if it is up to date.
    pub(crate) fn due(&self, ledger: &Ledger) -> Option<Instant> {
        match &self.evaluated {
            None => Some(Instant::now()),
            Some((at, basis)) => (!basis.is_of(ledger)).then(|| *at + INTERVAL),
        }
    }

    /// Asks the policies for the order if that is due.
    pub(crate) async fn evaluate(&mut self, kernel: &KernelHandle) {
        let ledger = kernel.snapshot();
        if self.due(&ledger).is_none_or(|due| due > Instant::now()) {
            return;
        }
        let mut names: BTreeMap<(Resource, DeviceId), String> = BTreeMap::new();
        let mut groups: BTreeMap<(Resource, bool), Vec<DeviceId>> = BTreeMap::new();
        for device in publication(&ledger, &Versions::default()) {
            let is_shared = matches!(device.capacity, Capacity::Shared(_));
            let Some(id) = free(&ledger, &device.part, &device.resource, is_shared) else { continue };
            groups.entry((device.resource.clone(), is_shared)).or_default().push(id.clone());
            names.insert((device.resource, id), device.name);
        }
        let mut free_names = Vec::new();
        for ((resource, _), devices) in groups {
            let order = kernel.order(&resource, devices).await;
            free_names.extend(order.into_iter().filter_map(|id| names.remove(&(resource.clone(), id))));
        }
        self.set(free_names);
        self.evaluated = Some((Instant::now(), Basis::of(&ledger)));
    }

    /// Gives the devices that are free their places. The others keep theirs, since no claim can have them, and each change of the
    /// order is a write.
    fn set(&mut self, free: Vec<String>) {
        let places: Option<Vec<usize>> = free.iter().map(|name| self.places.get(name).copied()).collect();
        if places.is_some_and(|places| places.is_sorted()) {
            return;
        }
        let mut held: Vec<_> = self.places.iter().filter(|(name, _)| !free.contains(name)).collect();
        held.sort_by_key(|(_, place)| **place);
        let held: Vec<String> = held.into_iter().map(|(name, _)| name.clone()).collect();
        self.places = free.into_iter().chain(held).enumerate().map(|(place, name)| (name, place)).collect();
    }
}

/// A device of a part that a claim could be granted: the whole part, or a share that nothing holds.
fn free(ledger: &Ledger, part: &PartId, resource: &Resource, is_shared: bool) -> Option<DeviceId> {
    let devices = ledger.part(part)?.devices.iter();
    let mut free = devices.filter(|((of, share), device)| {
        of == resource && share.is_some() == is_shared && device.offered() && !device.held()
    });
    free.next().map(|((_, share), _)| DeviceId { part: part.clone(), share: *share })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn order(places: &SliceOrder) -> String {
        let mut names: Vec<_> = places.places.iter().collect();
        names.sort_by_key(|(_, place)| **place);
        names.into_iter().map(|(name, _)| name.as_str()).collect()
    }

    #[test]
    fn only_another_order_of_free_devices_is_another_order() {
        let mut places = SliceOrder::default();
        let set = |places: &mut SliceOrder, free: &str| {
            places.set(free.chars().map(String::from).collect());
            order(places)
        };
        assert_eq!(set(&mut places, "cab"), "cab");
        // One is granted, and then released.
        assert_eq!(set(&mut places, "cb"), "cab");
        assert_eq!(set(&mut places, "cab"), "cab");
        assert_eq!(set(&mut places, "bc"), "bca", "the policies choose another one first");
        assert_eq!(set(&mut places, "bcd"), "bcda", "a new device");
        assert_eq!(set(&mut places, ""), "bcda");
    }
}
