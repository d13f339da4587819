//! Some of the histories of `just fleet-plan`.

use harness::fleet_plan::run_seed;

#[test]
fn no_history_of_rollouts_breaks_an_invariant() {
    let outcomes: Vec<_> = (0..20).map(|seed| run_seed(seed, false)).collect();
    let broken: Vec<_> = outcomes.iter().enumerate().filter(|(_, outcome)| outcome.is_err()).collect();
    assert!(broken.is_empty(), "{broken:?}");
    let assignments: u64 = outcomes.iter().flatten().map(|outcome| outcome.assignments).sum();
    assert!(assignments > 100, "{assignments}");
}
