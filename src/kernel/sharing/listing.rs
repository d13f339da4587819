//! The device list of one resource for the kubelet (I3).

use crate::grants::allocation::GrantOrigin;
use crate::ids::names::{DeviceId, GpuId, PartId, Resource};
use crate::node::ledger::{GpuState, Ledger};
use crate::sharing::breaker::Phase;
use crate::sharing::offer::Consumes;
use crate::sharing::part_state::{Device, PartState};
use crate::sharing::via::KubeletApi;
use std::collections::BTreeSet;
use std::sync::Arc;

/// One device of the list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListedDevice {
    /// Its id.
    pub id: DeviceId,
    /// Healthy: held by a container on a working GPU whose pods are not evicted, or free and grantable. The kubelet counts
    /// a healthy device that it has not assigned as free, so one that a claim holds is not healthy.
    pub healthy: bool,
    /// NUMA node for the kubelet's topology hints; `None` sends no topology.
    pub numa_node: Option<u32>,
}

/// The whole list of one resource, sorted by id.
///
/// Free devices are healthy in the order of their numbers as long as each fits next to all live
/// grants and the free devices before it. So the kubelet's allocatable count minus its assigned
/// devices is what can be granted.
#[must_use]
pub fn listing(ledger: &Ledger, resource: &Resource) -> Vec<ListedDevice> {
    let mut list = Vec::new();
    let mut free_left = match ledger.breakers.get(resource).map(|b| b.phase) {
        None | Some(Phase::Closed) => usize::MAX,
        Some(Phase::HalfOpen) => 1,
        Some(Phase::Open { .. }) => 0,
    };
    // Parts with a free device in this list. A GPU and its instances are the same hardware, so only
    // the first of them with a free device is listed as free under one resource.
    let mut free_parts: BTreeSet<&PartId> = BTreeSet::new();
    let is_listed = |part: &&Arc<PartState>| {
        ledger.gpu_of(part).is_none_or(|gpu| gpu.unlisting_wait_since_mono_ms.is_some())
    };
    for part in ledger.parts.values().filter(is_listed) {
        let promised = ledger.parts_on_same_hardware(part).any(|kin| free_parts.contains(&kin.part.id));
        let taken = ledger.taken(part);
        let mut taken = if promised { taken.plus(Consumes::Whole) } else { taken };
        // While a GPU's pods are evicted, the kubelet must not reassign a freed device before this
        // ledger records its release.
        let works = ledger.is_usable(part) && !ledger.gpu_of(part).is_some_and(|g| g.marks.evicts());
        let may_grant = ledger.may_grant(part);
        let memory_mib = ledger.memory_to_grant_mib(part);
        let of_resource = (resource.clone(), None)..=(resource.clone(), Some(u32::MAX));
        for ((_, share), device) in part.devices.range(of_resource) {
            let with_device = taken.plus(device.consumes);
            let is_offered = !device.held() && device.offered() && may_grant;
            let is_offered = is_offered && ledger.why_not_enforceable(part, device).is_none();
            let is_free = is_offered && free_left > 0 && with_device.excess(memory_mib).is_none();
            if is_free {
                taken = with_device;
                free_left -= 1;
                free_parts.insert(&part.part.id);
            }
            let healthy = is_free || (works && is_held_by_pod(ledger, device));
            let id = DeviceId { part: part.part.id.clone(), share: *share };
            list.push(ListedDevice { id, healthy, numa_node: part.part.numa_node });
        }
    }
    list
}

/// When the devices of a GPU that is granted through DRA leave the device lists, monotonic milliseconds: after they have been
/// Unhealthy, and not held through the device plugin API, for as long as a device that is no longer offered (I10). The
/// kubelet counts Unhealthy devices as capacity of the node, so a node whose GPUs are all granted through DRA would seem to
/// have broken ones. `None` while they must stay in the lists, and after they have left.
#[must_use]
pub fn unlisting_due(ledger: &Ledger, gpu: &GpuId, state: &GpuState) -> Option<u64> {
    if (state.via.api, state.via.moving) != (KubeletApi::Dra, false) {
        return None;
    }
    let timing = &ledger.rules.timing;
    let wait_ms = timing.retire_ms.max(timing.allocate_grace_ms);
    let due = state.unlisting_wait_since_mono_ms?.saturating_add(wait_ms);
    let held = ledger.allocations_on(ledger.parts_of(gpu)).into_iter();
    held.map(|allocation| allocation.origin.api()).all(|api| api == KubeletApi::Dra).then_some(due)
}

/// Whether a container holds a device that the kubelet assigned to it.
fn is_held_by_pod(ledger: &Ledger, device: &Device) -> bool {
    let newest = device.holders.last().and_then(|id| ledger.live.get(id));
    newest.is_some_and(|newest| newest.origin == GrantOrigin::DevicePlugin)
}

/// Devices that a kubelet counts as free: listed Healthy, and held by no allocation.
#[must_use]
pub fn free_devices(ledger: &Ledger, resource: &Resource) -> Vec<DeviceId> {
    let is_held = |id: &DeviceId| !ledger.holders_of(resource, id).is_empty();
    let listed = listing(ledger, resource).into_iter();
    listed.filter(|device| device.healthy && !is_held(&device.id)).map(|device| device.id).collect()
}
