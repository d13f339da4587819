//! Selects the older records that a grant ends. The kubelet alone assigns devices, so an Allocate for a held device
//! means that its former pod is gone or that the same pod asks again. Allocate names no pod, so the newest few records
//! of a device, which may belong to one pod, are kept; older ones end in the same append as the grant.
//!
//! No device becomes free: every ended record has newer records on each of its devices. Without this rule, records that
//! no reconcile pass can resolve would fill the ledger and slow down every call.

use super::allocation::{Allocation, LIVE_ALLOCATIONS_MAX};
use super::ledger::Ledger;
use super::names::{AllocationId, DeviceId};
use super::pods::Fate;
use super::policy::AdmitRequest;
use std::collections::BTreeSet;

/// Most records of one device after a grant, including the new one. A pod's init containers and then its app
/// container use the same devices, each by its own Allocate: this allows for seven init containers, where pods have
/// one or two. An init container beyond that loses its record but not its device, which its pod's newer records hold.
pub const RECORDS_PER_DEVICE: usize = 8;

/// From this number of live allocations on, a grant keeps only its own record of each device. The other half of the
/// ledger has room for one record of each of the 2048 devices of the largest node, so that records that no source can
/// judge never fill it.
pub const CROWDED_ALLOCATIONS: usize = LIVE_ALLOCATIONS_MAX / 2;

/// The live allocations that end as superseded when this request is granted, sorted.
///
/// An allocation that a source shows running stays, unless a newer record of the same pod holds its devices, too. The
/// cost depends on the request's devices and the few records of each, not on how many were superseded before.
#[must_use]
pub fn superseded(ledger: &Ledger, request: &AdmitRequest) -> Vec<AllocationId> {
    let kept = if ledger.live.len() < CROWDED_ALLOCATIONS { RECORDS_PER_DEVICE } else { 1 };
    let holders = |id: &DeviceId| ledger.device(&request.resource, id).map_or(&[][..], |d| &d.holders);
    let older: BTreeSet<AllocationId> = request.devices.iter().flat_map(holders).copied().collect();
    let requested: BTreeSet<&DeviceId> = request.devices.iter().collect();
    let is_old = |allocation: &&Allocation| {
        let newer = |id| newer_on(ledger, allocation, id).count() + usize::from(requested.contains(id));
        let counts = || allocation.devices.iter().map(newer);
        counts().all(|newer| newer > 0) && counts().any(|newer| newer >= kept)
    };
    let old = older.iter().filter_map(|id| ledger.live.get(id)).map(AsRef::as_ref).filter(is_old);
    let (running, not_running): (Vec<&Allocation>, Vec<_>) = old.partition(|a| is_shown_running(ledger, a));
    let mut ended: BTreeSet<AllocationId> = not_running.iter().map(|a| a.id).collect();
    let replaced = running.into_iter().filter(|allocation| {
        let remaining = |id: AllocationId| ledger.live.get(&id).filter(|a| !ended.contains(&a.id));
        let same_pod = |id| remaining(id).is_some_and(|newer| of_same_pod(newer, allocation));
        allocation.devices.iter().all(|id| newer_on(ledger, allocation, id).any(same_pod))
    });
    let replaced: Vec<AllocationId> = replaced.map(|a| a.id).collect();
    ended.extend(replaced);
    ended.into_iter().collect()
}

/// The records of one of the allocation's devices that are newer than the allocation, newest first.
fn newer_on<'l>(
    ledger: &'l Ledger,
    allocation: &'l Allocation,
    id: &DeviceId,
) -> impl Iterator<Item = AllocationId> + use<'l> {
    let holders = ledger.device(&allocation.resource, id).map_or(&[][..], |d| &d.holders);
    holders.iter().rev().copied().take_while(|holder| *holder != allocation.id)
}

/// Whether the pods source, the kubelet when it was last read, or the processes on its GPUs show the record's pod.
fn is_shown_running(ledger: &Ledger, allocation: &Allocation) -> bool {
    ledger.fate_of(allocation) == Fate::Alive
        || ledger.sightings.get(&allocation.id).is_some_and(|sighting| sighting.named)
        || has_process(ledger, allocation)
}

fn has_process(ledger: &Ledger, allocation: &Allocation) -> bool {
    let Some(uid) = allocation.holder.pod_uid.as_deref() else { return false };
    let gpus: BTreeSet<_> =
        allocation.devices.iter().filter_map(|id| ledger.part(&id.part)).map(|p| p.part.gpu()).collect();
    let mut seen = gpus.into_iter().filter_map(|gpu| ledger.processes.by_gpu.get(gpu)).flatten();
    seen.any(|seen| seen.process.identity.owner.pod().is_some_and(|pod| pod.uid == uid))
}

fn of_same_pod(a: &Allocation, b: &Allocation) -> bool {
    let (a, b) = (&a.holder, &b.holder);
    match (&a.pod_uid, &b.pod_uid) {
        (Some(a), Some(b)) => a == b,
        _ => a.pod.is_some() && (&a.namespace, &a.pod) == (&b.namespace, &b.pod),
    }
}

#[cfg(test)]
mod tests;
