//! Computes what changed from one status of the active policies to a later one. Pure.

use crate::stack::{FAULTS_TO_SUSPEND, PolicyStatuses};

/// The text of a fault without one.
const NO_ERROR_TEXT: &str = "no error text";

/// One change of a policy of the active stack.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PolicyTransition {
    /// It failed.
    Failed {
        /// Its label.
        label: String,
        /// How often, at least once.
        times: u64,
        /// The last fault.
        last: String,
    },
    /// It is no longer called, after [`FAULTS_TO_SUSPEND`] faults in a row.
    Suspended {
        /// Its label.
        label: String,
        /// The last fault.
        last: String,
    },
    /// It was suspended and is called again.
    Resumed {
        /// Its label.
        label: String,
    },
}

impl PolicyTransition {
    /// The label of the policy.
    #[must_use]
    pub fn label(&self) -> &str {
        match self {
            Self::Failed { label, .. } | Self::Suspended { label, .. } | Self::Resumed { label } => label,
        }
    }

    /// One sentence without a full stop.
    #[must_use]
    pub fn describe(&self) -> String {
        match self {
            Self::Failed { label, times: 1, last } => format!("policy {label} failed: {last}"),
            Self::Failed { label, times, last } => {
                format!("policy {label} failed {times} times, with the last error: {last}")
            }
            Self::Suspended { label, last } => format!(
                "policy {label} is suspended after {FAULTS_TO_SUSPEND} faults in a row (`berth policy unsuspend` \
                 has it called again): {last}"
            ),
            Self::Resumed { label } => format!("policy {label} is no longer suspended"),
        }
    }
}

/// The changes from one status to a later one. A policy that left the stack has none.
#[must_use]
pub fn policy_transitions(old: &PolicyStatuses, new: &PolicyStatuses) -> Vec<PolicyTransition> {
    let mut all = Vec::new();
    for (label, now) in new {
        let before = old.get(label).cloned().unwrap_or_default();
        // Each activation resets the counts, that of the same stack too.
        let same = before.revision == now.revision && before.faults <= now.faults;
        let times = now.faults - if same { before.faults } else { 0 };
        let last = || now.last.clone().unwrap_or_else(|| NO_ERROR_TEXT.to_owned());
        if times > 0 {
            all.push(PolicyTransition::Failed { label: label.clone(), times, last: last() });
        }
        if now.suspended && !(same && before.suspended) {
            all.push(PolicyTransition::Suspended { label: label.clone(), last: last() });
        }
        if before.suspended && !now.suspended {
            all.push(PolicyTransition::Resumed { label: label.clone() });
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stack::PolicyStatus;

    fn status(revision: u64, faults: u64, suspended: bool) -> PolicyStatuses {
        let status = PolicyStatus { revision, faults, suspended, last: Some("place: trap".into()) };
        PolicyStatuses::from([("a@1".into(), status)])
    }

    fn texts(old: &PolicyStatuses, new: &PolicyStatuses) -> Vec<String> {
        policy_transitions(old, new).iter().map(PolicyTransition::describe).collect()
    }

    #[test]
    fn new_faults_are_counted_since_the_earlier_status() {
        assert!(texts(&PolicyStatuses::new(), &status(1, 0, false)).is_empty());
        assert_eq!(texts(&status(1, 0, false), &status(1, 1, false)), ["policy a@1 failed: place: trap"]);
        let more = texts(&status(1, 1, false), &status(1, 4, false));
        assert_eq!(more, ["policy a@1 failed 3 times, with the last error: place: trap"]);
        assert!(texts(&status(1, 4, false), &PolicyStatuses::new()).is_empty(), "it left the stack");
    }

    #[test]
    fn an_activation_resets_the_counts() {
        // Fewer faults than before it, as many, and more.
        for (revision, faults) in [(2, 1), (2, 3), (2, 4)] {
            let all = policy_transitions(&status(1, 3, false), &status(revision, faults, false));
            let last = "place: trap".to_owned();
            assert_eq!(all, [PolicyTransition::Failed { label: "a@1".into(), times: faults, last }]);
        }
    }

    #[test]
    fn a_suspension_and_its_end_are_reported() {
        let suspended = texts(&status(1, 4, false), &status(1, 5, true));
        assert!(suspended.len() == 2 && suspended[1].contains("unsuspend"), "{suspended:?}");
        assert!(texts(&status(1, 5, true), &status(1, 5, true)).is_empty());
        assert_eq!(texts(&status(1, 5, true), &status(1, 5, false)), ["policy a@1 is no longer suspended"]);
    }
}
