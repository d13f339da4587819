//! Floods against the admin API of the release daemon: `just flood-admin`.
//!
//! The daemon runs as a child with simulated GPUs, the stand-in kubelet beside it. While each flood goes on,
//! a good client asks for the node on connections of its own, the probe asks the health listener, root asks
//! over the Unix socket, and pods are admitted. A flood is passed if all of them were served in time and
//! the daemon's memory and descriptors stayed below their bounds.
//!
//! Last line: `flood-admin: N passed, M failed`; exit code 1 where something failed.

mod connections;
mod floods;
mod node;
mod tls;
mod watch;

use fakes::program;
use floods::FLOODS;
use node::Node;
use std::path::PathBuf;
use std::time::Duration;
use watch::{Seen, Watch};

/// After a flood the daemon has so long to close what it left: the longest rest of a connection and 5 s.
const CLOSED_WITHIN: Duration = Duration::from_secs(40);

/// Floods against the admin API
#[derive(clap::Args)]
pub struct Args {
    /// Connections of the largest crowds
    #[arg(long, default_value_t = 10_000)]
    connections: usize,
    /// Only floods with this in their name
    #[arg(long)]
    only: Option<String>,
    /// How many times slower than an idle machine this one may be
    #[arg(long, default_value_t = 1)]
    patience: u32,
    /// The daemon [default: the one built beside this]
    #[arg(long)]
    berth: Option<PathBuf>,
}

/// Runs the floods; `Ok(false)` where one failed.
///
/// # Errors
/// If the daemon does not start.
pub fn run(args: &Args) -> anyhow::Result<bool> {
    let berth = program::or_beside_this(args.berth.as_deref(), "berth")?;
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let (passed, failed) = runtime.block_on(flood(args, berth))?;
    println!("flood-admin: {passed} passed, {failed} failed");
    Ok(failed == 0)
}

async fn flood(args: &Args, berth: PathBuf) -> anyhow::Result<(usize, usize)> {
    let wanted = |name: &str| args.only.as_deref().is_none_or(|only| name.contains(only));
    let (mut passed, mut failed) = (0, 0);
    for over_tls in [false, true] {
        if !FLOODS.iter().any(|flood| flood.tls == over_tls && wanted(flood.name)) {
            continue;
        }
        let node = Node::start(&berth, over_tls).await?;
        // Only now: the daemon has the limit that a process has as a rule, and we need more.
        connections::allow(args.connections + 2_000)?;
        let before = node.size()?;
        println!("{} before: {before}", if over_tls { "https" } else { "http" });
        for flood in FLOODS.iter().filter(|flood| flood.tls == over_tls && wanted(flood.name)) {
            let watch = Watch::start(&node, before);
            let result = (flood.run)(node.target.clone(), args.connections).await;
            let seen = watch.stop().await;
            let closed = node.closed(before.descriptors, CLOSED_WITHIN * args.patience).await;
            let mut wrong = Seen::wrong(&seen, args.patience);
            wrong.extend(result.as_ref().err().map(|error| format!("{error:#}")));
            wrong.extend(closed.err().map(|error| format!("{error:#}")));
            println!("{:<28} {seen}  {}", flood.name, result.unwrap_or_default());
            for what in &wrong {
                println!("    WRONG: {what}");
            }
            if wrong.is_empty() { passed += 1 } else { failed += 1 }
        }
        println!("{} after: {}", if over_tls { "https" } else { "http" }, node.size()?);
        node.stop().await?;
    }
    Ok((passed, failed))
}
