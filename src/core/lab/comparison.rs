//! Comparisons of a candidate policy's answers with the outcomes of decisions.

use crate::stack::evaluate::check_admit;
use berth_kernel::ids::names::Digest;
use berth_kernel::policy::compare::AnswerComparison;
use berth_kernel::policy::hooks::{Answer, Fault, FaultKind, Hook, Terms};
use berth_kernel::policy::stack::Permissions;
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
    /// What it may do; `None` for everything.
    pub permissions: Option<Permissions>,
}

impl Candidate {
    /// The result of one call of the policy, after a check of its permissions. An answer that it is not permitted to give is a fault, as
    /// in a stack.
    pub(super) fn permitted(&self, result: Result<Option<Answer>, Fault>) -> Result<Option<Answer>, Fault> {
        let answer = result?;
        if let (Some(permissions), Some(answer @ (Answer::Allow(_) | Answer::Deny(_)))) =
            (&self.permissions, &answer)
        {
            check_admit(permissions, &Terms::default(), answer)
                .map_err(|detail| Fault { kind: FaultKind::Answer, detail })?;
        }
        Ok(answer)
    }

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_that_the_permissions_of_the_entry_do_not_allow_is_a_fault() {
        let candidate = |permissions| Candidate {
            policy: "quota@aaaaaaaaaaaa".into(),
            digest: Digest::parse(&"a".repeat(64)).unwrap(),
            parameters: "{}".into(),
            permissions,
        };
        let sets = Terms { environment: vec![("A".into(), "1".into())], ..Terms::default() };
        let (deny, allow) = (Answer::Deny("no".into()), Answer::Allow(sets));
        let silent = Permissions { deny: false, ..Permissions::default() };
        for (answer, permissions, is_permitted) in [
            (&deny, None, true),
            (&deny, Some(Permissions::default()), true),
            (&deny, Some(silent), false),
            (&allow, None, true),
            (&allow, Some(Permissions::default()), false),
        ] {
            let result = candidate(permissions.clone()).permitted(Ok(Some(answer.clone())));
            assert_eq!(result.is_ok(), is_permitted, "{answer:?} {permissions:?}");
        }
        assert_eq!(candidate(Some(Permissions::default())).permitted(Ok(None)), Ok(None));
    }
}
