//! Reconciles live allocations with what the kubelet shows, since the kubelet has no Deallocate and
//! Allocate names no pod. The view of one reconcile pass is fetched elsewhere; here it becomes a plan,
//! which is a plain value.
//!
//! There are two sources. The kubelet's `List` has namespaces and names but no UIDs and no init
//! containers. Its checkpoint has UIDs and init containers but no names, and stores the environment of
//! our reply, which contains the allocation id.

use super::allocation::{Allocation, EndReason, Holder};
use super::evidence::{Evidence, evidence, newest_shares_pod};
use super::ledger::Ledger;
use super::names::{AllocationId, DeviceId, Resource};
use super::pods::Fate;
use super::sighting::KubeletReading;
use super::sighting::Sighting;
use super::stuck::SourceError;
use super::time::{Now, Timing};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// The view of one reconcile pass.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ReconcileView {
    /// When the pass began, monotonic milliseconds. It proves nothing about later grants.
    pub began_mono_ms: u64,
    /// When kubelet.sock was created; `None` if it does not exist.
    pub kubelet: Option<KubeletAge>,
    /// The reply of `List`; `None` if the call failed.
    pub list: Option<PodList>,
    /// The checkpoint; `None` if it could not be read.
    pub checkpoint: Option<Vec<CheckpointEntry>>,
    /// Whether the checkpoint was written after the pass began. An older one may show holdings that have
    /// ended, but lacks none.
    pub fresh: bool,
    /// The source that cannot be read, and since when.
    pub source_error: Option<SourceError>,
    /// Whether to adopt unknown holdings of our resources (before the first registration only).
    pub adopt: bool,
}

/// When kubelet.sock was created, by both clocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KubeletAge {
    /// Milliseconds since 1970.
    pub created_wall_ms: u64,
    /// Monotonic milliseconds; 0 if it is older than this process.
    pub created_mono_ms: u64,
}

/// The reply of pod-resources `List`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PodList {
    /// Every listed pod, as (namespace, name), with or without devices.
    pub pods: BTreeSet<(String, String)>,
    /// The containers' holdings of our resources.
    pub held: Vec<ListedHolding>,
}

/// One container's devices of one resource in `List`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListedHolding {
    /// The pod's namespace.
    pub namespace: String,
    /// The pod's name.
    pub pod: String,
    /// The container's name.
    pub container: String,
    /// Our resource.
    pub resource: Resource,
    /// The devices, sorted.
    pub devices: Vec<DeviceId>,
}

/// One entry of the kubelet's checkpoint under one of our resources.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CheckpointEntry {
    /// The pod's UID.
    pub pod_uid: String,
    /// The container's name.
    pub container: String,
    /// Our resource.
    pub resource: Resource,
    /// The devices, sorted.
    pub devices: Vec<DeviceId>,
    /// The allocation id in the environment of our reply; `None` if another plugin replied.
    pub allocation: Option<AllocationId>,
}

/// The effects of a reconcile pass.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// Holders, or parts of them, that became known.
    pub learned: Vec<(AllocationId, Holder)>,
    /// Overlapping allocations whose pod also holds the newer one.
    pub settled: Vec<AllocationId>,
    /// Allocations that end.
    pub ended: Vec<(AllocationId, EndReason)>,
    /// Unknown holdings to adopt.
    pub adopted: Vec<CheckpointEntry>,
    /// The sightings for the next pass.
    pub sightings: BTreeMap<AllocationId, Sighting>,
    /// Why ends are withheld.
    pub hold: Option<Arc<str>>,
    /// Creation time of the kubelet.sock under which a live allocation was seen, milliseconds since 1970.
    pub kubelet_seen_wall_ms: Option<u64>,
}

/// Turns the view of one reconcile pass into a plan.
#[must_use]
pub fn plan(ledger: &Ledger, view: &ReconcileView, timing: &Timing, now: Now) -> Plan {
    let mut plan = Plan { hold: ledger.hold.clone(), ..Plan::default() };
    // A view shows the state at its beginning, however late it arrives: waits are measured from there, so
    // that a delayed view counts neither as two passes nor as one after a grant settled.
    let at = Now { mono_ms: view.began_mono_ms, ..now };
    let mut missed = Vec::new();
    let mut seen_any = false;
    for (id, allocation) in ledger.live.iter() {
        let sighting = ledger.sightings.get(id).copied();
        let mut sighting = sighting.unwrap_or_else(|| Sighting::restored(&allocation.holder, now));
        // A miss before a kubelet restart does not count as one of the two.
        let restarted_ms = view.kubelet.map_or(0, |k| k.created_mono_ms);
        sighting.missed_mono_ms = sighting.missed_mono_ms.filter(|missed| *missed >= restarted_ms);
        // A list from before the grant may name the pod that held these devices before.
        let list = view.list.as_ref().filter(|_| view.began_mono_ms > sighting.since_mono_ms);
        let evidence = evidence(ledger, allocation, view, list);
        if !evidence.learned.is_unknown() {
            let mut holder = allocation.holder.clone();
            if holder.fill_from(&evidence.learned) {
                plan.learned.push((*id, evidence.learned.clone()));
            }
        }
        let seen = evidence.by_id
            || (evidence.by_device && !evidence.under_another_id)
            || evidence.held_by_list(allocation);
        if seen {
            seen_any = true;
            sighting.missed_mono_ms = None;
            sighting.kubelet_wall_ms = view.kubelet.map(|k| k.created_wall_ms).or(sighting.kubelet_wall_ms);
        }
        sighting.named = evidence.is_shown || (sighting.named && !evidence.can_be_shown);
        if allocation.overlapped && evidence.by_id && newest_shares_pod(ledger, allocation, view) {
            plan.settled.push(*id);
        }
        // A view of the same millisecond may be older than the grant.
        let since_grant = view.began_mono_ms > sighting.since_mono_ms;
        // A pass in which no source could name it does not count as a reading: an operator's `end` stays refused.
        if since_grant && (sighting.shown.is_some() || evidence.can_be_shown) {
            let before = sighting.shown.unwrap_or_default();
            let in_checkpoint = evidence.by_id || (evidence.by_device && !evidence.under_another_id);
            sighting.shown = Some(KubeletReading {
                by_list: if view.list.is_some() { evidence.listed } else { before.by_list },
                by_checkpoint: if view.checkpoint.is_some() { in_checkpoint } else { before.by_checkpoint },
            });
        }
        if allocation.overlapped && view.fresh && since_grant && !evidence.by_id && evidence.under_another_pod
        {
            plan.ended.push((*id, EndReason::Superseded));
        } else {
            match judge(ledger, allocation, &evidence, view, &sighting, timing, at) {
                Outcome::Kept => {}
                Outcome::Alive => sighting.missed_mono_ms = None,
                Outcome::Over => plan.ended.push((*id, end_reason(allocation, &evidence, view))),
                Outcome::Missed => {
                    let first = *sighting.missed_mono_ms.get_or_insert(at.mono_ms);
                    if at.passed(first, timing.rounds_apart_ms) {
                        missed.push((*id, end_reason(allocation, &evidence, view)));
                    }
                }
            }
        }
        plan.sightings.insert(*id, sighting);
    }
    if seen_any {
        plan.hold = None;
        plan.kubelet_seen_wall_ms = view.kubelet.map(|k| k.created_wall_ms);
    }
    // The pods source is decisive where it knows the fate of every pod.
    let is_certain = |a: &Allocation| ledger.fate_of(a) != Fate::Unknown;
    if ledger.live.values().all(|a| a.holder.is_unknown() || is_certain(a)) {
        plan.hold = None;
    }
    decide_ends(ledger, view, missed, seen_any, &mut plan);
    if view.adopt {
        plan.adopted = unknown_holdings(ledger, view);
    }
    plan
}

/// The outcome of one pass for one allocation that is not superseded.
enum Outcome {
    /// There is no sufficient evidence that it ended.
    Kept,
    /// Neither source of the kubelet shows it, but its pod is alive.
    Alive,
    /// Its pod is over and the kubelet has released it: it ends now.
    Over,
    /// Missed by this pass. Two misses end it.
    Missed,
}

/// The rules of ends (I6). The kubelet's sources need settling times and two passes, since they are
/// empty or partial after a restart. The pods source, which has all pods by UID, overrides them: it shows
/// that a pod is alive, and a pod that it showed finished ends in one pass if the kubelet has released the
/// devices, too. A pod that is gone without having finished was force-deleted, and the kubelet forgets it
/// before its containers end: that takes two passes, but no settling. Without a checkpoint a finished or
/// gone pod ends an allocation after the settling times and two passes.
fn judge(
    ledger: &Ledger,
    allocation: &Allocation,
    evidence: &Evidence,
    view: &ReconcileView,
    sighting: &Sighting,
    timing: &Timing,
    at: Now,
) -> Outcome {
    // `List` must have answered in either case: it shows that the kubelet has loaded its pods.
    if view.list.is_none() || !evidence.is_gone(allocation) {
        return Outcome::Kept;
    }
    let settled = view.kubelet.is_some_and(|k| at.passed(k.created_mono_ms, timing.kubelet_settle_ms))
        && at.passed(sighting.since_mono_ms, timing.reply_settle_ms);
    let reissued = allocation.overlapped && evidence.under_another_id;
    let readable = view.checkpoint.is_some();
    let after_grant = view.began_mono_ms > sighting.since_mono_ms;
    match ledger.fate_of(allocation) {
        Fate::Alive if !reissued => Outcome::Alive,
        Fate::Over if view.fresh && readable && after_grant => Outcome::Over,
        Fate::Gone if view.fresh && readable && after_grant => Outcome::Missed,
        Fate::Over | Fate::Gone if !readable && settled => Outcome::Missed,
        _ if view.fresh && readable && settled => Outcome::Missed,
        _ => Outcome::Kept,
    }
}

fn end_reason(allocation: &Allocation, evidence: &Evidence, view: &ReconcileView) -> EndReason {
    if view.checkpoint.is_none() {
        EndReason::PodGone
    } else if allocation.overlapped && evidence.under_another_id {
        EndReason::Superseded
    } else if allocation.holder.is_unknown() {
        EndReason::NeverStarted
    } else {
        EndReason::Released
    }
}

/// Ends the missed allocations, or sets a hold: if two or more vanish at once across a kubelet restart and
/// none is left, the kubelet may have lost its state.
fn decide_ends(
    ledger: &Ledger,
    view: &ReconcileView,
    missed: Vec<(AllocationId, EndReason)>,
    seen_any: bool,
    plan: &mut Plan,
) {
    let had_holder = |id: &AllocationId| ledger.live.get(id).is_some_and(|a| !a.holder.is_unknown());
    let restarted = view.kubelet.map(|k| k.created_wall_ms) != ledger.kubelet_seen_wall_ms;
    let missed_known = missed.iter().filter(|(id, _)| had_holder(id)).count();
    let ended = |id: &AllocationId| plan.ended.iter().any(|(e, _)| e == id);
    let all_known = ledger.live.values().filter(|a| !a.holder.is_unknown() && !ended(&a.id)).count();
    if !seen_any && restarted && missed_known >= 2 && missed_known == all_known {
        plan.hold = Some(
            format!(
                "all {missed_known} allocations vanished across a kubelet restart; none ends until one is seen again or an operator ends them"
            )
            .into(),
        );
    }
    if plan.hold.is_some() {
        plan.ended.extend(missed.into_iter().filter(|(_, reason)| *reason == EndReason::NeverStarted));
    } else {
        plan.ended.extend(missed);
    }
    for (id, _) in &plan.ended {
        plan.sightings.remove(id);
        plan.settled.retain(|s| s != id);
    }
}

/// Entries of our resources that belong to no live or ended allocation.
fn unknown_holdings(ledger: &Ledger, view: &ReconcileView) -> Vec<CheckpointEntry> {
    // Known by its id, or by devices and holder. An allocation of another pod with one of the devices does
    // not make it known: it may have ended while the daemon was stopped, and then becomes overlapped (I7).
    let known = |c: &CheckpointEntry| {
        c.allocation.is_some_and(|id| ledger.live.contains_key(&id))
            || ledger.live.values().any(|a| {
                a.resource == c.resource
                    && a.devices == c.devices
                    && a.holder.pod_uid.as_ref().is_none_or(|uid| *uid == c.pod_uid)
                    && a.holder.container.as_ref().is_none_or(|container| *container == c.container)
            })
    };
    // An allocation that this store granted and that is not live has ended; the checkpoint may be older, or
    // an operator ended it while its pod ran. The same holds for adopted ones, with an id of another store
    // or without one: the history keeps them as long as a checkpoint may show them
    // (`Past::may_be_shown_again`).
    let ended = |c: &CheckpointEntry| match c.allocation {
        Some(id) if id.store == ledger.store => id.number < ledger.next_number,
        Some(id) => ledger.ended.get(id).is_some(),
        None => ledger.ended.iter().any(|past| {
            past.pod_uid() == Some(&*c.pod_uid)
                && past.container() == Some(&*c.container)
                && *past.resource() == c.resource
                && past.devices() == c.devices
        }),
    };
    // A GPU of a holding may be absent at the first scan; it is held once it appears.
    let is_ours = |c: &CheckpointEntry| {
        c.devices.iter().any(|id| ledger.parts.contains_key(&id.part) || id.part.is_nvidia_uuid())
    };
    view.checkpoint
        .iter()
        .flatten()
        .filter(|c| !c.devices.is_empty() && is_ours(c) && !known(c) && !ended(c))
        .cloned()
        .collect()
}
