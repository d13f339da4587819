//! How long things took: a histogram that many write and one reads.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// A histogram of durations.
#[derive(Debug)]
pub struct Times {
    /// Upper bounds, microseconds, rising.
    bounds_us: &'static [u64],
    /// One more than there are bounds: the last is what took longer than all of them.
    counts: Vec<AtomicU64>,
    sum_us: AtomicU64,
}

/// What a histogram holds at one moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Spread {
    /// Upper bounds, microseconds.
    pub bounds_us: &'static [u64],
    /// What took up to the bound of its place and longer than the one before it; the last place is what
    /// took longer than all bounds.
    pub counts: Vec<u64>,
    /// All of them together, microseconds.
    pub sum_us: u64,
}

impl Times {
    /// Nothing was measured yet.
    #[must_use]
    pub fn new(bounds_us: &'static [u64]) -> Self {
        let counts = (0..=bounds_us.len()).map(|_| AtomicU64::new(0)).collect();
        Self { bounds_us, counts, sum_us: AtomicU64::new(0) }
    }

    /// Counts one.
    pub fn add(&self, took: Duration) {
        let us = u64::try_from(took.as_micros()).unwrap_or(u64::MAX);
        let place = self.bounds_us.partition_point(|bound| *bound < us);
        // The sum first: a reader in between sees at most one that is not yet in a bucket.
        self.sum_us.fetch_add(us, Ordering::Relaxed);
        self.counts[place].fetch_add(1, Ordering::Relaxed);
    }

    /// What was measured so far.
    #[must_use]
    pub fn read(&self) -> Spread {
        Spread {
            bounds_us: self.bounds_us,
            counts: self.counts.iter().map(|count| count.load(Ordering::Relaxed)).collect(),
            sum_us: self.sum_us.load(Ordering::Relaxed),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bound_belongs_to_the_place_below_it() {
        let times = Times::new(&[10, 100]);
        for us in [0, 10, 11, 100, 101, 1_000_000] {
            times.add(Duration::from_micros(us));
        }
        let read = times.read();
        assert_eq!((read.counts, read.sum_us), (vec![2, 2, 2], 1_000_222));
        times.add(Duration::MAX);
        assert_eq!(times.read().counts, [2, 2, 3]);
    }
}
