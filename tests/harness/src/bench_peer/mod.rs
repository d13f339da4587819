//! NVIDIA's device plugin and Berth under the same stand-in kubelet and on the same fake NVML: `just bench-peer`.
//!
//! Both are the built programs, started in turn, since a machine's speed changes from minute to minute; each round
//! measures all of it, and the program that is first changes from round to round. For Allocates of whole GPUs both run
//! at the same time, and are called in turn. A ratio is of medians of the rounds.
//!
//! ```text
//!   subject   the programs and their configurations   figures   the rows, the table, the last line
//!   node      kubelet, program, pods                  calls     Allocate, GetPreferredAllocation
//!   life      start, exit, at rest, after load        floor     the least that the libraries take
//! ```
//!
//! `just bench-peer` runs it in a mount namespace (`tests/compat/peer.py`), since the kubelet's folder is fixed in
//! NVIDIA's plugin.

mod calls;
mod figures;
mod floor;
mod life;
mod node;
mod subject;

use crate::bench::measure::Effort;
use crate::bench::node::House;
use crate::load_admin::machine::Machine;
use anyhow::{Context as _, Result};
use figures::Figures;
use node::Bench;
use std::path::PathBuf;
use std::time::Instant;
use subject::Programs;

/// Measures NVIDIA's device plugin and Berth in turn, with a table at the end
#[derive(clap::Args)]
pub struct Args {
    /// NVIDIA's device plugin
    #[arg(long)]
    nvidia: PathBuf,
    /// The daemon [default: the one built beside this]
    #[arg(long)]
    berth: Option<PathBuf>,
    /// Rounds of both programs
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=100))]
    rounds: u32,
    /// Only this section; may be repeated
    #[arg(long, value_name = "SECTION", value_parser = SECTIONS)]
    only: Vec<String>,
    /// One round with a few samples, which shows that everything works
    #[arg(long, conflicts_with = "rounds")]
    glance: bool,
}

const SECTIONS: [&str; 7] = ["calls", "live", "start", "rest", "load", "history", "floor"];

/// Measures, and prints the table.
///
/// # Errors
/// If a program is missing, or a section cannot be measured.
pub fn run(args: &Args) -> Result<bool> {
    let (began, before) = (Instant::now(), Machine::now()?);
    let programs = Programs::new(&args.nvidia, args.berth.as_deref())?;
    let effort = if args.glance { Effort::Glance } else { Effort::Full };
    let bytes = crate::bench::calls::weigh(&House::new()?)?;
    let bench = Bench::new(programs, effort, bytes)?;
    println!("an Allocate appends {bytes} bytes of records; the disk is {}", bench.disk()?);
    let mut figures = Figures::default();
    let rounds = if args.glance { 1 } else { args.rounds as usize };
    let measured = (0..rounds).try_for_each(|round| measure(args, &bench, round, &mut figures));
    let stolen = Machine::now()?.stolen_percent_since(before);
    println!(
        "\n{}, {:.0} s, {stolen:.1} % of the processors stolen",
        crate::bench::machine(),
        began.elapsed().as_secs_f64()
    );
    if args.glance {
        println!("a few samples of everything: the figures mean nothing");
    }
    // Also what came before a section that failed: it took minutes.
    println!("\n{figures}");
    measured?;
    println!("{}", figures.line());
    Ok(true)
}

fn measure(args: &Args, bench: &Bench, round: usize, figures: &mut Figures) -> Result<()> {
    for section in SECTIONS {
        if !args.only.is_empty() && !args.only.iter().any(|only| only == section) {
            continue;
        }
        println!("round {}, {section}", round + 1);
        let before = Machine::now()?;
        let measured = match section {
            "calls" => calls::whole(bench, round, figures),
            "live" => calls::live(bench, round, figures),
            "start" => life::starts(bench, round, figures),
            "rest" => life::rest(bench, round, figures),
            "load" => life::load(bench, round, figures),
            "history" => life::history(bench, figures),
            _ => floor::measure(bench, figures),
        };
        measured.with_context(|| section.to_owned())?;
        println!("  {:>9.1} %  stolen", Machine::now()?.stolen_percent_since(before));
    }
    Ok(())
}
