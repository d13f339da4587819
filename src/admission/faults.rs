//! What becomes of policies that fail: counted, and suspended after several faults in a row.

use crate::kernel::decision::Cost;
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
    /// How long calls took, by hook.
    pub times: BTreeMap<Hook, Times>,
}

/// Upper bounds of [`Times`], microseconds: around the budget of a call (p50 60, p99 300) and up to
/// the backstop.
pub const TIMES_US: [u64; 10] = [30, 60, 100, 200, 300, 1_000, 3_000, 10_000, 100_000, 500_000];

/// How long calls took: a histogram.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Times {
    /// Calls that took up to the bound of the same place in [`TIMES_US`], and no less than the one
    /// before it; the last place is what took longer.
    pub counts: [u64; TIMES_US.len() + 1],
    /// All of them together, microseconds.
    pub sum_us: u64,
}

impl Times {
    fn add(&mut self, cost: Cost) {
        let place = TIMES_US.iter().position(|bound| cost.wall_us <= *bound).unwrap_or(TIMES_US.len());
        self.counts[place] += 1;
        self.sum_us = self.sum_us.saturating_add(cost.wall_us);
    }
}

impl Record {
    fn called(&mut self, hook: Hook, cost: Cost) {
        *self.calls.entry(hook).or_default() += 1;
        self.times.entry(hook).or_default().add(cost);
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

    /// Notes a call that went well.
    pub fn well(&mut self, place: usize, entry: &StackEntry, hook: Hook, cost: Cost) {
        let record = self.records.entry((place, entry.digest.clone())).or_default();
        record.called(hook, cost);
        record.in_a_row = 0;
    }

    /// Notes a fault. Answers whether it suspended the entry just now.
    pub fn fault(&mut self, place: usize, entry: &StackEntry, hook: Hook, fault: &Fault, cost: Cost) -> bool {
        let record = self.records.entry((place, entry.digest.clone())).or_default();
        record.called(hook, cost);
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
