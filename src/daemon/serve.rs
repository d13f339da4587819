//! `berth serve`: the daemon between its start and the signal that ends it.

use super::{Daemon, Options};
use crate::config::Config;
use anyhow::Context;
use std::time::Duration;
use tokio::signal::unix::{Signal, SignalKind, signal};

/// Async workers. Fixed: GPU nodes have 96 to 256 processors, and each worker costs memory.
const WORKERS: usize = 2;

/// Runs `berth serve` until SIGTERM or SIGINT. SIGHUP, by which other daemons read their configuration
/// anew, changes nothing.
///
/// # Errors
/// What is wrong and what to do about it, in one line with its causes.
pub fn serve(config: Config) -> anyhow::Result<()> {
    super::memory::lay_out();
    serve_with(config, Options::default())
}

/// The same with other options.
///
/// # Errors
/// As [`serve`].
pub fn serve_with(config: Config, options: Options) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(WORKERS)
        .enable_all()
        .build()
        .context("cannot start the async runtime")?;
    let outcome = runtime.block_on(until_told(config, options));
    // A thread inside a hung NVML call, or a store that is being opened, ends with the process; every
    // Ok that was given is durable.
    runtime.shutdown_timeout(Duration::from_millis(50));
    outcome
}

async fn until_told(config: Config, options: Options) -> anyhow::Result<()> {
    let mut stop = Stop::new().context("cannot listen for signals")?;
    let mut daemon = tokio::select! {
        built = Daemon::build(config, options) => built?,
        () = stop.told() => {
            tracing::info!("stopping before the start was done");
            return Ok(());
        }
    };
    let outcome = tokio::select! {
        up = async {
            daemon.bring_up().await?;
            std::future::pending().await
        } => up,
        () = stop.told() => Ok(()),
    };
    tracing::info!("stopping");
    daemon.stop().await;
    outcome
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
                    "SIGHUP changes nothing: a changed configuration is taken over by a restart, which pods do not notice"
                ),
            }
        }
    }
}
