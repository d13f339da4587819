//! The invariants that depend on the kernel alone, one function each. Random histories
//! ([`crate::node::histories`]) check them after every step. I8 and I9 concern policies' answers: see the
//! stack's tests. I7 is checked where a history requests again what a pod holds.

use crate::evidence::kubelet_view::ReconcileView;
use crate::evidence::pods::PodState;
use crate::evidence::runtime::RuntimeState;
use crate::grants::allocate::RECORDS_PER_DEVICE;
use crate::grants::allocation::{Allocation, EndReason};
use crate::grants::history::HistoryLimit;
use crate::hardware::health::HealthState;
use crate::hardware::triage::Severity;
use crate::ids::names::{AllocationId, PartId};
use crate::ids::time::Now;
use crate::node::change::{Change, Entry};
use crate::node::command::Command;
use crate::node::histories::held::Held;
use crate::node::ledger::Ledger;
use crate::node::record::{Record, RecordKey, records};
use crate::node::restore::{carry_over, restore};
use crate::policy::judge_again::to_judge_again;
use crate::sharing::breaker::Phase;
use crate::sharing::listing::{ListedDevice, listing};
use crate::sharing::offer::Consumes;
use crate::sharing::part_state::DeviceState;
use crate::sharing::via::KubeletApi;
use std::collections::{BTreeMap, BTreeSet};

pub(crate) fn i1_no_two_pods_hold_one_device(ledger: &Ledger) {
    for part in ledger.parts.values() {
        for device in part.devices.values() {
            let live: Vec<_> =
                device.holders.iter().map(|id| &ledger.live[id]).filter(|a| !a.overlapped).collect();
            let pods: BTreeSet<_> = live.iter().map(|a| &a.holder.pod_uid).collect();
            assert!(live.len() <= 1 || (pods.len() == 1 && !pods.contains(&None)), "I1: {live:?}");
        }
    }
}

pub(crate) fn i2_grants_never_exceed_a_part(ledger: &Ledger) {
    for part in ledger.parts.values() {
        let taken = ledger.taken(part);
        assert_eq!(taken.excess(part.part.memory_mib), None, "I2: {} {taken:?}", part.part.id);
    }
}

pub(crate) fn i3_a_healthy_device_is_held_or_grantable(ledger: &Ledger) {
    for resource in ledger.resources() {
        let is_withdrawn = ledger.breakers.get(&resource).is_some_and(|b| b.phase != Phase::Closed);
        let list = listing(ledger, &resource);
        if ledger.device_access.no_strategy.is_some() {
            assert!(list.iter().all(|l| !l.healthy), "I3: no device can be passed to a container: {list:?}");
        }
        let free = |l: &&ListedDevice| l.healthy && !ledger.device(&resource, &l.id).unwrap().held();
        for part in ledger.parts.values() {
            let listed = list.iter().filter(|l| l.id.part == part.part.id);
            // A GPU and its instances are the same hardware; the GPU is listed as free first.
            let gpu_is_free = list
                .iter()
                .filter(free)
                .any(|l| !part.part.is_whole_gpu() && l.id.part == *part.part.gpu.as_part());
            let taken = ledger.taken(part);
            let taken = if gpu_is_free { taken.plus(Consumes::Whole) } else { taken };
            let (mut taken, mut refused) = (taken, None);
            for l in listed {
                let device = part.device(&resource, l.id.share).unwrap();
                let is_grantable = ledger.may_grant_device(&resource, &l.id);
                if device.held() {
                    let evicts = ledger.gpu_of(part).is_some_and(|g| g.marks.evicts());
                    let is_of_pod = ledger.live[device.holders.last().unwrap()].origin.claim().is_none();
                    let expected = is_of_pod && ledger.is_usable(part) && !evicts;
                    assert_eq!(l.healthy, expected, "I3: held {:?}", l.id);
                } else if l.healthy {
                    assert!(is_grantable, "I3: {:?} cannot be granted", l.id);
                    assert_ne!(
                        refused,
                        Some(device.consumes),
                        "I3: a lower-numbered device than {:?} is unhealthy",
                        l.id
                    );
                    taken = taken.plus(device.consumes);
                    assert_eq!(taken.excess(part.part.memory_mib), None, "I3: {:?} does not fit", l.id);
                } else if is_grantable && !is_withdrawn {
                    refused = Some(device.consumes);
                    let with_device = taken.plus(device.consumes);
                    let excess = with_device.excess(part.part.memory_mib);
                    assert!(excess.is_some(), "I3: {:?} could be granted", l.id);
                }
            }
        }
    }
}

/// The health of a GPU follows from its judgements, and each policy that made one is in the stack.
pub(crate) fn health_follows_from_judgements_of_active_policies(ledger: &Ledger) {
    for (gpu, state) in &ledger.gpus {
        let health = &state.health;
        let of_policy = to_judge_again(ledger, &ledger.stack.entries);
        assert!(of_policy.is_empty(), "{gpu} is judged by a policy that is not active: {health:?}");
        let bad = health.judgements.iter().filter(|one| one.severity != Severity::Ignore);
        match health.state {
            HealthState::Healthy => assert_eq!(bad.count(), 0, "{gpu} is healthy: {health:?}"),
            HealthState::Degraded | HealthState::Unhealthy => {
                // One whose quiet time is over counts until the next scan.
                assert!(bad.count() > 0 || health.quiet_ms.is_some(), "nothing ends {health:?}");
            }
            HealthState::Vanished => {}
        }
        let endless = health.judgements.iter().filter(|one| one.severity != Severity::Ignore);
        let endless = endless.filter(|one| one.quiet_ms.is_none()).count();
        assert_eq!(health.quiet_ms.is_none(), endless > 0, "{gpu} waits for an operator: {health:?}");
    }
}

/// I4. `pods`: the containers that hold devices before the grant.
pub(crate) fn i4_nothing_new_on_a_gpu_that_grants_nothing(before: &Ledger, entry: &Entry, pods: &[Held]) {
    for change in &entry.changes {
        let Change::Granted(allocation) = change else {
            continue;
        };
        if allocation.decision.is_adoption() {
            // Another plugin granted it.
            continue;
        }
        if allocation.origin.claim().is_some() {
            for id in &allocation.devices {
                assert!(is_given_to_claims(before, &id.part), "I4: {id} was granted to a claim");
            }
            continue;
        }
        for id in &allocation.devices {
            let holds = |held: &&Held| held.resource == allocation.resource && held.devices.contains(id);
            let has_main =
                |uid: &str| pods.iter().filter(holds).any(|h| h.uid == uid && h.container == "main");
            let is_reused =
                pods.iter().filter(holds).any(|held| held.container == "init" && !has_main(&held.uid));
            let may_grant = before.may_grant_device(&allocation.resource, id);
            assert!(may_grant || is_reused, "I4: {id} was granted");
        }
    }
}

/// Whether a part may be granted to the claim that the scheduler has given it to. A cordon comes too late for that.
fn is_given_to_claims(ledger: &Ledger, id: &PartId) -> bool {
    let part = ledger.part(id).unwrap();
    let gpu = ledger.gpu_of(part).unwrap();
    part.present
        && gpu.health.state.is_usable()
        && gpu.via.api == KubeletApi::Dra
        && gpu.marks.orders().next().is_none()
        && ledger.device_access.gives(KubeletApi::Dra, part)
}

/// I14. A GPU moves to the kubelet's other API only after an order, and only when no allocation of the former API is left
/// on it.
pub(crate) fn i14_a_gpu_changes_its_api_only_when_nothing_holds_it(before: &Ledger, entry: &Entry) {
    for change in &entry.changes {
        let Change::ViaChanged { gpu, via } = change else { continue };
        let old = &before.gpus[gpu].via;
        if old.api == via.api {
            continue;
        }
        assert!(old.moving, "I14: {gpu} was moved without an order");
        let is_held = |allocation: &Allocation| {
            let is_claim = allocation.origin.claim().is_some();
            before.gpus_of(allocation).contains(gpu) && is_claim == (old.api == KubeletApi::Dra)
        };
        let held = before.live.values().find(|allocation| is_held(allocation));
        assert!(held.is_none(), "I14: {gpu} was moved while {held:?} lives");
    }
}

pub(crate) fn i5_the_store_restores_the_ledger(
    ledger: &Ledger,
    disk: &BTreeMap<RecordKey, Record>,
    now: Now,
) {
    let stored: Vec<Record> = disk.values().cloned().collect();
    let mut expected = records(ledger);
    expected.retain(|r| r.key() != RecordKey::Stack || disk.contains_key(&RecordKey::Stack));
    assert_eq!(stored, expected, "I5: the store equals the ledger's records");
    let restored = carry_over(restore(stored, now), ledger);
    assert_eq!(restored.live, ledger.live, "I5");
    assert_eq!((&restored.stack, &restored.past_stacks), (&ledger.stack, &ledger.past_stacks), "I5");
    assert_eq!(restored.parts.len(), ledger.parts.len(), "I5");
    for (id, part) in &restored.parts {
        let mut part = crate::sharing::part_state::PartState::clone(part);
        for (key, device) in &mut part.devices {
            // The time at which a device became unoffered is not stored, so its wait starts again.
            if let (DeviceState::Retiring { .. }, Some(original)) =
                (device.state, ledger.parts[id].devices.get(key))
            {
                device.state = original.state;
            }
        }
        assert_eq!(part, *ledger.parts[id], "I5");
    }
}

pub(crate) fn i6_no_allocation_of_a_running_pod_ends(
    before: &Ledger,
    entry: &Entry,
    pods: &[Held],
    complete: bool,
) {
    for change in &entry.changes {
        let Change::Ended { id, reason } = change else {
            continue;
        };
        assert!(complete || *reason == EndReason::Superseded, "I6: {id} ended though a source was missing");
        let ended = &before.live[id];
        let holds = |p: &Held| match p.allocation {
            Some(allocation) => allocation == *id,
            // Granted by another plugin: matched by pod and devices.
            None => Some(&p.uid) == ended.holder.pod_uid.as_ref() && p.devices == ended.devices,
        };
        assert!(!pods.iter().any(holds), "I6: {id} ended as {reason:?} but its pod runs");
    }
}

/// I6: a superseded allocation has newer records on each of its devices, so no device becomes free, and no source
/// shows its pod running. Of records that no source can judge, each device keeps only the newest few.
pub(crate) fn i6_a_grant_ends_only_allocations_that_newer_ones_replace(
    before: &Ledger,
    after: &Ledger,
    command: &Command,
    entry: &Entry,
) {
    let Command::Allocate { request, .. } = command else { return };
    let newer = |ledger: &Ledger, allocation: &Allocation| -> Vec<Vec<AllocationId>> {
        let newer = |id| {
            let holders = ledger.holders_of(&allocation.resource, id);
            let start = holders.iter().position(|id| *id == allocation.id).map_or(0, |index| index + 1);
            holders[start..].to_vec()
        };
        allocation.devices.iter().map(newer).collect()
    };
    for change in &entry.changes {
        let Change::Ended { id, reason } = change else { continue };
        assert_eq!(*reason, EndReason::Superseded, "I6: {id} ended by a grant");
        let ended = &before.live[id];
        for (device, newer) in ended.devices.iter().zip(newer(before, ended)) {
            let held = newer.iter().any(|id| after.live.contains_key(id));
            assert!(held || request.devices.contains(device), "I6: {device} became free with {id}");
        }
        let alive = before.pod_state_of(ended) == PodState::Alive
            || before.runtime_state_of(ended) == RuntimeState::Exists;
        let same_pod = |a: &Allocation| match (&a.holder.pod_uid, &ended.holder.pod_uid) {
            (Some(a), Some(b)) => a == b,
            _ => a.holder.pod.is_some() && a.holder.pod == ended.holder.pod,
        };
        let of_pod =
            |newer: Vec<AllocationId>| newer.iter().any(|id| after.live.get(id).is_some_and(|a| same_pod(a)));
        assert!(
            !alive || newer(before, ended).into_iter().all(of_pod),
            "I6: {id} ended and its pod is alive"
        );
    }
    let holders = |id| after.holders_of(&request.resource, id);
    for id in request.devices.iter().flat_map(holders) {
        let allocation = &after.live[id];
        let newer = newer(after, allocation);
        let old = newer.iter().all(|n| !n.is_empty()) && newer.iter().any(|n| n.len() >= RECORDS_PER_DEVICE);
        assert!(!old || !allocation.holder.is_unknown(), "I6: {id} was not superseded");
    }
}

/// I6: a pass ends no allocation whose container the runtime shows, unless newer allocations give its pod the same
/// devices. One pass is enough only if the runtime showed container and sandbox end, while the kubelet had settled and
/// its sources were read.
pub(crate) fn i6_ends_agree_with_the_container_runtime(
    before: &Ledger,
    after: &Ledger,
    pass: &ReconcileView,
    entry: &Entry,
) {
    for change in &entry.changes {
        let Change::Ended { id, reason } = change else { continue };
        let ended = &before.live[id];
        let runtime = before.runtime.as_ref().filter(|view| view.is_whole);
        if runtime.is_some_and(|view| view.container_of(ended).is_some()) {
            let is_of_pod = |id: &AllocationId| {
                after.live.get(id).is_some_and(|a| a.holder.pod_uid == ended.holder.pod_uid)
            };
            let has_newer = |device| after.holders_of(&ended.resource, device).iter().any(is_of_pod);
            assert!(
                ended.devices.iter().all(has_newer),
                "I6: {id} ended as {reason:?} and its container exists"
            );
        }
        let sighting = before.sightings[id];
        let was_missed = sighting.missed_mono_ms.is_some();
        if was_missed || *reason == EndReason::Superseded || before.pod_state_of(ended) == PodState::Over {
            continue;
        }
        let view =
            runtime.unwrap_or_else(|| panic!("I6: {id} ended in one pass without a view of the runtime"));
        assert_eq!(sighting.seen_by_guard_run, Some(view.guard_run), "I6: {id} was not seen by this guard");
        let uid = ended.holder.pod_uid.as_ref().unwrap();
        assert!(!view.pods.contains(uid), "I6: {id} ended in one pass and its sandbox runs");
        let is_kubelet_settled = pass.kubelet.is_some_and(|kubelet| {
            pass.began_mono_ms >= kubelet.created_mono_ms + before.rules.timing.kubelet_settle_ms
        });
        assert!(
            is_kubelet_settled && pass.fresh && pass.checkpoint.is_some() && pass.list.is_some(),
            "I6: {id}"
        );
    }
}

/// Pruning removes only ended allocations and keeps the history within its limit.
pub(crate) fn pruning_loses_nothing_that_lives(
    before: &Ledger,
    after: &Ledger,
    entry: &Entry,
    limit: HistoryLimit,
) {
    let ended = |id| entry.changes.iter().any(|c| matches!(c, Change::Ended { id: e, .. } if *e == id));
    for change in &entry.changes {
        let Change::Pruned(id) = change else {
            continue;
        };
        assert!(before.ended.get(*id).is_some(), "{id} was pruned but had not ended");
        assert!(!before.live.contains_key(id) && !after.live.contains_key(id), "{id} was pruned but is live");
    }
    for id in before.live.keys() {
        assert!(after.live.contains_key(id) || ended(*id), "{id} is missing but did not end");
    }
    for id in before.ended.iter().map(|past| past.id) {
        let pruned = entry.changes.contains(&Change::Pruned(id));
        assert_eq!(after.ended.get(id).is_none(), pruned, "{id} leaves the history only when it is pruned");
    }
    let ends = entry.changes.iter().filter(|c| matches!(c, Change::Ended { .. })).count();
    assert!(after.ended.len() <= limit.allocations.max(before.ended.len()).max(ends), "the history grew");
}

pub(crate) fn i10_an_id_is_delisted_only_after_its_wait(
    before: &Ledger,
    after: &Ledger,
    entry: &Entry,
    now: Now,
) {
    let timing = &before.rules.timing;
    let forgotten = |p: &crate::sharing::part_state::PartState| {
        entry.changes.iter().any(|c| matches!(c, Change::GpuForgotten(g) if g == &p.part.gpu))
    };
    let part_forgotten =
        |id: &PartId| entry.changes.iter().any(|c| matches!(c, Change::PartForgotten(g) if g == id));
    for (id, part) in &before.parts {
        for ((resource, share), device) in &part.devices {
            if after.part(id).is_some_and(|p| p.device(resource, *share).is_some()) {
                continue;
            }
            assert!(!device.held(), "I10: {id} {share:?} left while held");
            if part_forgotten(id) {
                assert!(
                    !part.present && now.mono_ms >= part.present_changed_mono_ms + timing.retire_ms,
                    "I10: {id}"
                );
            } else if !forgotten(part) {
                let DeviceState::Retiring { since_mono_ms } = device.state else {
                    panic!("I10: {id} {share:?} left while offered")
                };
                assert!(now.mono_ms >= since_mono_ms + timing.retire_ms, "I10: {id} {share:?} left too soon");
                assert!(
                    device.last_allocate_mono_ms.is_none_or(|n| now.mono_ms >= n + timing.allocate_grace_ms),
                    "I10: just named"
                );
            }
        }
    }
}

pub(crate) fn i11_generation_grows_by_one(before: &Ledger, after: &Ledger) {
    assert_eq!(after.generation, before.generation + 1, "I11");
}
