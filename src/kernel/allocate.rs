//! Decides an Allocate: what is granted, or why it is refused.

use super::allocation::{Allocation, Decision, EndReason, Holder, LIVE_ALLOCATIONS_MAX};
use super::breaker;
use super::change::{Change, Entry};
use super::command::{Attempt, Rules, StackAnswer};
use super::decide::Verdict;
use super::decider::Decider;
use super::health::HealthState;
use super::ledger::Ledger;
use super::names::{AllocationId, DeviceId, PartId};
use super::part_state::{Device, PartState, Taken};
use super::policy::{AdmitRequest, Terms};
use super::refusal::Refusal;
use super::round::end_changes;
use super::supersede::superseded;
use super::time::Now;
use std::collections::BTreeMap;

/// The fields of [`Command::Allocate`](super::command::Command::Allocate) that decide it.
#[derive(Clone, Copy)]
pub struct AllocateInput<'a> {
    /// The request.
    pub request: &'a AdmitRequest,
    /// The stack's answer.
    pub answer: &'a StackAnswer,
    /// Whether a denial or a fault is final: the ledger has not changed since the stack answered, or
    /// this is the second try.
    pub current: bool,
    /// Whether a reconcile pass may still clear a refusal.
    pub attempt: Attempt,
}

/// Decides one Allocate.
#[must_use]
pub fn allocate(ledger: &Ledger, rules: &Rules, input: AllocateInput<'_>, now: Now) -> Verdict {
    let AllocateInput { request, answer, current, attempt } = input;
    let outcome = check_invariants(ledger, rules, request, now).and_then(|()| check_answer(answer, current));
    let mut changes = Vec::new();
    let refusal = match outcome {
        Ok((by, terms)) => {
            changes.push(Change::Granted(new_allocation(ledger, request, by, terms, now)));
            // The ends follow the grant, so that a device that stays held is never idle.
            let ends: Vec<_> =
                superseded(ledger, request).into_iter().map(|id| (id, EndReason::Superseded)).collect();
            if !ends.is_empty() {
                changes.extend(end_changes(ledger, rules, &ends, &[]));
            }
            if ledger.breakers.contains_key(&request.resource) {
                changes.push(Change::BreakerChanged { resource: request.resource.clone(), breaker: None });
            }
            None
        }
        Err(refusal) => {
            if counts_for_breaker(&refusal, attempt) {
                let next = breaker::after_denial(ledger.breakers.get(&request.resource), &rules.timing, now);
                changes
                    .push(Change::BreakerChanged { resource: request.resource.clone(), breaker: Some(next) });
            }
            Some(refusal)
        }
    };
    Verdict { entry: Entry { at: now, changes }, refusal }
}

/// Whether the same request would be refused again, so that a controller would retry forever.
fn counts_for_breaker(refusal: &Refusal, attempt: Attempt) -> bool {
    match refusal {
        Refusal::Held { .. } | Refusal::DoesNotFit { .. } => attempt == Attempt::Last,
        Refusal::Denied { .. } | Refusal::Faulted { .. } => true,
        _ => false,
    }
}

fn check_answer(answer: &StackAnswer, current: bool) -> Result<(Vec<Decider>, Terms), Refusal> {
    match answer {
        StackAnswer::Allow { by, terms } => Ok((by.clone(), terms.clone())),
        StackAnswer::Deny { .. } | StackAnswer::Faulted { .. } if !current => Err(Refusal::Moved),
        StackAnswer::Deny { policy, reason } => {
            Err(Refusal::Denied { policy: policy.clone(), reason: reason.clone() })
        }
        StackAnswer::Faulted { policy, kind, detail } => {
            Err(Refusal::Faulted { policy: policy.clone(), kind: *kind, detail: detail.clone() })
        }
    }
}

fn new_allocation(
    ledger: &Ledger,
    request: &AdmitRequest,
    by: Vec<Decider>,
    terms: Terms,
    now: Now,
) -> Allocation {
    Allocation {
        id: AllocationId { store: ledger.store, number: ledger.next_number },
        resource: request.resource.clone(),
        devices: request.devices.clone(),
        granted_wall_ms: now.wall_ms,
        holder: Holder::default(),
        overlapped: false,
        decision: Decision { by, reason: terms.reason, environment: terms.environment, limits: terms.limits },
        ended: None,
    }
}

/// Checks invariants I2 and I4, and that only listed devices are granted.
fn check_invariants(ledger: &Ledger, rules: &Rules, request: &AdmitRequest, now: Now) -> Result<(), Refusal> {
    if ledger.live.len() >= LIVE_ALLOCATIONS_MAX {
        return Err(Refusal::LedgerFull { limit: LIVE_ALLOCATIONS_MAX });
    }
    let mut wanted: BTreeMap<&PartId, (&PartState, Taken, &DeviceId)> = BTreeMap::new();
    for id in &request.devices {
        let unknown = || Refusal::UnknownDevice { resource: request.resource.clone(), device: id.clone() };
        let part = ledger.part(&id.part).ok_or_else(unknown)?;
        let device = part.device(&request.resource, id.share).ok_or_else(unknown)?;
        if !is_reused(device, rules.timing.named_ms, now) {
            check_grantable(ledger, part)?;
        }
        if device.held() {
            continue;
        }
        if !device.offered() {
            return Err(Refusal::NotOffered { resource: request.resource.clone(), device: id.clone() });
        }
        let sum = wanted.entry(&id.part).or_insert_with(|| (part, ledger.taken(part), id));
        sum.1 = sum.1.plus(device.consumes);
    }
    for (part, _, id) in wanted.values() {
        // The request names both a GPU and one of its instances.
        if part.part.parent.as_ref().is_some_and(|gpu| wanted.contains_key(gpu)) {
            let part = id.part.clone();
            return Err(Refusal::DoesNotFit { part, counter: "whole GPU", wanted: 1, left: 0 });
        }
    }
    wanted.into_values().try_for_each(|(part, sum, id)| check_fits(ledger, rules, part, sum, id))
}

/// Whether the kubelet reuses an init container's devices for an app container, which is granted whatever
/// their health (I4).
fn is_reused(device: &Device, named_ms: u64, now: Now) -> bool {
    device.held() && device.last_allocate_mono_ms.is_some_and(|named| !now.passed(named, named_ms))
}

fn check_grantable(ledger: &Ledger, part: &PartState) -> Result<(), Refusal> {
    let gpu = part.part.gpu().clone();
    let Some(state) = ledger.gpu_of(part) else {
        return Err(Refusal::UnknownGpu { gpu });
    };
    if !part.present || state.health.state == HealthState::Vanished {
        return Err(Refusal::Vanished { gpu });
    }
    if state.health.state == HealthState::Unhealthy {
        return Err(Refusal::Unhealthy { gpu, reason: state.health.reason.clone() });
    }
    match state.drain().mark() {
        None => Ok(()),
        Some(mark) => Err(Refusal::Cordoned { gpu, by: mark.by.clone(), why: mark.reason() }),
    }
}

fn check_fits(
    ledger: &Ledger,
    rules: &Rules,
    part: &PartState,
    sum: Taken,
    id: &DeviceId,
) -> Result<(), Refusal> {
    let Some(excess) = sum.excess(part.memory_to_grant_mib(rules.overcommit_percent)) else {
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
