//! Berth's DRA driver, and NVIDIA's beside it, on the same fake NVML and at the same API server: `just bench-dra`.
//!
//! There is no kubelet: this program calls the sockets of the drivers as a kubelet does, and a stand-in kubelet lists the
//! devices of Berth's device plugin. Of 40 GPUs Berth grants 8 through the device plugin and 32 through DRA, so that one
//! process answers both. Calls that are compared are made in turn, since a machine's speed changes from minute to minute.
//! Each value is a median of the rounds, and a ratio is a median of the rounds' ratios.
//!
//! ```text
//!   subject   the programs and their configurations   figures   the rows, the table, the last line
//!   node      stand-in kubelet, program, plugin       cluster   the API server: node, claims, ResourceSlices
//!   driver    a driver's sockets, as a kubelet        sections  what a round measures
//! ```
//!
//! `just bench-dra` starts the API server and runs this in a mount namespace (`tests/e2e/bench_dra.py`), which has a folder
//! in memory for what a node has there: the sockets and the CDI specifications.

mod cluster;
mod driver;
mod figures;
mod node;
mod sections;
mod subject;

use crate::bench::measure::Effort;
use crate::load_admin::machine::Machine;
use anyhow::{Context as _, Result};
use figures::Figures;
use node::Bench;
use std::path::PathBuf;
use std::time::Instant;
use subject::Programs;

/// Measures Berth's DRA driver, and NVIDIA's in turn, with a table at the end
#[derive(clap::Args)]
pub struct Args {
    /// The kubeconfig of a client that may do everything
    #[arg(long)]
    kubeconfig: PathBuf,
    /// The kubeconfig of Berth
    #[arg(long)]
    berth_kubeconfig: PathBuf,
    /// A folder on a disk, for what the programs must not lose
    #[arg(long)]
    disk: PathBuf,
    /// A folder in memory, for sockets and CDI specifications
    #[arg(long)]
    memory: PathBuf,
    /// The folder of the programs' logs
    #[arg(long)]
    logs: PathBuf,
    /// The plugin of NVIDIA's DRA driver, `gpu-kubelet-plugin`; without it only Berth is measured
    #[arg(long)]
    nvidia: Option<PathBuf>,
    /// The daemon [default: the one built beside this]
    #[arg(long)]
    berth: Option<PathBuf>,
    /// Rounds, each with all measurements
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=100))]
    rounds: u32,
    /// One round with a few samples, which shows that everything works
    #[arg(long, conflicts_with = "rounds")]
    glance: bool,
}

/// Measures, and prints the table.
///
/// # Errors
/// If a program is missing, or something cannot be measured.
pub fn run(args: &Args) -> Result<bool> {
    let (began, before) = (Instant::now(), Machine::now()?);
    let programs = Programs::new(args)?;
    let effort = if args.glance { Effort::Glance } else { Effort::Full };
    let bench = Bench::new(programs, effort, args)?;
    println!("the disk is {}", bench.disk()?);
    if args.nvidia.is_none() {
        println!("NVIDIA's DRA driver is not measured: name its plugin with --nvidia");
    }
    let rounds = if args.glance { 1 } else { args.rounds as usize };
    let mut figures = Figures::default();
    let measured = (0..rounds).try_for_each(|round| measure(&bench, round, &mut figures));
    let stolen = Machine::now()?.stolen_percent_since(before);
    println!(
        "\n{}, {:.0} s, {stolen:.1} % of the processors stolen",
        crate::bench::machine(),
        began.elapsed().as_secs_f64()
    );
    if args.glance {
        println!("a few samples of everything: the figures mean nothing");
    }
    // Printed even if a section failed, because what was measured before took minutes.
    println!("\n{figures}");
    measured?;
    println!("{}", figures.line());
    Ok(true)
}

fn measure(bench: &Bench, round: usize, figures: &mut Figures) -> Result<()> {
    println!("round {}", round + 1);
    let before = Machine::now()?;
    sections::calls(bench, round, figures).context("calls")?;
    sections::memory(bench, round, figures).context("memory")?;
    println!("  {:>9.1} %  stolen", Machine::now()?.stolen_percent_since(before));
    Ok(())
}
