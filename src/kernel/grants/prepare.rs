//! Decides what is granted for a ResourceClaim that the kubelet wants prepared (NodePrepareResources), and what ends when
//! it wants it unprepared.
//!
//! The scheduler has allocated the devices to the claim before. So a cordon, which only keeps a GPU from being allocated,
//! does not refuse them. It allocates by what was published, and two schedulers, a device that was taken away by force, or
//! a pod that still ends, can make it allocate what is not free: nothing that is held is granted (I2).

use crate::evidence::reconcile::end_changes;
use crate::grants::allocate::{check_answer, check_counters, check_enforceable, check_room, new_allocation};
use crate::grants::allocation::{Allocation, EndReason, GrantOrigin};
use crate::grants::claim::{CLAIM_PODS_MAX, Claim, ClaimPod, ClaimRequest};
use crate::ids::names::{DeviceId, Resource};
use crate::ids::time::Now;
use crate::node::change::{Change, Entry};
use crate::node::command::{StackAnswer, Verdict};
use crate::node::ledger::{Ledger, Ungrantable};
use crate::node::refusal::Refusal;
use crate::policy::hooks::AdmitRequest;
use crate::sharing::via::KubeletApi;
use std::sync::Arc;

/// A claim as the API server shows it while the kubelet wants it prepared.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClaimToPrepare {
    /// The claim.
    pub claim: Claim,
    /// The pods that it is reserved for; those beyond [`CLAIM_PODS_MAX`] are not recorded.
    pub pods: Vec<ClaimPod>,
    /// Its requests with devices of this node, each once.
    pub requests: Vec<RequestToPrepare>,
}

/// A request of a claim, with the devices that the scheduler chose.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RequestToPrepare {
    /// Its name in the claim.
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
        let pods: Vec<_> = wanted.pods.iter().take(CLAIM_PODS_MAX).cloned().collect();
        let is_outdated = |a: &&&Allocation| a.origin.claim().is_some_and(|request| request.pods != pods);
        let outdated = live.iter().filter(is_outdated);
        let changes = outdated.map(|a| Change::ClaimPodsChanged { id: a.id, pods: pods.clone() });
        return verdict(changes.collect(), None);
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

/// The ends of a claim's allocations. A claim without any is unprepared already.
#[must_use]
pub fn unprepare(ledger: &Ledger, claim_uid: &str) -> Vec<Change> {
    let ends: Vec<_> =
        allocations_of(ledger, claim_uid).iter().map(|a| (a.id, EndReason::Released)).collect();
    end_changes(ledger, &ends)
}

/// The live allocations of a claim, oldest first.
#[must_use]
pub fn allocations_of<'l>(ledger: &'l Ledger, claim_uid: &str) -> Vec<&'l Allocation> {
    ledger.live.values().map(AsRef::as_ref).filter(|a| a.is_of_claim(claim_uid)).collect()
}

fn is_prepared(live: &[&Allocation], wanted: &ClaimToPrepare) -> bool {
    let has = |request: &RequestToPrepare| {
        live.iter().any(|a| {
            a.origin.claim().is_some_and(|own| own.request == request.name)
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
