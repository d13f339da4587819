//! Two harnesses that try to make Berth lose or invent an allocation.
//!
//! ```text
//! just crash 10000        # kill -9 at random and at every named step of a turn, under load
//! just crash-power 10000  # power cuts at sampled points of the store's writes
//! ```
//!
//! The last line is `rounds=10000 lost=0 double=0 mismatch=0`, and the exit code 1 if any is not 0.

mod grow;
mod power;

use anyhow::{Context, bail};
use berth::cli::{Cli, Hooks, StateHooks};
use berth::config::{Config, Findings};
use berth::daemon::Options;
use berth::kernel::process::Sight;
use berth::kubelet::Waits;
use clap::Parser;
use harness::kill::{self, Program, Tally};
use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Set in the processes that are the daemon: this program is that, too.
const DAEMON: &str = "BERTH_CRASH_DAEMON";
/// Nodes side by side: one waits for its disk while the other one computes.
const NODES: u64 = 2;
/// How often progress is shown.
const SHOW_EVERY: u64 = 500;

/// Kills Berth, or takes its power away, again and again, and checks what is left.
#[derive(clap::Subcommand)]
pub(crate) enum Args {
    /// kill -9 at random and at every named step of a turn
    Kill {
        /// Restarts in all
        rounds: u64,
        /// Repeats the choices of a run; what the scheduler does is not repeated
        #[arg(long)]
        seed: Option<u64>,
    },
    /// The store's size and speed under allocations that come and go
    Grow {
        /// Appends in all
        appends: u64,
    },
    /// Power cuts at sampled points of the store's writes
    Power {
        /// Cuts in all
        rounds: u64,
        /// Repeats a run
        #[arg(long)]
        seed: Option<u64>,
    },
}

/// The daemon, in processes that are started to be killed; `None` in all others.
#[must_use]
pub(crate) fn daemon_process() -> Option<ExitCode> {
    std::env::var_os(DAEMON)?;
    let state = StateHooks {
        export: |_, _| bail!("this is the harness"),
        import: |_, _| bail!("this is the harness"),
        init: |_| bail!("this is the harness"),
        verify: |_| bail!("this is the harness"),
    };
    Some(berth::cli::run(
        &Cli::parse(),
        &Hooks {
            serve,
            look: |_| bail!("this is the harness"),
            check_source: |_| Ok(()),
            node_label: |_, _| bail!("this is the harness"),
            reach: |_| bail!("this is the harness"),
            rehearse: |_, _| Ok(Findings::default()),
            sight: |_| Sight::default(),
            state,
        },
    ))
}

/// Runs the rounds, and prints their tally; `Ok(false)` where something was lost, given twice or wrong.
///
/// # Errors
/// If the daemon or its store cannot be run.
pub(crate) fn run(args: &Args) -> anyhow::Result<bool> {
    let tally = match *args {
        Args::Kill { rounds, seed } => kills(rounds, seed)?,
        Args::Power { rounds, seed } => cuts(rounds, seed)?,
        Args::Grow { appends } => return grow::run(appends).map(|()| true),
    };
    println!("{tally}");
    Ok(tally.is_clean())
}

/// `berth serve` as it is, but for one wait: after a kill it gives the kubelet 250 ms to notice, which
/// would be most of a round. The stand-in notices within 5 ms.
fn serve(config: Config) -> anyhow::Result<()> {
    berth::telemetry::start(&config)?;
    let waits = Waits { settle: Duration::from_millis(25), ..Waits::default() };
    berth::daemon::serve_with(config, Options { waits, ..Options::default() })
}

fn kills(rounds: u64, seed: Option<u64>) -> anyhow::Result<Tally> {
    let seed = seed.unwrap_or_else(|| u64::from(std::process::id()));
    let program = Program {
        exe: std::env::current_exe().context("this program's path")?,
        environment: vec![(DAEMON.into(), "1".into())],
        kill_points: berth::kill_points::COMPILED_IN,
    };
    if !program.kill_points {
        eprintln!("crash: no named steps in this build (--features kill-points): kills at random alone");
    }
    let (began, done) = (Instant::now(), AtomicU64::new(0));
    let sum = Mutex::new(Tally::default());
    let progress = |_: &Tally| {
        let done = done.fetch_add(1, Ordering::Relaxed) + 1;
        if done % SHOW_EVERY == 0 {
            eprintln!("crash: {done} of {rounds} rounds after {:.0} s", began.elapsed().as_secs_f64());
        }
    };
    let node = |number: u64| -> anyhow::Result<()> {
        let folder = tempfile::Builder::new().prefix("berth-crash-").tempdir()?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let own = rounds / NODES + u64::from(number < rounds % NODES);
        let tally = runtime.block_on(kill::run(&program, folder.path(), own, seed + number, progress))?;
        sum.lock().expect("no node panics with it").add(&tally);
        Ok(())
    };
    std::thread::scope(|scope| {
        let nodes: Vec<_> = (0..NODES)
            .map(|n| {
                let node = &node;
                scope.spawn(move || node(n))
            })
            .collect();
        nodes.into_iter().try_for_each(|node| node.join().expect("a node's thread"))
    })?;
    eprintln!("crash: {:.1} s in all", began.elapsed().as_secs_f64());
    Ok(sum.into_inner().expect("no node panics with it"))
}

fn cuts(rounds: u64, seed: Option<u64>) -> anyhow::Result<Tally> {
    let seed = seed.unwrap_or_else(|| u64::from(std::process::id()));
    let began = Instant::now();
    eprintln!("crash: seed {seed}");
    let tally = power::run(rounds, seed, |tally| {
        if tally.rounds.is_multiple_of(SHOW_EVERY) {
            eprintln!(
                "crash: {} of {rounds} cuts after {:.0} s",
                tally.rounds,
                began.elapsed().as_secs_f64()
            );
        }
    })?;
    eprintln!("crash: {:.1} s in all", began.elapsed().as_secs_f64());
    Ok(tally)
}
