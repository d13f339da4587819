//! Activations and rollbacks on a busy node: a stand-in kubelet allocates so many times a second while
//! the stack is swapped again and again, and every grant is held against both.
//!
//! ```text
//! just soak-activation 200 500    # 200 activations and rollbacks at 500 Allocates a second
//! ```
//!
//! What is real: the daemon, its store, its policies, the gRPC over unix sockets, the admin API. What is
//! made up: the GPUs and the pods. Last line: `activations=200 failed_calls=0 violations=0`.
//!
//! A pod is one GetPreferredAllocation and one Allocate, each after the other, as a kubelet admits: 500 a
//! second leave 2 ms for both, for the kubelet's checkpoint, and for all that goes on beside them (rounds,
//! the record of decisions, offers, activations), all of it in this one process. What a policy is shown, what
//! is put on the record of decisions and what the kubelet writes down grow with the node, so 8 shares of
//! each GPU are the default, and half of them are held at any moment. `--replicas 64` makes 512: the checks
//! are the same, and two processors do not reach 500 a second. A share is given to another pod before
//! a round has shown the end of the one before, so that many grants are made over an older one (I7).

mod load;
mod stacks;

use anyhow::{Context, ensure};
use berth::daemon::{Options, Running};
use berth_config::{Config, FileConfig, ServeArgs};
use fakes::api::Api;
use kubelet_standin::{Kubelet, Rpc};
use load::Load;
use stacks::Stacks;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// The node beside its stack: ends are found within a second, so that the record does not grow with the
/// load.
const CONFIGURATION: &str = "
rounds: { listEveryMs: 250, listEveryCordonedMs: 250, roundEveryMs: 500 }
timing: { roundsApartMs: 250, kubeletSettleMs: 250, replySettleMs: 500 }
";
/// GPUs of the node.
const GPUS: usize = 8;
/// The resource that pods request.
pub(crate) const SHARED: &str = "nvidia.com/gpu.shared";
/// The fraction of the requested rate that must be reached.
const REACHED: f64 = 0.9;
/// Activations a second: as many as can be distinguished, and more than users need.
const ACTIVATIONS_PER_S: u64 = 4;

/// Swap the stack of a busy node again and again
#[derive(clap::Args)]
pub struct Args {
    /// Activations and rollbacks
    #[arg(default_value_t = 200)]
    activations: u64,
    /// Allocates a second
    #[arg(default_value_t = 500)]
    rate: u64,
    /// Shares of each of the 8 GPUs
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u16).range(2..=64))]
    replicas: u16,
}

/// What went wrong, counted; the first few are printed.
#[derive(Default)]
pub(crate) struct Wrong {
    pub(crate) failed_calls: AtomicU64,
    pub(crate) violations: AtomicU64,
}

/// Of each kind so many are printed.
const SHOWN: u64 = 10;

impl Wrong {
    pub(crate) fn failed(&self, what: &str) {
        if self.failed_calls.fetch_add(1, Ordering::Relaxed) < SHOWN {
            println!("  failed call: {what}");
        }
    }

    pub(crate) fn violated(&self, what: &str) {
        if self.violations.fetch_add(1, Ordering::Relaxed) < SHOWN {
            println!("  violation: {what}");
        }
    }
}

/// Runs the activations; `Ok(false)` where a call failed or an invariant was violated.
///
/// # Errors
/// If it cannot be run.
pub fn run(args: &Args) -> anyhow::Result<bool> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    runtime.block_on(soak(args))
}

async fn soak(args: &Args) -> anyhow::Result<bool> {
    let folder = tempfile::Builder::new().prefix("berth-soak-").tempdir().context("cannot make a folder")?;
    let of_kubelet = in_memory().context("cannot make a folder")?;
    let kubelet =
        Kubelet::started(of_kubelet.path().join("kubelet")).await.context("the stand-in kubelet")?;
    let kubelet = Arc::new(kubelet);
    let settings = ServeArgs {
        node_name: Some("soak-node".into()),
        kubelet_dir: Some(of_kubelet.path().join("kubelet")),
        state_dir: Some(folder.path().join("state")),
        gpus: Some("sim:8xh100".into()),
        admin_listen: Some("127.0.0.1:0".into()),
        ..ServeArgs::default()
    };
    let stack = format!("stack: [{{ policy: timeslice, parameters: {{ replicas: {} }} }}]", args.replicas);
    let file = FileConfig::parse(&format!("{stack}{CONFIGURATION}")).map_err(anyhow::Error::msg)?;
    let config = Config::merge(&settings, file)?;
    let shares = GPUS * usize::from(args.replicas);
    let token_file = config.admin.token_file.clone();
    let daemon = Running::start(config, Options::default()).await?;
    let token = std::fs::read_to_string(&token_file).context("the token file")?;
    let api = Api::new(daemon.admin_address(), token.trim());
    kubelet.wait_allocatable(SHARED, shares, Duration::from_secs(30)).await?;

    let wrong = Arc::new(Wrong::default());
    let mut stacks = Stacks::new(api, Arc::clone(&wrong), args.replicas).await?;
    stacks.warm_up().await?;
    let load = Load::start(&kubelet, daemon.kernel(), &wrong, &stacks.label_sets(), args.rate, shares);
    let began = Instant::now();
    println!(
        "{} activations at {} Allocates a second on {shares} shares, {ACTIVATIONS_PER_S} a second",
        args.activations, args.rate
    );
    let mut tick = tokio::time::interval(Duration::from_millis(1000 / ACTIVATIONS_PER_S));
    for n in 1..=args.activations {
        tick.tick().await;
        stacks.swap(n).await;
        if n % 50 == 0 || n == args.activations {
            let (pods, live) = (load.pods(), daemon.kernel().snapshot().live.len());
            let s = began.elapsed().as_secs_f64();
            println!("  {n} activations, {pods} pods, {live} allocations live on the record, {s:.0} s");
        }
    }
    let took = began.elapsed().as_secs_f64();
    let summary = load.stop().await;
    for anomaly in kubelet.anomalies() {
        wrong.violated(&format!("the kubelet saw {anomaly:?}"));
    }
    daemon.stop().await;
    kubelet.stop().await;
    let activations = stacks.done();
    println!(
        "slowest activation {} ms; a pod with its wait for those before it: {summary}",
        stacks.slowest_ms()
    );
    println!(
        "of it the daemon: placing {}, Allocate {}",
        calls(&kubelet, Rpc::GetPreferredAllocation),
        calls(&kubelet, Rpc::Allocate)
    );
    let rate = summary.pods as f64 / took;
    println!("rate={rate:.0} pods={} checked={}", summary.pods, summary.checked);
    let reached = rate >= args.rate as f64 * REACHED;
    if !reached {
        println!("this machine and the stand-in kubelet did not reach {} Allocates a second", args.rate);
    }
    let (failed, violations) =
        (wrong.failed_calls.load(Ordering::Relaxed), wrong.violations.load(Ordering::Relaxed));
    ensure!(summary.checked > 0 || args.activations == 0, "no grant was checked");
    println!("activations={activations} failed_calls={failed} violations={violations}");
    Ok(reached && activations == args.activations && failed == 0 && violations == 0)
}

/// The stand-in kubelet writes its checkpoint for every pod: in memory where possible, so
/// that it does not take from the disk what the daemon's store is measured with.
fn in_memory() -> std::io::Result<tempfile::TempDir> {
    let mut builder = tempfile::Builder::new();
    builder.prefix("berth-soak-");
    builder.tempdir_in("/dev/shm").or_else(|_| builder.tempdir())
}

/// How long calls of the kubelet took.
fn calls(kubelet: &Kubelet, rpc: Rpc) -> String {
    let stats = kubelet.calls(rpc, SHARED);
    let mean = stats.total.as_micros() / u128::from(stats.count.max(1));
    format!("{mean} us in the mean, {} ms at worst", stats.longest.as_millis())
}
