//! Call statistics of the active stack, and suspension of policies after several faults in a row.

use super::call_stats::CallStats;
use berth_kernel::ids::names::Digest;
use berth_kernel::policy::decision::{CallOutcome, Cost};
use berth_kernel::policy::hooks::{FaultKind, Hook};
use berth_kernel::policy::stack::{Stack, StackEntry};
use std::collections::BTreeMap;

/// Faults of one hook in a row that suspend an entry; only faults that the policy itself causes count, and evaluations
/// in a row that used up the stack's time, of which it took the most.
pub const FAULTS_TO_SUSPEND: u32 = 5;

/// Call statistics of one stack entry since its activation.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EntryStats {
    /// Call statistics by hook.
    pub hooks: BTreeMap<Hook, CallStats>,
    /// Faults in a row that the policy itself caused, by hook: another hook that works, such as `offer` after each grant, does not
    /// make up for one that fails for each pod.
    pub in_a_row: BTreeMap<Hook, u32>,
    /// Whether the entry is suspended: it is no longer called.
    pub suspended: bool,
    /// Message of the last fault.
    pub last: Option<String>,
}

impl EntryStats {
    /// The most faults in a row of one hook.
    #[must_use]
    pub fn most_in_a_row(&self) -> u32 {
        self.in_a_row.values().copied().max().unwrap_or(0)
    }

    /// Faults of all hooks, by kind.
    #[must_use]
    pub fn faults(&self) -> BTreeMap<FaultKind, u64> {
        let mut faults = BTreeMap::new();
        for (kind, n) in self.hooks.values().flat_map(|stats| &stats.faults) {
            *faults.entry(*kind).or_default() += n;
        }
        faults
    }

    /// Number of calls that failed.
    #[must_use]
    pub fn failed(&self) -> u64 {
        self.hooks.values().map(CallStats::failed).sum()
    }
}

/// Call statistics of the active stack, by index and version: a new version starts at 0.
#[derive(Clone, Debug, Default)]
pub struct Faults {
    records: BTreeMap<(usize, Digest), EntryStats>,
    /// By hook, the evaluations in a row that used up the stack's time.
    time_used_up: BTreeMap<Hook, TimeUsedUp>,
}

/// Evaluations in a row that used up the stack's time.
#[derive(Clone, Debug, Default)]
struct TimeUsedUp {
    /// In how many of them the entry at this index was the slowest.
    slowest: BTreeMap<usize, u32>,
    /// Whether the newest evaluation is one of them.
    is_newest: bool,
}

impl Faults {
    /// Whether the entry at this index is suspended.
    #[must_use]
    pub fn is_suspended(&self, index: usize, entry: &StackEntry) -> bool {
        self.records.get(&(index, entry.digest.clone())).is_some_and(|r| r.suspended)
    }

    /// Call statistics of the entry at this index.
    #[must_use]
    pub fn record(&self, index: usize, entry: &StackEntry) -> EntryStats {
        self.records.get(&(index, entry.digest.clone())).cloned().unwrap_or_default()
    }

    /// Counts a call of the entry at this index. Several faults in a row suspend it.
    pub fn record_call(
        &mut self,
        index: usize,
        entry: &StackEntry,
        hook: Hook,
        outcome: &CallOutcome,
        cost: Cost,
    ) {
        let record = self.records.entry((index, entry.digest.clone())).or_default();
        record.hooks.entry(hook).or_default().add(outcome, cost);
        let CallOutcome::Fault(fault) = outcome else {
            record.in_a_row.remove(&hook);
            return;
        };
        record.last = Some(format!("{hook}: {fault}"));
        if fault.kind.is_policy_fault() {
            let in_a_row = record.in_a_row.entry(hook).or_default();
            *in_a_row += 1;
            record.suspended |= *in_a_row >= FAULTS_TO_SUSPEND;
        }
    }

    /// Starts an evaluation of this hook.
    pub(super) fn start_evaluation(&mut self, hook: Hook) {
        let used_up = self.time_used_up.entry(hook).or_default();
        if !std::mem::take(&mut used_up.is_newest) {
            used_up.slowest.clear();
        }
    }

    /// Notes that the newest evaluation used up the stack's time, of which the entry at this index took the most. An
    /// entry that was the slowest in several such evaluations, with no evaluation between them that kept to the time,
    /// is suspended: a machine that is slow for a moment suspends none.
    pub(super) fn record_time_used_up(&mut self, index: usize, slowest: &StackEntry, hook: Hook) {
        let used_up = self.time_used_up.entry(hook).or_default();
        used_up.is_newest = true;
        let times = used_up.slowest.entry(index).or_default();
        *times += 1;
        if *times >= FAULTS_TO_SUSPEND {
            used_up.slowest.clear();
            self.suspend(index, slowest);
        }
    }

    /// Suspends the entry at this index, as several faults do: for a trial of a stack with entries that
    /// are suspended in the active one.
    pub fn suspend(&mut self, index: usize, entry: &StackEntry) {
        self.records.entry((index, entry.digest.clone())).or_default().suspended = true;
    }

    /// Ends an entry's suspension; its counts stay. Returns whether it was suspended.
    pub fn unsuspend(&mut self, index: usize, entry: &StackEntry) -> bool {
        let Some(record) = self.records.get_mut(&(index, entry.digest.clone())) else {
            return false;
        };
        record.in_a_row.clear();
        std::mem::take(&mut record.suspended)
    }

    /// Resets all statistics, when another stack is activated.
    pub fn reset(&mut self) {
        *self = Self::default();
    }

    /// Status of each policy of this stack.
    #[must_use]
    pub fn policy_statuses(&self, stack: &Stack) -> PolicyStatuses {
        let mut statuses = PolicyStatuses::new();
        for (index, entry) in stack.entries.iter().enumerate() {
            let record = self.record(index, entry);
            let status = statuses.entry(entry.label()).or_default();
            status.revision = stack.revision;
            status.faults += record.failed();
            status.suspended |= record.suspended;
            status.last = record.last.or(status.last.take());
        }
        statuses
    }
}

/// Status of a stack's policies, by label. Entries with the same label share one status.
pub type PolicyStatuses = BTreeMap<String, PolicyStatus>;

/// Status of one policy of the active stack.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PolicyStatus {
    /// The stack's revision: each activation resets the counts.
    pub revision: u64,
    /// Faults since the stack was activated.
    pub faults: u64,
    /// Whether the policy is suspended: it is no longer called.
    pub suspended: bool,
    /// Message of the last fault.
    pub last: Option<String>,
}
