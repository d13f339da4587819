//! Hostile guests against the real daemon, one line each: `just hostile`.
//!
//! Ends with `guests=N stopped=N survived=N`, and with exit code 1 where the three differ.

// It prints for people: that is its purpose.
#![allow(clippy::print_stdout)]

mod table;

use anyhow::Context;
use clap::Parser;
use std::path::PathBuf;
use std::process::ExitCode;
use table::Attack;

/// Hostile guests against the real daemon.
#[derive(Parser)]
struct Args {
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

fn main() -> ExitCode {
    match run(Args::parse()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("hostile: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: Args) -> anyhow::Result<bool> {
    let beside = || Some(std::env::current_exe().ok()?.parent()?.parent()?.join("berth"));
    let berth = args.berth.or_else(beside).context("where is berth? give --berth")?;
    let attack = Attack { berth, uploads: args.uploads, patience: args.patience };
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    println!("{:<23} {:<10} {:>9} {:>9}  error", "guest", "stopped at", "time", "its memory");
    let tally = runtime.block_on(table::run(&attack, |line| println!("{line}")))?;
    println!("{tally}");
    Ok(tally.is_clean())
}
