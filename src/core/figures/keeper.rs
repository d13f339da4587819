//! What the ledger's writer counts.

use super::beat::Beat;
use super::times::Times;
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};

/// Resources whose grants and ends are counted each; a node has at most 64 at a time. What comes after
/// that counts under `other`, so that a stack that names new ones for ever costs no memory.
pub const RESOURCES_COUNTED_MAX: usize = 128;

/// Around a turn's usual length (under 1 ms beside a disk of 0.2 ms), up to the deadline of an append.
const TURN_US: &[u64] =
    &[50, 100, 250, 500, 1_000, 2_500, 5_000, 10_000, 50_000, 250_000, 1_000_000, 2_500_000];

/// See the module.
#[derive(Debug)]
pub struct KeeperFigures {
    /// Turns, those that time alone brings among them.
    pub beat: Beat,
    /// How long turns take.
    pub turns: Times,
    /// How long appends take that the disk takes.
    pub appends: Times,
    append_failures: AtomicU64,
    /// Size of the store, bytes; 0 where it is not known.
    store_bytes: AtomicU64,
    granted: Mutex<BTreeMap<(String, &'static str), u64>>,
    ended: Mutex<BTreeMap<(String, &'static str), u64>>,
    health: Mutex<BTreeMap<&'static str, u64>>,
}

impl Default for KeeperFigures {
    fn default() -> Self {
        Self {
            beat: Beat::default(),
            turns: Times::new(TURN_US),
            appends: Times::new(TURN_US),
            append_failures: AtomicU64::new(0),
            store_bytes: AtomicU64::new(0),
            granted: Mutex::default(),
            ended: Mutex::default(),
            health: Mutex::default(),
        }
    }
}

impl KeeperFigures {
    /// An append that failed.
    pub fn append_failed(&self) {
        self.append_failures.fetch_add(1, Ordering::Relaxed);
    }

    /// Appends that failed.
    #[must_use]
    pub fn append_failures(&self) -> u64 {
        self.append_failures.load(Ordering::Relaxed)
    }

    /// The store's size, where it tells it.
    pub fn set_store_bytes(&self, bytes: Option<u64>) {
        self.store_bytes.store(bytes.unwrap_or(0), Ordering::Relaxed);
    }

    /// The store's size, if it told it.
    #[must_use]
    pub fn store_bytes(&self) -> Option<u64> {
        Some(self.store_bytes.load(Ordering::Relaxed)).filter(|bytes| *bytes > 0)
    }

    /// An allocation under this resource began; how: `granted` or `adopted`.
    pub fn granted(&self, resource: &str, how: &'static str) {
        count(&self.granted, resource, how);
    }

    /// An allocation ended, and why.
    pub fn ended(&self, resource: &str, reason: &'static str) {
        count(&self.ended, resource, reason);
    }

    /// A GPU turned to this state of health.
    pub fn turned(&self, state: &'static str) {
        *self.health.lock().entry(state).or_default() += 1;
    }

    /// Grants by resource and how.
    #[must_use]
    pub fn grants(&self) -> BTreeMap<(String, &'static str), u64> {
        self.granted.lock().clone()
    }

    /// Ends by resource and reason.
    #[must_use]
    pub fn ends(&self) -> BTreeMap<(String, &'static str), u64> {
        self.ended.lock().clone()
    }

    /// Turns of GPUs' health by the state turned to.
    #[must_use]
    pub fn health_turns(&self) -> BTreeMap<&'static str, u64> {
        self.health.lock().clone()
    }
}

fn count(table: &Mutex<BTreeMap<(String, &'static str), u64>>, resource: &str, word: &'static str) {
    let mut table = table.lock();
    let known = |name: &str| table.keys().any(|(resource, _)| resource == name);
    let resources = || {
        let mut names: Vec<&str> = table.keys().map(|(resource, _)| resource.as_str()).collect();
        names.dedup();
        names.len()
    };
    let name = if known(resource) || resources() < RESOURCES_COUNTED_MAX { resource } else { "other" };
    *table.entry((name.to_owned(), word)).or_default() += 1;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn resources_are_bounded_and_the_known_ones_go_on() {
        let figures = KeeperFigures::default();
        for n in 0..1_000 {
            figures.granted(&format!("x/{n}"), "granted");
            figures.granted("x/0", "adopted");
        }
        let grants = figures.grants();
        assert_eq!(grants[&("x/0".into(), "adopted")], 1_000);
        assert_eq!(grants[&("other".into(), "granted")], 1_000 - RESOURCES_COUNTED_MAX as u64);
        assert_eq!(grants.len(), RESOURCES_COUNTED_MAX + 2);
    }
}
