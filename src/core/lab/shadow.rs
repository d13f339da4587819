//! Shadows: policies that are called for every decision of the live node in addition to the active stack, without
//! effect. Their answers are compared with the outcomes. Shadows end with the daemon.

use super::comparison::{Candidate, CountsByHook, Difference};
use crate::stack::CALL_MS_MAX;
use berth_kernel::grants::pod_candidates::may_have_rules_about_pods;
use berth_kernel::ids::time::Now;
use berth_kernel::node::ports::{Call, PolicyRuntime};
use berth_kernel::policy::compare::{AnswerComparison, compare};
use berth_kernel::policy::decision::NewDecision;
use parking_lot::Mutex;
use std::collections::VecDeque;

/// Most concurrent shadows that callers start: each is called as often as the stack. A gate has one for each of its policies in
/// addition.
pub const SHADOWS_MAX: usize = 4;
/// Most differences kept of each shadow, newest last.
const DIFFERENCES_MAX: usize = 32;

/// One shadow.
#[derive(Clone, Debug)]
pub struct Shadow {
    /// Number, from 1.
    pub id: u64,
    /// The policy.
    pub candidate: Candidate,
    /// Start time.
    pub since: Now,
    /// Comparisons by hook.
    pub counts: CountsByHook,
    /// The newest differences and faults.
    pub differences: VecDeque<Difference>,
    /// Whether it is of a gate, not of a caller.
    is_of_gate: bool,
}

/// The number of the newest shadow, and all current ones.
#[derive(Debug, Default)]
pub(crate) struct Shadows(Mutex<(u64, Vec<Shadow>)>);

impl Shadows {
    pub(crate) fn all(&self) -> Vec<Shadow> {
        self.0.lock().1.clone()
    }

    /// Whether callers have started [`SHADOWS_MAX`].
    pub(crate) fn is_full(&self) -> bool {
        is_full(&self.0.lock().1)
    }

    /// Adds a shadow. `None` for one of a caller if [`Shadows::is_full`].
    pub(crate) fn add(&self, candidate: Candidate, since: Now, is_of_gate: bool) -> Option<Shadow> {
        let mut state = self.0.lock();
        if !is_of_gate && is_full(&state.1) {
            return None;
        }
        state.0 += 1;
        let shadow = Shadow {
            id: state.0,
            candidate,
            since,
            counts: CountsByHook::new(),
            differences: VecDeque::new(),
            is_of_gate,
        };
        state.1.push(shadow.clone());
        Some(shadow)
    }

    /// Removes and returns the shadow with this number.
    pub(crate) fn remove(&self, id: u64) -> Option<Shadow> {
        let mut state = self.0.lock();
        let index = state.1.iter().position(|shadow| shadow.id == id)?;
        Some(state.1.remove(index))
    }

    /// Calls each shadow that had begun for a decision that the journal has under the number `seq`, without holding the
    /// lock. Skips the calls if `busy`.
    pub(crate) fn compare(
        &self,
        note: &NewDecision,
        seq: Option<u64>,
        policies: &dyn PolicyRuntime,
        busy: bool,
    ) {
        // A decision waits for the recorder: one that was made before a shadow began is not the shadow's.
        let begun = self.all().into_iter().filter(|shadow| shadow.since.mono_ms <= note.now.mono_ms);
        for shadow in begun {
            let comparison = (!busy).then(|| compare_answer(&shadow.candidate, note, policies));
            let mut state = self.0.lock();
            // The shadow may have been removed meanwhile.
            let Some(shadow) = state.1.iter_mut().find(|s| s.id == shadow.id) else { continue };
            let hook = note.question.hook();
            let Some(comparison) = comparison else {
                shadow.counts.entry(hook).or_default().skipped += 1;
                continue;
            };
            let is_without = calls_without_candidates(&shadow.candidate, note);
            shadow.counts.entry(hook).or_default().without_candidates += u64::from(is_without);
            let at = note.now.wall_ms;
            if let Some(difference) = Difference::count(&mut shadow.counts, hook, seq, at, comparison) {
                if shadow.differences.len() >= DIFFERENCES_MAX {
                    shadow.differences.pop_front();
                }
                shadow.differences.push_back(difference);
            }
        }
    }
}

fn is_full(shadows: &[Shadow]) -> bool {
    shadows.iter().filter(|shadow| !shadow.is_of_gate).count() >= SHADOWS_MAX
}

/// Whether the candidate may have rules about pods, and was called without candidates.
fn calls_without_candidates(candidate: &Candidate, note: &NewDecision) -> bool {
    let hook = note.question.hook();
    let version = note.node.policies.get(&candidate.digest);
    version.is_some_and(|version| may_have_rules_about_pods(version, hook)) && note.candidates().is_empty()
}

fn compare_answer(
    candidate: &Candidate,
    note: &NewDecision,
    policies: &dyn PolicyRuntime,
) -> AnswerComparison {
    let hook = note.question.hook();
    let has_hook = note.node.policies.get(&candidate.digest).is_none_or(|v| v.hooks.contains(&hook));
    if !has_hook {
        return AnswerComparison::Passes;
    }
    let output = policies.call(Call {
        digest: &candidate.digest,
        parameters: &candidate.parameters,
        node: &note.node,
        now: note.now,
        question: note.question.question(),
        wall_ms_max: CALL_MS_MAX,
    });
    let answer = candidate.permitted(output.answer);
    compare(&note.question, &note.calls, &note.outcome, candidate.name(), &answer)
}
