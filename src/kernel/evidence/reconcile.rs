//! Reconciles live allocations with what the kubelet shows, since the kubelet has no Deallocate and
//! Allocate names no pod. The view of one reconcile pass is fetched elsewhere; here it becomes a plan,
//! which is a plain value, and the changes that carry it out.
//!
//! The kubelet has two sources. Its `List` has namespaces and names but no UIDs and no init containers. Its checkpoint
//! has UIDs and init containers but no names, and stores the environment of our reply, which contains the allocation
//! id. The source of all pods by UID (`pods`) overrides both.

use crate::evidence::device_plugin::{Evidence, Sources};
use crate::evidence::kubelet_view::{CheckpointEntry, ReconcileView};
use crate::evidence::pods::PodState;
use crate::evidence::runtime::RuntimeState;
use crate::evidence::sighting::{BlockedEnds, Sighting};
use crate::grants::allocation::{Allocation, Decision, EndReason, GrantOrigin, Holder};
use crate::ids::names::{AllocationId, DeviceId, Resource};
use crate::ids::time::{Now, Timing};
use crate::node::change::{Change, Entry};
use crate::node::ledger::Ledger;
use crate::policy::decider::Decider;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

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
    pub ends_withheld: Option<Arc<str>>,
    /// Creation time of the kubelet.sock under which a live allocation was seen, milliseconds since 1970.
    pub kubelet_seen_wall_ms: Option<u64>,
}

/// Turns the view of one reconcile pass into a plan.
#[must_use]
pub fn plan(ledger: &Ledger, view: &ReconcileView, timing: &Timing, now: Now) -> Plan {
    // A view shows the state at the beginning of its pass, even if it arrives late. Waits are therefore measured from
    // that moment: a late view must not count as a second pass, nor as a pass after the settling time of a grant.
    let at = Now { mono_ms: view.began_mono_ms, ..now };
    let plan = Plan { ends_withheld: ledger.ends_withheld.clone(), ..Plan::default() };
    let sources = Sources::new(view);
    let mut pass = Pass { ledger, view, sources, timing, at, plan, missed: Vec::new(), seen_any: false };
    for (id, allocation) in ledger.live.iter() {
        let sighting = ledger.sightings.get(id).copied();
        let sighting = sighting.unwrap_or_else(|| Sighting::restored(&allocation.holder, now));
        match allocation.origin {
            GrantOrigin::DevicePlugin => pass.examine(*id, allocation, sighting),
            // The kubelet says itself when a claim ends, and neither its `List` of devices nor its checkpoint has claims.
            GrantOrigin::Claim(_) => drop(pass.plan.sightings.insert(*id, sighting)),
        }
    }
    let Pass { mut plan, missed, seen_any, .. } = pass;
    if seen_any {
        plan.ends_withheld = None;
        plan.kubelet_seen_wall_ms = view.kubelet.map(|k| k.created_wall_ms);
    }
    // The pods source is decisive where it knows the state of every pod.
    let is_certain = |a: &Allocation| ledger.pod_state_of(a) != PodState::Unknown;
    if of_device_plugin(ledger).all(|a| a.holder.is_unknown() || is_certain(a)) {
        plan.ends_withheld = None;
    }
    decide_ends(ledger, view, missed, seen_any, &mut plan);
    if view.adopt {
        plan.adopted = unknown_holdings(ledger, view);
    }
    plan
}

/// The live allocations that reconcile passes end.
fn of_device_plugin(ledger: &Ledger) -> impl Iterator<Item = &Allocation> {
    ledger.live.values().map(AsRef::as_ref).filter(|a| a.origin == GrantOrigin::DevicePlugin)
}

/// One pass over the live allocations.
struct Pass<'a> {
    ledger: &'a Ledger,
    view: &'a ReconcileView,
    sources: Sources<'a>,
    timing: &'a Timing,
    /// When the view began.
    at: Now,
    plan: Plan,
    /// Allocations that end if ends are not withheld.
    missed: Vec<(AllocationId, EndReason)>,
    /// Whether the kubelet shows a live allocation.
    seen_any: bool,
}

impl<'a> Pass<'a> {
    fn examine(&mut self, id: AllocationId, allocation: &'a Allocation, mut sighting: Sighting) {
        let (ledger, view) = (self.ledger, self.view);
        // A miss before a kubelet restart does not count as one of the two.
        let restarted_ms = view.kubelet.map_or(0, |k| k.created_mono_ms);
        sighting.missed_mono_ms = sighting.missed_mono_ms.filter(|missed| *missed >= restarted_ms);
        if self.sources.restores_entries_of(ledger, sighting.recorded_under_wall_ms) {
            sighting.recorded_under_wall_ms = view.kubelet.map(|kubelet| kubelet.created_wall_ms);
        }
        // A view of the same millisecond may be older than the grant.
        let began_after_grant = view.began_mono_ms > sighting.since_mono_ms;
        let evidence = self.sources.evidence(ledger, allocation, &sighting, began_after_grant);
        if allocation.holder.clone().update_from(&evidence.learned) {
            self.plan.learned.push((id, evidence.learned.clone()));
        }
        self.record(allocation, &evidence, began_after_grant, &mut sighting);
        if allocation.overlapped && evidence.by_id && self.sources.newest_shares_pod(ledger, allocation) {
            self.plan.settled.push(id);
        }
        let may_be_superseded = allocation.overlapped && view.fresh && began_after_grant && !evidence.by_id;
        let has_container = ledger.runtime_state_of(allocation) == RuntimeState::Exists;
        if may_be_superseded && evidence.under_another_pod && !has_container {
            self.plan.ended.push((id, EndReason::Superseded));
        } else {
            let end = || (id, end_reason(allocation, &evidence, view));
            match self.judge(allocation, &evidence, &sighting) {
                Outcome::Kept => {}
                Outcome::Alive => sighting.missed_mono_ms = None,
                Outcome::Over => self.plan.ended.push(end()),
                Outcome::Missed => {
                    let first = *sighting.missed_mono_ms.get_or_insert(self.at.mono_ms);
                    if self.at.passed(first, self.timing.passes_apart_ms) {
                        self.missed.push(end());
                    }
                }
            }
        }
        self.plan.sightings.insert(id, sighting);
    }

    /// Records in the sighting what this pass shows of the allocation.
    fn record(
        &mut self,
        allocation: &Allocation,
        evidence: &Evidence,
        began_after_grant: bool,
        sighting: &mut Sighting,
    ) {
        let (ledger, view) = (self.ledger, self.view);
        if evidence.in_checkpoint || (evidence.is_pod_listed && allocation.holder.pod.is_some()) {
            self.seen_any = true;
            // A pod that was granted its devices again is listed, but it no longer holds the older allocation.
            if !evidence.reissued {
                sighting.missed_mono_ms = None;
            }
        }
        sighting.named = evidence.is_shown || (sighting.named && !evidence.can_be_shown);
        if evidence.has_entry {
            sighting.recorded_under_wall_ms = view.kubelet.map(|kubelet| kubelet.created_wall_ms);
        }
        if view.fresh && began_after_grant && view.checkpoint.is_some() {
            // An init container is recorded only if one of its devices is not granted to new pods, since only I4 uses
            // the record. This run of the kubelet must have requested the devices: after a restart of the kubelet,
            // `List` may lack pods whose containers are not init containers.
            let mut devices = allocation.devices.iter();
            let is_init_container = evidence.is_entry_complete
                && view.kubelet.is_some_and(|kubelet| sighting.is_requested_by(kubelet))
                && view.list.is_some()
                && !evidence.is_container_listed
                && devices.any(|id| !ledger.may_grant_device(&allocation.resource, id));
            sighting.init_container_mono_ms = is_init_container.then_some(view.began_mono_ms);
            sighting.contested = evidence.contested;
        }
        // A pass in which no source could name it does not count as a reading: an operator's `end` stays refused.
        if began_after_grant && (sighting.shown.is_some() || evidence.can_be_shown) {
            let shown = sighting.shown.get_or_insert_default();
            if view.list.is_some() {
                shown.by_list = evidence.is_pod_listed;
            }
            if view.checkpoint.is_some() {
                shown.by_checkpoint = evidence.in_checkpoint;
            }
        }
    }

    /// The rules of ends (I6). The kubelet's sources need settling times and two passes, since they are empty or
    /// partial after a restart. The pods source, which has all pods by UID, overrides them. An allocation stays while
    /// it shows the pod alive, unless its devices were granted to that pod again. If it showed that the pod finished,
    /// the allocation ends in one pass, provided that the kubelet has released the devices, too. A pod that is gone
    /// without having finished was force-deleted, and the kubelet forgets it before its containers end: its allocation
    /// ends after two passes, without settling times. Without a checkpoint a finished or gone pod ends an allocation
    /// after the settling times and two passes.
    ///
    /// An allocation also stays while the container runtime shows its container, unless newer allocations give its pod
    /// the same devices: a pod that was deleted by force is forgotten by all other sources while its container runs. If
    /// the runtime showed the container and the sandbox end, one pass in which the kubelet's sources agree ends the
    /// allocation. Only the kubelet's settling time counts then, since a kubelet that restarts has not read all of its
    /// pods.
    fn judge(&self, allocation: &Allocation, evidence: &Evidence, sighting: &Sighting) -> Outcome {
        let (view, timing, at) = (self.view, self.timing, self.at);
        let runtime_state = self.ledger.runtime_state_of(allocation);
        let is_replaced = evidence.reissued && self.sources.is_granted_again(self.ledger, allocation);
        if runtime_state == RuntimeState::Exists && !is_replaced {
            return Outcome::Alive;
        }
        // `List` must have answered in either case: it shows that the kubelet has loaded its pods.
        if view.list.is_none() || !evidence.is_gone {
            return Outcome::Kept;
        }
        let is_kubelet_settled =
            view.kubelet.is_some_and(|k| at.passed(k.created_mono_ms, timing.kubelet_settle_ms));
        let settled = is_kubelet_settled && at.passed(sighting.since_mono_ms, timing.reply_settle_ms);
        let readable = view.checkpoint.is_some();
        let began_after_grant = view.began_mono_ms > sighting.since_mono_ms;
        match self.ledger.pod_state_of(allocation) {
            PodState::Alive if !evidence.reissued => Outcome::Alive,
            PodState::Over if view.fresh && readable && began_after_grant => Outcome::Over,
            _ if runtime_state == RuntimeState::Gone
                && is_kubelet_settled
                && view.fresh
                && readable
                && began_after_grant =>
            {
                Outcome::Over
            }
            PodState::Gone if view.fresh && readable && began_after_grant => Outcome::Missed,
            PodState::Over | PodState::Gone if !readable && settled => Outcome::Missed,
            _ if view.fresh && readable && settled => Outcome::Missed,
            _ => Outcome::Kept,
        }
    }
}

/// The outcome of one pass for one allocation that is not superseded.
enum Outcome {
    /// There is no sufficient evidence that it ended.
    Kept,
    /// Its pod is alive or its container exists, whatever the kubelet's sources show.
    Alive,
    /// Its pod is over, or its container and its sandbox are gone, and the kubelet has released it: it ends now.
    Over,
    /// Missed by this pass. Two misses end it.
    Missed,
}

fn end_reason(allocation: &Allocation, evidence: &Evidence, view: &ReconcileView) -> EndReason {
    if view.checkpoint.is_none() {
        EndReason::PodGone
    } else if evidence.reissued {
        EndReason::Superseded
    } else if allocation.holder.is_unknown() {
        EndReason::NeverStarted
    } else {
        EndReason::Released
    }
}

/// Ends the missed allocations, or withholds ends: if two or more vanish at once across a kubelet restart and
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
    let all_known = of_device_plugin(ledger).filter(|a| !a.holder.is_unknown() && !ended(&a.id)).count();
    if !seen_any && restarted && missed_known >= 2 && missed_known == all_known {
        let reason = format!(
            "all {missed_known} allocations vanished across a kubelet restart; none of them ends until the kubelet \
             shows a live allocation again, or an operator ends them with `berth allocation end`"
        );
        plan.ends_withheld = Some(reason.into());
    }
    let is_held_back = |reason| plan.ends_withheld.is_some() && reason != EndReason::NeverStarted;
    plan.ended.extend(missed.into_iter().filter(|(_, reason)| !is_held_back(*reason)));
    for (id, _) in &plan.ended {
        plan.sightings.remove(id);
        plan.settled.retain(|s| s != id);
    }
}

/// Entries of our resources that belong to no live or ended allocation.
fn unknown_holdings(ledger: &Ledger, view: &ReconcileView) -> Vec<CheckpointEntry> {
    // A holding is known by its id, or by its devices and holder. A live allocation of another pod with one of the
    // devices does not make the holding known: that allocation may have ended while the daemon was stopped, and becomes
    // overlapped by the adoption (I7).
    let known = |c: &CheckpointEntry| {
        c.allocation.is_some_and(|id| ledger.live.contains_key(&id))
            || of_device_plugin(ledger).any(|a| {
                a.resource == c.resource
                    && a.devices == c.devices
                    && a.holder.pod_uid.as_ref().is_none_or(|uid| *uid == c.pod_uid)
                    && a.holder.container.as_ref().is_none_or(|container| *container == c.container)
            })
    };
    // An allocation that this store granted and that is not live has ended; the checkpoint may be older, or
    // an operator ended it while its pod ran. The same holds for adopted ones, with an id of another store
    // or without one: the history keeps them as long as a checkpoint may show them
    // (`EndedAllocation::may_be_shown_again`).
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

/// The changes of one reconcile pass.
#[must_use]
pub fn changes(ledger: &Ledger, view: &ReconcileView, now: Now) -> Vec<Change> {
    let plan = plan(ledger, view, &ledger.rules.timing, now);
    let blocked_ends = find_blocked_ends(ledger, view, &plan, &ledger.rules.timing, now);
    let mut changes: Vec<Change> =
        plan.learned.into_iter().map(|(id, holder)| Change::HolderLearned { id, holder }).collect();
    changes.extend(plan.settled.into_iter().map(Change::OverlapResolved));
    if let Some(seen) = plan.kubelet_seen_wall_ms.filter(|s| Some(*s) != ledger.kubelet_seen_wall_ms) {
        changes.push(Change::KubeletSeen(seen));
    }
    if blocked_ends.as_ref() != ledger.blocked_ends.as_deref() {
        changes.push(Change::BlockedEndsChanged(blocked_ends.map(Arc::new)));
    }
    if plan.sightings != *ledger.sightings || plan.ends_withheld != ledger.ends_withheld {
        changes.push(Change::SightingsUpdated {
            sightings: Arc::new(plan.sightings),
            ends_withheld: plan.ends_withheld,
        });
    }
    changes.extend(end_changes(ledger, &plan.ended));
    adopt(ledger, &plan.adopted, now, &mut changes);
    changes
}

/// Ends and their consequences: a release resets its resource's breaker, and old records are pruned.
#[must_use]
pub fn end_changes(ledger: &Ledger, ends: &[(AllocationId, EndReason)]) -> Vec<Change> {
    let ending = || ends.iter().filter_map(|(id, _)| ledger.live.get(id)).map(Arc::as_ref);
    let resources: BTreeSet<&Resource> = ending().map(|a| &a.resource).collect();
    let ended = ends.iter().map(|(id, reason)| Change::Ended { id: *id, reason: *reason });
    let reset = resources.into_iter().filter_map(|resource| reset_breaker(ledger, resource));
    let pruned = ledger.ended.to_prune(ledger.rules.history, ending()).into_iter().map(Change::Pruned);
    ended.chain(reset).chain(pruned).collect()
}

/// Removes the breaker of a resource, if it has one: a device of it was granted or released.
pub(crate) fn reset_breaker(ledger: &Ledger, resource: &Resource) -> Option<Change> {
    let has_one = ledger.breakers.contains_key(resource);
    has_one.then(|| Change::BreakerChanged { resource: resource.clone(), breaker: None })
}

/// Adopts holdings of our resources that this store did not grant.
fn adopt(ledger: &Ledger, holdings: &[CheckpointEntry], now: Now, changes: &mut Vec<Change>) {
    // Later holdings may be on parts that earlier ones changed.
    let mut scratch = ledger.clone();
    for holding in holdings {
        let by_part = holding.devices.chunk_by(|a, b| a.part == b.part);
        let mut adoption: Vec<Change> =
            by_part.filter_map(|ids| list_adopted(&scratch, &holding.resource, ids, now)).collect();
        let id = holding
            .allocation
            .filter(|id| !scratch.live.contains_key(id))
            .unwrap_or(AllocationId { store: scratch.store, number: scratch.next_number });
        adoption.push(Change::Granted(Allocation {
            id,
            resource: holding.resource.clone(),
            devices: holding.devices.clone(),
            granted_wall_ms: now.wall_ms,
            origin: GrantOrigin::DevicePlugin,
            holder: Holder {
                pod_uid: Some(holding.pod_uid.clone()),
                container: Some(holding.container.clone()),
                ..Holder::default()
            },
            overlapped: false,
            decision: Decision {
                by: vec![Decider::Adopted],
                reason: "held when the daemon started".into(),
                ..Decision::default()
            },
            ended: None,
        }));
        scratch.apply(&Entry { at: now, changes: adoption.clone() });
        changes.extend(adoption);
    }
}

/// Lists the devices of one part that an adopted allocation has and the offer does not, as retiring ones.
pub(crate) fn list_adopted(
    ledger: &Ledger,
    resource: &Resource,
    ids: &[DeviceId],
    now: Now,
) -> Option<Change> {
    let known = ledger.part(&ids[0].part)?;
    let mut part = known.clone();
    for id in ids {
        part.adopt_device(resource, id.share, now.mono_ms);
    }
    (part != *known).then_some(Change::Offered {
        part: part.part.id,
        by: part.offered_by,
        lines: part.lines,
        ranges: part.ranges,
        devices: part.devices,
    })
}

/// The missing evidence after a reconcile pass. An error counts only after the grace time of a grant, so that a kubelet
/// restart is not reported.
#[must_use]
fn find_blocked_ends(
    ledger: &Ledger,
    view: &ReconcileView,
    plan: &Plan,
    timing: &Timing,
    now: Now,
) -> Option<BlockedEnds> {
    let live = || of_device_plugin(ledger).filter(|a| !plan.ended.iter().any(|(id, _)| *id == a.id));
    let known = ledger.blocked_ends.as_deref();
    if let Some(cause) = &plan.ends_withheld {
        let since_wall_ms =
            known.filter(|k| k.cause == *cause).map_or(now.wall_ms, |known| known.since_wall_ms);
        return Some(BlockedEnds { since_wall_ms, cause: Arc::clone(cause), allocations: live().count() });
    }
    let error = view.source_error.as_ref()?;
    if !now.passed(error.since.mono_ms, timing.reply_settle_ms) {
        return None;
    }
    // Without a checkpoint the pods source (API server, Pods API) ends an allocation if `List` answers.
    let can_end =
        |pod_state| view.list.is_some() && view.checkpoint.is_none() && pod_state != PodState::Unknown;
    let allocations = live().filter(|a| !can_end(ledger.pod_state_of(a))).count();
    let blocked_ends =
        BlockedEnds { since_wall_ms: error.since.wall_ms, cause: error.reason.as_str().into(), allocations };
    (allocations > 0).then_some(blocked_ends)
}

#[cfg(test)]
mod tests;
