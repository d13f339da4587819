//! What is counted as long as the daemon lives, for metrics: calls by policy and hook, and what came
//! of decisions. A record of the active stack begins anew with each activation; this does not.

use super::fared::Fared;
use berth_kernel::decision::CallNote;
use berth_kernel::policy::Hook;
use std::collections::BTreeMap;

/// Versions of policies that are counted at a time: a stack of 16, and as many that were active before
/// it. Each has at most four hooks, so a scrape has at most 128 histograms. The one that was not asked
/// for longest goes first; its counts begin anew if it comes back, as after a restart.
pub const VERSIONS_COUNTED_MAX: usize = 32;

/// The counts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// By the policies' labels.
    pub policies: BTreeMap<String, Counted>,
    /// What came of decisions, by hook and [`berth_kernel::decision::Outcome::word`].
    pub decisions: BTreeMap<(Hook, &'static str), u64>,
    walks: u64,
}

/// One version of a policy.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counted {
    /// How its calls went, by hook.
    pub hooks: BTreeMap<Hook, Fared>,
    /// The number of the walk in which it was asked last.
    asked: u64,
}

impl Tally {
    /// Counts what the policies said to one question.
    pub(super) fn walked(&mut self, hook: Hook, calls: &[CallNote]) {
        self.walks += 1;
        for call in calls {
            if !self.policies.contains_key(&call.policy) {
                self.make_room();
                self.policies.insert(call.policy.clone(), Counted::default());
            }
            if let Some(counted) = self.policies.get_mut(&call.policy) {
                counted.asked = self.walks;
                counted.hooks.entry(hook).or_default().add(&call.said, call.cost);
            }
        }
    }

    /// Counts what came of a question.
    pub(super) fn decided(&mut self, hook: Hook, outcome: &'static str) {
        *self.decisions.entry((hook, outcome)).or_default() += 1;
    }

    fn make_room(&mut self) {
        if self.policies.len() < VERSIONS_COUNTED_MAX {
            return;
        }
        let oldest = self.policies.iter().min_by_key(|(_, counted)| counted.asked);
        if let Some(label) = oldest.map(|(label, _)| label.clone()) {
            self.policies.remove(&label);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use berth_kernel::decision::{Cost, Said};
    use berth_kernel::names::Digest;

    fn call(policy: &str) -> CallNote {
        CallNote {
            policy: policy.into(),
            digest: Digest::parse(&"a".repeat(64)).unwrap(),
            parameters: "{}".into(),
            said: Said::Pass,
            cost: Cost { fuel: 1, wall_us: 40 },
        }
    }

    #[test]
    fn versions_are_bounded_and_those_that_are_asked_stay() {
        let mut tally = Tally::default();
        for n in 0..1000 {
            tally.walked(Hook::Place, &[call("always@a"), call(&format!("once@{n}"))]);
        }
        assert_eq!(tally.policies.len(), VERSIONS_COUNTED_MAX);
        assert_eq!(tally.policies["always@a"].hooks[&Hook::Place].calls, 1000);
        assert!(tally.policies.contains_key("once@999") && !tally.policies.contains_key("once@0"));
    }

    #[test]
    fn decisions_are_counted_by_hook_and_outcome() {
        let mut tally = Tally::default();
        tally.decided(Hook::Admit, "granted");
        tally.decided(Hook::Admit, "granted");
        tally.decided(Hook::Admit, "denied");
        let counts: Vec<_> = tally.decisions.iter().map(|((hook, word), n)| (*hook, *word, *n)).collect();
        assert_eq!(counts, [(Hook::Admit, "denied", 1), (Hook::Admit, "granted", 2)]);
    }
}
