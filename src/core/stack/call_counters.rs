//! Counters since the daemon started, for metrics: calls by policy and hook, and decisions by outcome. Unlike
//! the statistics of the active stack, an activation does not reset them.

use super::call_stats::CallStats;
use berth_kernel::policy::decision::CallRecord;
use berth_kernel::policy::hooks::Hook;
use std::collections::BTreeMap;

/// Most policy versions with counters: a stack of 16, and as many that were active before it. Each has at most
/// four hooks, so a scrape has at most 128 histograms. The version that was not called for the longest time is
/// removed first; its counters restart at 0 if it is called again, as after a restart.
pub const VERSIONS_COUNTED_MAX: usize = 32;

/// Call and decision counters.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CallCounters {
    /// Calls by the policies' labels.
    pub policies: BTreeMap<String, PolicyCounters>,
    /// Decisions by hook and [`berth_kernel::policy::decision::Outcome::as_str`].
    pub decisions: BTreeMap<(Hook, &'static str), u64>,
    evaluations: u64,
}

/// Call counters of one policy version.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PolicyCounters {
    /// Call statistics by hook.
    pub hooks: BTreeMap<Hook, CallStats>,
    /// Number of the evaluation with the last call.
    last_evaluation: u64,
}

impl CallCounters {
    /// Counts the calls of one evaluation.
    pub(crate) fn record_calls(&mut self, hook: Hook, calls: &[CallRecord]) {
        self.evaluations += 1;
        for call in calls {
            if !self.policies.contains_key(&call.policy) {
                self.remove_oldest();
                self.policies.insert(call.policy.clone(), PolicyCounters::default());
            }
            if let Some(counters) = self.policies.get_mut(&call.policy) {
                counters.last_evaluation = self.evaluations;
                counters.hooks.entry(hook).or_default().add(&call.outcome, call.cost);
            }
        }
    }

    /// Counts a decision.
    pub(crate) fn record_outcome(&mut self, hook: Hook, outcome: &'static str) {
        *self.decisions.entry((hook, outcome)).or_default() += 1;
    }

    fn remove_oldest(&mut self) {
        if self.policies.len() < VERSIONS_COUNTED_MAX {
            return;
        }
        let oldest = self.policies.iter().min_by_key(|(_, counters)| counters.last_evaluation);
        if let Some(label) = oldest.map(|(label, _)| label.clone()) {
            self.policies.remove(&label);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use berth_kernel::ids::names::Digest;
    use berth_kernel::policy::decision::{CallOutcome, Cost};

    fn call(policy: &str) -> CallRecord {
        CallRecord {
            policy: policy.into(),
            digest: Digest::parse(&"a".repeat(64)).unwrap(),
            parameters: "{}".into(),
            outcome: CallOutcome::Pass,
            cost: Cost { fuel: 1, wall_us: 40 },
        }
    }

    #[test]
    fn versions_are_bounded_and_recently_called_ones_stay() {
        let mut counters = CallCounters::default();
        for n in 0..1000 {
            counters.record_calls(Hook::Place, &[call("always@a"), call(&format!("once@{n}"))]);
        }
        assert_eq!(counters.policies.len(), VERSIONS_COUNTED_MAX);
        assert_eq!(counters.policies["always@a"].hooks[&Hook::Place].calls, 1000);
        assert!(counters.policies.contains_key("once@999") && !counters.policies.contains_key("once@0"));
    }

    #[test]
    fn decisions_are_counted_by_hook_and_outcome() {
        let mut counters = CallCounters::default();
        counters.record_outcome(Hook::Admit, "granted");
        counters.record_outcome(Hook::Admit, "granted");
        counters.record_outcome(Hook::Admit, "denied");
        let counts: Vec<_> =
            counters.decisions.iter().map(|((hook, outcome), n)| (*hook, *outcome, *n)).collect();
        assert_eq!(counts, [(Hook::Admit, "denied", 1), (Hook::Admit, "granted", 2)]);
    }
}
