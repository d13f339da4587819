//! Statistics of stack evaluations: counters, statistics of the active stack, and notification of policy failures.

use super::Door;
use super::call_counters::CallCounters;
use super::faults::{FAULTS_TO_SUSPEND, Faults, Record, Standings};
use super::offers::Notes;
use super::policy_thread::Worker;
use crate::figures::Figures;
use berth_kernel::decision::{CallNote, Said};
use berth_kernel::policy::Hook;
use berth_kernel::stack::{Stack, StackEntry};
use parking_lot::Mutex;
use std::sync::Arc;
use tokio::sync::watch;

/// Shared statistics of the policies: written by the policy thread only, read by all threads.
#[derive(Clone, Default)]
pub(super) struct PolicyStats {
    pub(super) faults: Arc<Mutex<Faults>>,
    pub(super) call_counters: Arc<Mutex<CallCounters>>,
    /// Messages for operators about the offers in force.
    pub(super) notes: Arc<Mutex<Notes>>,
    /// Publishes changes of the policies' statuses.
    pub(super) statuses: Arc<watch::Sender<Arc<Standings>>>,
}

impl PolicyStats {
    /// Call statistics of the active stack.
    pub(super) fn faults(&self) -> Faults {
        self.faults.lock().clone()
    }

    /// Call statistics of the active stack's entry at this index.
    pub(super) fn record(&self, index: usize, entry: &StackEntry) -> Record {
        self.faults.lock().record(index, entry)
    }

    /// Publishes the current statuses of this stack's policies if they have changed.
    pub(super) fn publish(&self, stack: &Stack) {
        let statuses = self.faults().policy_statuses(stack);
        self.statuses.send_if_modified(|published| {
            let changed = **published != statuses;
            if changed {
                *published = Arc::new(statuses);
            }
            changed
        });
    }

    pub(super) fn record_outcome(&self, hook: Hook, outcome: &'static str) {
        self.call_counters.lock().record_outcome(hook, outcome);
    }
}

impl Worker {
    /// Records the calls of an evaluation of the active stack. Only this thread writes the statistics.
    pub(super) fn record_calls(&self, stack: &Stack, hook: Hook, calls: &[CallNote], faults: Faults) {
        self.policy_stats.call_counters.lock().record_calls(hook, calls);
        self.fault_log.borrow_mut().tell(hook, calls);
        let failed = calls.iter().any(|call| matches!(call.said, Said::Fault(_)));
        let before = {
            let mut current = self.policy_stats.faults.lock();
            std::mem::replace(&mut *current, faults)
        };
        if !failed {
            return;
        }
        let now = self.policy_stats.faults();
        for (index, entry) in stack.entries.iter().enumerate() {
            if now.suspended(index, entry) && !before.suspended(index, entry) {
                tracing::error!(
                    policy = entry.label(),
                    index,
                    "suspended after {FAULTS_TO_SUSPEND} faults in a row: it is not called until \
                     `berth policy unsuspend` or another activation"
                );
            }
        }
        self.policy_stats.publish(stack);
    }
}

impl Door {
    /// Counters and heartbeats since the daemon started, for metrics and liveness.
    #[must_use]
    pub fn figures(&self) -> &Arc<Figures> {
        self.keeper.figures()
    }

    /// Number of commands in the keeper's inboxes: the kubelet's and the other one.
    #[must_use]
    pub fn queue_lengths(&self) -> (usize, usize) {
        self.keeper.queue_lengths()
    }

    /// Call and decision counters since the daemon started.
    #[must_use]
    pub fn tally(&self) -> CallCounters {
        self.policy_stats.call_counters.lock().clone()
    }

    /// Status of each policy of the active stack.
    #[must_use]
    pub fn policy_statuses(&self, stack: &Stack) -> Standings {
        self.policy_stats.faults().policy_statuses(stack)
    }

    /// A receiver of the policies' statuses; empty before the first fault or activation.
    #[must_use]
    pub fn watch_standings(&self) -> watch::Receiver<Arc<Standings>> {
        self.policy_stats.statuses.subscribe()
    }
}
