//! Activations of stacks in a history.

use super::world::World;
use crate::hardware::judgement::TriagedReading;
use crate::hardware::triage::{XidRules, baseline_triage};
use crate::node::command::{Activation, Command, NewStack};
use crate::policy::decider::Decider;
use crate::policy::judge_again::to_judge_again;
use crate::policy::stack::{ACTIVATIONS_MAX, OnFault, Permissions, StackEntry, StackOrigin};
use crate::policy::version::{Origin, PolicyVersion, test_version};

fn version() -> PolicyVersion {
    PolicyVersion { origin: Origin { by: "me".into(), ..Origin::default() }, ..test_version('a') }
}

impl World {
    pub(super) fn activate(&mut self, entries: usize) {
        let version = version();
        if !self.ledger.policies.contains_key(&version.digest) {
            self.apply(&Command::RecordUpload(version.clone())).unwrap();
        }
        let entry = |i: usize| StackEntry {
            name: version.name.clone(),
            digest: version.digest.clone(),
            parameters: format!("{{\"n\":{i}}}"),
            permissions: Permissions::default(),
            on_fault: OnFault::Skip,
        };
        let stack = NewStack {
            origin: if entries.is_multiple_of(2) { StackOrigin::Api } else { StackOrigin::File },
            failed: None,
            by: "me".into(),
            why: "a step".into(),
            entries: (0..entries).map(entry).collect(),
        };
        let before = self.ledger.clone();
        // Without the policy the reading is judged by Berth's own rules.
        let again = to_judge_again(&before, &stack.entries).into_iter().map(|reading| {
            let answer = baseline_triage(&reading, &XidRules::default(), 40_000);
            TriagedReading { reading, answer, by: Decider::Baseline }
        });
        let triage = again.collect();
        self.apply(&Command::Activate(Activation { stack, offers: Vec::new(), triage })).unwrap();
        let past = &self.ledger.past_stacks;
        assert_eq!(
            past.last_key_value().unwrap().1,
            &before.stack,
            "the previously active stack is the newest past one"
        );
        assert!(past.len() < ACTIVATIONS_MAX, "the history is bounded");
        let kept = past.keys().copied().collect::<Vec<_>>();
        let newest = self.ledger.stack.revision;
        assert_eq!(kept, (newest - kept.len() as u64..newest).collect::<Vec<_>>(), "without a gap");
    }
}
