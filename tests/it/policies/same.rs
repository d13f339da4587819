//! Same input, same answer: every hook of every shipped policy on random nodes, as WebAssembly in two instances and
//! natively. `just same-answers` does the same over 10,000 nodes on all processors, which CI runs.
// Clippy does not see that helpers of tests are tests, too.
#![allow(clippy::unwrap_used)]

use crate::support::guests::{NOW, policies};

use harness::same_answers::both;

/// The number of nodes: an unoptimised build checks 300 in seconds, and 10,000 in minutes.
const NODES: u64 = 300;

#[test]
fn the_same_call_has_the_same_answer_in_every_instance_and_natively() {
    let versions = policies().restore_shipped(NOW).unwrap();
    let both = both::Both::new(policies(), &versions).unwrap();
    let tally = both.ask_about(0..NODES);
    println!("{}", tally.table());
    assert_eq!(tally.differences, Vec::<String>::new());
    assert_eq!(tally.silent(), None);
    assert_eq!(tally.policies(), versions.len());
}
