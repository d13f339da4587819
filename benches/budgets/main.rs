//! The budgets of the design, measured: `cargo bench --bench budgets`, at most a few minutes.
//!
//! Everything here is on simulated GPUs and through the real rooms: the kubelet front end on its
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
//! Words after `--` choose sections (`placement`, `policy`, `allocate`, `prefer`, `stream`,
//! `process`, `load`, `upload`);
//! `--strict` makes a missed budget an error. Without `--bench`, as `cargo test --benches` calls it,
//! a few samples show that everything works, and no budget is judged.
// A bench talks to a terminal.
#![allow(clippy::print_stdout)]

mod brute;
mod calls;
mod disk;
mod history;
mod load;
mod measure;
mod node;
mod placement;
#[path = "../../examples/common/plugin.rs"]
mod plugin;
mod policy;
mod process;
#[path = "../../examples/common/serving.rs"]
mod serving;
mod stream;
mod table;
mod upload;

use anyhow::{Context as _, Result, bail};
use measure::Effort;
use node::House;
use std::time::Instant;
use table::Table;

/// What the command line asks for.
struct Wish {
    sections: Vec<String>,
    strict: bool,
    effort: Effort,
}

impl Wish {
    fn read() -> Result<Self> {
        let mut wish = Self { sections: Vec::new(), strict: false, effort: Effort::Glance };
        for word in std::env::args().skip(1) {
            match word.as_str() {
                "--bench" => wish.effort = Effort::Full,
                "--strict" => wish.strict = true,
                section if SECTIONS.contains(&section) => wish.sections.push(word),
                other => bail!("{other:?} is no section; there are {}, and --strict", SECTIONS.join(", ")),
            }
        }
        Ok(wish)
    }

    fn wants(&self, section: &str) -> bool {
        self.sections.is_empty() || self.sections.iter().any(|s| s == section)
    }
}

const SECTIONS: [&str; 8] =
    ["placement", "policy", "allocate", "prefer", "stream", "process", "load", "upload"];

fn main() -> Result<()> {
    let wish = Wish::read()?;
    let began = Instant::now();
    let mut table = Table::default();
    let measured = sections(&wish, &mut table);
    println!("\n{}, {:.0} s", machine(), began.elapsed().as_secs_f64());
    if wish.effort == Effort::Glance {
        println!("everything was called; nothing is judged without --bench");
        return measured;
    }
    // Also what came before a section that failed: it took minutes.
    println!("\n{table}");
    measured?;
    let missed = table.missed();
    if wish.strict && missed > 0 {
        bail!("{missed} budgets missed");
    }
    Ok(())
}

fn sections(wish: &Wish, table: &mut Table) -> Result<()> {
    if wish.wants("placement") {
        placement::measure(wish.effort, table)?;
    }
    if SECTIONS[1..].iter().any(|section| wish.wants(section)) {
        let house = House::new()?;
        println!("state folder: {}", house.disk()?);
        if wish.wants("policy") {
            policy::measure(wish.effort, &house, table).context("policy")?;
        }
        if wish.wants("allocate") {
            calls::allocate(wish.effort, &house, table).context("allocate")?;
        }
        if wish.wants("prefer") {
            calls::prefer(wish.effort, &house, table).context("prefer")?;
        }
        if wish.wants("stream") {
            stream::measure(wish.effort, &house, table).context("stream")?;
        }
        if wish.wants("process") {
            process::measure(wish.effort, &house, table).context("process")?;
        }
        if wish.wants("load") {
            load::measure(wish.effort, &house, table).context("load")?;
        }
        if wish.wants("upload") {
            upload::measure(wish.effort, &house, table).context("upload")?;
        }
    }
    Ok(())
}

/// What ran this, and how busy it was: a load well above 1 says that others ran beside it.
fn machine() -> String {
    let read = |path| std::fs::read_to_string(path).unwrap_or_default();
    let processors = std::thread::available_parallelism().map_or(0, std::num::NonZero::get);
    let cpu = read("/proc/cpuinfo");
    let model = cpu.lines().find_map(|l| l.strip_prefix("model name")?.split_once(": "));
    let load = read("/proc/loadavg");
    let load = load.split(' ').next().unwrap_or("?").to_owned();
    format!("{processors} x {}, load {load} in the last minute", model.map_or("?", |(_, name)| name))
}
