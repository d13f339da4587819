//! The shipped policies on random nodes: as WebAssembly, in two instances, and natively they give the
//! same answers.
//!
//! ```text
//! just same-answers 10000                # the nodes 0 to 9999
//! just same-answers 1 --from 4711        # one of them again
//! ```
//!
//! Every hook of every policy is called on every node. Last line:
//! `nodes=10000 policies=9 differences=0`.

pub mod both;

use anyhow::Context;
use berth_kernel::ids::time::Now;
use berth_wasm::{Settings, WasmPolicies};
use both::{Both, Tally};
use std::num::NonZero;
use std::thread;

/// Of the differences so many are printed in full.
const SHOWN: usize = 10;

/// Call the shipped policies on random nodes, as WebAssembly and natively
#[derive(clap::Args)]
pub struct Args {
    /// Nodes
    #[arg(default_value_t = 10_000)]
    nodes: u64,
    /// The first node's number, its seed
    #[arg(long, default_value_t = 0)]
    from: u64,
}

/// Makes the calls on every node; `Ok(false)` if two answers differ.
///
/// # Errors
/// If it cannot be run.
pub fn run(args: &Args) -> anyhow::Result<bool> {
    let state = tempfile::tempdir().context("a folder for compiled policies")?;
    let policies = WasmPolicies::new(Settings::new(state.path().to_owned())).context("the policies' room")?;
    let versions =
        policies.restore_shipped(Now { wall_ms: 0, mono_ms: 0 }).context("the shipped policies")?;
    let both = Both::new(&policies, &versions).map_err(anyhow::Error::msg)?;
    let threads = thread::available_parallelism().map_or(1, NonZero::get);
    let nodes = args.from..args.from.saturating_add(args.nodes);
    let mut tally = Tally::default();
    thread::scope(|scope| {
        let share = |n| {
            let (nodes, both) = (nodes.clone().skip(n).step_by(threads), &both);
            scope.spawn(move || both.ask_about(nodes))
        };
        let shares: Vec<_> = (0..threads).map(share).collect();
        for share in shares {
            match share.join() {
                Ok(part) => tally.add(part),
                Err(panic) => std::panic::resume_unwind(panic),
            }
        }
    });
    for difference in tally.differences.iter().take(SHOWN) {
        println!("{difference}\n");
    }
    print!("{}", tally.table());
    if let Some(silent) = tally.silent() {
        println!("{silent}: that both say nothing proves little; ask about more nodes");
    }
    println!("nodes={} policies={} differences={}", args.nodes, tally.policies(), tally.differences.len());
    Ok(tally.differences.is_empty() && tally.silent().is_none())
}
