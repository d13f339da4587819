//! The rollouts of a fleet, simulated: the controller's plan against an API server in memory, daemons and people, driven by seeds.
//!
//! ```text
//! just fleet-plan 10000      # so many seeds; the last line is `fleet-plan: seeds=10000 violations=0`
//! just fleet-plan --seed 17  # one seed, every event printed
//! ```

mod daemon;
mod world;

use world::World;

/// Runs the controller's plan through seeded histories of a fleet and checks every write.
///
/// One seed is one fleet of up to 60 nodes: nodes that go away, come back and are replaced, daemons that
/// die, policies that trap, deny or take the node with them, watches that are late, people who edit, pause,
/// retry and undo in the middle of a rollout, controllers that die between two writes.
/// Exit status: 0 if nothing broke, 1 if something did, 2 for wrong arguments.
#[derive(clap::Args)]
pub struct Args {
    /// How many seeds to run
    #[arg(default_value_t = 1_000, conflicts_with = "seed")]
    seeds: u64,
    /// The first seed
    #[arg(long, value_name = "SEED", default_value_t = 0)]
    from: u64,
    /// Run this one seed and print every event
    #[arg(long)]
    seed: Option<u64>,
}

/// Runs the histories; `Ok(false)` where an invariant broke.
///
/// # Errors
/// None.
pub fn run(args: &Args) -> anyhow::Result<bool> {
    let (first, seeds) = args.seed.map_or((args.from, args.seeds), |seed| (seed, 1));
    let (mut violations, mut sum) = (0, Outcome::default());
    for seed in first..first + seeds {
        match run_seed(seed, args.seed.is_some()) {
            Ok(outcome) => sum.add(&outcome),
            Err(violation) => {
                violations += 1;
                println!("seed {seed}: {violation}");
            }
        }
        let done = seed - first + 1;
        if done.is_multiple_of(1_000) {
            println!("{done} seeds: {violations} violations");
        }
    }
    let Outcome { assignments, complete, halted, undone } = sum;
    println!("{assignments} stacks assigned; rollouts complete {complete}, halted {halted}, undone {undone}");
    println!("fleet-plan: seeds={seeds} violations={violations}");
    Ok(violations == 0)
}

/// What happened in a history.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    /// Stacks that were assigned to nodes.
    pub assignments: u64,
    /// Rollouts that became complete.
    pub complete: u64,
    /// Rollouts that were halted.
    pub halted: u64,
    /// Histories at whose end a rollout was halted and taken back.
    pub undone: u64,
}

impl Outcome {
    fn add(&mut self, other: &Self) {
        self.assignments += other.assignments;
        self.complete += other.complete;
        self.halted += other.halted;
        self.undone += other.undone;
    }
}

/// One history.
///
/// # Errors
/// The invariant that it breaks.
pub fn run_seed(seed: u64, is_printed: bool) -> Result<Outcome, String> {
    let mut world = World::new(seed, is_printed);
    world.run()?;
    Ok(world.outcome)
}
