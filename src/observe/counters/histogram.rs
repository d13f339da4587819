//! A histogram of durations that many threads write concurrently.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// A histogram of durations.
#[derive(Debug)]
pub struct Histogram {
    /// Upper bounds, microseconds, ascending.
    bounds_us: &'static [u64],
    /// One more than bounds: the last bucket counts durations above all bounds.
    counts: Vec<AtomicU64>,
    sum_us: AtomicU64,
}

/// The values of a [`Histogram`] at one moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HistogramSnapshot {
    /// Upper bounds, microseconds.
    pub bounds_us: &'static [u64],
    /// Number of durations per bucket, not cumulative: above the previous bound, up to and including the bucket's own;
    /// the last bucket has no bound.
    pub counts: Vec<u64>,
    /// Sum of all durations, microseconds.
    pub sum_us: u64,
}

impl Histogram {
    /// An empty histogram with these bounds, microseconds, ascending.
    #[must_use]
    pub fn new(bounds_us: &'static [u64]) -> Self {
        let counts = (0..=bounds_us.len()).map(|_| AtomicU64::new(0)).collect();
        Self { bounds_us, counts, sum_us: AtomicU64::new(0) }
    }

    /// Counts one duration.
    pub fn add(&self, took: Duration) {
        let us = u64::try_from(took.as_micros()).unwrap_or(u64::MAX);
        let bucket = self.bounds_us.partition_point(|bound| *bound < us);
        // The sum first: a concurrent reader sees at most a duration that is not yet in a bucket.
        self.sum_us.fetch_add(us, Ordering::Relaxed);
        self.counts[bucket].fetch_add(1, Ordering::Relaxed);
    }

    /// The current values.
    #[must_use]
    pub fn read(&self) -> HistogramSnapshot {
        HistogramSnapshot {
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
        let histogram = Histogram::new(&[10, 100]);
        for us in [0, 10, 11, 100, 101, 1_000_000] {
            histogram.add(Duration::from_micros(us));
        }
        let read = histogram.read();
        assert_eq!((read.counts, read.sum_us), (vec![2, 2, 2], 1_000_222));
        histogram.add(Duration::MAX);
        assert_eq!(histogram.read().counts, [2, 2, 3]);
    }
}
