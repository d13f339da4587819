//! What decided a grant, an offer, a placement or a triage.

use std::fmt;
use std::sync::Arc;

/// The source of a decision. Stores, the journal and the API have it as text.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Decider {
    /// The built-in rules, where all policies passed.
    Baseline,
    /// No policy: the allocation was found in the kubelet's checkpoint or in a claim's record rather than granted.
    Adopted,
    /// The policy with this label, `name@digest12`.
    Policy(Arc<str>),
}

const BASELINE: &str = "baseline";
const ADOPTED: &str = "adopted";

impl Decider {
    /// Its text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        match self {
            Self::Baseline => BASELINE,
            Self::Adopted => ADOPTED,
            Self::Policy(label) => label,
        }
    }
}

impl From<&str> for Decider {
    /// Reads its text. A policy's label has an `@`, so that it is neither of the two words.
    fn from(text: &str) -> Self {
        match text {
            BASELINE => Self::Baseline,
            ADOPTED => Self::Adopted,
            label => Self::Policy(label.into()),
        }
    }
}

impl From<String> for Decider {
    fn from(text: String) -> Self {
        text.as_str().into()
    }
}

impl PartialEq<str> for Decider {
    fn eq(&self, text: &str) -> bool {
        self.as_str() == text
    }
}

impl PartialEq<&str> for Decider {
    fn eq(&self, text: &&str) -> bool {
        self.as_str() == *text
    }
}

impl fmt::Display for Decider {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

/// The texts of several deciders, separated by spaces.
#[must_use]
pub fn join(deciders: &[Decider]) -> String {
    deciders.iter().map(Decider::as_str).collect::<Vec<_>>().join(" ")
}
