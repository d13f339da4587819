//! The front end's handle: created, started and stopped by the daemon.

use super::checkpoint::{self, CheckpointError};
use super::device_list::DeviceLists;
use super::folder::FolderWatcher;
use super::plugin::{Predecessor, Registrations};
use super::pods_api;
use super::reconciler::{ReconcileError, Reconciler};
use super::settings::{ReconcileTiming, Settings};
use super::supervisor::Supervisor;
use berth_core::{KernelHandle, Shared};
use std::sync::Arc;
use tokio::sync::watch;
use tokio::task::JoinHandle;

/// Why running pods' devices could not be adopted. Nothing may be registered then.
#[derive(Debug, thiserror::Error)]
pub enum AdoptError {
    /// The checkpoint cannot be read or parsed.
    #[error(
        "cannot determine the devices of running pods, so no resource is registered: make the kubelet's checkpoint \
         readable, or start with --skip-adoption if no running pod uses a GPU of this node"
    )]
    Checkpoint(#[source] CheckpointError),
    /// The checkpoint was read, but its entries could not be recorded.
    #[error("the devices of running pods could not be recorded, so no resource is registered")]
    Record(#[source] ReconcileError),
}

/// The kubelet front end, not started yet.
pub struct DevicePlugins {
    settings: Arc<Settings>,
    timing: Shared<ReconcileTiming>,
    kernel: KernelHandle,
    folder: FolderWatcher,
    device_lists: Arc<DeviceLists>,
    reconciler: Arc<Reconciler>,
    predecessor: Predecessor,
}

impl DevicePlugins {
    /// Creates the front end and starts to watch the kubelet's folder. Must be called in a tokio runtime.
    #[must_use]
    pub fn new(settings: Settings, kernel: KernelHandle) -> Self {
        let timing = Shared::new(settings.reconcile.clone());
        let settings = Arc::new(settings);
        let folder = FolderWatcher::watch(&settings);
        let device_lists = Arc::new(DeviceLists::default());
        let reconciler = Arc::new(Reconciler::new(
            Arc::clone(&settings),
            timing.clone(),
            kernel.clone(),
            Arc::clone(&device_lists),
            folder.subscribe(),
        ));
        let predecessor = Predecessor::find(&settings, folder.subscribe().borrow().kubelet.ok());
        Self { settings, timing, kernel, folder, device_lists, reconciler, predecessor }
    }

    /// Adopts the devices that pods hold already. Called before [`start`]. Returns the number of entries of the
    /// checkpoint, or 0 without a checkpoint.
    ///
    /// [`start`]: Self::start
    ///
    /// # Errors
    /// If the checkpoint exists but cannot be used, or its entries could not be recorded.
    pub async fn adopt(&self) -> Result<usize, AdoptError> {
        let checkpoint = match checkpoint::read(&self.settings.device_plugins, None) {
            Ok(checkpoint) => Some(checkpoint),
            Err(CheckpointError::Missing { .. }) => None,
            Err(error) => return Err(AdoptError::Checkpoint(error)),
        };
        let (count, foreign) = checkpoint.as_ref().map_or((0, 0), |read| (read.entries.len(), read.foreign));
        if foreign > 0 {
            tracing::warn!(
                foreign,
                "pods hold devices that another plugin listed under berth's resources; berth does not track them"
            );
        }
        self.reconciler.adopt(checkpoint).await.map_err(AdoptError::Record)?;
        Ok(count)
    }

    /// Registers every listed resource and keeps it registered.
    #[must_use]
    pub fn start(self) -> RunningPlugins {
        let (stop, stopped) = watch::channel(false);
        let registrations = Arc::new(watch::Sender::new(Registrations::new()));
        let (pods_socket, pods_timeouts) = (self.settings.pods_api_socket(), self.settings.timeouts.pods_api);
        let supervisor = Supervisor {
            settings: self.settings,
            kernel: self.kernel.clone(),
            reconciler: Arc::clone(&self.reconciler),
            device_lists: self.device_lists,
            folder_state: self.folder.subscribe(),
            registrations: Arc::clone(&registrations),
            predecessor: self.predecessor,
        };
        let supervisor_task = tokio::spawn(supervisor.run(stopped));
        let reconciler_task = tokio::spawn(Arc::clone(&self.reconciler).run());
        let pods_task = tokio::spawn(pods_api::run(pods_socket, pods_timeouts, self.kernel));
        RunningPlugins {
            stop,
            registrations: registrations.subscribe(),
            timing: self.timing,
            reconciler: self.reconciler,
            supervisor_task,
            reconciler_task,
            pods_task,
            _folder: self.folder,
        }
    }
}

/// The running front end. Dropping it stops it without waiting.
pub struct RunningPlugins {
    stop: watch::Sender<bool>,
    registrations: watch::Receiver<Registrations>,
    timing: Shared<ReconcileTiming>,
    reconciler: Arc<Reconciler>,
    supervisor_task: JoinHandle<()>,
    reconciler_task: JoinHandle<()>,
    pods_task: JoinHandle<()>,
    _folder: FolderWatcher,
}

impl RunningPlugins {
    /// The registration state of each resource.
    #[must_use]
    pub fn registrations(&self) -> watch::Receiver<Registrations> {
        self.registrations.clone()
    }

    /// Changes the intervals of the reconcile passes. A wait that is under way ends by the old ones.
    pub fn set_timing(&self, timing: ReconcileTiming) {
        self.timing.replace(timing);
    }

    /// Runs one full reconcile pass now.
    ///
    /// # Errors
    /// If the kubelet's records could not be applied.
    pub async fn reconcile(&self) -> Result<(), ReconcileError> {
        self.reconciler.run_pass().await
    }

    /// Ends the streams, waits for running calls, and returns when no socket is served any more.
    pub async fn stop(mut self) {
        self.stop.send_replace(true);
        // A task that panicked has been reported by the runtime.
        let _ = (&mut self.supervisor_task).await;
    }
}

impl Drop for RunningPlugins {
    fn drop(&mut self) {
        self.reconciler_task.abort();
        self.pods_task.abort();
        self.stop.send_replace(true);
    }
}
