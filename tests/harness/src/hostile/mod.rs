//! Hostile guests against the real daemon, one line each: `just hostile`.
//!
//! Ends with `guests=N stopped=N survived=N`, and with exit code 1 where the three differ.

pub mod table;

use fakes::program;
use std::path::PathBuf;
use table::Attack;

/// Hostile guests against the real daemon.
#[derive(clap::Args)]
pub struct Args {
    /// Uploads in a row at the end
    #[arg(long, default_value_t = 1_000)]
    uploads: u32,
    /// How many times slower than an idle machine this one may be
    #[arg(long, default_value_t = 1)]
    patience: u32,
    /// The daemon [default: the one built beside this]
    #[arg(long)]
    berth: Option<PathBuf>,
}

/// Runs every guest; `Ok(false)` where one was not stopped, or the daemon did not survive it.
///
/// # Errors
/// If it cannot be run.
pub fn run(args: &Args) -> anyhow::Result<bool> {
    let berth = program::or_beside_this(args.berth.as_deref(), "berth")?;
    let attack = Attack { berth, uploads: args.uploads, patience: args.patience };
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    println!("{:<23} {:<10} {:>9} {:>9}  error", "guest", "stopped at", "time", "its memory");
    let tally = runtime.block_on(table::run(&attack, |line| println!("{line}")))?;
    println!("{tally}");
    Ok(tally.is_clean())
}
