//! Whether reading the admin API costs anybody an Allocate, and what a reader waits: `just load-admin`.
//!
//! ```text
//! just load-admin                 # 5,000 reads a second, five pairs of blocks, two minutes
//! just load-admin --tls           # the same over TLS
//! just load-admin --each          # what each kind of read costs the daemon, and how large its answer is
//! ```
//!
//! What is real: the built daemon as a process of its own, its store on the disk, its policies, the gRPC
//! over its unix socket, the admin API over TCP with tokens and limits as they are by default. What is made
//! up: the GPUs, the pods, and that the readers are on this machine: they take their part of its processors,
//! as readers elsewhere would not.
//!
//! A block in which only Allocates are asked for and one in which the API is read as well make a pair; which
//! of the two is first changes from pair to pair, and the reported figure is the median over the pairs, since
//! a machine's speed changes from minute to minute. Last line:
//! `load-admin: reads_per_s=5041 p99_ms=1.20 allocate_p99_ratio=1.31`, and exit code 1 where a bound is missed.

mod allocates;
mod answer;
mod figures;
pub(crate) mod machine;
mod mix;
mod node;
mod readers;
mod wire;

use allocates::Allocates;
use fakes::program;
use figures::{Block, Pair, Summary};
use machine::Machine;
use mix::Mix;
use node::Node;
use readers::Readers;
use std::path::PathBuf;
use std::time::Duration;

/// How many more requests are sent than must be answered, percent: a block ends shortly after its last request.
const ABOVE_PERCENT: u64 = 1;
/// Before the first block, with both at work: caches, connections and the processor's clock.
const WARM_UP: Duration = Duration::from_secs(2);

/// Read the admin API at a steady rate while pods come
#[derive(clap::Args)]
pub struct Args {
    /// Reads a second
    #[arg(long, default_value_t = 5_000, value_parser = clap::value_parser!(u64).range(1..=100_000))]
    rate: u64,
    /// Allocates a second
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u64).range(1..=500))]
    allocates: u64,
    /// Pairs of blocks, without readers and with them
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1_000))]
    pairs: u32,
    /// Seconds of a block
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..=600))]
    seconds: u64,
    /// Over TLS
    #[arg(long)]
    tls: bool,
    /// Only what each kind of read costs the daemon, without other load
    #[arg(long)]
    each: bool,
    /// The daemon [default: the one built beside this]
    #[arg(long)]
    berth: Option<PathBuf>,
}

/// Runs the pairs of blocks; `Ok(false)` where a bound is missed.
///
/// # Errors
/// If it cannot be run.
pub fn run(args: &Args) -> anyhow::Result<bool> {
    let berth = program::or_beside_this(args.berth.as_deref(), "berth")?;
    let node = Node::start(&berth, args.tls)?;
    let mix = Mix::of(&node)?;
    let mut allocates = Allocates::new(&node, args.allocates)?;
    let mut readers = Readers::connect(&node, &mix, args.rate * (100 + ABOVE_PERCENT) / 100)?;
    println!("{node}");
    if args.each {
        return each(&node, &mix, &mut readers).map(|()| true);
    }
    println!(
        "{} reads a second over {} kept connections, {} Allocates a second, {} pairs of blocks of {} s",
        args.rate,
        readers::CONNECTIONS,
        args.allocates,
        args.pairs,
        args.seconds
    );
    let length = Duration::from_secs(args.seconds);
    Block::run(&mut allocates, Some(&mut readers), WARM_UP)?;
    println!("\n{}", Pair::HEAD);
    let mut pairs = Vec::new();
    for number in 1..=args.pairs {
        let (before, machine) = (node.processor_time()?, Machine::now()?);
        let readers_first = number % 2 == 0;
        let mut block = |read: bool| Block::run(&mut allocates, read.then_some(&mut readers), length);
        let (one, other) = (block(readers_first)?, block(!readers_first)?);
        let (alone, loaded) = if readers_first { (other, one) } else { (one, other) };
        let stolen = Machine::now()?.stolen_percent_since(machine);
        let pair = Pair::of(number, alone, loaded, node.processor_time()? - before, stolen)?;
        println!("{pair}");
        pairs.push(pair);
    }
    let summary = Summary::of(&pairs)?;
    println!("\n{summary}");
    let missed = summary.missed(args.rate);
    for bound in &missed {
        println!("missed: {bound}");
    }
    println!("{}", summary.line());
    Ok(missed.is_empty())
}

/// How often each read is requested.
const TIMES: usize = 300;

fn each(node: &Node, mix: &Mix, readers: &mut Readers) -> anyhow::Result<()> {
    println!("daemon's processor time    bytes      with gzip");
    for kind in &mix.kinds {
        let mut line = String::new();
        for gzip in [false, true] {
            readers.repeat(*kind, gzip, TIMES / 10)?;
            let before = node.processor_time()?;
            let bytes = readers.repeat(*kind, gzip, TIMES)?;
            let us = (node.processor_time()? - before).as_secs_f64() * 1e6 / TIMES as f64;
            line += &format!("{us:6.0} us {:9}      ", bytes / TIMES);
        }
        println!("{line} {}", mix.paths[*kind]);
    }
    Ok(())
}
