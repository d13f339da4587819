//! The judgements that a GPU's health follows from. Those of a policy are made again once an activation has removed or
//! replaced the policy: it may have been wrong, and what it left to an operator would otherwise outlast it.

use super::change::Change;
use super::decider::Decider;
use super::gpu::Reading;
use super::health::{Health, HealthState, REASON_BYTES_MAX, needs_reset, shown};
use super::ledger::Ledger;
use super::policy::{Severity, TriageAnswer};
use super::stack::StackEntry;
use super::time::Now;

/// Most judgements of one GPU: they and its history fit into a record of 16 KiB, even if escaping doubles each text.
pub const JUDGEMENTS_MAX: usize = 5;
/// Longest stored detail of a reading, bytes, for the same reason.
const DETAIL_BYTES_MAX: usize = 128;

/// A reading with its triage.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TriagedReading {
    /// The reading.
    pub reading: Reading,
    /// Its severity and the reason.
    pub answer: TriageAnswer,
    /// What judged it.
    pub by: Decider,
}

/// A judgement of a GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Judgement {
    /// The reading, with a detail that may be cut; `None` for an error of a scan.
    pub reading: Option<Reading>,
    /// What judged it.
    pub by: Decider,
    /// Revision of the stack that judged it.
    pub revision: u64,
    /// The severity.
    pub severity: Severity,
    /// The reason.
    pub reason: String,
    /// How long it stands without further readings, milliseconds; `None` if only an operator or a reset ends it.
    pub quiet_ms: Option<u64>,
    /// When the reading came last, monotonic milliseconds. It starts again with the daemon.
    pub at_mono_ms: u64,
}

impl Judgement {
    /// The judgement of a reading that came at this time. One without effect is `None`, unless a policy ignores an event
    /// after which the GPU needs a reset: without the policy that event stands.
    pub(super) fn of_reading(triaged: &TriagedReading, revision: u64, at_mono_ms: u64) -> Option<Self> {
        let TriagedReading { reading, answer, by } = triaged;
        let is_ignored = answer.severity == Severity::Ignore;
        let is_overruled = matches!(by, Decider::Policy(_)) && !reading.is_sign() && needs_reset(reading);
        (!is_ignored || is_overruled).then(|| Self {
            reading: Some(Reading { detail: shown(&reading.detail, DETAIL_BYTES_MAX), ..reading.clone() }),
            by: by.clone(),
            revision,
            severity: answer.severity,
            reason: shown(&answer.reason, REASON_BYTES_MAX),
            quiet_ms: answer.quiet_ms().filter(|_| !is_ignored),
            at_mono_ms,
        })
    }

    /// The judgement of an error of a scan, which no policy makes.
    pub(super) fn of_scan(reason: &str, quiet_ms: Option<u64>, now: Now) -> Self {
        Self {
            reading: None,
            by: Decider::Baseline,
            revision: 0,
            severity: Severity::Unhealthy,
            reason: shown(reason, REASON_BYTES_MAX),
            quiet_ms,
            at_mono_ms: now.mono_ms,
        }
    }

    /// The end of its quiet time, monotonic milliseconds.
    pub(super) fn again_mono_ms(&self) -> u64 {
        self.at_mono_ms.saturating_add(self.quiet_ms.unwrap_or(0))
    }

    /// Whether it still makes the GPU degraded or unhealthy.
    pub(super) fn is_valid(&self, now: Now) -> bool {
        self.severity != Severity::Ignore && (self.quiet_ms.is_none() || self.again_mono_ms() > now.mono_ms)
    }

    /// Whether the GPU needs a reset after its reading.
    pub(super) fn needs_reset(&self) -> bool {
        self.reading.as_ref().is_some_and(needs_reset)
    }

    fn key(&self) -> (Option<(&str, u64)>, &Decider) {
        (self.reading.as_ref().map(|reading| (reading.source.as_str(), reading.code)), &self.by)
    }
}

/// Adds a judgement. One of the same source, code and judge is merged with it: the more severe counts, for the longer quiet
/// time. Beyond [`JUDGEMENTS_MAX`] one is dropped that time ends, the least severe and then the oldest.
pub(super) fn add(judgements: &mut Vec<Judgement>, mut judgement: Judgement) {
    if let Some(index) = judgements.iter().position(|known| known.key() == judgement.key()) {
        let known = judgements.remove(index);
        judgement = match (known.severity, judgement.severity) {
            (Severity::Ignore, _) => judgement,
            (_, Severity::Ignore) => known,
            (old, new) => {
                judgement.quiet_ms = known.quiet_ms.zip(judgement.quiet_ms).map(|(old, new)| old.max(new));
                if old > new {
                    (judgement.severity, judgement.reason) = (known.severity, known.reason);
                }
                judgement
            }
        };
    }
    judgements.push(judgement);
    let rank = |one: &Judgement| {
        let is_endless = one.severity != Severity::Ignore && one.quiet_ms.is_none();
        (is_endless, one.severity, one.at_mono_ms)
    };
    while judgements.len() > JUDGEMENTS_MAX {
        let least = judgements.iter().enumerate().min_by_key(|(_, one)| rank(one));
        let Some(index) = least.map(|(index, _)| index) else { return };
        judgements.remove(index);
    }
}

/// The readings that policies judged that a stack of these entries no longer has, or has with other parameters.
pub fn to_judge_again(ledger: &Ledger, entries: &[StackEntry]) -> Vec<Reading> {
    let judgements = ledger.gpus.values().flat_map(|gpu| &gpu.health.judgements);
    let outdated = judgements.filter(|judgement| is_outdated(ledger, judgement, entries));
    outdated.filter_map(|judgement| judgement.reading.clone()).collect()
}

/// Whether a policy made the judgement that a stack of these entries no longer has with the same parameters.
pub(super) fn is_outdated(ledger: &Ledger, judgement: &Judgement, entries: &[StackEntry]) -> bool {
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

/// The changes of health at the activation of a stack of these entries, which judged readings again. `revision`: its
/// revision.
pub(super) fn judge_again(
    ledger: &Ledger,
    entries: &[StackEntry],
    again: &[TriagedReading],
    revision: u64,
    now: Now,
) -> Vec<Change> {
    let mut changes = Vec::new();
    for (gpu, state) in &ledger.gpus {
        let health = &state.health;
        let mut judgements = Vec::new();
        for old in &health.judgements {
            let new = again.iter().find(|new| {
                let is_of = |reading: &Reading| {
                    (&reading.part, &reading.source, reading.code)
                        == (&new.reading.part, &new.reading.source, new.reading.code)
                };
                is_outdated(ledger, old, entries) && old.reading.as_ref().is_some_and(is_of)
            });
            match new {
                // The reading came when it came: a new quiet time may be over.
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

impl Health {
    /// The judgement of a policy that alone makes the GPU unhealthy; `None` if the GPU is not unhealthy, or Berth itself
    /// judges it so, too.
    #[must_use]
    pub fn unhealthy_by_policy(&self, now: Now) -> Option<&Judgement> {
        let is_unhealthy = |one: &&Judgement| one.severity == Severity::Unhealthy && one.is_valid(now);
        let all: Vec<&Judgement> = self.judgements.iter().filter(is_unhealthy).collect();
        let is_policys = all.iter().all(|one| matches!(one.by, Decider::Policy(_)));
        all.into_iter().next_back().filter(|_| is_policys && self.state == HealthState::Unhealthy)
    }
}

#[cfg(test)]
mod tests;
