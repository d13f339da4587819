//! What a policy would have answered to the questions on the record.

use super::shadow::{Counts, Difference};
use berth_kernel::compare::compare;
use berth_kernel::decision::{Decision, Filter};
use berth_kernel::names::Digest;
use berth_kernel::policy::Hook;
use berth_kernel::ports::{Input, Journal, JournalError, Policies};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// Longest replay in one request; the report says where to go on.
const REPLAY_MAX: Duration = Duration::from_secs(20);
/// Differences that a report names; the others are counted.
const DIFFERENCES_MAX: usize = 200;

/// A policy that might be activated.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Candidate {
    /// By label, for people.
    pub policy: String,
    /// Which version.
    pub digest: Digest,
    /// Its parameters, JSON.
    pub parameters: String,
}

impl Candidate {
    /// The policy's name, without its version.
    pub(super) fn name(&self) -> &str {
        self.policy.split('@').next().unwrap_or_default()
    }
}

/// What would have differed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Decisions that were looked at.
    pub looked: u64,
    /// Of these, such as cannot be asked again: without input, or of another world.
    pub unreadable: u64,
    /// By hook.
    pub counts: BTreeMap<Hook, Counts>,
    /// The newest of what was different or failed, newest first.
    pub differences: Vec<Difference>,
    /// If there is more: [`Filter::before`] of the next replay.
    pub next: Option<u64>,
}

/// Asks the candidate whatever the filter finds, newest first, at most `limit` questions.
///
/// # Errors
/// If the journal cannot be read.
pub(super) fn replay(
    candidate: &Candidate,
    filter: &Filter,
    limit: u64,
    journal: &dyn Journal,
    policies: &dyn Policies,
) -> Result<Report, JournalError> {
    let end = Instant::now() + REPLAY_MAX;
    let mut report = Report::default();
    let mut filter = filter.clone();
    loop {
        let mut done = false;
        let next = journal.each(&filter, &mut |decision, input| {
            done = report.looked >= limit || Instant::now() > end;
            if !done {
                report.take(candidate, &decision, input, policies);
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
    /// Asks the candidate one question again, and counts what it says.
    fn take(
        &mut self,
        candidate: &Candidate,
        decision: &Decision,
        input: Option<Input>,
        policies: &dyn Policies,
    ) {
        self.looked += 1;
        let ask = |input| policies.ask_again(&candidate.digest, &candidate.parameters, &input).ok();
        let Some(again) = input.and_then(ask) else {
            self.unreadable += 1;
            return;
        };
        let compared =
            compare(&again.asked, &decision.calls, &decision.outcome, candidate.name(), &again.told);
        let (seq, at_wall_ms, hook) = (Some(decision.seq), decision.at_wall_ms, decision.hook);
        let differs = self.counts.entry(hook).or_default().add(compared);
        if let Some((failed, words)) = differs.filter(|_| self.differences.len() < DIFFERENCES_MAX) {
            self.differences.push(Difference { seq, at_wall_ms, hook, failed, words });
        }
    }
}
