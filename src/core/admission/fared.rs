//! How the calls of one hook of one policy went: counts, and how long they took.

use berth_kernel::decision::{Cost, Said};
use berth_kernel::policy::FaultKind;
use std::collections::BTreeMap;

/// Upper bounds of [`Times`], microseconds: around the budget of a call (p50 60, p99 300) and up to
/// the backstop.
pub const TIMES_US: [u64; 10] = [30, 60, 100, 200, 300, 1_000, 3_000, 10_000, 100_000, 500_000];

/// How long calls took: a histogram.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Times {
    /// Calls that took up to the bound of the same place in [`TIMES_US`], and longer than the one
    /// before it; the last place is what took longer than all bounds.
    pub counts: [u64; TIMES_US.len() + 1],
    /// All of them together, microseconds.
    pub sum_us: u64,
    /// The longest, microseconds.
    pub worst_us: u64,
}

impl Times {
    fn add(&mut self, cost: Cost) {
        let place = TIMES_US.iter().position(|bound| cost.wall_us <= *bound).unwrap_or(TIMES_US.len());
        self.counts[place] += 1;
        self.sum_us = self.sum_us.saturating_add(cost.wall_us);
        self.worst_us = self.worst_us.max(cost.wall_us);
    }

    /// How long a call takes at most in so many of a hundred, microseconds: the bound of the place
    /// where that call is, or the longest one if that is less. `None` before the first call.
    #[must_use]
    pub fn percentile_us(&self, percent: u64) -> Option<u64> {
        let all: u64 = self.counts.iter().sum();
        let wanted = (all * percent).div_ceil(100).max(1);
        let mut seen = 0;
        let place = self.counts.iter().position(|count| {
            seen += count;
            seen >= wanted
        })?;
        Some(TIMES_US.get(place).map_or(self.worst_us, |bound| self.worst_us.min(*bound)))
    }
}

/// The calls of one hook.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Fared {
    /// All of them: answers, passes and faults.
    pub calls: u64,
    /// How often it left the answer to others.
    pub passes: u64,
    /// How often it failed, by kind.
    pub faults: BTreeMap<FaultKind, u64>,
    /// How long they took.
    pub times: Times,
}

impl Fared {
    /// Notes what a policy said, unless it was not asked.
    pub fn add(&mut self, said: &Said, cost: Cost) {
        match said {
            Said::Suspended => return,
            Said::Pass => self.passes += 1,
            Said::Answer(_) => {}
            Said::Fault(fault) => *self.faults.entry(fault.kind).or_default() += 1,
        }
        self.calls += 1;
        self.times.add(cost);
    }

    /// How often it failed.
    #[must_use]
    pub fn failed(&self) -> u64 {
        self.faults.values().sum()
    }

    /// How often it gave an answer that could be used.
    #[must_use]
    pub fn answers(&self) -> u64 {
        self.calls.saturating_sub(self.passes + self.failed())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use berth_kernel::policy::Fault;

    fn took(wall_us: u64) -> Cost {
        Cost { fuel: 0, wall_us }
    }

    #[test]
    fn percentiles_are_bounds_that_hold_and_no_more_than_the_worst() {
        let mut times = Times::default();
        assert_eq!(times.percentile_us(50), None);
        times.add(took(7));
        assert_eq!((times.percentile_us(50), times.percentile_us(99)), (Some(7), Some(7)));
        (0..97).for_each(|_| times.add(took(55)));
        times.add(took(250));
        times.add(took(700_000));
        assert_eq!(times.percentile_us(50), Some(60));
        assert_eq!(times.percentile_us(99), Some(300));
        assert_eq!(times.percentile_us(100), Some(700_000));
        assert_eq!((times.worst_us, times.sum_us), (700_000, 7 + 97 * 55 + 250 + 700_000));
        // A bound belongs to the place below it.
        let mut edge = Times::default();
        edge.add(took(60));
        assert_eq!(edge.counts[1], 1);
    }

    #[test]
    fn a_call_is_an_answer_a_pass_or_a_fault() {
        let mut fared = Fared::default();
        let fault = |kind| Said::Fault(Fault { kind, detail: String::new() });
        fared.add(&Said::Suspended, took(1));
        assert_eq!(fared, Fared::default(), "it was not asked");
        let answer = berth_kernel::policy::Answer::Deny("no".into());
        for said in [Said::Pass, Said::Pass, Said::Answer(answer), fault(FaultKind::Trap)] {
            fared.add(&said, took(1));
        }
        assert_eq!((fared.calls, fared.passes, fared.answers(), fared.failed()), (4, 2, 1, 1));
    }
}
