//! The harness's programs, one subcommand each.

// The output is for people.
#![allow(clippy::print_stdout)]

// Not in the library: it redefines the system calls that write a store, for the whole program.
mod crash;

use clap::Parser;
use harness::{
    bench, bench_dra, bench_peer, fleet_plan, flood_admin, hostile, load_admin, same_answers, sim, soak,
};
use std::process::ExitCode;

/// Tries to break Berth, or measures it
#[derive(Parser)]
#[command(name = "harness")]
enum Args {
    Bench(bench::Args),
    BenchDra(bench_dra::Args),
    BenchPeer(bench_peer::Args),
    #[command(subcommand)]
    Crash(crash::Args),
    FleetPlan(fleet_plan::Args),
    FloodAdmin(flood_admin::Args),
    Hostile(hostile::Args),
    LoadAdmin(load_admin::Args),
    SameAnswers(same_answers::Args),
    Sim(sim::Args),
    Soak(soak::Args),
}

fn main() -> ExitCode {
    // Policies are compiled by a child process, which is this very program.
    if let Some(code) = berth_wasm::compiler_process().or_else(crash::daemon_process) {
        return code;
    }
    let outcome = match &Args::parse() {
        Args::Bench(args) => bench::run(args),
        Args::BenchDra(args) => bench_dra::run(args),
        Args::BenchPeer(args) => bench_peer::run(args),
        Args::Crash(args) => crash::run(args),
        Args::FleetPlan(args) => fleet_plan::run(args),
        Args::FloodAdmin(args) => flood_admin::run(args),
        Args::Hostile(args) => hostile::run(args),
        Args::LoadAdmin(args) => load_admin::run(args),
        Args::SameAnswers(args) => same_answers::run(args),
        Args::Sim(args) => sim::run(args),
        Args::Soak(args) => soak::run(args),
    };
    match outcome {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("harness: {error:#}");
            ExitCode::FAILURE
        }
    }
}
