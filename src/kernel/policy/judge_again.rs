//! The judgements of a policy are made again once an activation has removed or replaced the policy: the policy may have
//! been wrong, and a state that only an operator can end would otherwise outlast it.

use crate::hardware::gpu::Reading;
use crate::hardware::judgement::{Judgement, TriagedReading, add};
use crate::ids::time::Now;
use crate::node::change::Change;
use crate::node::ledger::Ledger;
use crate::policy::decider::Decider;
use crate::policy::stack::StackEntry;

/// The readings that were judged by policies that are not in a stack of these entries, or are there with other
/// parameters.
pub fn to_judge_again(ledger: &Ledger, entries: &[StackEntry]) -> Vec<Reading> {
    let judgements = ledger.gpus.values().flat_map(|gpu| &gpu.health.judgements);
    let outdated = judgements.filter(|judgement| is_outdated(ledger, judgement, entries));
    outdated.filter_map(|judgement| judgement.reading.clone()).collect()
}

/// Whether the judgement was made by a policy that is not in a stack of these entries with the same parameters.
pub(crate) fn is_outdated(ledger: &Ledger, judgement: &Judgement, entries: &[StackEntry]) -> bool {
    let Decider::Policy(label) = &judgement.by else { return false };
    let is_active = ledger.stack.revision == judgement.revision;
    let stack = if is_active { Some(&ledger.stack) } else { ledger.past_stacks.get(&judgement.revision) };
    let Some(stack) = stack else { return true };
    let mut judges = stack.entries.iter().filter(|entry| entry.label() == **label).peekable();
    let is_kept = |judge: &StackEntry| {
        entries.iter().any(|entry| entry.digest == judge.digest && entry.parameters == judge.parameters)
    };
    judges.peek().is_none() || !judges.all(is_kept)
}

/// The changes of health when a stack of these entries is activated. `again` is its triage of the readings to judge
/// again, `revision` its revision.
pub(crate) fn judge_again(
    ledger: &Ledger,
    entries: &[StackEntry],
    again: &[TriagedReading],
    revision: u64,
    now: Now,
) -> Vec<Change> {
    let mut changes = Vec::new();
    for (gpu, state) in &ledger.gpus {
        let mut health = state.health.clone();
        // The new stack has the policies of the judgements that are kept; the old one may be forgotten before they end.
        for one in &mut health.judgements {
            if matches!(one.by, Decider::Policy(_)) && !is_outdated(ledger, one, entries) {
                one.revision = revision;
            }
        }
        let mut judgements = Vec::new();
        for old in &health.judgements {
            let new = again.iter().find(|new| {
                let is_of = |reading: &Reading| {
                    (&reading.part, &reading.source, reading.code)
                        == (&new.reading.part, &new.reading.source, new.reading.code)
                };
                let is_policys = matches!(old.by, Decider::Policy(_));
                is_policys && old.revision != revision && old.reading.as_ref().is_some_and(is_of)
            });
            match new {
                // The reading keeps its time, so the new quiet time may be over already.
                Some(new) => {
                    let new = Judgement::of_reading(new, revision, old.at_mono_ms);
                    new.into_iter().for_each(|new| add(&mut judgements, new));
                }
                None => add(&mut judgements, old.clone()),
            }
        }
        let answers = ledger.parts_of(gpu).any(|part| part.present) && !ledger.scan_errors.contains_key(gpu);
        let health = health.judged_again(judgements, answers, now);
        if health != state.health {
            changes.push(Change::HealthChanged { gpu: gpu.clone(), health });
        }
    }
    changes
}

#[cfg(test)]
mod tests;
