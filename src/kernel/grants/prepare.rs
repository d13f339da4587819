//! Decides what is granted for a ResourceClaim that the kubelet wants prepared (NodePrepareResources), and what ends when
//! it wants it unprepared.
//!
//! The scheduler has allocated the devices to the claim before. So a cordon, which only keeps a GPU from being allocated,
//! does not refuse them. It allocates by what was published, and two schedulers, a device that was taken away by force, or
//! a pod that still ends, can make it allocate what is not free: nothing that is held is granted (I2).

use crate::evidence::pods::Stage;
use crate::evidence::reconcile::{end_changes, list_adopted};
use crate::grants::allocate::{check_answer, check_counters, check_enforceable, check_room, new_allocation};
use crate::grants::allocation::{Allocation, EndReason, GrantOrigin};
use crate::grants::claim::{CLAIM_PODS_MAX, Claim, ClaimPod, ClaimRequest, main_request};
use crate::ids::names::{AllocationId, DeviceId, GpuId, Resource};
use crate::ids::time::Now;
use crate::node::change::{Change, Entry};
use crate::node::command::{StackAnswer, Verdict};
use crate::node::ledger::{Ledger, Ungrantable};
use crate::node::refusal::Refusal;
use crate::policy::hooks::AdmitRequest;
use crate::sharing::via::{KubeletApi, Via};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// A claim as the API server shows it while the kubelet wants it prepared.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClaimToPrepare {
    /// The claim.
    pub claim: Claim,
    /// See [`ClaimRequest::pod_claim_name`].
    pub pod_claim_name: Option<String>,
    /// The pods that it is reserved for; those beyond [`CLAIM_PODS_MAX`] are not recorded.
    pub pods: Vec<ClaimPod>,
    /// Its requests with devices of this node, each once.
    pub requests: Vec<RequestToPrepare>,
}

/// A request of a claim, with the devices that the scheduler chose.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RequestToPrepare {
    /// Its name in the claim; see [`ClaimRequest::request`].
    pub name: String,
    /// Its devices.
    pub devices: AdmitRequest,
    /// The stack's answer.
    pub answer: StackAnswer,
}

impl ClaimToPrepare {
    /// What the policies are asked about one of its requests.
    #[must_use]
    pub fn question(&self, request: &RequestToPrepare) -> AdmitRequest {
        let claim = Some(Arc::new(self.recorded(request)));
        AdmitRequest { claim, ..request.devices.clone() }
    }

    fn recorded(&self, request: &RequestToPrepare) -> ClaimRequest {
        ClaimRequest {
            claim: self.claim.clone(),
            pod_claim_name: self.pod_claim_name.clone(),
            request: request.name.clone(),
            pods: self.pods.iter().take(CLAIM_PODS_MAX).cloned().collect(),
        }
    }
}

/// Decides on a claim: all of its requests are granted, or none. A claim whose devices are granted already changes only
/// its pods; what was granted to it for other devices ends. `answer_is_final`: as for an Allocate.
#[must_use]
pub fn prepare(ledger: &Ledger, wanted: &ClaimToPrepare, answer_is_final: bool, now: Now) -> Verdict {
    let verdict = |changes, refusal| Verdict { entry: Entry { at: now, changes }, refusal };
    let live = allocations_of(ledger, &wanted.claim.uid);
    if is_prepared(&live, wanted) {
        return verdict(record_pods(ledger, &wanted.claim.uid, &wanted.pods), None);
    }
    let ends: Vec<_> = live.iter().map(|a| (a.id, EndReason::Superseded)).collect();
    let mut changes = end_changes(ledger, &ends);
    // Each request is judged with the ends and with the requests before it.
    let mut judged = ledger.clone();
    judged.apply(&Entry { at: now, changes: changes.clone() });
    for request in &wanted.requests {
        let granted = check_request(&judged, &request.devices)
            .and_then(|()| check_answer(ledger, &request.answer, answer_is_final))
            .and_then(|(by, terms)| {
                check_enforceable(ledger, &request.devices, &terms).map(|()| (by, terms))
            });
        let terms = match granted {
            Ok(terms) => terms,
            Err(refusal) => return verdict(Vec::new(), Some(refusal)),
        };
        let origin = GrantOrigin::Claim(Arc::new(wanted.recorded(request)));
        let grant = Change::Granted(new_allocation(&judged, &request.devices, origin, terms, now));
        judged.apply(&Entry { at: now, changes: vec![grant.clone()] });
        changes.push(grant);
    }
    verdict(changes, None)
}

/// The changes that record these pods in the allocations of a claim.
#[must_use]
pub fn record_pods(ledger: &Ledger, claim_uid: &str, pods: &[ClaimPod]) -> Vec<Change> {
    let pods = &pods[..pods.len().min(CLAIM_PODS_MAX)];
    let is_outdated = |a: &&Allocation| a.origin.claim().is_some_and(|request| request.pods != pods);
    let outdated = allocations_of(ledger, claim_uid).into_iter().filter(is_outdated);
    outdated.map(|a| Change::ClaimPodsChanged { id: a.id, pods: pods.to_vec() }).collect()
}

/// Claims whose recorded pods are not the unfinished pods whose specs name the claim, each with the UIDs of these pods. A claim
/// that no such pod names is left out, and so are further pods of a claim that has [`CLAIM_PODS_MAX`] already.
#[must_use]
pub fn claims_with_outdated_pods(ledger: &Ledger) -> BTreeMap<Claim, BTreeSet<String>> {
    let Some(view) = &ledger.pods else { return BTreeMap::new() };
    let pods_of = |claim: &Claim| -> BTreeSet<String> {
        let pods = view.pods.values().filter(|pod| {
            pod.namespace == claim.namespace
                && pod.stage != Stage::Finished
                && pod.named_claims.contains(&claim.name)
        });
        pods.map(|pod| pod.uid.clone()).collect()
    };
    let requests = ledger.live.values().filter_map(|allocation| allocation.origin.claim());
    // All requests of a claim have the same pods.
    let by_claim: BTreeMap<&Claim, &ClaimRequest> =
        requests.map(|request| (&request.claim, request)).collect();
    let outdated = by_claim.into_iter().filter_map(|(claim, request)| {
        let pods = pods_of(claim);
        let is_recorded = |uid: &String| request.pods.iter().any(|pod| pod.uid == *uid);
        let are_all_shown = request.pods.iter().all(|pod| pods.contains(&pod.uid));
        let is_complete = request.may_have_more_pods() || pods.iter().all(is_recorded);
        (!(pods.is_empty() || are_all_shown && is_complete)).then(|| (claim.clone(), pods))
    });
    outdated.collect()
}

/// The ends of a claim's allocations. A claim without any is unprepared already.
#[must_use]
pub fn unprepare(ledger: &Ledger, claim_uid: &str) -> Vec<Change> {
    let ends: Vec<_> =
        allocations_of(ledger, claim_uid).iter().map(|a| (a.id, EndReason::Released)).collect();
    end_changes(ledger, &ends)
}

/// Takes over allocations of claims that an earlier store granted, since their containers may run. Their GPUs are granted
/// through DRA from then on. An allocation is passed over if this store knows it, if another allocation holds one of its
/// devices or excludes it (I2), or if the device plugin has granted any device of its GPUs.
#[must_use]
pub fn adopt(ledger: &Ledger, found: &[Allocation], now: Now) -> Vec<Change> {
    let (mut judged, mut changes) = (ledger.clone(), Vec::new());
    for allocation in found {
        let gpus = judged.gpus_of(allocation);
        let held = gpus.iter().flat_map(|gpu| judged.allocations_on(judged.parts_of(gpu)));
        let is_taken = held.into_iter().any(|other| {
            other.origin == GrantOrigin::DevicePlugin
                || other.devices.iter().any(|id| allocation.devices.contains(id))
        });
        if is_taken || is_known(&judged, allocation.id) {
            continue;
        }
        let mut adoption: Vec<Change> =
            gpus.iter().filter_map(|gpu| move_to_dra(&judged, gpu, now)).collect();
        let by_part = allocation.devices.chunk_by(|a, b| a.part == b.part);
        adoption.extend(by_part.filter_map(|ids| list_adopted(&judged, &allocation.resource, ids, now)));
        adoption.push(Change::Granted(allocation.clone()));
        let mut next = judged.clone();
        next.apply(&Entry { at: now, changes: adoption.clone() });
        let parts = allocation.devices.iter().filter_map(|id| next.part(&id.part));
        let has_room = parts.into_iter().all(|part| next.taken(part).excess(u64::MAX).is_none());
        if has_room {
            judged = next;
            changes.extend(adoption);
        }
    }
    changes
}

/// Whether this store has granted or recorded the allocation with this id. One that it has granted and that is not live has
/// ended.
fn is_known(ledger: &Ledger, id: AllocationId) -> bool {
    let is_granted = id.store == ledger.store && id.number < ledger.next_number;
    is_granted || ledger.live.contains_key(&id) || ledger.ended.get(id).is_some()
}

/// The change by which this GPU is granted through DRA; `None` if it is already.
fn move_to_dra(ledger: &Ledger, gpu: &GpuId, now: Now) -> Option<Change> {
    let via = &ledger.gpus.get(gpu)?.via;
    (via.api != KubeletApi::Dra).then(|| {
        let via = Via {
            why: "a claim held it when the daemon started".into(),
            since_wall_ms: now.wall_ms,
            since_mono_ms: now.mono_ms,
            ..Via::new(KubeletApi::Dra)
        };
        Change::ViaChanged { gpu: gpu.clone(), via }
    })
}

/// The live allocations of a claim, oldest first.
#[must_use]
pub fn allocations_of<'l>(ledger: &'l Ledger, claim_uid: &str) -> Vec<&'l Allocation> {
    ledger.live.values().map(AsRef::as_ref).filter(|a| a.is_of_claim(claim_uid)).collect()
}

/// Whether these allocations have exactly the devices that the claim requests. Their recorded pods may differ from its pods.
fn is_prepared(live: &[&Allocation], wanted: &ClaimToPrepare) -> bool {
    // Earlier releases of Berth recorded the request's name without that of the subrequest.
    let is_for = |own: &ClaimRequest, name: &str| own.request == name || own.request == main_request(name);
    let has = |request: &RequestToPrepare| {
        live.iter().any(|a| {
            a.origin.claim().is_some_and(|own| is_for(own, &request.name))
                && (&a.resource, &a.devices) == (&request.devices.resource, &request.devices.devices)
        })
    };
    live.len() == wanted.requests.len() && wanted.requests.iter().all(has)
}

/// Checks I2 and I4 for the devices of one request.
fn check_request(ledger: &Ledger, request: &AdmitRequest) -> Result<(), Refusal> {
    check_room(ledger)?;
    request.devices.iter().try_for_each(|id| check_device(ledger, &request.resource, id))?;
    check_counters(ledger, request)
}

fn check_device(ledger: &Ledger, resource: &Resource, id: &DeviceId) -> Result<(), Refusal> {
    let unknown = || Refusal::UnknownDevice { resource: resource.clone(), device: id.clone() };
    let part = ledger.part(&id.part).ok_or_else(unknown)?;
    let device = part.device(resource, id.share).ok_or_else(unknown)?;
    let why_not = match ledger.ungrantable_through(KubeletApi::Dra, part) {
        // The scheduler may have chosen the GPU before the cordon, so a cordon alone refuses no claim. The check stops at
        // the cordon, so the CDI name is checked here.
        Some(Ungrantable::Cordoned(state)) if state.marks.orders().next().is_none() => {
            (!ledger.device_access.gives(KubeletApi::Dra, part)).then_some(Ungrantable::NoCdiName)
        }
        why_not => why_not,
    };
    if let Some(why_not) = why_not {
        return Err(why_not.refusal(part));
    }
    if ledger.is_excluded(part) || !device.offered() {
        return Err(Refusal::NotOffered { resource: resource.clone(), device: id.clone() });
    }
    if let Some(why) = ledger.why_not_enforceable(part, device) {
        return Err(Refusal::NotEnforced { part: id.part.clone(), why });
    }
    match device.holders.last().and_then(|holder| ledger.live.get(holder)) {
        Some(by) => Err(Refusal::Held { device: id.clone(), by: by.id, resource: by.resource.clone() }),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests;
