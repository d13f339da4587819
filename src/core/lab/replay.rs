//! Replays: a candidate policy's answers to recorded decisions, compared with their outcomes.

use super::comparison::{Candidate, CountsByHook, Difference};
use berth_kernel::grants::pod_candidates::may_have_rules_about_pods;
use berth_kernel::node::ports::{Input, Journal, JournalError, PolicyRuntime};
use berth_kernel::policy::compare::compare;
use berth_kernel::policy::decision::{Decision, Filter};
use berth_kernel::policy::version::PolicyVersion;
use std::time::{Duration, Instant};

/// Time limit of one replay; the report says where the next one continues.
const REPLAY_MAX: Duration = Duration::from_secs(20);
/// Most differences in a report; further ones are counted.
const DIFFERENCES_MAX: usize = 200;

/// Result of a replay.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Decisions that were read.
    pub decisions: u64,
    /// Those of them that cannot be replayed: without input, or with the input of another WIT world.
    pub unreadable: u64,
    /// Comparisons by hook.
    pub counts: CountsByHook,
    /// The newest differences and faults, newest first.
    pub differences: Vec<Difference>,
    /// [`Filter::before`] of the next replay, if there are more decisions.
    pub next: Option<u64>,
}

/// Replays the decisions that the filter selects with the candidate, newest first, at most `limit`. `version` is that
/// of the candidate.
///
/// # Errors
/// If the journal cannot be read.
pub(super) fn replay(
    candidate: &Candidate,
    version: Option<&PolicyVersion>,
    filter: &Filter,
    limit: u64,
    journal: &dyn Journal,
    policies: &dyn PolicyRuntime,
) -> Result<Report, JournalError> {
    let end = Instant::now() + REPLAY_MAX;
    let mut report = Report::default();
    let mut filter = filter.clone();
    loop {
        let mut done = false;
        let next = journal.visit_each(&filter, &mut |decision, input| {
            done = report.decisions >= limit || Instant::now() > end;
            if !done {
                report.add(candidate, version, &decision, input, policies);
            }
            !done
        })?;
        match next {
            Some(next) if !done && Instant::now() <= end => filter.before = Some(next),
            next => {
                report.next = next;
                return Ok(report);
            }
        }
    }
}

impl Report {
    /// Replays one decision with the candidate, and counts the comparison.
    fn add(
        &mut self,
        candidate: &Candidate,
        version: Option<&PolicyVersion>,
        decision: &Decision,
        input: Option<Input>,
        policies: &dyn PolicyRuntime,
    ) {
        self.decisions += 1;
        let call = |input| policies.call_recorded(&candidate.digest, &candidate.parameters, &input).ok();
        let Some(again) = input.and_then(call) else {
            self.unreadable += 1;
            return;
        };
        let answer = candidate.permitted(again.answer);
        let comparison =
            compare(&again.question, &decision.calls, &decision.outcome, candidate.name(), &answer);
        let (seq, at) = (Some(decision.seq), decision.at_wall_ms);
        let difference = Difference::count(&mut self.counts, decision.hook, seq, at, comparison);
        self.differences.extend(difference.filter(|_| self.differences.len() < DIFFERENCES_MAX));
        let is_without = decision.candidates.is_empty()
            && version.is_some_and(|version| may_have_rules_about_pods(version, decision.hook));
        self.counts.entry(decision.hook).or_default().without_candidates += u64::from(is_without);
    }
}
