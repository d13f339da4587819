//! What each fuzz target does with an input, and what must hold. Apart from the targets, so that the
//! tests replay the corpus without a fuzzer: a violation panics.

// A target that cannot go on says so by panicking.
#![allow(clippy::unwrap_used, clippy::expect_used)]

pub mod answer;
mod bytes;
pub mod lift;
mod node;
pub mod upload;

use crate::sim::simulation::violation::Violation;

/// What must hold of an answer or a ledger.
fn hold(checked: Result<(), Violation>) {
    if let Err(violation) = checked {
        panic!("{violation}");
    }
}
