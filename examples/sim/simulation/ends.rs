//! When an allocation may end (I6): the rules of rounds, written down a second time.

use super::kubelet::Kubelet;
use super::violation::Violation;
use berth::kernel::allocation::{ADOPTED, Allocation, EndReason};
use berth::kernel::ledger::Ledger;
use berth::kernel::names::AllocationId;
use berth::kernel::reconcile::{Checkpointed, RoundView};
use berth::kernel::time::Timing;
use std::collections::BTreeMap;

/// What a round saw, and when in true time.
#[derive(Clone, Debug)]
pub(crate) struct Sight {
    pub(crate) view: RoundView,
    pub(crate) began_ms: u64,
    /// When the kubelet.sock of then was made.
    pub(crate) kubelet_ms: u64,
}

/// What may end an allocation.
#[derive(Clone, Debug)]
pub(crate) enum Cause {
    Round(Box<Sight>),
    Operator(AllocationId),
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

/// What rounds showed of live allocations.
#[derive(Debug, Default)]
pub(crate) struct Ends {
    /// Since when this process knows them.
    since_ms: BTreeMap<AllocationId, u64>,
    /// When good rounds began that missed each since it was last seen.
    missed_ms: BTreeMap<AllocationId, Vec<u64>>,
    /// Commands of which nobody knows whether they were recorded.
    open: Vec<Cause>,
}

impl Ends {
    /// A new process remembers nothing of rounds.
    pub(crate) fn restarted(&mut self) {
        self.since_ms.clear();
        self.missed_ms.clear();
    }

    /// A command failed or died: it may show up later all the same.
    pub(crate) fn unsure(&mut self, cause: Cause) {
        self.open.push(cause);
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
        kubelet: &Kubelet,
    ) -> Result<(), Violation> {
        let Turn { before, after, cause, taken_in, true_ms } = *turn;
        for (id, allocation) in before.live.iter().filter(|(id, _)| !after.live.contains_key(id)) {
            let Some(end) = after.ended.get(*id).map(|past| past.end()) else {
                return Err(Violation::new("I5", format!("{id} is neither live nor ended")));
            };
            let causes = || self.open.iter().chain([cause]);
            let may = |cause: &Cause| match cause {
                Cause::Operator(who) => end.reason == EndReason::Operator && who == id,
                Cause::Round(sight) => {
                    end.reason != EndReason::Operator && self.may_end(allocation, sight, timing)
                }
                Cause::Nothing => false,
            };
            if !causes().any(may) {
                let what = format!("{id} ended as {} although no rule says so", end.reason.as_str());
                return Err(Violation::new("I6", what));
            }
            if end.reason != EndReason::Operator && lives(allocation, kubelet) {
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

    fn note(&mut self, before: &Ledger, sight: &Sight, timing: &Timing) {
        for (id, allocation) in before.live.iter() {
            if entries(sight).any(|c| c.allocation == Some(*id)) {
                self.missed_ms.remove(id);
            } else if self.speaks(*id, sight, timing) && nowhere(allocation, sight) {
                self.missed_ms.entry(*id).or_default().push(sight.began_ms);
            }
        }
    }

    fn may_end(&self, allocation: &Allocation, sight: &Sight, timing: &Timing) -> bool {
        // One of before a kubelet restart counts for nothing after it.
        let counts =
            |first: &u64| *first >= sight.kubelet_ms && sight.began_ms >= first + timing.rounds_apart_ms;
        let twice = self.missed_ms.get(&allocation.id).is_some_and(|firsts| firsts.iter().any(counts));
        (self.speaks(allocation.id, sight, timing) && nowhere(allocation, sight) && twice)
            || self.superseded(allocation, sight)
    }

    /// Whether this round may speak against an allocation at all.
    fn speaks(&self, id: AllocationId, sight: &Sight, timing: &Timing) -> bool {
        let since = self.since_ms.get(&id).copied().unwrap_or(u64::MAX / 2);
        let view = &sight.view;
        view.fresh
            && view.list.is_some()
            && view.checkpoint.is_some()
            && sight.began_ms >= since + timing.reply_settle_ms
            && sight.began_ms >= sight.kubelet_ms + timing.kubelet_settle_ms
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

fn entries(sight: &Sight) -> impl Iterator<Item = &Checkpointed> {
    sight.view.checkpoint.iter().flatten()
}

fn overlaps(entry: &Checkpointed, allocation: &Allocation) -> bool {
    entry.resource == allocation.resource && entry.devices.iter().any(|id| allocation.devices.contains(id))
}

/// The checkpoint has neither its id nor, unless a newer one answers for them, its devices.
fn nowhere(allocation: &Allocation, sight: &Sight) -> bool {
    let by_id = entries(sight).any(|c| c.allocation == Some(allocation.id));
    let mut on_devices = entries(sight).filter(|c| overlaps(c, allocation));
    !by_id && on_devices.all(|c| allocation.overlapped && c.allocation.is_some())
}

/// Whether a pod that lives holds it, by the kubelet's books.
fn lives(allocation: &Allocation, kubelet: &Kubelet) -> bool {
    let adopted = allocation.decision.by == [ADOPTED];
    kubelet.held().any(|h| {
        h.allocation == Some(allocation.id)
            || (adopted
                && h.allocation.is_none()
                && h.resource == allocation.resource
                && h.devices == allocation.devices)
    })
}
