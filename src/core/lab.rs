//! The lab: recorded decisions, and policies that are tried without effect, on recorded decisions ([`Lab::replay`]), on
//! live ones ([`Lab::add_shadow`]), or on the live node ([`Lab::try_policy`]).

mod comparison;
mod gate;
pub(crate) mod recorder;
mod replay;
pub(crate) mod shadow;
mod trial;

pub use comparison::{Candidate, Counts, CountsByHook, Difference};
pub use gate::{GateError, GateReport, GateRules};
pub use replay::Report;
pub use shadow::{SHADOWS_MAX, Shadow};
pub use trial::{
    CallReport, DeviceRequest, Proposal, Proposed, RequestOutcome, RequestingPod, TRIAL_DEVICES_MAX,
    TrialError, TrialReport,
};

use crate::jobs::{ActivateError, Unprepared};
use crate::keeper::CommandError;
use crate::policies::{PolicyService, Prepared};
use crate::priority::lower_priority;
use berth_kernel::node::command::NewStack;
use berth_kernel::node::ports::{DecisionPage, Input, Journal, JournalError, JournalStats, PolicyRuntime};
use berth_kernel::node::refusal::Refusal;
use berth_kernel::policy::decision::{Decision, Filter};
use berth_kernel::policy::stack::{OnFault, Permissions, StackEntry, StackOrigin};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Concurrent replays: each uses a whole processor.
const REPLAYS: usize = 1;
/// Concurrent reads of the journal, including replays: each holds a file of 4 MiB and its decoded records.
const READS: usize = 3;

/// Reads decisions, and tries policies without effect. Cheap to clone.
#[derive(Clone)]
pub struct Lab {
    policies: PolicyService,
    journal: Option<Arc<dyn Journal>>,
    /// Number of decisions that the recorder lost.
    lost: Arc<AtomicU64>,
    trials: Arc<Semaphore>,
    replays: Arc<Semaphore>,
    reads: Arc<Semaphore>,
}

/// Error of reading decisions, of a replay or of a shadow.
#[derive(Debug, thiserror::Error)]
pub enum LabError {
    /// This daemon has no journal.
    #[error("this daemon keeps no record of decisions (decisions.maxMiB is 0)")]
    None,
    /// The journal failed.
    #[error("{error}{}", cause(.error))]
    Journal {
        /// The journal's error.
        error: JournalError,
    },
    /// The policy cannot be made callable.
    #[error("{0}")]
    Unprepared(Unprepared),
    /// The policy fails on this node.
    #[error("policy {policy} fails on this node: {fault}")]
    Fails {
        /// The policy's label.
        policy: String,
        /// The fault.
        fault: String,
        /// Whether the machine may have caused the fault rather than the policy, so that a retry may succeed.
        passing: bool,
    },
    /// The policy could not be tried.
    #[error("{0}")]
    Command(CommandError),
    /// Another replay is running.
    #[error("another replay is running; try again when it has finished")]
    Busy,
    /// There are [`SHADOWS_MAX`] shadows already.
    #[error("{SHADOWS_MAX} shadows are running already; end one of them first")]
    ShadowsFull,
    /// The daemon is stopping.
    #[error("the daemon is stopping")]
    Stopping,
}

impl LabError {
    /// Whether the same attempt may succeed later.
    #[must_use]
    pub fn may_succeed_later(&self) -> bool {
        match self {
            Self::None | Self::Fails { passing: false, .. } => false,
            Self::Unprepared(unprepared) => !unprepared.error.is_permanent(),
            _ => true,
        }
    }
}

fn cause(error: &JournalError) -> String {
    error.source.as_ref().map_or_else(String::new, |source| format!(": {source}"))
}

impl From<ActivateError> for LabError {
    fn from(error: ActivateError) -> Self {
        match error {
            ActivateError::Fails { policy, fault, passing } => Self::Fails { policy, fault, passing },
            ActivateError::Unprepared(error) => Self::Unprepared(error),
            ActivateError::FileChanged => Self::Command(CommandError::Refused(Refusal::Moved)),
            ActivateError::Command(error) => Self::Command(error),
        }
    }
}

impl From<JournalError> for LabError {
    fn from(error: JournalError) -> Self {
        Self::Journal { error }
    }
}

impl Lab {
    pub(crate) fn new(
        policies: PolicyService,
        journal: Option<Arc<dyn Journal>>,
        lost: Arc<AtomicU64>,
    ) -> Self {
        let permits = |count| Arc::new(Semaphore::new(count));
        let (trials, replays, reads) = (permits(trial::TRIALS), permits(REPLAYS), permits(READS));
        Self { policies, journal, lost, trials, replays, reads }
    }

    /// Runs a read of the journal on a blocking thread.
    async fn read<T: Send + 'static>(
        &self,
        read: impl FnOnce(&dyn Journal, &dyn PolicyRuntime) -> Result<T, JournalError> + Send + 'static,
    ) -> Result<T, LabError> {
        let journal = self.journal.clone().ok_or(LabError::None)?;
        let runtime = Arc::clone(self.policies.runtime());
        // The task holds the permit, since it continues if the caller is dropped.
        let permit = Arc::clone(&self.reads).acquire_owned().await.map_err(|_| LabError::Stopping)?;
        let work = tokio::task::spawn_blocking(move || {
            let _permit = permit;
            read(&*journal, &*runtime)
        });
        Ok(work.await.map_err(|_| LabError::Stopping)??)
    }

    /// Finds decisions, newest first, at most `limit`. There may be more if `next` is set, even if none were
    /// found: one call searches a part of the journal only.
    ///
    /// # Errors
    /// If there is no journal, or it cannot be read.
    pub async fn decisions(
        &self,
        filter: Filter,
        limit: usize,
    ) -> Result<(DecisionPage, JournalStats), LabError> {
        let lost = self.lost.load(Ordering::Relaxed);
        self.read(move |journal, _| {
            let found = journal.find(&filter, limit)?;
            let stats = journal.stats();
            // Decisions lost in the recorder's queue, and those that could not be written.
            Ok((found, JournalStats { lost: stats.lost + lost, ..stats }))
        })
        .await
    }

    /// Reads one decision, and the input of its policy calls.
    ///
    /// # Errors
    /// As [`Lab::decisions`].
    pub async fn decision(&self, seq: u64) -> Result<Option<(Decision, Option<Input>)>, LabError> {
        self.read(move |journal, _| journal.open(seq)).await
    }

    /// Replays recorded decisions with a candidate policy, newest first, at most `limit` of them.
    ///
    /// # Errors
    /// If another replay is running, there is no journal, or it cannot be read.
    pub async fn replay(&self, candidate: Candidate, filter: Filter, limit: u64) -> Result<Report, LabError> {
        let permit = Arc::clone(&self.replays).try_acquire_owned().map_err(|_| LabError::Busy)?;
        self.replay_with(permit, candidate, filter, limit).await
    }

    async fn replay_with(
        &self,
        permit: OwnedSemaphorePermit,
        candidate: Candidate,
        filter: Filter,
        limit: u64,
    ) -> Result<Report, LabError> {
        let report = match self.prepare_candidate(&candidate).await {
            Ok(prepared) => {
                let version = self.policies.kernel.snapshot().policies.get(&candidate.digest).cloned();
                let work = move |journal: &dyn Journal, runtime: &dyn PolicyRuntime| {
                    let _held = (permit, prepared);
                    lower_priority();
                    replay::replay(&candidate, version.as_deref(), &filter, limit, journal, runtime)
                };
                self.read(work).await
            }
            Err(error) => Err(error),
        };
        self.policies.unload_unused();
        report
    }

    /// The journal's size and counts, without the time of its oldest decision; `None` if there is no journal. Does not
    /// block.
    #[must_use]
    pub fn journal_stats(&self) -> Option<JournalStats> {
        let size = self.journal.as_ref()?.stats_without_oldest();
        let lost = self.lost.load(Ordering::Relaxed);
        Some(JournalStats { lost: size.lost + lost, ..size })
    }

    /// Makes a candidate callable, and tries its parameters: if its hooks are rarely called, wrong parameters would
    /// otherwise go unnoticed for a long time. The entry has all permissions, so that only the policy itself can fail.
    async fn prepare_candidate(&self, candidate: &Candidate) -> Result<Prepared, LabError> {
        let prepared = self.policies.prepare([&candidate.digest]).await.map_err(LabError::Unprepared)?;
        let any = || vec!["*".to_owned()];
        let entry = StackEntry {
            name: candidate.name().to_owned(),
            digest: candidate.digest.clone(),
            parameters: candidate.parameters.clone(),
            permissions: Permissions { resources: any(), environment: any(), ..Permissions::default() },
            on_fault: OnFault::default(),
        };
        let (by, why, entries) = (String::new(), String::new(), vec![entry]);
        self.policies
            .try_stack(&NewStack { origin: StackOrigin::Api, failed: None, by, why, entries })
            .await?;
        Ok(prepared)
    }

    /// All shadows.
    #[must_use]
    pub fn shadows(&self) -> Vec<Shadow> {
        self.policies.shadows.all()
    }

    /// Starts a shadow.
    ///
    /// # Errors
    /// If callers have started [`SHADOWS_MAX`] already, or the candidate fails on this node.
    pub async fn add_shadow(&self, candidate: Candidate) -> Result<Shadow, LabError> {
        if self.policies.shadows.is_full() {
            return Err(LabError::ShadowsFull);
        }
        let added = self.start_shadow(candidate, false).await;
        self.policies.unload_unused();
        added
    }

    async fn start_shadow(&self, candidate: Candidate, is_of_gate: bool) -> Result<Shadow, LabError> {
        let _prepared = self.prepare_candidate(&candidate).await?;
        let now = self.policies.kernel.now();
        self.policies.shadows.add(candidate, now, is_of_gate).ok_or(LabError::ShadowsFull)
    }

    /// Ends a shadow, and returns it; `None` if there is no such shadow.
    #[must_use]
    pub fn remove_shadow(&self, id: u64) -> Option<Shadow> {
        let removed = self.policies.shadows.remove(id);
        self.policies.unload_unused();
        removed
    }
}
