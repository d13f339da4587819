//! What becomes of policies that fail: counted, and suspended after several faults in a row.

use super::fared::Fared;
use berth_kernel::decision::{Cost, Said};
use berth_kernel::names::Digest;
use berth_kernel::policy::{FaultKind, Hook};
use berth_kernel::stack::{Stack, StackEntry};
use std::collections::BTreeMap;

/// Faults in a row, by the policy's own doing, that suspend its entry.
pub const FAULTS_TO_SUSPEND: u32 = 5;

/// The record of one stack entry since its activation.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Record {
    /// How its calls went, by hook.
    pub hooks: BTreeMap<Hook, Fared>,
    /// Faults in a row, by the policy's own doing.
    pub in_a_row: u32,
    /// Set once it is no longer asked.
    pub suspended: bool,
    /// The last fault, in words.
    pub last: Option<String>,
}

impl Record {
    /// Faults of all hooks, by kind.
    #[must_use]
    pub fn faults(&self) -> BTreeMap<FaultKind, u64> {
        let mut all = BTreeMap::new();
        for (kind, n) in self.hooks.values().flat_map(|fared| &fared.faults) {
            *all.entry(*kind).or_default() += n;
        }
        all
    }

    /// How often it failed.
    #[must_use]
    pub fn failed(&self) -> u64 {
        self.hooks.values().map(Fared::failed).sum()
    }
}

/// The records of the active stack, by place and version: a new version begins anew.
#[derive(Clone, Debug, Default)]
pub struct Faults {
    records: BTreeMap<(usize, Digest), Record>,
}

impl Faults {
    /// Whether the entry at this place is suspended.
    #[must_use]
    pub fn suspended(&self, place: usize, entry: &StackEntry) -> bool {
        self.records.get(&(place, entry.digest.clone())).is_some_and(|r| r.suspended)
    }

    /// The record of the entry at this place.
    #[must_use]
    pub fn record(&self, place: usize, entry: &StackEntry) -> Record {
        self.records.get(&(place, entry.digest.clone())).cloned().unwrap_or_default()
    }

    /// Notes what the entry at this place said. Several faults in a row suspend it.
    pub fn take(&mut self, place: usize, entry: &StackEntry, hook: Hook, said: &Said, cost: Cost) {
        let record = self.records.entry((place, entry.digest.clone())).or_default();
        record.hooks.entry(hook).or_default().add(said, cost);
        let Said::Fault(fault) = said else {
            record.in_a_row = 0;
            return;
        };
        record.last = Some(format!("{hook}: {fault}"));
        if fault.kind.counts() {
            record.in_a_row += 1;
            record.suspended |= record.in_a_row >= FAULTS_TO_SUSPEND;
        }
    }

    /// Has the entry at this place not asked, as after several faults: for a trial of a stack whose
    /// other entries are as they are.
    pub fn suspend(&mut self, place: usize, entry: &StackEntry) {
        self.records.entry((place, entry.digest.clone())).or_default().suspended = true;
    }

    /// Lets a suspended entry be asked again; its counts stay. Answers whether it was suspended.
    pub fn forgive(&mut self, place: usize, entry: &StackEntry) -> bool {
        let Some(record) = self.records.get_mut(&(place, entry.digest.clone())) else {
            return false;
        };
        record.in_a_row = 0;
        std::mem::take(&mut record.suspended)
    }

    /// Forgets all: another stack is active.
    pub fn reset(&mut self) {
        self.records.clear();
    }

    /// How the policies of this stack fare, in short.
    #[must_use]
    pub fn standings(&self, stack: &Stack) -> Standings {
        let mut all = Standings::new();
        for (place, entry) in stack.entries.iter().enumerate() {
            let record = self.record(place, entry);
            let standing = all.entry(entry.label()).or_default();
            standing.revision = stack.revision;
            standing.faults += record.failed();
            standing.suspended |= record.suspended;
            standing.last = record.last.or(standing.last.take());
        }
        all
    }
}

/// How the policies of a stack fare, by label. One that is in the stack twice is one.
pub type Standings = BTreeMap<String, Standing>;

/// How one of them fares.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Standing {
    /// The revision of the stack that was activated then: with another one the counts have begun anew.
    pub revision: u64,
    /// Faults since the stack was activated.
    pub faults: u64,
    /// Whether it is no longer asked.
    pub suspended: bool,
    /// The last fault, in words.
    pub last: Option<String>,
}
