//! Comparisons of a candidate policy's answers with the outcomes of decisions.

use berth_kernel::ids::names::Digest;
use berth_kernel::policy::compare::AnswerComparison;
use berth_kernel::policy::hooks::Hook;
use std::collections::BTreeMap;

/// A policy that might be activated.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Candidate {
    /// The version's label.
    pub policy: String,
    /// The version's digest.
    pub digest: Digest,
    /// The parameters, JSON.
    pub parameters: String,
}

impl Candidate {
    /// The policy's name, without its version.
    pub(crate) fn name(&self) -> &str {
        self.policy.split('@').next().unwrap_or_default()
    }
}

/// Comparisons of a candidate's answers with the outcomes of the decisions of one hook.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Answers with the same effect.
    pub same: u64,
    /// Answers with another effect.
    pub differs: u64,
    /// Answers among `differs` that deny what was granted.
    pub denies: u64,
    /// Calls that passed.
    pub passes: u64,
    /// Calls that failed.
    pub fails: u64,
    /// Decisions for which it was not called, because the recorder was busy.
    pub skipped: u64,
    /// Calls without candidates of a policy that may have rules about pods: such a rule had no effect.
    pub without_candidates: u64,
}

/// Comparisons by hook.
pub type CountsByHook = BTreeMap<Hook, Counts>;

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
    /// Whether the candidate denies what was granted.
    pub is_denial: bool,
    /// Description of the difference, or the fault.
    pub message: String,
}

impl Difference {
    /// Counts a comparison with one decision. Returns the difference, if the candidate failed or answered differently.
    pub(super) fn count(
        counts: &mut CountsByHook,
        hook: Hook,
        seq: Option<u64>,
        at_wall_ms: u64,
        comparison: AnswerComparison,
    ) -> Option<Self> {
        let counts = counts.entry(hook).or_default();
        let (failed, is_denial, message) = match comparison {
            AnswerComparison::Same => {
                counts.same += 1;
                return None;
            }
            AnswerComparison::Passes => {
                counts.passes += 1;
                return None;
            }
            AnswerComparison::Differs(message) => {
                counts.differs += 1;
                (false, false, message)
            }
            AnswerComparison::Denies(message) => {
                counts.differs += 1;
                counts.denies += 1;
                (false, true, message)
            }
            AnswerComparison::Fails(message) => {
                counts.fails += 1;
                (true, false, message)
            }
        };
        Some(Self { seq, at_wall_ms, hook, failed, is_denial, message })
    }
}
