//! What the sources of truth prove about live allocations (DESIGN: the kubelet has no Deallocate
//! and Allocate names no pod). A round is fetched outside; here it becomes a plan, which is a plain
//! value.
//!
//! Two sources: the kubelet's `List` knows namespaces and names but no UIDs and no init
//! containers; its checkpoint knows UIDs and init containers but no names, and keeps the
//! environment that we answered, with our allocation id in it.

use super::allocation::{Allocation, EndReason, Holder};
use super::evidence::{Evidence, evidence, newest_shares_pod};
use super::ledger::Ledger;
use super::names::{AllocationId, DeviceId, Resource};
use super::pods::Fate;
use super::running::Shown;
use super::stuck::SourceError;
use super::time::{Now, Timing};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// What one round saw.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RoundView {
    /// When the round began, monotonic milliseconds. It says nothing of what was granted later.
    pub began_mono_ms: u64,
    /// When kubelet.sock was created; `None` if there is none.
    pub kubelet: Option<KubeletAge>,
    /// `List`: `None` if it could not be asked.
    pub list: Option<PodList>,
    /// The checkpoint: `None` if it could not be read.
    pub checkpoint: Option<Vec<Checkpointed>>,
    /// Whether the checkpoint was written after the round began. A stale one can only show too
    /// much.
    pub fresh: bool,
    /// Which account could not be had, and since when.
    pub source_error: Option<SourceError>,
    /// Take over what pods hold under our names and we do not know (before the first
    /// registration only).
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

/// The answer of pod-resources `List`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PodList {
    /// Every pod it names, as (namespace, name), with devices or not.
    pub pods: BTreeSet<(String, String)>,
    /// What their containers hold of our resources.
    pub held: Vec<ListedHold>,
}

/// One container's devices of one resource, by `List`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListedHold {
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
pub struct Checkpointed {
    /// The pod's UID.
    pub pod_uid: String,
    /// The container's name.
    pub container: String,
    /// Our resource.
    pub resource: Resource,
    /// The devices, sorted.
    pub devices: Vec<DeviceId>,
    /// The id that we put into the environment; `None` where another plugin answered.
    pub allocation: Option<AllocationId>,
}

/// What rounds remember of one live allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sighting {
    /// When we answered, or when this process learned of it; monotonic milliseconds.
    pub since_mono_ms: u64,
    /// When a round first missed it since it was last seen.
    pub missed_mono_ms: Option<u64>,
    /// The kubelet.sock (by creation time, wall) under which it was last seen.
    pub kubelet_wall_ms: Option<u64>,
    /// What the kubelet's accounts showed when each was last read; `None` before the first reading since then.
    pub shown: Option<Shown>,
    /// Whether the kubelet named it, by its id or by its pod, when an account that can do so was last read. Devices
    /// alone do not count: they may be another allocation's.
    pub named: bool,
}

impl Sighting {
    /// Of an allocation that is granted now.
    #[must_use]
    pub fn granted(now: Now) -> Self {
        Self {
            since_mono_ms: now.mono_ms,
            missed_mono_ms: None,
            kubelet_wall_ms: None,
            shown: None,
            named: false,
        }
    }

    /// Of one that was read back from the store. Where its holder is known, a source has shown it once, and none
    /// was asked since.
    #[must_use]
    pub fn restored(holder: &Holder, now: Now) -> Self {
        Self { named: !holder.is_unknown(), ..Self::granted(now) }
    }
}

/// What a round changes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// Holders, or parts of them, that became known.
    pub learned: Vec<(AllocationId, Holder)>,
    /// Overlaps that turned out to be of one pod.
    pub settled: Vec<AllocationId>,
    /// What ends.
    pub ended: Vec<(AllocationId, EndReason)>,
    /// Holdings that nobody recorded.
    pub adopted: Vec<Checkpointed>,
    /// The memory of the next round.
    pub sightings: BTreeMap<AllocationId, Sighting>,
    /// Why ends are withheld.
    pub hold: Option<Arc<str>>,
    /// The kubelet under which a live allocation was seen.
    pub kubelet_seen_wall_ms: Option<u64>,
}

/// Turns one round into a plan. Pure.
#[must_use]
pub fn plan(ledger: &Ledger, view: &RoundView, timing: &Timing, now: Now) -> Plan {
    let mut plan = Plan { hold: ledger.hold.clone(), ..Plan::default() };
    // A round says how things were when it began, however late it is handed in: one that waited
    // must not pass for two, nor for one of after a grant had settled.
    let at = Now { mono_ms: view.began_mono_ms, ..now };
    let mut missed = Vec::new();
    let mut seen_any = false;
    for (id, allocation) in ledger.live.iter() {
        let sighting = ledger.sightings.get(id).copied();
        let mut sighting = sighting.unwrap_or_else(|| Sighting::restored(&allocation.holder, now));
        // A miss of before a kubelet restart does not count as one of the two.
        let restarted_ms = view.kubelet.map_or(0, |k| k.created_mono_ms);
        sighting.missed_mono_ms = sighting.missed_mono_ms.filter(|missed| *missed >= restarted_ms);
        // What was fetched before the grant can name the pod that held these devices before.
        let list = view.list.as_ref().filter(|_| view.began_mono_ms > sighting.since_mono_ms);
        let evidence = evidence(ledger, allocation, view, list);
        if !evidence.learned.is_unknown() {
            let mut holder = allocation.holder.clone();
            if holder.learn(&evidence.learned) {
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
        sighting.named = evidence.names || (sighting.named && !evidence.can_name);
        if allocation.overlapped && evidence.by_id && newest_shares_pod(ledger, allocation, view) {
            plan.settled.push(*id);
        }
        // In the same millisecond it may have looked before.
        let since_grant = view.began_mono_ms > sighting.since_mono_ms;
        // A round in which no account could name it is no reading: an operator's `end` stays refused.
        if since_grant && (sighting.shown.is_some() || evidence.can_name) {
            let before = sighting.shown.unwrap_or_default();
            let in_checkpoint = evidence.by_id || (evidence.by_device && !evidence.under_another_id);
            sighting.shown = Some(Shown {
                by_list: if view.list.is_some() { evidence.listed } else { before.by_list },
                by_checkpoint: if view.checkpoint.is_some() { in_checkpoint } else { before.by_checkpoint },
            });
        }
        if allocation.overlapped && view.fresh && since_grant && !evidence.by_id && evidence.under_another_pod
        {
            plan.ended.push((*id, EndReason::Superseded));
        } else {
            match verdict(ledger, allocation, &evidence, view, &sighting, timing, at) {
                Sight::Kept => {}
                Sight::Alive => sighting.missed_mono_ms = None,
                Sight::Over => plan.ended.push((*id, end_reason(allocation, &evidence, view))),
                Sight::Missed => {
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
    // Who knows all pods by UID has the last word on each of them.
    let certain = |a: &Allocation| ledger.fate_of(a) != Fate::Unknown;
    if ledger.live.values().all(|a| a.holder.is_unknown() || certain(a)) {
        plan.hold = None;
    }
    decide_ends(ledger, view, missed, seen_any, &mut plan);
    if view.adopt {
        plan.adopted = unknown_holdings(ledger, view);
    }
    plan
}

/// What one round makes of one allocation that is not superseded.
enum Sight {
    /// Nothing speaks against it, or nothing that counts.
    Kept,
    /// No source of the kubelet shows it, but its pod is alive.
    Alive,
    /// Its pod is over, and the kubelet agrees: nothing to wait for.
    Over,
    /// Missed by this round. Two of them end it.
    Missed,
}

/// The rules of ends (I6). The kubelet's sources need settling times and two rounds, since they
/// are empty or partial after a restart. Who knows all pods by UID is better in both ways: it
/// vouches for a living pod, and a pod that it saw finish needs no second look where the kubelet has
/// let go of the devices, too. One that is gone without having finished was deleted by force, and the
/// kubelet forgets it before its containers end: that takes two rounds, but no settling. Without a
/// checkpoint either word ends an allocation by the old waits.
fn verdict(
    ledger: &Ledger,
    allocation: &Allocation,
    evidence: &Evidence,
    view: &RoundView,
    sighting: &Sighting,
    timing: &Timing,
    at: Now,
) -> Sight {
    // `List` must have answered in either case: it is what shows that the kubelet knows its pods.
    if view.list.is_none() || !evidence.gone(allocation) {
        return Sight::Kept;
    }
    let settled = view.kubelet.is_some_and(|k| at.passed(k.created_mono_ms, timing.kubelet_settle_ms))
        && at.passed(sighting.since_mono_ms, timing.reply_settle_ms);
    let reissued = allocation.overlapped && evidence.under_another_id;
    let readable = view.checkpoint.is_some();
    let after_grant = view.began_mono_ms > sighting.since_mono_ms;
    match ledger.fate_of(allocation) {
        Fate::Alive if !reissued => Sight::Alive,
        Fate::Over if view.fresh && readable && after_grant => Sight::Over,
        Fate::Gone if view.fresh && readable && after_grant => Sight::Missed,
        Fate::Over | Fate::Gone if !readable && settled => Sight::Missed,
        _ if view.fresh && readable && settled => Sight::Missed,
        _ => Sight::Kept,
    }
}

fn end_reason(allocation: &Allocation, evidence: &Evidence, view: &RoundView) -> EndReason {
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

/// If two or more vanish at once across a kubelet restart and nothing is left, the kubelet may have
/// lost its state rather than the pods their GPUs: hold.
fn decide_ends(
    ledger: &Ledger,
    view: &RoundView,
    missed: Vec<(AllocationId, EndReason)>,
    seen_any: bool,
    plan: &mut Plan,
) {
    let had_holder = |id: &AllocationId| ledger.live.get(id).is_some_and(|a| !a.holder.is_unknown());
    let restarted = view.kubelet.map(|k| k.created_wall_ms) != ledger.kubelet_seen_wall_ms;
    let known: Vec<_> = missed.iter().filter(|(id, _)| had_holder(id)).collect();
    let ended = |id: &AllocationId| plan.ended.iter().any(|(e, _)| e == id);
    let all_known = ledger.live.values().filter(|a| !a.holder.is_unknown() && !ended(&a.id)).count();
    if !seen_any && restarted && known.len() >= 2 && known.len() == all_known {
        plan.hold = Some(
            format!(
                "all {} allocations vanished across a kubelet restart; none ends until one is seen again or an operator ends them",
                known.len()
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

/// Entries of our resources whose devices no live allocation names.
fn unknown_holdings(ledger: &Ledger, view: &RoundView) -> Vec<Checkpointed> {
    // By its id, or by who holds what. That one of its devices is in somebody else's name does not
    // make it known: that other one may have ended while nobody looked, and is overlapped then (I7).
    let known = |c: &Checkpointed| {
        c.allocation.is_some_and(|id| ledger.live.contains_key(&id))
            || ledger.live.values().any(|a| {
                a.resource == c.resource
                    && a.devices == c.devices
                    && a.holder.pod_uid.as_ref().is_none_or(|uid| *uid == c.pod_uid)
                    && a.holder.container.as_ref().is_none_or(|container| *container == c.container)
            })
    };
    // What this store granted and no longer has live has ended; the checkpoint can be older than that,
    // or an operator ended it while its pod went on. The same goes for what was once taken over, by
    // its id of another store or without one: of that the history tells as long as a checkpoint may
    // show it (`Past::may_be_shown_again`).
    let ended = |c: &Checkpointed| match c.allocation {
        Some(id) if id.store == ledger.store => id.number < ledger.next_number,
        Some(id) => ledger.ended.get(id).is_some(),
        None => ledger.ended.iter().any(|past| {
            past.pod_uid() == Some(&*c.pod_uid)
                && past.container() == Some(&*c.container)
                && *past.resource() == c.resource
                && past.devices() == c.devices
        }),
    };
    // A GPU of a holding may be away when we first look, and is held all the same when it appears.
    let ours = |c: &Checkpointed| {
        c.devices.iter().any(|id| ledger.parts.contains_key(&id.part) || id.part.is_nvidia_uuid())
    };
    view.checkpoint
        .iter()
        .flatten()
        .filter(|c| !c.devices.is_empty() && ours(c) && !known(c) && !ended(c))
        .cloned()
        .collect()
}
