//! The DRA driver: registration, NodePrepareResources and NodeUnprepareResources, the health of devices, and the CDI
//! specifications of prepared claims. ResourceSlices are published by `berth-cluster`.
//!
//! ```text
//!   register   the socket that the kubelet's plugin watcher finds
//!   service    prepares and unprepares claims
//!   claims     what a claim of the API server requests of this node
//!   cdi        one specification for each prepared claim
//!   metadata   one file for each request of a claim, which its containers can read
//!   record     what a daemon adopts after the loss of its store
//!   health     the stream of the devices' health
//! ```

mod cdi;
mod claims;
mod health;
mod metadata;
mod record;
mod register;
mod service;

pub use claims::ClaimReader;
pub use record::adopt_claims;
pub use register::DriverRegistration;

use crate::settings::CurrentEdits;
use crate::timeouts::ConnectionTimeouts;
use berth_core::KernelHandle;
use cdi::Specifications;
use register::Registrar;
use service::Driver;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tonic::service::Routes;

/// The longest name of a driver (kubernetes `apis/resource/validation`: `DriverNameMaxLength`).
pub const DRIVER_NAME_BYTES_MAX: usize = 63;

/// How long the daemon waits for the holder of a claim's devices. The kubelet waits 45 s for a call, and after an error it
/// calls again only a minute later.
pub const HOLDER_WAIT_MAX: Duration = Duration::from_secs(40);

/// After how long the daemon releases a claim that the API server no longer has. The kubelet unprepares a claim before that is
/// deleted, and does not repeat it: a release that could not be recorded before a restart of the daemon ends so.
pub const GONE_AFTER: Duration = Duration::from_secs(600);

/// Settings of the DRA driver.
#[derive(Clone, Debug)]
pub struct DriverSettings {
    /// The driver's name, such as `gpu.nvidia.com`.
    pub driver: String,
    /// The node's name, which is the pool's.
    pub node: String,
    /// The kubelet's `--root-dir`, which holds `plugins/` and `plugins_registry/`.
    pub root_dir: PathBuf,
    /// The folder of the claims' CDI specifications, which the container runtime reads.
    pub cdi_dir: PathBuf,
    /// What a grant changes in its container, at present.
    pub edits: CurrentEdits,
    /// How long a call waits for the holder of its devices: less than the 45 s after which the kubelet gives up.
    pub wait_max: Duration,
    /// After how long a claim that the API server no longer has is released, although the kubelet has not unprepared it.
    pub gone_after: Duration,
    /// Of the connections to the sockets.
    pub connections: ConnectionTimeouts,
}

impl DriverSettings {
    /// The socket of the driver's API.
    #[must_use]
    pub fn socket(&self) -> PathBuf {
        self.root_dir.join("plugins").join(&self.driver).join("dra.sock")
    }

    /// See [`grants_folder`].
    #[must_use]
    pub fn grants_folder(&self) -> PathBuf {
        grants_folder(&self.root_dir, &self.driver)
    }

    /// The socket that the kubelet's plugin watcher finds. The watcher dials it with its escaped path as `:authority`. The
    /// HTTP/2 library accepts that because of the `@`: what is before it may have escapes (RFC 3986, 3.2.1), and a host
    /// may not.
    #[must_use]
    pub fn registration_socket(&self) -> PathBuf {
        self.root_dir.join("plugins_registry").join(format!("{}@reg.sock", self.driver))
    }
}

/// The folder of the files that containers of claims find, with a subfolder for each claim, named by its UID. `root_dir`: the kubelet's.
#[must_use]
pub fn grants_folder(root_dir: &Path, driver: &str) -> PathBuf {
    root_dir.join("plugins").join(driver).join("grants")
}

/// The driver never closes an idle connection. If it did, the kubelet would assume that the driver is gone, and delete the
/// node's slices after 30 s (kubernetes `dra/plugin/dra_plugin_manager.go`). The connection ends with the kubelet's process.
const IDLE_MAX: Duration = Duration::from_secs(365 * 24 * 3600);

/// The DRA driver, not started yet.
pub struct DraDriver {
    settings: Arc<DriverSettings>,
    kernel: KernelHandle,
    claims: Arc<dyn ClaimReader>,
}

impl DraDriver {
    /// `claims` reads claims from the API server.
    #[must_use]
    pub fn new(settings: DriverSettings, kernel: KernelHandle, claims: Arc<dyn ClaimReader>) -> Self {
        Self { settings: Arc::new(settings), kernel, claims }
    }

    /// Writes the specifications of the claims that are prepared, and then serves and registers the driver. Must be called
    /// in a tokio runtime.
    #[must_use]
    pub fn start(self) -> RunningDriver {
        let Self { settings, kernel, claims } = self;
        let specifications = Arc::new(Specifications::new(&settings, kernel.clone()));
        let driver =
            Arc::new(Driver::new(Arc::clone(&settings), kernel.clone(), claims, Arc::clone(&specifications)));
        let (stop, stopped) = watch::channel(false);
        let registration = watch::Sender::new(DriverRegistration::Waiting);
        let state = registration.subscribe();
        let first = Arc::clone(&specifications);
        let keep_files = tokio::spawn(specifications.keep());
        let release = tokio::spawn(Arc::clone(&driver).retry_releases());
        let gone = tokio::spawn(Arc::clone(&driver).release_gone());
        let pods = tokio::spawn(Arc::clone(&driver).record_pods());
        let registrar = Registrar::new(Arc::clone(&settings), registration);
        let connections = ConnectionTimeouts { idle_max: IDLE_MAX, ..settings.connections };
        let routes = {
            let health = health::Health::new(Arc::clone(&settings), kernel);
            move || {
                let routes = Routes::new(service::server(&driver));
                health.clone().add_to(routes)
            }
        };
        let serving = tokio::spawn(async move {
            // Before the kubelet can start containers of claims that were prepared before.
            if let Err(error) = first.bring_up_to_date().await {
                tracing::warn!(%error, "the CDI specifications of claims cannot be written");
            }
            registrar.run(connections, routes, stopped).await;
        });
        RunningDriver { stop, state, serving, tasks: vec![keep_files, release, gone, pods] }
    }
}

/// The running driver. Dropping it stops it without waiting.
pub struct RunningDriver {
    stop: watch::Sender<bool>,
    state: watch::Receiver<DriverRegistration>,
    serving: JoinHandle<()>,
    tasks: Vec<JoinHandle<()>>,
}

impl RunningDriver {
    /// The state of the registration.
    #[must_use]
    pub fn registration(&self) -> watch::Receiver<DriverRegistration> {
        self.state.clone()
    }

    /// Stops serving, and returns when the sockets are removed. Prepared claims and their specifications stay.
    pub async fn stop(mut self) {
        self.stop.send_replace(true);
        // A task that panicked has been reported by the runtime.
        let _ = (&mut self.serving).await;
    }
}

impl Drop for RunningDriver {
    fn drop(&mut self) {
        self.tasks.iter().for_each(JoinHandle::abort);
        self.stop.send_replace(true);
    }
}
