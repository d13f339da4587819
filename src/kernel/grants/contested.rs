//! Devices that the kubelet has given to two pods at once. It calls Allocate without its lock, and a pod that ends at
//! that moment makes it compute the free devices without those on the wire (kubernetes#137534). An Allocate names no
//! pod, so that both are granted; the checkpoint shows it afterwards.

use crate::grants::allocation::Allocation;
use crate::ids::names::DeviceId;
use crate::node::ledger::Ledger;
use std::sync::Arc;

/// A device that an allocation shares with allocations of other pods.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Contested {
    /// The allocation.
    pub allocation: Arc<Allocation>,
    /// The first of its devices that another pod holds, too.
    pub device: DeviceId,
    /// The other pods' newest allocation of the device.
    pub other: Arc<Allocation>,
}

/// All allocations that share a device with another pod, by the newest checkpoint. A pair is in it twice, once from the
/// side of each pod.
#[must_use]
pub fn contested(ledger: &Ledger) -> Vec<Contested> {
    let shown = ledger.sightings.iter().filter(|(_, sighting)| sighting.contested);
    shown.filter_map(|(id, _)| of_allocation(ledger, ledger.live.get(id)?)).collect()
}

fn of_allocation(ledger: &Ledger, allocation: &Arc<Allocation>) -> Option<Contested> {
    let is_contested = |id| ledger.sightings.get(id).is_some_and(|sighting| sighting.contested);
    allocation.devices.iter().find_map(|device| {
        let mut holders = ledger.holders_of(&allocation.resource, device).iter().rev();
        let other = holders.find_map(|id| {
            let other = ledger.live.get(id).filter(|_| is_contested(id))?;
            (other.holder.pod_uid != allocation.holder.pod_uid).then_some(other)
        })?;
        Some(Contested {
            allocation: Arc::clone(allocation),
            device: device.clone(),
            other: Arc::clone(other),
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::evidence::sighting::Sighting;
    use crate::node::change::{Change, Entry};
    use crate::node::test_node::Node;

    #[test]
    fn a_device_of_two_pods_is_contested_from_both_sides() {
        let mut node = Node::new();
        let a = node.grant("GPU-0", Some(0), "uid-a", "main");
        let b = node.grant("GPU-0", Some(0), "uid-b", "main");
        let alone = node.grant("GPU-0", Some(1), "uid-c", "main");
        assert_eq!(contested(&node.ledger), []);
        let sightings = [(a, true), (b, true), (alone, false)]
            .map(|(id, contested)| (id, Sighting { contested, ..Sighting::granted(node.now) }));
        let shown = Change::SightingsUpdated { sightings: Arc::new(sightings.into()), ends_withheld: None };
        node.ledger.apply(&Entry { at: node.now, changes: vec![shown] });
        let pairs: Vec<_> =
            contested(&node.ledger).into_iter().map(|found| (found.allocation.id, found.other.id)).collect();
        assert_eq!(pairs, [(a, b), (b, a)]);
        node.end(a);
        assert_eq!(contested(&node.ledger), [], "one of them has ended");
    }
}
