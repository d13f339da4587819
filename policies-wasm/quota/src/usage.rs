//! The devices that a namespace holds.

use std::collections::{BTreeMap, BTreeSet};

use berth_policy_sdk::{Allocation, Node, room};

use crate::limit::Limit;

/// The devices of one namespace.
pub(crate) struct Usage<'a> {
    node: &'a Node,
    devices: BTreeSet<u32>,
}

/// A number of devices and the sum of their memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Count {
    pub(crate) devices: u64,
    pub(crate) memory_mib: u64,
}

impl<'a> Usage<'a> {
    /// Every device counts once, for its newest known holder: the container after an init container is
    /// granted the same devices in a further allocation.
    pub(crate) fn of(node: &'a Node, namespace: &str, count_unknown: bool) -> Self {
        let mut owners = BTreeMap::<u32, Option<&str>>::new();
        let mut all: Vec<&Allocation> = node.allocations.iter().collect();
        // A stable sort, so that of two allocations in the same second the one listed later is newer.
        all.sort_by_key(|allocation| (!allocation.overlapped, u32::MAX - allocation.age_seconds));
        for allocation in all {
            let known = allocation.holder.as_ref().map(|holder| holder.namespace.as_str());
            let known = known.filter(|namespace| !namespace.is_empty());
            for device in &allocation.devices {
                let owner = owners.entry(*device).or_default();
                *owner = known.or(*owner);
            }
        }
        let counts = |owner: Option<&str>| owner.map_or(count_unknown, |owner| owner == namespace);
        let devices = owners.into_iter().filter(|(_, owner)| counts(*owner)).map(|(device, _)| device);
        Self { node, devices: devices.collect() }
    }

    /// The devices that a limit counts, including `more` devices; devices that are already held count
    /// once.
    pub(crate) fn count(&self, limit: &Limit, more: &[u32]) -> Count {
        let new = more.iter().filter(|index| !self.devices.contains(index));
        let all = self.devices.iter().chain(new);
        let devices = all.filter_map(|index| room::device(self.node, *index));
        let counted = devices.filter(|device| {
            let name = usize::try_from(device.resource).ok().and_then(|at| self.node.resources.get(at));
            name.is_some_and(|name| limit.counts(name))
        });
        counted.fold(Count::default(), |count, device| Count {
            devices: count.devices + 1,
            memory_mib: count.memory_mib.saturating_add(room::takes_mib(self.node, device)),
        })
    }
}
