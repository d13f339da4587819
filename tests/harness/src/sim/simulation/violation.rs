//! A broken invariant.

use std::fmt;

/// Which invariant broke, and how.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Violation {
    /// `I1` to `I11`, `health`, `end` for what a run must come to, `panic`.
    pub(crate) invariant: &'static str,
    pub(crate) what: String,
}

impl Violation {
    pub(crate) fn new(invariant: &'static str, what: impl Into<String>) -> Self {
        Self { invariant, what: what.into() }
    }
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.invariant, self.what)
    }
}
