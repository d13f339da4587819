//! The budgets of the design, measured: `just bench`, at most a few minutes.
//!
//! Everything runs on simulated GPUs and through the real modules: the kubelet front end on its
//! unix socket, the policy thread, the keeper, the store; in this process, or, where the process
//! itself is the subject, in the built binary beside the stand-in kubelet. What is compared is
//! measured in one run, sample by sample, each in turn the first, since a machine's speed changes
//! from minute to minute; a ratio of two figures of one run means something, a lone figure only on
//! this machine.
//!
//! ```text
//!   measure    samples, medians, percentiles      table      the rows and their budgets
//!   placement  the kernel's best set, beside      brute      the score by its definition
//!   policy     one hook call
//!   calls      Allocate and GetPreferredAllocation over the socket, on a
//!   node       daemon without its main            disk       a bare append and fdatasync
//!   stream     health, faults and a new kubelet.sock, as the kubelet sees them
//!   history    ten thousand records of what has ended
//!   process    the binary: its start and memory   load       Allocate while the admin API is read
//!   upload     a new policy, until it is active
//! ```
//!
mod brute;
pub(crate) mod calls;
pub(crate) mod disk;
pub(crate) mod history;
mod load;
pub(crate) mod measure;
pub(crate) mod node;
mod placement;
mod policy;
mod process;
mod stream;
pub(crate) mod table;
mod upload;

use anyhow::{Context as _, Result};
use measure::Effort;
use node::House;
use std::time::Instant;
use table::Table;

/// Measures the budgets of the design, with a table at the end
#[derive(clap::Args)]
pub struct Args {
    /// Only these sections
    #[arg(value_parser = SECTIONS)]
    sections: Vec<String>,
    /// A missed budget is an error
    #[arg(long)]
    strict: bool,
    /// A few samples that show that everything works; no budget is judged
    #[arg(long, conflicts_with = "strict")]
    glance: bool,
}

impl Args {
    fn effort(&self) -> Effort {
        if self.glance { Effort::Glance } else { Effort::Full }
    }

    fn wants(&self, section: &str) -> bool {
        self.sections.is_empty() || self.sections.iter().any(|s| s == section)
    }
}

const SECTIONS: [&str; 8] =
    ["placement", "policy", "allocate", "prefer", "stream", "process", "load", "upload"];

/// Measures, and prints the table; `Ok(false)` where `--strict` is given and a budget is missed.
///
/// # Errors
/// If a section cannot be measured.
pub fn run(args: &Args) -> Result<bool> {
    let began = Instant::now();
    let mut table = Table::default();
    let measured = sections(args, &mut table);
    println!("\n{}, {:.0} s", machine(), began.elapsed().as_secs_f64());
    if args.glance {
        println!("everything was called; nothing is judged with --glance");
        return measured.map(|()| true);
    }
    // Also what came before a section that failed: it took minutes.
    println!("\n{table}");
    measured?;
    let missed = table.missed();
    if missed > 0 {
        println!("{missed} budgets missed");
    }
    Ok(missed == 0 || !args.strict)
}

fn sections(args: &Args, table: &mut Table) -> Result<()> {
    if args.wants("placement") {
        placement::measure(args.effort(), table)?;
    }
    if SECTIONS[1..].iter().any(|section| args.wants(section)) {
        let house = House::new()?;
        println!("state folder: {}", house.disk()?);
        if args.wants("policy") {
            policy::measure(args.effort(), &house, table).context("policy")?;
        }
        if args.wants("allocate") {
            calls::allocate(args.effort(), &house, table).context("allocate")?;
        }
        if args.wants("prefer") {
            calls::prefer(args.effort(), &house, table).context("prefer")?;
        }
        if args.wants("stream") {
            stream::measure(args.effort(), &house, table).context("stream")?;
        }
        if args.wants("process") {
            process::measure(args.effort(), &house, table).context("process")?;
        }
        if args.wants("load") {
            load::measure(args.effort(), &house, table).context("load")?;
        }
        if args.wants("upload") {
            upload::measure(args.effort(), &house, table).context("upload")?;
        }
    }
    Ok(())
}

/// What ran this, and how busy it was: a load well above 1 says that others ran beside it.
pub(crate) fn machine() -> String {
    let read = |path| std::fs::read_to_string(path).unwrap_or_default();
    let processors = std::thread::available_parallelism().map_or(0, std::num::NonZero::get);
    let cpu = read("/proc/cpuinfo");
    let model = cpu.lines().find_map(|l| l.strip_prefix("model name")?.split_once(": "));
    let load = read("/proc/loadavg");
    let load = load.split(' ').next().unwrap_or("?").to_owned();
    format!("{processors} x {}, load {load} in the last minute", model.map_or("?", |(_, name)| name))
}
