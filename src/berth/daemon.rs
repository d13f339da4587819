//! The composition root: what is opened first, what runs then, and how it ends.
//!
//! ```text
//! Starting::open     state folder, store, policies, the API's port; the search for GPUs begins
//!     | bring_up     GPUs, adoption, stack, registration --- failed or interrupted ---+
//!     v                                                                               |
//! Running            the configuration is followed                                    |
//!     | stop         tasks, GPUs, device plugin and API,                              |
//!     v              then the threads of the ledger  <--------------------------------+
//! ```

mod access;
mod admin_api;
mod configuration;
mod dra;
mod exit_signals;
mod progress;
mod reload;
mod running;
mod serve;
mod setup;
mod starting;

pub(crate) use exit_signals::{exit_on_signals, let_daemon_handle_signals};
pub use running::Running;
pub use serve::{serve, serve_with};
pub use starting::Starting;

use berth_cluster::LabelChannels;
use berth_config::Config;
use berth_core::{KernelHandle, PolicyService, RunningCore};
use berth_kernel::node::ports::Gpus;
use berth_wasm::WasmPolicies;
use configuration::Configuration;
use dra::DraChannels;
use progress::Progress;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use tokio::task::JoinSet;
use tokio::time::Instant;

/// Interval of attempts to make the active stack callable.
const STACK_RETRY_INTERVAL: Duration = Duration::from_secs(30);
/// The longest time of a stop; then the process exits without its remaining steps.
const STOP_MAX: Duration = Duration::from_millis(900);

/// Options for programs other than `berth serve`.
#[derive(Clone)]
pub struct Options {
    /// The program that compiles policies; its `main` must call
    /// [`berth_wasm::compiler_process`] first.
    pub compiler: PathBuf,
    /// The timeouts and intervals of the kubelet front end.
    pub timeouts: berth_kubelet::Timeouts,
    /// Interval of the attempts to make the active stack callable, if it is not at the start.
    pub stack_retry_interval: Duration,
    /// The GPUs, instead of those of the configuration.
    pub gpus: Option<Arc<dyn Gpus>>,
    /// The longest time of a stop. After it, [`Running::stop`] returns even if steps remain. In a process that does not
    /// exit, the state folder stays in use until these steps are done.
    pub stop_max: Duration,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            compiler: berth_wasm::default_compiler(),
            timeouts: berth_kubelet::Timeouts::default(),
            stack_retry_interval: STACK_RETRY_INTERVAL,
            gpus: None,
            stop_max: STOP_MAX,
        }
    }
}

/// The parts of the daemon that exist from its opening to the end of its stop.
struct Base {
    config: Config,
    options: Options,
    core: RunningCore,
    wasm: Arc<WasmPolicies>,
    progress: Arc<Progress>,
    admin_address: SocketAddr,
    labels: LabelChannels,
    dra: DraChannels,
    /// Whether the stack of the GPUNode may be activated.
    may_activate: tokio::sync::watch::Sender<bool>,
    configuration: Option<Configuration>,
    /// Tasks that run until the stop.
    tasks: JoinSet<()>,
}

impl Base {
    fn kernel(&self) -> &KernelHandle {
        &self.core.core.kernel
    }

    fn policies(&self) -> &PolicyService {
        &self.core.core.policies
    }

    /// Ends the tasks, then `fronts`, then the threads of the ledger.
    async fn stop(mut self, fronts: impl Future<Output = ()>) {
        self.tasks.shutdown().await;
        // One deadline for all steps: by default a stop takes at most a second.
        let end = Instant::now() + self.options.stop_max;
        if tokio::time::timeout_at(end, fronts).await.is_err() {
            tracing::warn!("the admin API or the device plugin did not stop in time");
        }
        let RunningCore { core, threads } = self.core;
        drop(core);
        let join = tokio::task::spawn_blocking(move || threads.into_iter().for_each(|t| drop(t.join())));
        if tokio::time::timeout_at(end, join).await.is_err() {
            // Acknowledged changes are durable, so nothing is lost.
            tracing::warn!("the thread that writes the ledger did not stop in time");
        }
    }
}
