//! What the sources of truth prove about live allocations (DESIGN: the kubelet has no Deallocate
//! and Allocate names no pod). A round is fetched outside; here it becomes a plan, which is a plain
//! value.
//!
//! Two sources: the kubelet's `List` knows namespaces and names but no UIDs and no init
//! containers; its checkpoint knows UIDs and init containers but no names, and keeps the
//! environment that we answered, with our allocation id in it.

use super::allocation::{Allocation, EndReason, Holder};
use super::ledger::Ledger;
use super::names::{AllocationId, DeviceId, Resource};
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
}

impl Sighting {
    /// Of an allocation that is granted now.
    #[must_use]
    pub fn granted(now: Now) -> Self {
        Self {
            since_mono_ms: now.mono_ms,
            missed_mono_ms: None,
            kubelet_wall_ms: None,
        }
    }

    /// Of one that was read back from the store.
    #[must_use]
    pub fn restored(now: Now) -> Self {
        Self::granted(now)
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

/// What one round says of one allocation.
struct Evidence {
    /// By the checkpoint or `List`.
    learned: Holder,
    /// The checkpoint names its id.
    by_id: bool,
    /// The checkpoint names one of its devices, under whatever id.
    by_device: bool,
    /// The checkpoint names its devices under other pods only, and its own UID is known.
    under_another_pod: bool,
    /// Its devices are in the checkpoint, but only under ids of other allocations.
    under_another_id: bool,
    /// `List` shows its pod, or it has no pod to look for.
    listed: bool,
}

/// Turns one round into a plan. Pure.
#[must_use]
pub fn plan(ledger: &Ledger, view: &RoundView, timing: &Timing, now: Now) -> Plan {
    let mut plan = Plan {
        hold: ledger.hold.clone(),
        ..Plan::default()
    };
    let mut missed = Vec::new();
    let mut seen_any = false;
    for (id, allocation) in ledger.live.iter() {
        let mut sighting = ledger
            .sightings
            .get(id)
            .copied()
            .unwrap_or_else(|| Sighting::restored(now));
        let evidence = evidence(ledger, allocation, view);
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
            sighting.kubelet_wall_ms = view
                .kubelet
                .map(|k| k.created_wall_ms)
                .or(sighting.kubelet_wall_ms);
        }
        if allocation.overlapped && evidence.by_id && newest_shares_pod(ledger, allocation, view) {
            plan.settled.push(*id);
        }
        if allocation.overlapped && view.fresh && !evidence.by_id && evidence.under_another_pod {
            plan.ended.push((*id, EndReason::Superseded));
        } else if judged(view, &sighting, timing, now) && evidence.gone(allocation) {
            let first = *sighting.missed_mono_ms.get_or_insert(now.mono_ms);
            if now.passed(first, timing.rounds_apart_ms) {
                missed.push((*id, end_reason(allocation, &evidence)));
            }
        }
        plan.sightings.insert(*id, sighting);
    }
    if seen_any {
        plan.hold = None;
        plan.kubelet_seen_wall_ms = view.kubelet.map(|k| k.created_wall_ms);
    }
    decide_ends(ledger, view, missed, seen_any, &mut plan);
    if view.adopt {
        plan.adopted = unknown_holdings(ledger, view);
    }
    plan
}

impl Evidence {
    /// `List` shows the very pod that holds it.
    fn held_by_list(&self, allocation: &Allocation) -> bool {
        self.listed && allocation.holder.pod.is_some()
    }

    /// No source shows it any more.
    fn gone(&self, allocation: &Allocation) -> bool {
        let devices_gone = !self.by_device || (allocation.overlapped && self.under_another_id);
        // A pod that lives on with other containers does not keep a superseded grant alive.
        let pod_gone = !self.listed || (allocation.overlapped && self.under_another_id);
        !self.by_id && devices_gone && pod_gone
    }
}

/// Whether this round may speak against an allocation at all (I6).
fn judged(view: &RoundView, sighting: &Sighting, timing: &Timing, now: Now) -> bool {
    let settled = view
        .kubelet
        .is_some_and(|k| now.passed(k.created_mono_ms, timing.kubelet_settle_ms));
    view.fresh
        && view.checkpoint.is_some()
        && view.list.is_some()
        && settled
        && view.began_mono_ms >= sighting.since_mono_ms
        && now.passed(sighting.since_mono_ms, timing.reply_settle_ms)
}

fn end_reason(allocation: &Allocation, evidence: &Evidence) -> EndReason {
    if allocation.overlapped && evidence.under_another_id {
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
    let had_holder =
        |id: &AllocationId| ledger.live.get(id).is_some_and(|a| !a.holder.is_unknown());
    let restarted = view.kubelet.map(|k| k.created_wall_ms) != ledger.kubelet_seen_wall_ms;
    let known: Vec<_> = missed.iter().filter(|(id, _)| had_holder(id)).collect();
    let all_known = ledger
        .live
        .values()
        .filter(|a| !a.holder.is_unknown())
        .count();
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
        plan.ended.extend(
            missed
                .into_iter()
                .filter(|(_, reason)| *reason == EndReason::NeverStarted),
        );
    } else {
        plan.ended.extend(missed);
    }
    for (id, _) in &plan.ended {
        plan.sightings.remove(id);
        plan.settled.retain(|s| s != id);
    }
}

fn evidence(ledger: &Ledger, allocation: &Allocation, view: &RoundView) -> Evidence {
    let on_devices: Vec<&Checkpointed> = view
        .checkpoint
        .iter()
        .flatten()
        .filter(|c| {
            c.resource == allocation.resource && shares_device(&c.devices, &allocation.devices)
        })
        .collect();
    let own = view
        .checkpoint
        .iter()
        .flatten()
        .find(|c| c.allocation == Some(allocation.id));
    // An entry without an id of ours (another plugin answered it) belongs to whoever holds exactly
    // these devices.
    let claim = own.or_else(|| {
        on_devices
            .iter()
            .copied()
            .find(|c| c.allocation.is_none() && c.devices == allocation.devices)
    });
    let mut learned = Holder::default();
    if let Some(c) = claim {
        learned.pod_uid = Some(c.pod_uid.clone());
        learned.container = Some(c.container.clone());
    }
    let mut known = allocation.holder.clone();
    known.learn(&learned);
    if let Some(hold) = listed_hold(ledger, allocation, &known, view) {
        learned.namespace = Some(hold.namespace.clone());
        learned.pod = Some(hold.pod.clone());
        learned
            .container
            .get_or_insert_with(|| hold.container.clone());
    } else if known.pod.is_none() {
        // An init container's pod is named by the app container of the same UID.
        if let Some(pod) = known
            .pod_uid
            .as_deref()
            .and_then(|uid| ledger.pod_by_uid(uid))
        {
            learned.learn(&pod);
        }
    }
    known.learn(&learned);
    let listed = match (&known.namespace, &known.pod, &view.list) {
        (Some(namespace), Some(pod), Some(list)) => {
            list.pods.contains(&(namespace.clone(), pod.clone()))
        }
        _ => false,
    };
    let foreign = |c: &&&Checkpointed| c.allocation.is_some_and(|id| id != allocation.id);
    let by_other_pod =
        |c: &&Checkpointed| known.pod_uid.as_ref().is_some_and(|uid| *uid != c.pod_uid);
    Evidence {
        by_id: own.is_some(),
        by_device: !on_devices.is_empty(),
        under_another_pod: !on_devices.is_empty() && on_devices.iter().all(by_other_pod),
        under_another_id: !on_devices.is_empty()
            && on_devices.iter().filter(foreign).count() == on_devices.len(),
        learned,
        listed,
    }
}

/// The container that `List` shows with exactly these devices. Only the newest allocation of the
/// devices can be meant, unless the container's name says otherwise.
fn listed_hold<'v>(
    ledger: &Ledger,
    allocation: &Allocation,
    known: &Holder,
    view: &'v RoundView,
) -> Option<&'v ListedHold> {
    let newest = allocation
        .keys()
        .all(|key| ledger.holders_of(&key).last() == Some(&allocation.id));
    view.list.as_ref()?.held.iter().find(|h| {
        h.resource == allocation.resource
            && h.devices == allocation.devices
            && match &known.container {
                Some(container) => *container == h.container,
                None => newest,
            }
            && known.pod.as_ref().is_none_or(|pod| *pod == h.pod)
    })
}

/// Whether the newest allocation on the same devices is of the same pod, by UID.
fn newest_shares_pod(ledger: &Ledger, allocation: &Allocation, view: &RoundView) -> bool {
    let uid_of = |id: AllocationId| {
        let shown = view
            .checkpoint
            .iter()
            .flatten()
            .find(|c| c.allocation == Some(id))
            .map(|c| c.pod_uid.clone());
        shown.or_else(|| ledger.live.get(&id).and_then(|a| a.holder.pod_uid.clone()))
    };
    let own = uid_of(allocation.id);
    own.is_some()
        && allocation.keys().all(|key| {
            ledger
                .holders_of(&key)
                .iter()
                .filter(|h| **h > allocation.id)
                .all(|newer| uid_of(*newer) == own)
        })
}

/// Entries of our resources whose devices no live allocation names.
fn unknown_holdings(ledger: &Ledger, view: &RoundView) -> Vec<Checkpointed> {
    let known = |c: &Checkpointed| {
        c.devices.iter().any(|id| {
            ledger
                .device(&c.resource, id)
                .is_some_and(super::part_state::Device::held)
        })
    };
    let ours = |c: &Checkpointed| {
        c.devices
            .iter()
            .all(|id| ledger.parts.contains_key(&id.part))
    };
    view.checkpoint
        .iter()
        .flatten()
        .filter(|c| !c.devices.is_empty() && ours(c) && !known(c))
        .cloned()
        .collect()
}

fn shares_device(a: &[DeviceId], b: &[DeviceId]) -> bool {
    a.iter().any(|id| b.contains(id))
}
