//! What each fuzz target does with an input, and what must hold. Apart from the targets, so that the
//! tests replay the corpus without a fuzzer: a violation panics.

// One target uses one of them, the tests all.
#![allow(dead_code)]
// A target that cannot go on says so by panicking.
#![allow(clippy::unwrap_used, clippy::expect_used)]

pub(crate) mod answer;
// The simulation's own checks; its tests are in the same binary as these.
#[allow(clippy::duplicate_mod)]
#[path = "../../examples/sim/simulation/answers.rs"]
mod answers;
mod bytes;
pub(crate) mod lift;
mod node;
#[allow(clippy::duplicate_mod)]
#[path = "../../examples/sim/simulation/state.rs"]
mod state;
pub(crate) mod upload;
#[allow(clippy::duplicate_mod)]
#[path = "../../examples/sim/simulation/violation.rs"]
mod violation;

/// What must hold of an answer or a ledger.
fn hold(checked: Result<(), violation::Violation>) {
    if let Err(violation) = checked {
        panic!("{violation}");
    }
}
