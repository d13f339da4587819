//! The front end's handle: built, made to adopt, started, stopped.

use super::boards::Boards;
use super::checkpoint::{self, CheckpointError};
use super::folder::Folder;
use super::plugin::Registrations;
use super::pods_api;
use super::rounds::{RoundError, Rounds};
use super::settings::Settings;
use super::supervisor::Supervisor;
use berth_core::admission::KernelHandle;
use std::sync::Arc;
use tokio::sync::watch;
use tokio::task::JoinHandle;

/// What running pods hold could not be taken over, so nothing may be registered.
#[derive(Debug, thiserror::Error)]
pub enum AdoptError {
    /// The checkpoint cannot be read or understood.
    #[error(
        "cannot tell what running pods hold, so no resource is registered: make the kubelet's checkpoint readable, or start with --skip-adoption if no running pod uses a GPU of this node"
    )]
    Checkpoint(#[source] CheckpointError),
    /// It could be read, but not recorded.
    #[error("what running pods hold could not be recorded, so no resource is registered")]
    Record(#[source] RoundError),
}

/// The kubelet front end, not started yet.
pub struct Front {
    settings: Arc<Settings>,
    kernel: KernelHandle,
    folder: Folder,
    boards: Arc<Boards>,
    rounds: Arc<Rounds>,
}

impl Front {
    /// Begins to watch the kubelet's folder. Needs a tokio runtime around it.
    #[must_use]
    pub fn new(settings: Settings, kernel: KernelHandle) -> Self {
        let settings = Arc::new(settings);
        let folder = Folder::watch(&settings);
        let boards = Arc::new(Boards::default());
        let rounds =
            Arc::new(Rounds::new(Arc::clone(&settings), kernel.clone(), Arc::clone(&boards), folder.seen()));
        Self { settings, kernel, folder, boards, rounds }
    }

    /// Takes over what pods hold under our resource names. For an empty store, before [`start`].
    /// Answers how many holdings the checkpoint showed. No checkpoint at all is fine.
    ///
    /// [`start`]: Self::start
    ///
    /// # Errors
    /// If the checkpoint is there and cannot be used, or what it shows could not be recorded.
    pub async fn adopt(&self) -> Result<usize, AdoptError> {
        let folder = self.settings.device_plugins();
        let found = match checkpoint::read(&folder, None) {
            Ok(found) => Some(found),
            Err(CheckpointError::Missing { .. }) => None,
            Err(error) => return Err(AdoptError::Checkpoint(error)),
        };
        let count = found.as_ref().map_or(0, |found| found.entries.len());
        let foreign = found.as_ref().map_or(0, |found| found.foreign);
        if foreign > 0 {
            tracing::warn!(
                foreign,
                "pods hold devices of our resources under ids of another plugin; they are not known to us until their pods end"
            );
        }
        self.rounds.adopt(found).await.map_err(AdoptError::Record)?;
        Ok(count)
    }

    /// Registers every listed resource and keeps it so.
    #[must_use]
    pub fn start(self) -> Running {
        let (stop, stopped) = watch::channel(false);
        let registrations = Arc::new(watch::Sender::new(Registrations::new()));
        let supervisor = Supervisor {
            settings: Arc::clone(&self.settings),
            kernel: self.kernel.clone(),
            rounds: Arc::clone(&self.rounds),
            boards: self.boards,
            seen: self.folder.seen(),
            registrations: Arc::clone(&registrations),
        };
        let supervising = tokio::spawn(supervisor.run(stopped));
        let keeping = tokio::spawn(Arc::clone(&self.rounds).keep());
        let showing = tokio::spawn(pods_api::keep(self.settings, self.kernel));
        Running {
            stop,
            registrations: registrations.subscribe(),
            rounds: self.rounds,
            supervising,
            keeping,
            showing,
            _folder: self.folder,
        }
    }
}

/// The front end at work. Dropping it stops it without waiting.
pub struct Running {
    stop: watch::Sender<bool>,
    registrations: watch::Receiver<Registrations>,
    rounds: Arc<Rounds>,
    supervising: JoinHandle<()>,
    keeping: JoinHandle<()>,
    showing: JoinHandle<()>,
    _folder: Folder,
}

impl Running {
    /// Where each resource's registration stands.
    #[must_use]
    pub fn registrations(&self) -> watch::Receiver<Registrations> {
        self.registrations.clone()
    }

    /// Takes one round now.
    ///
    /// # Errors
    /// If what it saw could not be applied.
    pub async fn round(&self) -> Result<(), RoundError> {
        self.rounds.round().await
    }

    /// Ends the streams, lets calls under way end, and returns when nothing is served any more.
    pub async fn stop(mut self) {
        self.stop.send_replace(true);
        // A task that panicked has been reported by the runtime.
        let _ = (&mut self.supervising).await;
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.keeping.abort();
        self.showing.abort();
        self.stop.send_replace(true);
    }
}
