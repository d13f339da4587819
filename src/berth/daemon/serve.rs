//! `berth serve`: runs the daemon until a signal.

use super::setup::wait_until_clock_is_set;
use super::{Options, Starting, exit_signals};
use anyhow::Context;
use berth_config::Config;
use berth_core::keeper::Snapshot;
use berth_kernel::drain::marks::Drain;
use berth_kernel::ids::names::GpuId;
use berth_kernel::node::ledger::Ledger;
use berth_observe::spans;
use berth_observe::trace::Pump;
use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::time::Duration;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::watch;
use tracing::Span;

/// The number of async worker threads. One is enough: the calls of the kubelet come one after the other, and long work
/// runs on other threads. With two workers, each timer and each result of another thread would wake both.
const WORKERS: usize = 1;
/// How long an unused thread for blocking work is kept: longer than the interval of checks of the node
/// (`src/strategy/task.rs`), which would otherwise start a thread each time.
const BLOCKING_THREAD_KEEP_ALIVE: Duration = Duration::from_secs(15);
/// Longest time to send the last spans after the daemon has stopped.
const FLUSH_MAX: Duration = Duration::from_millis(500);

/// Why the daemon stopped.
enum StopReason {
    /// A signal.
    Signal,
    /// The node's label selects another configuration.
    Reconfigured,
}

/// Runs `berth serve` until SIGTERM or SIGINT. SIGHUP has the daemon read its configuration again (`daemon/reload.rs`).
/// When the node's label selects another configuration, the daemon stops and the program starts again in the same
/// process, which neither the kubelet nor systemd counts as a failure.
///
/// # Errors
/// If the daemon cannot start or run, with the cause and the fix.
pub fn serve(config: Config, traces: Option<Pump>) -> anyhow::Result<()> {
    berth_core::memory::configure_allocator();
    match run(run_until_signal(config, Options::default()), traces)? {
        StopReason::Signal => Ok(()),
        // The next program would not know of a signal that arrived during the stop.
        StopReason::Reconfigured if exit_signals::exit_on_signals_again() => Ok(()),
        StopReason::Reconfigured => Err(restart()),
    }
}

/// Replaces the program; returns only on failure. Threads, locks and sockets end with the old program.
fn restart() -> anyhow::Error {
    let mut arguments = std::env::args_os();
    // The program is started by its path, so that it keeps its name in the process table. If the file was replaced,
    // /proc has the running program.
    let path = std::env::current_exe().ok().filter(|path| path.exists());
    let mut program = Command::new(path.unwrap_or_else(|| "/proc/self/exe".into()));
    if let Some(name) = arguments.next() {
        program.arg0(name);
    }
    anyhow::Error::new(program.args(arguments).exec())
        .context("cannot start again with the other configuration")
}

/// As [`serve`], with options and without traces.
///
/// # Errors
/// As [`serve`].
pub fn serve_with(config: Config, options: Options) -> anyhow::Result<()> {
    run(run_until_signal(config, options), None).map(drop)
}

fn run(
    daemon: impl Future<Output = anyhow::Result<StopReason>>,
    traces: Option<Pump>,
) -> anyhow::Result<StopReason> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(WORKERS)
        .thread_keep_alive(BLOCKING_THREAD_KEEP_ALIVE)
        .enable_all()
        .build()
        .context("cannot start the async runtime")?;
    let outcome = runtime.block_on(async {
        let running_pump = traces.map(|pump| {
            // For collectors with TLS.
            berth_cli::endpoint::use_ring();
            pump.run()
        });
        let outcome = daemon.await;
        if let Some(pump) = running_pump {
            pump.finish(FLUSH_MAX).await;
        }
        outcome
    });
    // A thread in a hung NVML call, or one that opens the store, ends with the process; acknowledged changes are
    // durable.
    runtime.shutdown_timeout(Duration::from_millis(50));
    outcome
}

async fn run_until_signal(config: Config, options: Options) -> anyhow::Result<StopReason> {
    let mut signals = ShutdownSignals::new().context("cannot listen for signals")?;
    // The handler is installed before the start, so that a SIGHUP during the start is not lost.
    let hangup = signal(SignalKind::hangup()).context("cannot listen for signals")?;
    exit_signals::let_daemon_handle_signals();
    // A separate task, so that a signal ends the start even if it hangs on the disk.
    let open = tokio::spawn(async {
        wait_until_clock_is_set().await;
        Box::pin(Starting::open(config, options)).await
    });
    let starting = tokio::select! {
        opened = open => opened.context("the start panicked")??,
        () = signals.recv() => {
            tracing::info!("stopping before the start was complete");
            return Ok(StopReason::Signal);
        }
    };
    if spans::is_on() {
        tokio::spawn(follow_drains(starting.kernel().watch()));
    }
    let reconfigured = starting.wait_for_reconfiguration();
    let ended = async {
        let reason = tokio::select! {
            () = signals.recv() => StopReason::Signal,
            () = reconfigured => StopReason::Reconfigured,
        };
        tracing::info!("stopping");
        reason
    };
    let mut ended = std::pin::pin!(ended);
    let mut running = match Box::pin(starting.bring_up(&mut ended)).await? {
        ControlFlow::Continue(running) => running,
        ControlFlow::Break(reason) => return Ok(reason),
    };
    let reason = tokio::select! {
        reason = &mut ended => reason,
        never = running.follow_configuration(hangup) => match never {},
    };
    running.stop().await;
    Ok(reason)
}

/// The signals that end the daemon.
struct ShutdownSignals {
    terminate: Signal,
    interrupt: Signal,
}

impl ShutdownSignals {
    fn new() -> std::io::Result<Self> {
        Ok(Self { terminate: signal(SignalKind::terminate())?, interrupt: signal(SignalKind::interrupt())? })
    }

    /// Returns at the next signal that ends the daemon.
    async fn recv(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }
}

/// Keeps one span for each drain. The span begins with the order and ends when the GPU is drained, or when the drain is
/// stopped or given up. Returns when the keeper has ended. A drain may last hours, so its span is not part of the trace
/// of the request that ordered it; a drain that outlasts the daemon has one span for each run of the daemon.
async fn follow_drains(mut snapshots: watch::Receiver<Snapshot>) {
    let mut open = BTreeMap::new();
    loop {
        update_drain_spans(&mut open, &snapshots.borrow_and_update());
        if snapshots.changed().await.is_err() {
            open.values().for_each(|span| spans::ended(span, "daemonStopped"));
            return;
        }
    }
}

fn update_drain_spans(open: &mut BTreeMap<GpuId, Span>, ledger: &Ledger) {
    let state = |gpu: &GpuId| ledger.gpus.get(gpu).map(|gpu| gpu.drain());
    open.retain(|gpu, span| {
        let outcome = match state(gpu) {
            Some(Drain::Draining(..)) => return true,
            Some(Drain::Drained(_)) => "drained",
            Some(Drain::Active | Drain::Cordoned(_)) | None => "stopped",
        };
        spans::ended(span, outcome);
        false
    });
    for (gpu, state) in &ledger.gpus {
        if matches!(state.drain(), Drain::Draining(..)) && !open.contains_key(gpu) {
            open.insert(gpu.clone(), spans::drain(gpu, state.marks.evicts()));
        }
    }
}
