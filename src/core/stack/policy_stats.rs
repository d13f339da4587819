//! Statistics of stack evaluations: counters, statistics of the active stack, and notification of policy failures.

use super::call_counters::CallCounters;
use super::faults::{EntryStats, Faults, PolicyStatuses};
use super::offers::OfferNotes;
use berth_kernel::policy::hooks::Hook;
use berth_kernel::policy::stack::{Stack, StackEntry};
use parking_lot::Mutex;
use std::sync::Arc;
use tokio::sync::watch;

/// Shared statistics of the policies: written by the policy thread only, read by all threads.
#[derive(Clone, Default)]
pub(crate) struct PolicyStats {
    pub(crate) faults: Arc<Mutex<Faults>>,
    pub(crate) call_counters: Arc<Mutex<CallCounters>>,
    /// Messages for operators about the offers in force.
    pub(crate) notes: Arc<Mutex<OfferNotes>>,
    /// Publishes changes of the policies' statuses.
    pub(crate) statuses: Arc<watch::Sender<Arc<PolicyStatuses>>>,
}

impl PolicyStats {
    /// Call statistics of the active stack.
    pub(crate) fn faults(&self) -> Faults {
        self.faults.lock().clone()
    }

    /// Call statistics of the active stack's entry at this index.
    pub(crate) fn record(&self, index: usize, entry: &StackEntry) -> EntryStats {
        self.faults.lock().record(index, entry)
    }

    /// Publishes the current statuses of this stack's policies if they have changed.
    pub(crate) fn publish(&self, stack: &Stack) {
        let statuses = self.faults().policy_statuses(stack);
        self.statuses.send_if_modified(|published| {
            let changed = **published != statuses;
            if changed {
                *published = Arc::new(statuses);
            }
            changed
        });
    }

    pub(crate) fn record_outcome(&self, hook: Hook, outcome: &'static str) {
        self.call_counters.lock().record_outcome(hook, outcome);
    }
}
