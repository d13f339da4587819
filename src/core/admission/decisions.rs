//! Recorded decisions, replays and shadows.

use super::jobs::ActivateError;
use super::jobs::Unprepared;
use super::kernel_handle::KernelHandle;
use super::prepare::Prepared;
use super::recorder::lower_priority;
use super::replay::{self, Candidate, Report};
use super::shadow::{SHADOWS_MAX, Shadow, Shadows};
use crate::keeper::CommandError;
use berth_kernel::command::NewStack;
use berth_kernel::decision::{Decision, Filter};
use berth_kernel::ports::{DecisionPage, Input, Journal, JournalError, JournalStats, Policies};
use berth_kernel::stack::{OnFault, Permissions, StackEntry};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use tokio::sync::Semaphore;

/// Concurrent replays: each uses a whole processor.
const REPLAYS: usize = 1;
/// Concurrent reads of the journal, including replays: each holds a file of 4 MiB and its decoded records.
const READS: usize = 3;

/// Access to the journal, and the shadows.
#[derive(Clone)]
pub(super) struct Decisions {
    journal: Option<Arc<dyn Journal>>,
    lost: Arc<AtomicU64>,
    shadows: Arc<Shadows>,
    policies: Arc<dyn Policies>,
    replays: Arc<Semaphore>,
    reads: Arc<Semaphore>,
}

/// Error of reading decisions, of a replay or of a shadow.
#[derive(Debug, thiserror::Error)]
pub enum DecisionsError {
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

fn cause(error: &JournalError) -> String {
    error.source.as_ref().map_or_else(String::new, |source| format!(": {source}"))
}

impl From<ActivateError> for DecisionsError {
    fn from(error: ActivateError) -> Self {
        match error {
            ActivateError::Fails { policy, fault, .. } => Self::Fails { policy, fault },
            ActivateError::Unprepared(error) => Self::Unprepared(error),
            ActivateError::Command(error) => Self::Command(error),
        }
    }
}

impl From<JournalError> for DecisionsError {
    fn from(error: JournalError) -> Self {
        Self::Journal { error }
    }
}

impl Decisions {
    pub(super) fn new(
        journal: Option<Arc<dyn Journal>>,
        lost: Arc<AtomicU64>,
        shadows: Arc<Shadows>,
        policies: Arc<dyn Policies>,
    ) -> Self {
        let (replays, reads) = (Arc::new(Semaphore::new(REPLAYS)), Arc::new(Semaphore::new(READS)));
        Self { journal, lost, shadows, policies, replays, reads }
    }

    /// All shadows.
    pub(super) fn shadows(&self) -> Vec<Shadow> {
        self.shadows.all()
    }

    /// Runs a read of the journal on a blocking thread.
    async fn read<T: Send + 'static>(
        &self,
        read: impl FnOnce(&dyn Journal, &dyn Policies) -> Result<T, JournalError> + Send + 'static,
    ) -> Result<T, DecisionsError> {
        let journal = self.journal.clone().ok_or(DecisionsError::None)?;
        let policies = Arc::clone(&self.policies);
        // The task holds the permit, since it continues if the caller is dropped.
        let permit = Arc::clone(&self.reads).acquire_owned().await.map_err(|_| DecisionsError::Stopping)?;
        let work = tokio::task::spawn_blocking(move || {
            let _permit = permit;
            read(&*journal, &*policies)
        });
        Ok(work.await.map_err(|_| DecisionsError::Stopping)??)
    }
}

impl KernelHandle {
    /// Finds decisions, newest first, at most `limit`. There may be more if `next` is set, even if none were
    /// found: one call searches a part of the journal only.
    ///
    /// # Errors
    /// If there is no journal, or it cannot be read.
    pub async fn decisions(
        &self,
        filter: Filter,
        limit: usize,
    ) -> Result<(DecisionPage, JournalStats), DecisionsError> {
        let lost = self.decisions.lost.load(Ordering::Relaxed);
        self.decisions
            .read(move |journal, _| {
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
    /// As [`KernelHandle::decisions`].
    pub async fn decision(&self, seq: u64) -> Result<Option<(Decision, Option<Input>)>, DecisionsError> {
        self.decisions.read(move |journal, _| journal.open(seq)).await
    }

    /// Replays recorded decisions with a candidate policy, newest first, at most `limit` of them.
    ///
    /// # Errors
    /// If another replay is running, there is no journal, or it cannot be read.
    pub async fn replay(
        &self,
        candidate: Candidate,
        filter: Filter,
        limit: u64,
    ) -> Result<Report, DecisionsError> {
        let permit =
            Arc::clone(&self.decisions.replays).try_acquire_owned().map_err(|_| DecisionsError::Busy)?;
        let report = match self.prepare_candidate(&candidate).await {
            Ok(prepared) => {
                let work = move |journal: &dyn Journal, policies: &dyn Policies| {
                    let _held = (permit, prepared);
                    lower_priority();
                    replay::replay(&candidate, &filter, limit, journal, policies)
                };
                self.decisions.read(work).await
            }
            Err(error) => Err(error),
        };
        self.unload_unused();
        report
    }

    /// The journal's size and counts, without the time of its oldest decision; `None` if there is no journal. Does not block.
    #[must_use]
    pub fn journal_stats(&self) -> Option<JournalStats> {
        let size = self.decisions.journal.as_ref()?.stats_without_oldest();
        let lost = self.decisions.lost.load(Ordering::Relaxed);
        Some(JournalStats { lost: size.lost + lost, ..size })
    }

    /// Makes a candidate callable, and tries its parameters: if its hooks are rarely called, wrong parameters would
    /// otherwise go unnoticed for a long time. The entry has all permissions, so that only the policy itself can fail.
    async fn prepare_candidate(&self, candidate: &Candidate) -> Result<Prepared, DecisionsError> {
        let prepared = self.prepare([&candidate.digest]).await.map_err(DecisionsError::Unprepared)?;
        let any = || vec!["*".to_owned()];
        let entry = StackEntry {
            name: candidate.name().to_owned(),
            digest: candidate.digest.clone(),
            parameters: candidate.parameters.clone(),
            permissions: Permissions { resources: any(), environment: any(), ..Permissions::default() },
            on_fault: OnFault::default(),
        };
        let (by, why, entries) = (String::new(), String::new(), vec![entry]);
        self.try_stack(&NewStack { from_api: true, by, why, entries }).await?;
        Ok(prepared)
    }

    /// All shadows.
    #[must_use]
    pub fn shadows(&self) -> Vec<Shadow> {
        self.decisions.shadows()
    }

    /// Starts a shadow.
    ///
    /// # Errors
    /// If there are [`SHADOWS_MAX`] already, or the candidate fails on this node.
    pub async fn add_shadow(&self, candidate: Candidate) -> Result<Shadow, DecisionsError> {
        if self.decisions.shadows().len() >= SHADOWS_MAX {
            return Err(DecisionsError::ShadowsFull);
        }
        let added = match self.prepare_candidate(&candidate).await {
            Ok(_prepared) => {
                self.decisions.shadows.add(candidate, self.now()).ok_or(DecisionsError::ShadowsFull)
            }
            Err(error) => Err(error),
        };
        self.unload_unused();
        added
    }

    /// Ends a shadow, and returns it; `None` if there is no such shadow.
    #[must_use]
    pub fn remove_shadow(&self, id: u64) -> Option<Shadow> {
        let removed = self.decisions.shadows.remove(id);
        self.unload_unused();
        removed
    }
}
