//! `berth serve`: the daemon between its start and the signal that ends it.

use super::{Daemon, Options, clock, drains};
use crate::config::Config;
use crate::trace::Pump;
use anyhow::Context;
use futures_util::FutureExt as _;
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::time::Duration;
use tokio::signal::unix::{Signal, SignalKind, signal};

/// Async workers. Fixed: GPU nodes have 96 to 256 processors, and each worker costs memory.
const WORKERS: usize = 2;
/// Longest that the last spans may take to a collector, once all else has stopped within a second.
const FLUSH_MAX: Duration = Duration::from_millis(500);

/// How a run ended.
enum End {
    /// By a signal.
    Stopped,
    /// A label of the node chooses another configuration. With the receiver of signals until the program is replaced.
    Reconfigured(Stop),
}

/// Runs `berth serve` until SIGTERM or SIGINT. SIGHUP, at which other daemons read their configuration
/// again, changes nothing. Where a label of the node chooses another configuration, the program stops as by a signal
/// and starts again in the same process, which is no failure to a kubelet or systemd and waits for neither.
///
/// # Errors
/// What is wrong and what to do about it, in one line with its causes.
pub fn serve(config: Config, traces: Option<Pump>) -> anyhow::Result<()> {
    super::memory::lay_out();
    match run(until_told(config, Options::default()), traces)? {
        End::Stopped => Ok(()),
        End::Reconfigured(_) => Err(start_again()),
    }
}

/// Returns only if it fails. Threads, locks and sockets end with the old program.
fn start_again() -> anyhow::Error {
    let mut arguments = std::env::args_os();
    // By its path, so that it keeps its name in the process table; a program that was replaced is still that of /proc.
    let path = std::env::current_exe().ok().filter(|path| path.exists());
    let mut program = Command::new(path.unwrap_or_else(|| "/proc/self/exe".into()));
    if let Some(name) = arguments.next() {
        program.arg0(name);
    }
    anyhow::Error::new(program.args(arguments).exec())
        .context("cannot start again with the other configuration")
}

/// The same with other options.
///
/// # Errors
/// As [`serve`].
pub fn serve_with(config: Config, options: Options) -> anyhow::Result<()> {
    run(until_told(config, options), None).map(drop)
}

fn run(work: impl Future<Output = anyhow::Result<End>>, traces: Option<Pump>) -> anyhow::Result<End> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(WORKERS)
        .enable_all()
        .build()
        .context("cannot start the async runtime")?;
    let outcome = runtime.block_on(async {
        let pumping = traces.map(|pump| {
            // For a collector that is asked over TLS.
            berth_cli::reach::use_ring();
            pump.run()
        });
        let mut outcome = work.await;
        if let Some(pumping) = pumping {
            pumping.finish(FLUSH_MAX).await;
        }
        // A signal that came during the stop has been taken from the system: the next program would not see it.
        if let Ok(End::Reconfigured(stop)) = &mut outcome
            && stop.told().now_or_never().is_some()
        {
            outcome = Ok(End::Stopped);
        }
        outcome
    });
    // A thread inside a hung NVML call, or a store that is being opened, ends with the process; every
    // Ok that was given is durable.
    runtime.shutdown_timeout(Duration::from_millis(50));
    outcome
}

async fn until_told(config: Config, options: Options) -> anyhow::Result<End> {
    let mut stop = Stop::new().context("cannot listen for signals")?;
    // A task of its own: what it opens may hang with its disk, and a signal ends the start all the same.
    let build = tokio::spawn(async {
        clock::until_set().await;
        Box::pin(Daemon::build(config, options)).await
    });
    let mut daemon = tokio::select! {
        built = build => built.context("the start panicked")??,
        () = stop.told() => {
            tracing::info!("stopping before the start was done");
            return Ok(End::Stopped);
        }
    };
    if berth_core::spans::is_on() {
        tokio::spawn(drains::follow(daemon.door().watch()));
    }
    let reconfigured = daemon.reconfigured();
    let outcome = tokio::select! {
        up = async {
            daemon.bring_up().await?;
            std::future::pending().await
        } => up,
        () = stop.told() => Ok(false),
        () = reconfigured => Ok(true),
    };
    tracing::info!("stopping");
    daemon.stop().await;
    outcome.map(|reconfigured| if reconfigured { End::Reconfigured(stop) } else { End::Stopped })
}

/// Returns at a signal that ends the daemon, for what comes before [`serve`]: process 1 of a container ends at none
/// that it does not listen for.
///
/// # Errors
/// If the handlers of the signals cannot be installed.
pub async fn stop_requested() -> std::io::Result<()> {
    Stop::new()?.told().await;
    Ok(())
}

/// The signals that end the daemon, and the one that does not.
struct Stop {
    hangup: Signal,
    terminate: Signal,
    interrupt: Signal,
}

impl Stop {
    fn new() -> std::io::Result<Self> {
        Ok(Self {
            hangup: signal(SignalKind::hangup())?,
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
        })
    }

    async fn told(&mut self) {
        loop {
            tokio::select! {
                _ = self.terminate.recv() => return,
                _ = self.interrupt.recv() => return,
                _ = self.hangup.recv() => tracing::info!(
                    "SIGHUP changes nothing: restart the daemon to use a changed configuration; running pods are not affected"
                ),
            }
        }
    }
}
