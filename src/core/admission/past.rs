//! The part of the door that leads to decisions of the past, and to policies on trial.

use super::Door;
use super::prepare::{Prepared, Unprepared};
use super::recorder::step_back;
use super::replay::{self, Candidate, Report};
use super::shadow::{SHADOWS_MAX, Shadow, Shadows};
use super::thread::ActivateError;
use crate::keeper::AskError;
use berth_kernel::command::NewStack;
use berth_kernel::decision::{Decision, Filter};
use berth_kernel::ports::{Found, Input, Journal, JournalError, Policies, Standing};
use berth_kernel::stack::{OnFault, Permissions, StackEntry};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use tokio::sync::Semaphore;

/// Replays at a time: each takes a whole processor.
const REPLAYS: usize = 1;
/// Looks into the journal at a time, a replay among them: each holds a file of 4 MiB and what is in it.
const READS: usize = 3;

/// What the door holds of it.
#[derive(Clone)]
pub(super) struct Past {
    journal: Option<Arc<dyn Journal>>,
    lost: Arc<AtomicU64>,
    shadows: Arc<Shadows>,
    policies: Arc<dyn Policies>,
    replays: Arc<Semaphore>,
    reads: Arc<Semaphore>,
}

/// The past cannot be told.
#[derive(Debug, thiserror::Error)]
pub enum PastError {
    /// This daemon puts nothing down.
    #[error("this daemon keeps no record of decisions (decisions.maxMiB is 0)")]
    None,
    /// The journal failed.
    #[error("{error}{}", because(.error))]
    Journal {
        /// How.
        error: JournalError,
    },
    /// The policy cannot be made callable.
    #[error("{0}")]
    Unprepared(Unprepared),
    /// It fails when it is asked.
    #[error("policy {policy} fails on this node: {fault}")]
    Fails {
        /// Its label.
        policy: String,
        /// How.
        fault: String,
    },
    /// It could not be asked.
    #[error("{0}")]
    Ask(AskError),
    /// Another replay is at work.
    #[error("another replay is running; try again when it has finished")]
    Busy,
    /// There are as many shadows as there may be.
    #[error("{SHADOWS_MAX} policies are asked as shadows already; end one of them first")]
    ShadowsFull,
    /// The daemon is on its way down.
    #[error("the daemon is stopping")]
    Stopping,
}

fn because(error: &JournalError) -> String {
    error.source.as_ref().map_or_else(String::new, |source| format!(": {source}"))
}

impl From<ActivateError> for PastError {
    fn from(error: ActivateError) -> Self {
        match error {
            ActivateError::Fails { policy, fault, .. } => Self::Fails { policy, fault },
            ActivateError::Unprepared(error) => Self::Unprepared(error),
            ActivateError::Ask(error) => Self::Ask(error),
        }
    }
}

impl From<JournalError> for PastError {
    fn from(error: JournalError) -> Self {
        Self::Journal { error }
    }
}

impl Past {
    pub(super) fn new(
        journal: Option<Arc<dyn Journal>>,
        lost: Arc<AtomicU64>,
        shadows: Arc<Shadows>,
        policies: Arc<dyn Policies>,
    ) -> Self {
        let (replays, reads) = (Arc::new(Semaphore::new(REPLAYS)), Arc::new(Semaphore::new(READS)));
        Self { journal, lost, shadows, policies, replays, reads }
    }

    /// Policies that are asked beside the stack.
    pub(super) fn shadows(&self) -> Vec<Shadow> {
        self.shadows.all()
    }

    /// Reads in a thread that may wait for the disk.
    async fn read<T: Send + 'static>(
        &self,
        read: impl FnOnce(&dyn Journal, &dyn Policies) -> Result<T, JournalError> + Send + 'static,
    ) -> Result<T, PastError> {
        let journal = self.journal.clone().ok_or(PastError::None)?;
        let policies = Arc::clone(&self.policies);
        // It goes with the work, which goes on when whoever asked has gone.
        let place = Arc::clone(&self.reads).acquire_owned().await.map_err(|_| PastError::Stopping)?;
        let work = tokio::task::spawn_blocking(move || {
            let _place = place;
            read(&*journal, &*policies)
        });
        Ok(work.await.map_err(|_| PastError::Stopping)??)
    }
}

impl Door {
    /// Decisions, newest first, at most `limit`. Where `next` is set there may be more, also with an
    /// empty answer: only a part of the journal is looked at in one call.
    ///
    /// # Errors
    /// If there is no journal, or it cannot be read.
    pub async fn decisions(&self, filter: Filter, limit: usize) -> Result<(Found, Standing), PastError> {
        let lost = self.past.lost.load(Ordering::Relaxed);
        self.past
            .read(move |journal, _| {
                let found = journal.find(&filter, limit)?;
                let standing = journal.standing();
                // Those that found no room on their way, and those that the disk did not take.
                Ok((found, Standing { lost: standing.lost + lost, ..standing }))
            })
            .await
    }

    /// One decision, and what the policies were shown.
    ///
    /// # Errors
    /// As [`Door::decisions`].
    pub async fn decision(&self, seq: u64) -> Result<Option<(Decision, Option<Input>)>, PastError> {
        self.past.read(move |journal, _| journal.open(seq)).await
    }

    /// Asks a policy the questions on the record again, newest first, at most `limit` of them.
    ///
    /// # Errors
    /// If another replay is at work, there is no journal, or it cannot be read.
    pub async fn replay(
        &self,
        candidate: Candidate,
        filter: Filter,
        limit: u64,
    ) -> Result<Report, PastError> {
        let alone = Arc::clone(&self.past.replays).try_acquire_owned().map_err(|_| PastError::Busy)?;
        let report = match self.ready(&candidate).await {
            Ok(prepared) => {
                let work = move |journal: &dyn Journal, policies: &dyn Policies| {
                    let _held = (alone, prepared);
                    step_back();
                    replay::replay(&candidate, &filter, limit, journal, policies)
                };
                self.past.read(work).await
            }
            Err(error) => Err(error),
        };
        self.rest();
        report
    }

    /// How much the journal holds, but for its oldest moment; `None` where none is kept. Waits for nobody.
    #[must_use]
    pub fn journal_size(&self) -> Option<Standing> {
        let size = self.past.journal.as_ref()?.size();
        let lost = self.past.lost.load(Ordering::Relaxed);
        Some(Standing { lost: size.lost + lost, ..size })
    }

    /// Makes a candidate callable, and has it look at its parameters: one whose hooks are rarely asked
    /// would have nothing to say of wrong ones for a long time. What its entry might forbid it does not
    /// count.
    async fn ready(&self, candidate: &Candidate) -> Result<Prepared, PastError> {
        let prepared = self.prepare([&candidate.digest]).await.map_err(PastError::Unprepared)?;
        let all = || vec!["*".to_owned()];
        let entry = StackEntry {
            name: candidate.name().to_owned(),
            digest: candidate.digest.clone(),
            parameters: candidate.parameters.clone(),
            permissions: Permissions { resources: all(), environment: all(), ..Permissions::default() },
            on_fault: OnFault::default(),
        };
        let (by, why, entries) = (String::new(), String::new(), vec![entry]);
        self.try_stack(&NewStack { from_api: true, by, why, entries }).await?;
        Ok(prepared)
    }

    /// Policies that are asked beside the stack.
    #[must_use]
    pub fn shadows(&self) -> Vec<Shadow> {
        self.past.shadows()
    }

    /// Asks a policy beside the stack from now on.
    ///
    /// # Errors
    /// If there are as many as there may be.
    pub async fn add_shadow(&self, candidate: Candidate) -> Result<Shadow, PastError> {
        if self.past.shadows().len() >= SHADOWS_MAX {
            return Err(PastError::ShadowsFull);
        }
        let added = match self.ready(&candidate).await {
            Ok(_prepared) => self.past.shadows.add(candidate, self.now()).ok_or(PastError::ShadowsFull),
            Err(error) => Err(error),
        };
        self.rest();
        added
    }

    /// Asks it no more; answers what it was, if there was one.
    #[must_use]
    pub fn remove_shadow(&self, id: u64) -> Option<Shadow> {
        let removed = self.past.shadows.remove(id);
        self.rest();
        removed
    }
}
