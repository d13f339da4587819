//! Call counts and latencies of one hook of one policy.

use berth_kernel::policy::decision::{CallOutcome, Cost};
use berth_kernel::policy::hooks::FaultKind;
use std::collections::BTreeMap;

/// Upper bounds of [`Latencies`], microseconds: around the budget of a call (p50 60, p99 300), and up to
/// its limit.
pub const LATENCY_BOUNDS_US: [u64; 10] = [30, 60, 100, 200, 300, 1_000, 3_000, 10_000, 100_000, 500_000];

/// A histogram of call latencies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Latencies {
    /// Number of calls per bucket, not cumulative: above the previous bound, up to and including the bucket's own in
    /// [`LATENCY_BOUNDS_US`]; the last bucket has no bound.
    pub counts: [u64; LATENCY_BOUNDS_US.len() + 1],
    /// Sum of all latencies, microseconds.
    pub sum_us: u64,
    /// Longest latency, microseconds.
    pub worst_us: u64,
}

impl Latencies {
    fn add(&mut self, cost: Cost) {
        let bucket = LATENCY_BOUNDS_US
            .iter()
            .position(|bound| cost.wall_us <= *bound)
            .unwrap_or(LATENCY_BOUNDS_US.len());
        self.counts[bucket] += 1;
        self.sum_us = self.sum_us.saturating_add(cost.wall_us);
        self.worst_us = self.worst_us.max(cost.wall_us);
    }

    /// A percentile, microseconds: the upper bound of its bucket, or the longest latency if that is less. `None` before
    /// the first call.
    #[must_use]
    pub fn percentile_us(&self, percent: u64) -> Option<u64> {
        let total: u64 = self.counts.iter().sum();
        let rank = (total * percent).div_ceil(100).max(1);
        let mut seen = 0;
        let bucket = self.counts.iter().position(|count| {
            seen += count;
            seen >= rank
        })?;
        Some(LATENCY_BOUNDS_US.get(bucket).map_or(self.worst_us, |bound| self.worst_us.min(*bound)))
    }
}

/// Call statistics of one hook.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CallStats {
    /// Number of calls: answers, passes and faults.
    pub calls: u64,
    /// Number of calls that passed.
    pub passes: u64,
    /// Number of calls that failed, by kind.
    pub faults: BTreeMap<FaultKind, u64>,
    /// Latencies of the calls.
    pub latencies: Latencies,
}

impl CallStats {
    /// Counts a call. A suspended policy was not called and counts nothing.
    pub fn add(&mut self, outcome: &CallOutcome, cost: Cost) {
        match outcome {
            CallOutcome::Suspended => return,
            CallOutcome::Pass => self.passes += 1,
            CallOutcome::Answer(_) => {}
            CallOutcome::Fault(fault) => *self.faults.entry(fault.kind).or_default() += 1,
        }
        self.calls += 1;
        self.latencies.add(cost);
    }

    /// Number of calls that failed.
    #[must_use]
    pub fn failed(&self) -> u64 {
        self.faults.values().sum()
    }

    /// Number of calls with a valid answer.
    #[must_use]
    pub fn answers(&self) -> u64 {
        self.calls.saturating_sub(self.passes + self.failed())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use berth_kernel::policy::hooks::Fault;

    fn cost(wall_us: u64) -> Cost {
        Cost { fuel: 0, wall_us }
    }

    #[test]
    fn percentiles_are_upper_bounds_and_at_most_the_longest_latency() {
        let mut times = Latencies::default();
        assert_eq!(times.percentile_us(50), None);
        times.add(cost(7));
        assert_eq!((times.percentile_us(50), times.percentile_us(99)), (Some(7), Some(7)));
        (0..97).for_each(|_| times.add(cost(55)));
        times.add(cost(250));
        times.add(cost(700_000));
        assert_eq!(times.percentile_us(50), Some(60));
        assert_eq!(times.percentile_us(99), Some(300));
        assert_eq!(times.percentile_us(100), Some(700_000));
        assert_eq!((times.worst_us, times.sum_us), (700_000, 7 + 97 * 55 + 250 + 700_000));
        // A bound belongs to the bucket below it.
        let mut edge = Latencies::default();
        edge.add(cost(60));
        assert_eq!(edge.counts[1], 1);
    }

    #[test]
    fn a_call_is_an_answer_a_pass_or_a_fault() {
        let mut stats = CallStats::default();
        let fault = |kind| CallOutcome::Fault(Fault { kind, detail: String::new() });
        stats.add(&CallOutcome::Suspended, cost(1));
        assert_eq!(stats, CallStats::default(), "it was not called");
        let answer = berth_kernel::policy::hooks::Answer::Deny("no".into());
        for outcome in
            [CallOutcome::Pass, CallOutcome::Pass, CallOutcome::Answer(answer), fault(FaultKind::Trap)]
        {
            stats.add(&outcome, cost(1));
        }
        assert_eq!((stats.calls, stats.passes, stats.answers(), stats.failed()), (4, 2, 1, 1));
    }
}
