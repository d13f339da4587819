//! The simulation: the product's single writer driven by seeds through everything that can go
//! wrong on a node, its invariants checked after every turn.
//!
//! ```text
//! just sim 10000        # so many seeds; the last line is `seeds=10000 violations=0`
//! just sim --endless    # until Ctrl-C
//! just sim --seed 17    # one seed, every event printed
//! just sim --replay F   # a log that a failing seed left behind
//! ```

mod log;
mod seeds;
pub(crate) mod simulation;

use simulation::event::Event;
use simulation::{generate, world::World};
use std::path::PathBuf;

/// Runs a simulated node through seeded histories and checks every invariant after every turn.
///
/// One seed is one history of a few hundred events: pods that come and go, rounds that are partial,
/// late, doubled or out of order, a kubelet and a daemon that restart, a disk that fails, GPUs that
/// vanish, policies that trap and lie, an operator. The same seed is always the same history. A
/// history that breaks an invariant is made shorter, printed, and written to a log file.
/// Exit status: 0 if nothing broke, 1 if something did, 2 for wrong arguments.
#[derive(clap::Args)]
pub struct Args {
    /// How many seeds to run
    #[arg(default_value_t = 1_000, conflicts_with_all = ["endless", "seed", "replay"])]
    seeds: u64,
    /// The first seed
    #[arg(long, value_name = "SEED", default_value_t = 0)]
    from: u64,
    /// Run until Ctrl-C or the first broken invariant
    #[arg(long, conflicts_with_all = ["seed", "replay"])]
    endless: bool,
    /// Run this one seed and print every event, with the ledger before it
    #[arg(long, conflicts_with = "replay")]
    seed: Option<u64>,
    /// Run a log file and print every event, with the ledger before it
    #[arg(long, value_name = "FILE")]
    replay: Option<PathBuf>,
    /// Where the logs of broken histories go
    #[arg(long, value_name = "FOLDER", default_value = "target/sim")]
    logs: PathBuf,
}

/// Runs the histories; `Ok(false)` where an invariant broke.
///
/// # Errors
/// If a log cannot be read or written.
pub fn run(args: &Args) -> anyhow::Result<bool> {
    // A panic of the product is a finding like any other; it is printed with its history.
    std::panic::set_hook(Box::new(|_| {}));
    match (&args.replay, args.seed) {
        (Some(file), _) => log::read(file).map(|(seed, events)| tell(seed, &events)),
        (None, Some(seed)) => Ok(tell(seed, &generate::events(seed))),
        (None, None) => seeds::all(args.from, (!args.endless).then_some(args.seeds), &args.logs),
    }
}

/// One history, quietly: how many grants it had.
///
/// # Errors
/// The invariant that it breaks, and after how many events.
pub fn run_seed(seed: u64) -> Result<u64, String> {
    let outcome = simulation::run::run(seed, &generate::events(seed), |_, _, _| {});
    match outcome.broken {
        None => Ok(outcome.grants),
        Some((violation, after)) => Err(format!("{violation} after {after} events")),
    }
}

/// The history of a seed, one line an event.
#[must_use]
pub fn history(seed: u64) -> Vec<String> {
    generate::events(seed).iter().map(log::line).collect()
}

/// One history, every event printed. Returns whether nothing was violated.
fn tell(seed: u64, events: &[Event]) -> bool {
    let outcome = simulation::run::run(seed, events, |at, event, world: &World| {
        println!("{}", world.in_words());
        println!("{at:4} {}", log::line(event));
    });
    match &outcome.broken {
        None => println!("seed={seed} events={} grants={} violations=0", events.len(), outcome.grants),
        Some((violation, after)) => println!("seed={seed} events={after} violations=1\n{violation}"),
    }
    outcome.broken.is_none()
}
