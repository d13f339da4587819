//! A fixed set of the simulation's seeds (examples/sim): enough to notice a broken rule, few enough
//! for every test run. `just sim 10000` runs many more.

// The command beside it uses more of it.
#[allow(dead_code)]
#[path = "../../examples/sim/simulation/mod.rs"]
mod runs;

use runs::generate;
use runs::run::run;

/// Enough that each of the rules broken on purpose (ARCHITECTURE.md) is caught.
const SEEDS: std::ops::Range<u64> = 0..100;

fn holds(seed: u64) {
    let outcome = run(seed, &generate::events(seed), |_, _, _| {});
    if let Some((violation, after)) = outcome.broken {
        panic!("seed {seed} breaks {violation} after {after} events: `just sim --seed {seed}`");
    }
}

#[test]
fn every_invariant_holds_after_every_event_of_many_histories() {
    SEEDS.for_each(holds);
}

#[test]
fn a_seed_is_always_the_same_history() {
    assert_eq!(generate::events(7), generate::events(7));
    assert_ne!(generate::events(7), generate::events(8));
    let grants = |seed| run(seed, &generate::events(seed), |_, _, _| {}).grants;
    assert_eq!(grants(7), grants(7));
}
