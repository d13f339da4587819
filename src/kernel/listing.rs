//! What the kubelet is told of one resource (I3).

use super::breaker::Phase;
use super::ledger::Ledger;
use super::names::{DeviceId, PartId, Resource};
use super::offer::Consumes;
use super::part_state::{PartState, Taken};
use std::collections::BTreeSet;

/// One device as the kubelet's list shows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listed {
    /// Its id.
    pub id: DeviceId,
    /// Healthy: held on a working GPU that nobody is asked to leave, or free and to be had.
    pub healthy: bool,
    /// NUMA node for the kubelet's topology hints; `None` sends no topology.
    pub numa_node: Option<u32>,
}

/// The whole list of one resource, sorted by id.
///
/// A free device is healthy if it is one of the lowest-numbered free ones that fit beside all live
/// grants, each beside those before it. So the kubelet's allocatable less what it has given away is
/// what can really be granted.
#[must_use]
pub fn listing(ledger: &Ledger, resource: &Resource, overcommit_percent: u32) -> Vec<Listed> {
    let mut list = Vec::new();
    let mut free_left = match ledger.breakers.get(resource).map(|b| b.phase) {
        None | Some(Phase::Closed) => usize::MAX,
        Some(Phase::HalfOpen) => 1,
        Some(Phase::Open { .. }) => 0,
    };
    // Parts with a free device in this list. A GPU and its instances are one hardware, so only the
    // first of them that has one is listed free under one resource.
    let mut free_parts: BTreeSet<&PartId> = BTreeSet::new();
    for part in ledger.parts.values() {
        let promised = ledger.kin(part).any(|kin| free_parts.contains(&kin.part.id));
        let taken = ledger.taken(part);
        let taken = if promised { taken.plus(Consumes::Whole) } else { taken };
        let before = free_left;
        list_part(ledger, part, resource, overcommit_percent, taken, &mut free_left, &mut list);
        if free_left < before {
            free_parts.insert(&part.part.id);
        }
    }
    list
}

/// What a kubelet takes for free: listed Healthy, and nobody's.
#[must_use]
pub fn free_devices(ledger: &Ledger, resource: &Resource, overcommit_percent: u32) -> Vec<DeviceId> {
    let held = |id: &DeviceId| ledger.device(resource, id).is_some_and(|device| device.held());
    let listed = listing(ledger, resource, overcommit_percent).into_iter();
    listed.filter(|device| device.healthy && !held(&device.id)).map(|device| device.id).collect()
}

fn list_part(
    ledger: &Ledger,
    part: &PartState,
    resource: &Resource,
    overcommit_percent: u32,
    mut taken: Taken,
    free_left: &mut usize,
    list: &mut Vec<Listed>,
) {
    // A freed device of a GPU whose pods are asked to leave must not be given away again before we
    // hear of it.
    let works = ledger.works(part) && !ledger.gpu_of(part).is_some_and(|g| g.drain.evicts());
    let may_grant = ledger.may_grant(part);
    let memory_mib = part.memory_to_grant_mib(overcommit_percent);
    let of_resource = (resource.clone(), None)..=(resource.clone(), Some(u32::MAX));
    for ((_, share), device) in part.devices.range(of_resource) {
        let healthy = if device.held() {
            works
        } else if may_grant && device.offered() && *free_left > 0 {
            let with_it = taken.plus(device.consumes);
            let fits = with_it.excess(memory_mib).is_none();
            if fits {
                taken = with_it;
                *free_left -= 1;
            }
            fits
        } else {
            false
        };
        let id = DeviceId { part: part.part.id.clone(), share: *share };
        list.push(Listed { id, healthy, numa_node: part.part.numa_node });
    }
}
