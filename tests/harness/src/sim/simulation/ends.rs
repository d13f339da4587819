//! When an allocation may end (I6): the rules of rounds, written down a second time.

use super::kubelet::Kubelet;
use super::views::Views;
use super::violation::Violation;
use berth_kernel::evidence::kubelet_view::{CheckpointEntry, ReconcileView};
use berth_kernel::evidence::pods::{PodsSource, PodsView, Stage};
use berth_kernel::evidence::runtime::RuntimeView;
use berth_kernel::grants::allocate::RECORDS_PER_DEVICE;
use berth_kernel::grants::allocation::{Allocation, EndReason};
use berth_kernel::ids::names::{AllocationId, DeviceId};
use berth_kernel::ids::time::{Now, Timing};
use berth_kernel::node::command::Command;
use berth_kernel::node::ledger::Ledger;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// What a round saw, and when in true time.
#[derive(Clone, Debug)]
pub(crate) struct Sight {
    pub(crate) view: ReconcileView,
    pub(crate) began_ms: u64,
    /// When the kubelet.sock of then was made.
    pub(crate) kubelet_ms: u64,
}

/// What may end an allocation.
#[derive(Clone, Debug)]
pub(crate) enum Cause {
    Round(Box<Sight>),
    Operator(AllocationId),
    /// An Allocate.
    Grant,
    /// The kubelet prepares the claim with this UID, or unprepares it.
    Prepare(String),
    Unprepare(String),
    Nothing,
}

/// One step of the keeper.
#[derive(Clone, Copy)]
pub(crate) struct Turn<'a> {
    pub(crate) before: &'a Ledger,
    pub(crate) after: &'a Ledger,
    pub(crate) cause: &'a Cause,
    /// Whether the command was answered with success.
    pub(crate) taken_in: bool,
    pub(crate) true_ms: u64,
}

/// Who really lives.
#[derive(Clone, Copy)]
pub(crate) struct Truth<'a> {
    pub(crate) kubelet: &'a Kubelet,
    pub(crate) views: &'a Views,
}

/// What the source of all pods shows of one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Word {
    Alive,
    Over,
    Gone,
    Nothing,
}

/// What rounds showed of live allocations.
#[derive(Debug, Default)]
pub(crate) struct Ends {
    /// Since when this process knows them.
    since_ms: BTreeMap<AllocationId, u64>,
    /// When good rounds began that missed each since it was last seen.
    missed_ms: BTreeMap<AllocationId, Vec<u64>>,
    /// Those that the last round that saw anything named by their id.
    shown: BTreeSet<AllocationId>,
    /// Commands that may or may not have been recorded.
    open: Vec<Cause>,
    /// The view of all pods that counts, and the true time at which its list was requested.
    pods: Option<(Arc<PodsView>, u64)>,
    /// What the container runtime showed last.
    runtime: Option<RuntimeView>,
    /// The guard's run that has seen the container of an allocation.
    seen_by: BTreeMap<AllocationId, u64>,
}

impl Ends {
    /// A new process remembers nothing of rounds.
    pub(crate) fn restarted(&mut self) {
        self.since_ms.clear();
        self.missed_ms.clear();
        self.shown.clear();
        self.pods = None;
        self.runtime = None;
        self.seen_by.clear();
    }

    /// A command failed or died: it may show up later all the same.
    pub(crate) fn unsure(&mut self, cause: Cause) {
        self.open.push(cause);
    }

    /// Whether the outcome of every command is known.
    pub(crate) fn are_sure(&self) -> bool {
        self.open.is_empty()
    }

    /// Memory and disk are known to agree.
    pub(crate) fn sure(&mut self) {
        self.open.clear();
    }

    /// Checks what ended between two ledgers, then takes the round down if it was taken in.
    pub(crate) fn turn(
        &mut self,
        turn: &Turn<'_>,
        timing: &Timing,
        truth: Truth<'_>,
    ) -> Result<(), Violation> {
        let Turn { before, after, cause, taken_in, true_ms } = *turn;
        for (id, allocation) in before.live.iter().filter(|(id, _)| !after.live.contains_key(id)) {
            let Some(end) = after.ended.get(*id).map(|past| past.end()) else {
                return Err(Violation::new("I5", format!("{id} is neither live nor ended")));
            };
            let causes = || self.open.iter().chain([cause]);
            let claim = allocation.origin.claim().map(|request| &request.claim.uid);
            let superseded = |reason| {
                claim.is_none() && reason == EndReason::Superseded && self.may_supersede(turn, allocation)
            };
            // A pod that runs on keeps its devices, by newer records.
            if superseded(end.reason) && causes().any(|cause| matches!(cause, Cause::Grant)) {
                continue;
            }
            let may = |cause: &Cause| match cause {
                Cause::Operator(who) => end.reason == EndReason::Operator && who == id,
                Cause::Round(sight) => {
                    claim.is_none()
                        && end.reason != EndReason::Operator
                        && self.may_end(allocation, sight, timing, after)
                }
                Cause::Prepare(uid) => end.reason == EndReason::Superseded && claim == Some(uid),
                Cause::Unprepare(uid) => end.reason == EndReason::Released && claim == Some(uid),
                Cause::Grant | Cause::Nothing => false,
            };
            if !causes().any(may) {
                let what = format!("{id} ended as {} although no rule says so", end.reason.as_str());
                return Err(Violation::new("I6", what));
            }
            // One that was deleted by force may run on while the kubelet's holdings cannot be read.
            let forced = end.reason == EndReason::PodGone
                && allocation.holder.pod_uid.as_ref().is_some_and(|uid| truth.views.deleted_by_force(uid));
            if end.reason != EndReason::Operator && !forced && lives(allocation, truth.kubelet) {
                let what = format!("{id} ended as {} although its pod lives", end.reason.as_str());
                return Err(Violation::new("I6", what));
            }
        }
        for id in after.live.keys() {
            self.since_ms.entry(*id).or_insert(true_ms);
        }
        if let (Cause::Round(sight), true) = (cause, taken_in) {
            self.note(before, sight, timing);
        }
        Ok(())
    }

    /// Which view of all pods counts: that of the API server as long as it is heard.
    pub(crate) fn pods(&mut self, turn: &Turn<'_>, command: &Command, now: Now) -> Result<(), Violation> {
        if let (Command::Pods(view), true) = (command, turn.taken_in) {
            let last = self.pods.as_ref().map(|(known, _)| (known.source, known.current));
            // A disconnected source keeps only its own view; the API server's takes precedence over the kubelet's.
            let counts = match (view.source, view.current, last) {
                (_, _, None) | (PodsSource::ApiServer, true, _) => true,
                (source, false, Some((known, _))) => source == known,
                (PodsSource::Kubelet, true, Some(known)) => known != (PodsSource::ApiServer, true),
            };
            if counts {
                let listed_ms = (turn.true_ms + view.listed_mono_ms).saturating_sub(now.mono_ms);
                self.pods = Some((Arc::new(view.clone()), listed_ms));
            }
        }
        let known = self.pods.as_ref().map(|(view, _)| view);
        if turn.after.pods.as_ref() == known || !turn.taken_in {
            return Ok(());
        }
        Err(Violation::new("I6", "the ledger believes another view of all pods than the one that counts"))
    }

    /// Records what the runtime shows.
    pub(crate) fn containers(&mut self, turn: &Turn<'_>, command: &Command) -> Result<(), Violation> {
        if let (Command::SeeContainers(view), true) = (command, turn.taken_in) {
            for (id, containers) in &view.containers {
                let live = turn.before.live.get(id);
                let is_believed = |a: &Arc<Allocation>| {
                    let uid = a.holder.pod_uid.as_ref();
                    containers.iter().any(|one| uid.is_none_or(|uid| *uid == one.pod_uid))
                };
                if live.is_some_and(is_believed) {
                    self.seen_by.insert(*id, view.guard_run);
                }
            }
            self.runtime = Some(without_limits(view));
        }
        if turn.after.runtime.as_deref().map(without_limits) == self.runtime || !turn.taken_in {
            return Ok(());
        }
        Err(Violation::new("I6", "the ledger believes other containers than the runtime showed last"))
    }

    /// Whether the runtime shows the container of an allocation now.
    fn exists(&self, allocation: &Allocation) -> bool {
        let view = self.runtime.as_ref().filter(|view| view.is_whole);
        let mut named = view.and_then(|view| view.containers.get(&allocation.id)).into_iter().flatten();
        named.any(|one| allocation.holder.pod_uid.as_ref().is_none_or(|uid| *uid == one.pod_uid))
    }

    /// Whether this run of the guard saw the container, and neither it nor its sandbox is there any more.
    fn is_gone(&self, allocation: &Allocation) -> bool {
        let Some(view) = self.runtime.as_ref().filter(|view| view.is_whole) else { return false };
        let has_sandbox = allocation.holder.pod_uid.as_ref().is_none_or(|uid| view.pods.contains(uid));
        !self.exists(allocation) && !has_sandbox && self.seen_by.get(&allocation.id) == Some(&view.guard_run)
    }

    /// What the view says of an allocation's pod, if that is known.
    fn word(&self, allocation: &Allocation, since_ms: u64) -> Word {
        let (Some((view, listed_ms)), Some(uid)) = (&self.pods, &allocation.holder.pod_uid) else {
            return Word::Nothing;
        };
        match view.pods.get(uid) {
            Some(pod) if pod.stage == Stage::Finished => return Word::Over,
            Some(_) => return if view.current { Word::Alive } else { Word::Nothing },
            None => {}
        }
        if view.finished.contains(uid) || (view.deleted.contains(uid) && view.source == PodsSource::Kubelet) {
            Word::Over
        } else if view.deleted.contains(uid) || (*listed_ms > since_ms && uid.starts_with("uid-")) {
            Word::Gone
        } else {
            Word::Nothing
        }
    }

    /// A grant ends what newer records hold wholly, many of them on some device, unless its pod is known to
    /// run and holds nothing of it by a newer record.
    fn may_supersede(&self, turn: &Turn<'_>, allocation: &Allocation) -> bool {
        let Turn { before, after, .. } = *turn;
        let left = |id: &DeviceId| after.device(&allocation.resource, id).map_or(&[][..], |d| &d.holders);
        let held = allocation.devices.iter().all(|id| !left(id).is_empty());
        let newer = |id: &DeviceId| {
            let holders = before.device(&allocation.resource, id).map_or(&[][..], |d| &d.holders);
            holders.iter().rev().take_while(|holder| **holder != allocation.id).count() + 1
        };
        let many = allocation.devices.iter().any(|id| newer(id) >= RECORDS_PER_DEVICE);
        let since = self.since_ms.get(&allocation.id).copied().unwrap_or(u64::MAX / 2);
        let runs = self.word(allocation, since) == Word::Alive || self.shown.contains(&allocation.id);
        let pod = |a: &Allocation| (a.holder.pod_uid.clone(), a.holder.pod.clone());
        let (uid, name) = pod(allocation);
        let same = |holder: &AllocationId| {
            after.live.get(holder).map(|a| pod(a)).is_some_and(|(other_uid, other_name)| {
                (uid.is_some() && uid == other_uid) || (name.is_some() && name == other_name)
            })
        };
        held && many && (!runs || allocation.devices.iter().all(|id| left(id).iter().any(same)))
    }

    fn note(&mut self, before: &Ledger, sight: &Sight, timing: &Timing) {
        if sight.view.list.is_some() || sight.view.checkpoint.is_some() {
            let named = entries(sight).filter_map(|c| c.allocation);
            self.shown = named.filter(|id| before.live.contains_key(id)).collect();
        }
        for (id, allocation) in before.live.iter() {
            // A container keeps no record of a device whose newer record may be of the same pod.
            let is_kept = self.exists(allocation) && !allocation.overlapped;
            if entries(sight).any(|c| c.allocation == Some(*id)) || is_kept {
                self.missed_ms.remove(id);
            } else if self.speaks(allocation, sight, timing) && nowhere(allocation, sight) {
                self.missed_ms.entry(*id).or_default().push(sight.began_ms);
            }
        }
    }

    fn may_end(&self, allocation: &Allocation, sight: &Sight, timing: &Timing, after: &Ledger) -> bool {
        let is_of_pod = |id: &AllocationId| {
            let newer = after.live.get(id);
            newer.is_some_and(|a| a.holder.pod_uid.is_some() && a.holder.pod_uid == allocation.holder.pod_uid)
        };
        let left = |id: &DeviceId| after.device(&allocation.resource, id).map_or(&[][..], |d| &d.holders);
        // Its pod has the devices by newer records.
        let is_replaced = allocation.devices.iter().all(|id| left(id).iter().any(is_of_pod));
        if self.exists(allocation) && !is_replaced {
            return false;
        }
        if self.superseded(allocation, sight) {
            return true;
        }
        // One of before a kubelet restart counts for nothing after it.
        let counts =
            |first: &u64| *first >= sight.kubelet_ms && sight.began_ms >= first + timing.passes_apart_ms;
        let twice = self.missed_ms.get(&allocation.id).is_some_and(|firsts| firsts.iter().any(counts));
        let since = self.since_ms.get(&allocation.id).copied().unwrap_or(u64::MAX / 2);
        let word = self.word(allocation, since);
        // The kubelet allocated its devices to another pod, even if it runs on.
        let reissued = allocation.overlapped && entries(sight).any(|c| overlaps(c, allocation));
        let once = (word == Word::Over || self.is_gone_for(allocation, sight, timing))
            && good(&sight.view)
            && sight.began_ms > since;
        (word != Word::Alive || reissued)
            && nowhere(allocation, sight)
            && self.speaks(allocation, sight, timing)
            && (once || twice)
    }

    /// Whether this round may speak against an allocation at all.
    fn speaks(&self, allocation: &Allocation, sight: &Sight, timing: &Timing) -> bool {
        let since = self.since_ms.get(&allocation.id).copied().unwrap_or(u64::MAX / 2);
        let view = &sight.view;
        let settled = sight.began_ms >= since + timing.reply_settle_ms
            && sight.began_ms >= sight.kubelet_ms + timing.kubelet_settle_ms;
        let ended = matches!(self.word(allocation, since), Word::Over | Word::Gone);
        let blind = view.list.is_some() && view.checkpoint.is_none();
        let shown = ended || self.is_gone_for(allocation, sight, timing);
        (good(view) && (settled || (shown && sight.began_ms > since))) || (blind && ended && settled)
    }

    /// Whether container and sandbox are gone, for a round of a kubelet that has settled.
    fn is_gone_for(&self, allocation: &Allocation, sight: &Sight, timing: &Timing) -> bool {
        self.is_gone(allocation) && sight.began_ms >= sight.kubelet_ms + timing.kubelet_settle_ms
    }

    /// One round suffices where it shows the devices under another pod.
    fn superseded(&self, allocation: &Allocation, sight: &Sight) -> bool {
        let since = self.since_ms.get(&allocation.id).copied().unwrap_or(u64::MAX);
        let uid = allocation.holder.pod_uid.as_ref();
        let on_devices: Vec<_> = entries(sight).filter(|c| overlaps(c, allocation)).collect();
        allocation.overlapped
            && sight.view.fresh
            && sight.began_ms > since
            && !on_devices.is_empty()
            && on_devices
                .iter()
                .all(|c| c.allocation != Some(allocation.id) && uid.is_some_and(|uid| *uid != c.pod_uid))
    }
}

/// Whether both of the kubelet's accounts answered, the checkpoint as it is now.
fn good(view: &ReconcileView) -> bool {
    view.fresh && view.list.is_some() && view.checkpoint.is_some()
}

fn entries(sight: &Sight) -> impl Iterator<Item = &CheckpointEntry> {
    sight.view.checkpoint.iter().flatten()
}

fn overlaps(entry: &CheckpointEntry, allocation: &Allocation) -> bool {
    entry.resource == allocation.resource && entry.devices.iter().any(|id| allocation.devices.contains(id))
}

/// The checkpoint has neither its id nor, unless a newer one answers for them or another pod has them, its devices.
fn nowhere(allocation: &Allocation, sight: &Sight) -> bool {
    let uid = allocation.holder.pod_uid.as_ref();
    let is_others = |c: &CheckpointEntry| uid.is_some_and(|uid| *uid != c.pod_uid);
    let by_id = entries(sight).any(|c| c.allocation == Some(allocation.id));
    let mut on_devices = entries(sight).filter(|c| overlaps(c, allocation));
    !by_id && on_devices.all(|c| is_others(c) || (allocation.overlapped && c.allocation.is_some()))
}

/// Whether a pod that lives holds it, by the kubelet's books.
fn lives(allocation: &Allocation, kubelet: &Kubelet) -> bool {
    let adopted = allocation.decision.is_adoption();
    kubelet.held().any(|h| {
        h.allocation == Some(allocation.id)
            || (adopted
                && h.allocation.is_none()
                && h.resource == allocation.resource
                && h.devices == allocation.devices)
    })
}

/// The view without memory limits, since their readings expire.
fn without_limits(view: &RuntimeView) -> RuntimeView {
    let mut view = view.clone();
    for container in view.containers.values_mut().flatten() {
        Arc::make_mut(container).limits.clear();
    }
    view
}
