//! What is kept of each walk over the stack: counts, records, and who is told when a policy fails.

use super::Door;
use super::faults::{FAULTS_TO_SUSPEND, Faults, Record, Standings};
use super::offers::Notes;
use super::tally::Tally;
use super::thread::Worker;
use crate::figures::Figures;
use berth_kernel::decision::{CallNote, Said};
use berth_kernel::policy::Hook;
use berth_kernel::stack::{Stack, StackEntry};
use parking_lot::Mutex;
use std::sync::Arc;
use tokio::sync::watch;

/// Where the counts of a running daemon lie: written by the policy thread alone, read by any.
#[derive(Clone, Default)]
pub(super) struct Account {
    pub(super) faults: Arc<Mutex<Faults>>,
    pub(super) tally: Arc<Mutex<Tally>>,
    /// What operators are shown about the offers in force.
    pub(super) notes: Arc<Mutex<Notes>>,
    /// Wakes whoever tells of policies that fail.
    pub(super) standings: Arc<watch::Sender<Arc<Standings>>>,
}

impl Account {
    /// The records of the active stack.
    pub(super) fn faults(&self) -> Faults {
        self.faults.lock().clone()
    }

    /// The record of one entry of it.
    pub(super) fn record(&self, place: usize, entry: &StackEntry) -> Record {
        self.faults.lock().record(place, entry)
    }

    /// Tells how the policies of this stack fare now.
    pub(super) fn publish(&self, stack: &Stack) {
        let standings = self.faults().standings(stack);
        self.standings.send_if_modified(|told| {
            let news = **told != standings;
            if news {
                *told = Arc::new(standings);
            }
            news
        });
    }

    pub(super) fn decided(&self, hook: Hook, outcome: &'static str) {
        self.tally.lock().decided(hook, outcome);
    }
}

impl Worker {
    /// Keeps what came of a walk over the active stack. Only this thread writes the records.
    pub(super) fn account(&self, stack: &Stack, hook: Hook, calls: &[CallNote], faults: Faults) {
        self.account.tally.lock().walked(hook, calls);
        self.fault_log.borrow_mut().tell(hook, calls);
        let failed = calls.iter().any(|call| matches!(call.said, Said::Fault(_)));
        let before = {
            let mut kept = self.account.faults.lock();
            std::mem::replace(&mut *kept, faults)
        };
        if !failed {
            return;
        }
        let now = self.account.faults();
        for (place, entry) in stack.entries.iter().enumerate() {
            if now.suspended(place, entry) && !before.suspended(place, entry) {
                tracing::error!(
                    policy = entry.label(),
                    place,
                    "suspended after {FAULTS_TO_SUSPEND} faults in a row: it is not asked until \
                     `berth policy unsuspend` or another activation"
                );
            }
        }
        self.account.publish(stack);
    }
}

impl Door {
    /// What is counted as long as the daemon lives, for metrics and signs of life.
    #[must_use]
    pub fn figures(&self) -> &Arc<Figures> {
        self.keeper.figures()
    }

    /// How many commands wait for the keeper: the kubelet's, and others'.
    #[must_use]
    pub fn waiting(&self) -> (usize, usize) {
        self.keeper.waiting()
    }

    /// What was counted since the daemon started.
    #[must_use]
    pub fn tally(&self) -> Tally {
        self.account.tally.lock().clone()
    }

    /// How the policies of the active stack fare.
    #[must_use]
    pub fn standings(&self, stack: &Stack) -> Standings {
        self.account.faults().standings(stack)
    }

    /// The same as it changes: empty before the first fault or activation.
    #[must_use]
    pub fn watch_standings(&self) -> watch::Receiver<Arc<Standings>> {
        self.account.standings.subscribe()
    }
}
