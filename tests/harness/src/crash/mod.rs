//! Two harnesses that try to make Berth lose or invent an allocation.
//!
//! ```text
//! just crash 10000        # kill -9 at random and at every named step of a turn, under load
//! just crash 200 --small-disk tmpfs   # the same on small disks, which another program fills
//! just crash-power 10000  # power cuts at sampled points of the store's writes
//! ```
//!
//! The last line is `rounds=10000 lost=0 double=0 mismatch=0`, and the exit code 1 if any is not 0.

mod grow;
mod power;

use anyhow::Context;
use berth::args::{Cli, Command};
use berth::command;
use berth::daemon::Options;
use berth_config::Config;
use berth_kernel::node::steps::{self, Step};
use clap::Parser;
use harness::kill::{self, Beside, KILL_AT, Program, SmallDisk, Tally};
use std::process::ExitCode;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock};
use std::time::{Duration, Instant};

/// Set in the processes that are the daemon: this program is that, too.
const DAEMON: &str = "BERTH_CRASH_DAEMON";
/// Set in the process that may mount small disks.
const IN_NAMESPACE: &str = "BERTH_CRASH_NAMESPACE";
/// Nodes side by side, one with a guard and one with claims: one waits for its disk while the other one computes.
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
        /// Puts the state folders on small disks, which another program fills
        #[arg(long)]
        small_disk: Option<SmallDisk>,
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
    steps::observe(die_at_step);
    let cli = Cli::parse();
    let ended = match &cli.command {
        Command::Serve(args) => command::load(args, &cli.client).and_then(serve),
        Command::Guard { config, own_namespace, log } => {
            command::guard(config.as_deref(), own_namespace.clone(), *log)
        }
        _ => {
            eprintln!("harness: this process only runs `serve` and `guard`");
            return Some(ExitCode::FAILURE);
        }
    };
    Some(match ended {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("harness: {error:#}");
            ExitCode::FAILURE
        }
    })
}

/// Ends this process at the step and passage that [`KILL_AT`] names, as `kill -9` does.
fn die_at_step(step: Step) {
    static WANTED: OnceLock<Option<(String, u32)>> = OnceLock::new();
    static PASSED: AtomicU32 = AtomicU32::new(0);
    let wanted = WANTED.get_or_init(|| {
        let text = std::env::var(KILL_AT).ok()?;
        let (name, passage) = text.split_once(':')?;
        Some((name.to_owned(), passage.parse().ok()?))
    });
    let Some((name, passage)) = wanted else { return };
    if name == step.as_str() && PASSED.fetch_add(1, Ordering::SeqCst) + 1 == *passage {
        // Not `abort`: no handler, no message, nothing flushed.
        let _ = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
        // The signal is on its way; not one step further.
        loop {
            std::thread::park();
        }
    }
}

/// Runs the rounds, and prints their tally; `Ok(false)` where something was lost, given twice or wrong.
///
/// # Errors
/// If the daemon or its store cannot be run.
pub(crate) fn run(args: &Args) -> anyhow::Result<bool> {
    let tally = match *args {
        Args::Kill { small_disk: Some(disk), .. } if std::env::var_os(IN_NAMESPACE).is_none() => {
            let mut again = disk.namespace(&std::env::current_exe().context("this program's path")?);
            let status = again.args(std::env::args_os().skip(1)).env(IN_NAMESPACE, "1").status();
            return Ok(status.context("unshare")?.success());
        }
        Args::Kill { rounds, seed, small_disk } => kills(rounds, seed, small_disk)?,
        Args::Power { rounds, seed } => cuts(rounds, seed)?,
        Args::Grow { appends } => return grow::run(appends).map(|()| true),
    };
    println!("{tally}");
    Ok(tally.is_clean())
}

/// `berth serve` as it is, but for one wait: after a kill it gives the kubelet 250 ms to notice, which
/// would be most of a round. The stand-in notices within 5 ms.
fn serve(config: Config) -> anyhow::Result<()> {
    berth_observe::logs::start(config.observe.log, config.observe.tracing.as_ref(), &config.node.name)?;
    let mut options = Options::default();
    options.timeouts.disconnect.settle = Duration::from_millis(25);
    berth::daemon::serve_with(config, options)
}

fn kills(rounds: u64, seed: Option<u64>, small_disk: Option<SmallDisk>) -> anyhow::Result<Tally> {
    let seed = seed.unwrap_or_else(|| u64::from(std::process::id()));
    let program = Program {
        exe: std::env::current_exe().context("this program's path")?,
        environment: vec![(DAEMON.into(), "1".into())],
        named_steps: true,
        small_disk,
    };
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
        let beside = if number == 0 { Beside::Guard } else { Beside::Claims };
        let run = kill::run(&program, beside, folder.path(), own, seed + number, progress);
        let tally = runtime.block_on(run)?;
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
