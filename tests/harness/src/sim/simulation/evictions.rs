//! Evictions of pods from GPUs that are being drained, and their outcomes.

use super::ends::Cause;
use super::violation::Violation;
use super::world::World;
use berth_kernel::drain::eviction::{EvictionMethod, EvictionOutcome, EvictionRequest};
use berth_kernel::drain::eviction_plan::{due_requests, is_being_evicted};
use berth_kernel::evidence::pods::PodsSource;
use berth_kernel::node::command::Command;
use berth_kernel::node::ledger::Ledger;
use berth_kernel::node::ports::Clock;
use std::collections::BTreeMap;

/// The request.
#[derive(Debug, Default)]
pub(crate) struct Evictions {
    /// Requested, and the outcome has not been submitted.
    under_way: Option<(EvictionRequest, EvictionOutcome)>,
    /// The last submitted outcome of each pod: the kind of request, and when (true time).
    answered: BTreeMap<String, (EvictionMethod, u64)>,
}

impl Evictions {
    /// The daemon died.
    pub(crate) fn forget(&mut self) {
        *self = Self::default();
    }
}

impl World {
    /// Sends the next due request to the API server, on a snapshot that may be old.
    pub(crate) fn evict(&mut self, which: u32, refusal: u32, stale: bool) {
        if self.daemon.is_none() || self.evictions.under_way.is_some() {
            return;
        }
        let ledger = if stale { self.older.clone() } else { self.newest() };
        let now = self.around.hands.now();
        let due = due_requests(&ledger, now);
        let Some(ask) = due.get(which as usize % due.len().max(1)).cloned() else { return };
        self.checks.note(may_be_asked(&ledger, &ask));
        if !stale && let Some((way, at_ms)) = self.evictions.answered.get(&ask.pod.uid) {
            let again = at_ms + self.around.rules.timing.evict_again_ms;
            if *way >= ask.method && self.around.hands.true_ms() < again {
                let what = format!("pod {} is asked again before it is time", ask.pod.uid);
                self.checks.note(Err(Violation::new("evict", what)));
            }
        }
        // The UID is the precondition: another pod is never affected, and a missing one is reported.
        let outcome = match refusal {
            _ if !self.shows.has(&ask.pod.uid) => EvictionOutcome::Gone,
            0 => EvictionOutcome::Budget("needs one more".into()),
            1 => EvictionOutcome::Failed("no answer".into()),
            _ => EvictionOutcome::Accepted,
        };
        if outcome == EvictionOutcome::Accepted {
            let pod = self.shows.leave(&ask.pod.uid, now.wall_ms);
            // Some end at once, some take their time.
            if let Some(pod) = pod.filter(|_| refusal.is_multiple_of(2)) {
                self.kubelet.end_pod(pod);
            }
        }
        self.evictions.under_way = Some((ask, outcome));
    }

    /// The answer is submitted, sometimes once more later.
    pub(crate) fn evict_answered(&mut self, keep: bool) {
        let Some((ask, outcome)) = self.evictions.under_way.take() else { return };
        let (uid, way) = (ask.pod.uid.clone(), ask.method);
        let wanted = is_being_evicted(self.ledger(), &uid);
        let before = self.ledger().evictions.get(&uid).cloned();
        if keep {
            self.evictions.under_way = Some((ask.clone(), outcome.clone()));
        }
        if let Some(Ok(applied)) = self.turn(&Command::RecordEviction { ask, outcome }, Cause::Nothing) {
            let now = applied.snapshot.evictions.get(&uid);
            let right = if wanted {
                now.is_some_and(|now| now.request.method == way)
            } else {
                now == before.as_ref()
            };
            if !right {
                let what = format!("pod {uid} is wanted away: {wanted}, and {now:?} is kept of it");
                self.checks.note(Err(Violation::new("evict", what)));
            }
            if wanted {
                self.evictions.answered.insert(uid, (way, self.around.hands.true_ms()));
            }
        }
    }

    /// After a tick only pods are remembered that were to be evicted before it.
    pub(crate) fn evictions_ticked(&mut self, before: &Ledger) {
        let ledger = self.newest();
        let left = ledger.evictions.keys().find(|uid| !is_being_evicted(before, uid));
        if let Some(uid) = left {
            let what = format!("pod {uid} is remembered as asked, and no drain evicts it");
            self.checks.note(Err(Violation::new("evict", what)));
        }
        self.evictions.answered.retain(|uid, _| ledger.evictions.contains_key(uid));
    }
}

/// Only a pod that the API server shows now, that holds something of a GPU that is emptied by force,
/// and that can go; by the UID that the kubelet knows.
fn may_be_asked(ledger: &Ledger, ask: &EvictionRequest) -> Result<(), Violation> {
    let shown = ledger.pods.as_ref().is_some_and(|view| {
        view.current && view.source == PodsSource::ApiServer && view.pods.contains_key(&ask.pod.uid)
    });
    let evicts = ledger.gpus.get(&ask.gpu).is_some_and(|gpu| gpu.marks.evicts());
    let holds = ledger.live.values().any(|a| {
        let on = |part| ledger.part(part).is_some_and(|p| p.part.gpu == ask.gpu);
        a.holder.pod_uid.as_ref() == Some(&ask.pod.uid) && a.devices.iter().any(|d| on(&d.part))
    });
    let leaves = ask.pod.deletion_wall_ms.is_some();
    if shown && evicts && holds && !ask.pod.is_static && !leaves {
        return Ok(());
    }
    let what = format!(
        "pod {} is asked to leave {}: shown {shown}, evicts {evicts}, holds {holds}, leaves {leaves}",
        ask.pod.uid, ask.gpu
    );
    Err(Violation::new("evict", what))
}
