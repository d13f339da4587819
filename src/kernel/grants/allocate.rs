//! Decides an Allocate: what is granted, or why it is refused.

use crate::evidence::limits::Enforcement;
use crate::evidence::pods::PodState;
use crate::evidence::reconcile::{end_changes, reset_breaker};
use crate::evidence::runtime::RuntimeState;
use crate::grants::allocation::{Allocation, Decision, EndReason, GrantOrigin, LIVE_ALLOCATIONS_MAX};
use crate::grants::pod_candidates::candidates;
use crate::ids::names::{AllocationId, DeviceId, PartId};
use crate::ids::time::Now;
use crate::node::change::{Change, Entry};
use crate::node::command::{Attempt, StackAnswer, Verdict};
use crate::node::ledger::Ledger;
use crate::node::refusal::Refusal;
use crate::policy::decider::Decider;
use crate::policy::hooks::{AdmitRequest, Hook, Terms};
use crate::sharing::breaker::{self, Denial};
use crate::sharing::part_state::{Device, PartState, Taken};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// Decides one Allocate. `answer_is_final`: whether a denial or a fault counts, because the ledger has not changed
/// since the stack answered, or this is the second try.
#[must_use]
pub fn allocate(
    ledger: &Ledger,
    request: &AdmitRequest,
    answer: &StackAnswer,
    answer_is_final: bool,
    attempt: Attempt,
    now: Now,
) -> Verdict {
    let outcome = check_grantable_request(ledger, request, attempt)
        .and_then(|()| check_answer(ledger, answer, answer_is_final))
        .and_then(|(by, terms)| check_enforceable(ledger, request, &terms).map(|()| (by, terms)));
    let mut changes = Vec::new();
    let refusal = match outcome {
        Ok(terms) => {
            let origin = GrantOrigin::DevicePlugin;
            changes.push(Change::Granted(new_allocation(ledger, request, origin, terms, now)));
            // The ends follow the grant, so that a device that stays held is never idle.
            let ends: Vec<_> =
                superseded(ledger, request).into_iter().map(|id| (id, EndReason::Superseded)).collect();
            if ends.is_empty() {
                changes.extend(reset_breaker(ledger, &request.resource));
            } else {
                // They are of the same resource, so that they reset its breaker, too.
                changes.extend(end_changes(ledger, &ends));
            }
            None
        }
        Err(refusal) => {
            if let Some(denial) = counted_denial(ledger, request, &refusal, attempt) {
                let known = ledger.breakers.get(&request.resource);
                let next = breaker::after_denial(known, &denial, &ledger.rules.timing, now);
                changes
                    .push(Change::BreakerChanged { resource: request.resource.clone(), breaker: Some(next) });
            }
            Some(refusal)
        }
    };
    Verdict { entry: Entry { at: now, changes }, refusal }
}

/// The denial that counts for the breaker; `None` unless the same request would be refused again, so that a controller
/// would retry forever.
fn counted_denial(
    ledger: &Ledger,
    request: &AdmitRequest,
    refusal: &Refusal,
    attempt: Attempt,
) -> Option<Denial> {
    match refusal {
        Refusal::Denied { policy, .. }
            if ledger.stack.entries.iter().any(|entry| entry.label() == *policy) =>
        {
            if !ledger.pods.as_ref().is_some_and(|view| view.current) {
                return Some(Denial::OfUnknown);
            }
            let candidates = candidates(ledger, &request.resource, request.devices.len());
            let namespaces: BTreeSet<_> =
                candidates.into_iter().map(|one| one.pod.namespace.clone()).collect();
            // Without candidates the source does not show the pod yet. That happens to a pod now and then, so the
            // denial does not count.
            (!namespaces.is_empty()).then_some(Denial::OfNamespaces(namespaces))
        }
        // The built-in rules would deny any pod's request. Devices whose size is their limit are withdrawn without a
        // breaker, but those that a policy limits are not.
        Refusal::Denied { .. } | Refusal::Faulted { .. } | Refusal::NotEnforced { .. } => {
            Some(Denial::OfAnyone)
        }
        Refusal::Held { .. } | Refusal::DoesNotFit { .. } => {
            matches!(attempt, Attempt::Last { .. }).then_some(Denial::OfAnyone)
        }
        // The free devices of a GPU that grants nothing new are withdrawn without a breaker.
        Refusal::UnknownDevice { .. }
        | Refusal::NotOffered { .. }
        | Refusal::OtherApi { .. }
        | Refusal::Cordoned { .. }
        | Refusal::Unhealthy { .. }
        | Refusal::Vanished { .. }
        | Refusal::NoDeviceStrategy { .. }
        | Refusal::NoCdiName { .. } => None,
        // These are no judgement of the request.
        Refusal::Moved
        | Refusal::LedgerFull { .. }
        | Refusal::CannotMoveYet { .. }
        | Refusal::ViaChanged { .. }
        | Refusal::TooManyMarks { .. }
        | Refusal::UnknownGpu { .. }
        | Refusal::NoAnswer { .. }
        | Refusal::StillThere { .. }
        | Refusal::StillHeld { .. }
        | Refusal::TooSoon { .. }
        | Refusal::UnknownAllocation { .. }
        | Refusal::AlreadyEnded { .. }
        | Refusal::StillRunning { .. }
        | Refusal::StackChanged { .. }
        | Refusal::MarksChanged { .. }
        | Refusal::PolicyChanged { .. }
        | Refusal::PolicyInUse { .. }
        | Refusal::PolicyShadows { .. }
        | Refusal::UnknownPolicy { .. }
        | Refusal::PolicyShipped { .. }
        | Refusal::Untrusted { .. }
        | Refusal::TooManyVersions { .. }
        | Refusal::BadOffer { .. } => None,
    }
}

/// The decision on a stack's answer: who allows the request on which terms, or why it is refused.
pub(crate) fn check_answer(
    ledger: &Ledger,
    answer: &StackAnswer,
    answer_is_final: bool,
) -> Result<(Vec<Decider>, Terms), Refusal> {
    match answer.clone() {
        // Another stack was activated meanwhile.
        StackAnswer::NotCalled if ledger.calls_policies(Hook::Admit) => Err(Refusal::Moved),
        StackAnswer::NotCalled => Ok((vec![Decider::Baseline], Terms::default())),
        StackAnswer::Allow { by, terms } => Ok((by, terms)),
        StackAnswer::Deny { .. } | StackAnswer::Faulted { .. } if !answer_is_final => Err(Refusal::Moved),
        StackAnswer::Deny { policy, reason } => Err(Refusal::Denied { policy, reason }),
        StackAnswer::Faulted { policy, kind, detail } => Err(Refusal::Faulted { policy, kind, detail }),
    }
}

/// Whether the memory limit of a policy's answer can be enforced, under `enforce.memory: require`.
pub(crate) fn check_enforceable(
    ledger: &Ledger,
    request: &AdmitRequest,
    terms: &Terms,
) -> Result<(), Refusal> {
    if terms.limits.memory_mib.is_none() || ledger.rules.enforcement != Enforcement::Require {
        return Ok(());
    }
    for part in request.devices.iter().filter_map(|id| ledger.part(&id.part)) {
        if let Some(why) = ledger.why_not_limitable(part) {
            return Err(Refusal::NotEnforced { part: part.part.id.clone(), why });
        }
    }
    Ok(())
}

/// The allocation that a request gets.
pub(crate) fn new_allocation(
    ledger: &Ledger,
    request: &AdmitRequest,
    origin: GrantOrigin,
    (by, terms): (Vec<Decider>, Terms),
    now: Now,
) -> Allocation {
    Allocation {
        id: AllocationId { store: ledger.store, number: ledger.next_number },
        resource: request.resource.clone(),
        devices: request.devices.clone(),
        granted_wall_ms: now.wall_ms,
        holder: origin.holder(),
        origin,
        overlapped: false,
        decision: Decision { by, reason: terms.reason, environment: terms.environment, limits: terms.limits },
        ended: None,
    }
}

/// Checks invariants I2 and I4, and that only listed devices are granted which no claim holds.
fn check_grantable_request(ledger: &Ledger, request: &AdmitRequest, attempt: Attempt) -> Result<(), Refusal> {
    check_room(ledger)?;
    if let Some(why) = &ledger.device_access.no_strategy {
        return Err(Refusal::NoDeviceStrategy { why: Arc::clone(why) });
    }
    for id in &request.devices {
        let unknown = || Refusal::UnknownDevice { resource: request.resource.clone(), device: id.clone() };
        let part = ledger.part(&id.part).ok_or_else(unknown)?;
        let device = part.device(&request.resource, id.share).ok_or_else(unknown)?;
        if !is_reused(ledger, device, attempt) {
            if let Some(why) = ledger.ungrantable(part) {
                return Err(why.refusal(part));
            }
            if let Some(why) = ledger.why_not_enforceable(part, device) {
                return Err(Refusal::NotEnforced { part: id.part.clone(), why });
            }
            // A held device that is no longer offered is retiring: if new pods got it, it would never become free. The
            // devices of a GPU that the configuration excludes are not granted either.
            if !ledger.may_grant_device(&request.resource, id) {
                return Err(Refusal::NotOffered { resource: request.resource.clone(), device: id.clone() });
            }
        }
        // The kubelet gives a device that a pod holds to the next container of that pod, but knows nothing of claims.
        let newest = device.holders.last().and_then(|holder| ledger.live.get(holder));
        if let Some(by) = newest.filter(|newest| newest.origin.claim().is_some()) {
            return Err(Refusal::Held { device: id.clone(), by: by.id, resource: by.resource.clone() });
        }
    }
    check_counters(ledger, request)
}

/// Whether the ledger has room for one more allocation.
pub(crate) fn check_room(ledger: &Ledger) -> Result<(), Refusal> {
    if ledger.live.len() >= LIVE_ALLOCATIONS_MAX {
        return Err(Refusal::LedgerFull { limit: LIVE_ALLOCATIONS_MAX });
    }
    Ok(())
}

/// Checks that the parts have what the request's devices take beside all that is held (I2). A device that is held takes
/// nothing more.
pub(crate) fn check_counters(ledger: &Ledger, request: &AdmitRequest) -> Result<(), Refusal> {
    let mut wanted: BTreeMap<&PartId, (&PartState, Taken, &DeviceId)> = BTreeMap::new();
    for id in &request.devices {
        let Some(part) = ledger.part(&id.part) else { continue };
        let Some(device) = part.device(&request.resource, id.share).filter(|device| !device.held()) else {
            continue;
        };
        let sum = wanted.entry(&id.part).or_insert_with(|| (part, ledger.taken(part), id));
        sum.1 = sum.1.plus(device.consumes);
    }
    for (part, _, id) in wanted.values() {
        // The request names both a GPU and one of its instances.
        if !part.part.is_whole_gpu() && wanted.contains_key(part.part.gpu.as_part()) {
            let part = id.part.clone();
            return Err(Refusal::DoesNotFit { part, counter: "whole GPU", wanted: 1, left: 0 });
        }
    }
    wanted.into_values().try_for_each(|(part, sum, id)| check_fits(ledger, part, sum, id))
}

/// Whether the device's newest holder is an init container. The kubelet requests its devices again for the next
/// container of the same pod, whatever their health, and for no other pod while this one exists (I4). A reconcile pass
/// since the request must have shown this: the kubelet forgets a pod that has ended before Berth learns of the end, and
/// then requests the device for another pod.
fn is_reused(ledger: &Ledger, device: &Device, attempt: Attempt) -> bool {
    let Attempt::Last { asked_mono_ms } = attempt else { return false };
    let newest = device.holders.last().and_then(|id| ledger.sightings.get(id));
    let shown = newest.and_then(|sighting| sighting.init_container_mono_ms);
    shown.is_some_and(|shown| shown >= asked_mono_ms)
}

fn check_fits(ledger: &Ledger, part: &PartState, sum: Taken, id: &DeviceId) -> Result<(), Refusal> {
    let Some(excess) = sum.excess(ledger.memory_to_grant_mib(part)) else {
        return Ok(());
    };
    let before = part.taken();
    let holders =
        std::iter::once(part).chain(ledger.parts_on_same_hardware(part)).filter_map(|p| ledger.newest_on(p));
    if let Some(holder) = holders.max_by_key(|a| a.id)
        && sum.wholes > 0
    {
        return Err(Refusal::Held { device: id.clone(), by: holder.id, resource: holder.resource.clone() });
    }
    let used =
        if excess.counter == "MiB of memory" { before.memory_mib } else { u64::from(before.compute_percent) };
    Err(Refusal::DoesNotFit {
        part: part.part.id.clone(),
        counter: excess.counter,
        wanted: excess.wanted.saturating_sub(used),
        left: excess.has.saturating_sub(used),
    })
}

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
/// The kubelet alone assigns devices, so an Allocate for a held device means that its former pod is gone or that the
/// same pod requests it again. Allocate names no pod, so the newest few records of a device, which may belong to one
/// pod, are kept; older ones end in the same append as the grant. No device becomes free: every ended record has newer
/// records on each of its devices. Without this rule, records that no reconcile pass can resolve would fill the ledger
/// and slow down every call.
///
/// An allocation that a source shows running stays, unless a newer record of the same pod holds its devices, too. The
/// cost depends on the request's devices and the few records of each, not on how many were superseded before.
#[must_use]
pub fn superseded(ledger: &Ledger, request: &AdmitRequest) -> Vec<AllocationId> {
    let kept = if ledger.live.len() < CROWDED_ALLOCATIONS { RECORDS_PER_DEVICE } else { 1 };
    let holders = |id: &DeviceId| ledger.holders_of(&request.resource, id);
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
    ledger
        .holders_of(&allocation.resource, id)
        .iter()
        .rev()
        .copied()
        .take_while(|holder| *holder != allocation.id)
}

/// Whether the pods source, the container runtime, the kubelet when it was last read, or the processes on its GPUs show
/// the record's pod.
fn is_shown_running(ledger: &Ledger, allocation: &Allocation) -> bool {
    ledger.pod_state_of(allocation) == PodState::Alive
        || ledger.runtime_state_of(allocation) == RuntimeState::Exists
        || ledger.sightings.get(&allocation.id).is_some_and(|sighting| sighting.named)
        || has_process(ledger, allocation)
}

fn has_process(ledger: &Ledger, allocation: &Allocation) -> bool {
    let Some(uid) = allocation.holder.pod_uid.as_deref() else { return false };
    let gpus = ledger.gpus_of(allocation).into_iter();
    let mut seen = gpus.filter_map(|gpu| ledger.processes.by_gpu.get(&gpu)).flatten();
    seen.any(|seen| seen.process.identity.owner.pod().is_some_and(|pod| pod.uid == uid))
}

fn of_same_pod(a: &Allocation, b: &Allocation) -> bool {
    let (a, b) = (&a.holder, &b.holder);
    match (&a.pod_uid, &b.pod_uid) {
        (Some(a), Some(b)) => a == b,
        // A name alone may be that of a later pod.
        (Some(_), None) | (None, Some(_)) => false,
        (None, None) => a.pod.is_some() && (&a.namespace, &a.pod) == (&b.namespace, &b.pod),
    }
}

#[cfg(test)]
mod tests;
