//! Counters of the keeper, the ledger's single writer.

use super::heartbeat::Heartbeat;
use super::histogram::Histogram;
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};

/// Resources whose grants and ends have counters of their own; a node has at most 64 at a time. Further resources are
/// counted as `other`, so that a stack that keeps inventing names uses no more memory.
pub const RESOURCES_COUNTED_MAX: usize = 128;

/// From a turn's usual duration (under 1 ms with a disk of 0.2 ms) to the deadline of an append.
const TURN_US: &[u64] =
    &[50, 100, 250, 500, 1_000, 2_500, 5_000, 10_000, 50_000, 250_000, 1_000_000, 2_500_000];

/// Counters of the keeper.
#[derive(Debug)]
pub struct KeeperCounters {
    /// Heartbeat of the keeper's turns, ticks included.
    pub heartbeat: Heartbeat,
    /// Durations of turns.
    pub turn_durations: Histogram,
    /// Durations of appends that succeeded.
    pub append_durations: Histogram,
    append_failures: AtomicU64,
    /// Size of the store, bytes; 0 if unknown.
    store_bytes: AtomicU64,
    granted: Mutex<BTreeMap<(String, &'static str), u64>>,
    ended: Mutex<BTreeMap<(String, &'static str), u64>>,
    health_changes: Mutex<BTreeMap<&'static str, u64>>,
}

impl Default for KeeperCounters {
    fn default() -> Self {
        Self {
            heartbeat: Heartbeat::default(),
            turn_durations: Histogram::new(TURN_US),
            append_durations: Histogram::new(TURN_US),
            append_failures: AtomicU64::new(0),
            store_bytes: AtomicU64::new(0),
            granted: Mutex::default(),
            ended: Mutex::default(),
            health_changes: Mutex::default(),
        }
    }
}

impl KeeperCounters {
    /// Counts an append that failed.
    pub fn append_failed(&self) {
        self.append_failures.fetch_add(1, Ordering::Relaxed);
    }

    /// Appends that failed.
    #[must_use]
    pub fn append_failures(&self) -> u64 {
        self.append_failures.load(Ordering::Relaxed)
    }

    /// Sets the store's size, bytes; `None` if unknown.
    pub fn set_store_bytes(&self, bytes: Option<u64>) {
        self.store_bytes.store(bytes.unwrap_or(0), Ordering::Relaxed);
    }

    /// The store's size, bytes, if known.
    #[must_use]
    pub fn store_bytes(&self) -> Option<u64> {
        Some(self.store_bytes.load(Ordering::Relaxed)).filter(|bytes| *bytes > 0)
    }

    /// Counts a new allocation of this resource; `how` is `granted` or `adopted`.
    pub fn granted(&self, resource: &str, how: &'static str) {
        count(&self.granted, resource, how);
    }

    /// Counts an allocation of this resource that ended.
    pub fn ended(&self, resource: &str, reason: &'static str) {
        count(&self.ended, resource, reason);
    }

    /// Counts a GPU's change to this health state.
    pub fn health_changed(&self, state: &'static str) {
        *self.health_changes.lock().entry(state).or_default() += 1;
    }

    /// New allocations by resource and by `granted` or `adopted`.
    #[must_use]
    pub fn grants(&self) -> BTreeMap<(String, &'static str), u64> {
        self.granted.lock().clone()
    }

    /// Ended allocations by resource and reason.
    #[must_use]
    pub fn ends(&self) -> BTreeMap<(String, &'static str), u64> {
        self.ended.lock().clone()
    }

    /// Changes of GPU health by new state.
    #[must_use]
    pub fn health_changes(&self) -> BTreeMap<&'static str, u64> {
        self.health_changes.lock().clone()
    }
}

fn count(table: &Mutex<BTreeMap<(String, &'static str), u64>>, resource: &str, label: &'static str) {
    let mut table = table.lock();
    let is_known = |name: &str| table.keys().any(|(resource, _)| resource == name);
    let resources = || {
        let mut names: Vec<&str> = table.keys().map(|(resource, _)| resource.as_str()).collect();
        names.dedup();
        names.len()
    };
    let name = if is_known(resource) || resources() < RESOURCES_COUNTED_MAX { resource } else { "other" };
    *table.entry((name.to_owned(), label)).or_default() += 1;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn resource_counters_are_bounded_and_known_resources_keep_theirs() {
        let counters = KeeperCounters::default();
        for n in 0..1_000 {
            counters.granted(&format!("x/{n}"), "granted");
            counters.granted("x/0", "adopted");
        }
        let grants = counters.grants();
        assert_eq!(grants[&("x/0".into(), "adopted")], 1_000);
        assert_eq!(grants[&("other".into(), "granted")], 1_000 - RESOURCES_COUNTED_MAX as u64);
        assert_eq!(grants.len(), RESOURCES_COUNTED_MAX + 2);
    }
}
