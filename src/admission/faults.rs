//! What becomes of policies that fail: counted, and suspended after several faults in a row.

use crate::kernel::names::Digest;
use crate::kernel::policy::{Fault, FaultKind, Hook};
use crate::kernel::stack::StackEntry;
use std::collections::BTreeMap;

/// Faults in a row, by the policy's own doing, that suspend its entry.
pub const FAULTS_TO_SUSPEND: u32 = 5;

/// The record of one stack entry since its activation.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Record {
    /// Calls by hook.
    pub calls: BTreeMap<Hook, u64>,
    /// Faults by kind.
    pub faults: BTreeMap<FaultKind, u64>,
    /// Faults in a row, by the policy's own doing.
    pub in_a_row: u32,
    /// Set once it is no longer asked.
    pub suspended: bool,
    /// The last fault, in words.
    pub last: Option<String>,
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

    /// Notes a call that went well.
    pub fn well(&mut self, place: usize, entry: &StackEntry, hook: Hook) {
        let record = self.records.entry((place, entry.digest.clone())).or_default();
        *record.calls.entry(hook).or_default() += 1;
        record.in_a_row = 0;
    }

    /// Notes a fault. Answers whether it suspended the entry just now.
    pub fn fault(&mut self, place: usize, entry: &StackEntry, hook: Hook, fault: &Fault) -> bool {
        let record = self.records.entry((place, entry.digest.clone())).or_default();
        *record.calls.entry(hook).or_default() += 1;
        *record.faults.entry(fault.kind).or_default() += 1;
        record.last = Some(format!("{hook}: {fault}"));
        if !fault.kind.counts() {
            return false;
        }
        record.in_a_row += 1;
        let suspends = record.in_a_row >= FAULTS_TO_SUSPEND && !record.suspended;
        record.suspended |= suspends;
        suspends
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
}
