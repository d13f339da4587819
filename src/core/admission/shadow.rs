//! Shadows: policies that are called for every decision of the live node in addition to the active stack, without
//! effect. Their answers are compared with the outcomes. Shadows end with the daemon.

use super::evaluate::CALL_MS_MAX;
use super::replay::Candidate;
use berth_kernel::compare::{AnswerComparison, compare};
use berth_kernel::decision::NewDecision;
use berth_kernel::policy::Hook;
use berth_kernel::policy_call::Call;
use berth_kernel::ports::Policies;
use berth_kernel::time::Now;
use parking_lot::{Mutex, MutexGuard};
use std::collections::{BTreeMap, VecDeque};

/// Most concurrent shadows: each is called as often as the stack.
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
    pub counts: BTreeMap<Hook, Counts>,
    /// The newest differences and faults.
    pub differences: VecDeque<Difference>,
}

/// Comparisons of a candidate's answers with the outcomes of the decisions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Answers with the same effect.
    pub same: u64,
    /// Answers with another effect.
    pub differs: u64,
    /// Calls that passed.
    pub passes: u64,
    /// Calls that failed.
    pub fails: u64,
    /// Decisions for which it was not called, because the recorder was busy.
    pub skipped: u64,
}

impl Counts {
    /// Counts a comparison. Returns whether the candidate failed and a message, if it failed or differed.
    pub(super) fn add(&mut self, comparison: AnswerComparison) -> Option<(bool, String)> {
        match comparison {
            AnswerComparison::Same => self.same += 1,
            AnswerComparison::Passes => self.passes += 1,
            AnswerComparison::Differs(words) => {
                self.differs += 1;
                return Some((false, words));
            }
            AnswerComparison::Fails(words) => {
                self.fails += 1;
                return Some((true, words));
            }
        }
        None
    }
}

/// A decision for which the candidate failed or answered differently.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Difference {
    /// The decision's number, if it is in the journal: repeated offers are not recorded again.
    pub seq: Option<u64>,
    /// Time of the decision, milliseconds since 1970.
    pub at_wall_ms: u64,
    /// The hook that was called.
    pub hook: Hook,
    /// Whether the candidate failed.
    pub failed: bool,
    /// Description of the difference, or the fault.
    pub message: String,
}

/// The number of the newest shadow, and all current ones.
#[derive(Debug, Default)]
pub(super) struct Shadows(Mutex<(u64, Vec<Shadow>)>);

impl Shadows {
    fn lock(&self) -> MutexGuard<'_, (u64, Vec<Shadow>)> {
        self.0.lock()
    }

    pub(super) fn all(&self) -> Vec<Shadow> {
        self.lock().1.clone()
    }

    /// Adds a shadow. `None` if there are [`SHADOWS_MAX`] already.
    pub(super) fn add(&self, candidate: Candidate, since: Now) -> Option<Shadow> {
        let mut state = self.lock();
        if state.1.len() >= SHADOWS_MAX {
            return None;
        }
        state.0 += 1;
        let shadow =
            Shadow { id: state.0, candidate, since, counts: BTreeMap::new(), differences: VecDeque::new() };
        state.1.push(shadow.clone());
        Some(shadow)
    }

    /// Removes and returns the shadow with this number.
    pub(super) fn remove(&self, id: u64) -> Option<Shadow> {
        let mut state = self.lock();
        let index = state.1.iter().position(|shadow| shadow.id == id)?;
        Some(state.1.remove(index))
    }

    /// Calls each shadow for a decision that the journal has under the number `seq`, without holding the lock. Skips the calls
    /// if `busy`.
    pub(super) fn compare(&self, note: &NewDecision, seq: Option<u64>, policies: &dyn Policies, busy: bool) {
        for shadow in self.all() {
            let comparison = (!busy).then(|| compare_answer(&shadow.candidate, note, policies));
            let mut state = self.lock();
            // The shadow may have been removed meanwhile.
            let Some(shadow) = state.1.iter_mut().find(|s| s.id == shadow.id) else { continue };
            let hook = note.question.hook();
            let counts = shadow.counts.entry(hook).or_default();
            let Some(comparison) = comparison else {
                counts.skipped += 1;
                continue;
            };
            if let Some((failed, words)) = counts.add(comparison) {
                if shadow.differences.len() >= DIFFERENCES_MAX {
                    shadow.differences.pop_front();
                }
                let at_wall_ms = note.now.wall_ms;
                shadow.differences.push_back(Difference { seq, at_wall_ms, hook, failed, message: words });
            }
        }
    }
}

fn compare_answer(candidate: &Candidate, note: &NewDecision, policies: &dyn Policies) -> AnswerComparison {
    let hook = note.question.hook();
    let has_hook = note.node.policies.get(&candidate.digest).is_none_or(|v| v.hooks.contains(&hook));
    if !has_hook {
        return AnswerComparison::Passes;
    }
    let answer = policies.call(Call {
        digest: &candidate.digest,
        parameters: &candidate.parameters,
        node: &note.node,
        now: note.now,
        question: note.question.question(),
        wall_ms_max: CALL_MS_MAX,
    });
    compare(&note.question, &note.calls, &note.outcome, candidate.name(), &answer)
}
