//! THE single writer. One thread, one `turn()`: decide, append, apply, publish, reply, in that
//! order. It never runs guest code and never waits for NVML.
//!
//! Readers only ever see snapshots, so a slow reader cannot slow an Allocate. What is absent here:
//! locks around the ledger, and any other place that changes it.

mod inbox;

pub use inbox::{Handle, KUBELET_INBOX, OTHER_INBOX, Running, spawn};

use crate::figures::Figures;
use crate::spans;
use berth_kernel::allocation::ADOPTED;
use berth_kernel::change::{Change, Entry};
use berth_kernel::command::{Command, Rules};
use berth_kernel::decide::{Verdict, decide};
use berth_kernel::ledger::Ledger;
use berth_kernel::names::PartId;
use berth_kernel::ports::{Clock, Store, StoreError};
use berth_kernel::record::{HealthRecord, Record, Write, health_records, health_writes, writes};
use berth_kernel::refusal::Refusal;
use berth_kernel::restore::{carry_over, restore};
use berth_kernel::steps::{Step, pass};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;
use tokio::sync::watch;

/// The ledger as readers see it: a value that no longer changes.
pub type Snapshot = Arc<Ledger>;

/// A store that failed is tried again at most this often, milliseconds.
const REOPEN_MS: u64 = 500;

/// What an applied command left behind.
#[derive(Clone, Debug)]
pub struct Applied {
    /// The ledger with it.
    pub snapshot: Snapshot,
    /// What changed; empty if nothing had to.
    pub entry: Arc<Entry>,
}

/// Why a command was not applied. "You may not" and "I could not" are kept apart.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AskError {
    /// You may not.
    #[error("{0}")]
    Refused(Refusal),
    /// The store did not take it; nothing was granted.
    #[error("the allocation store failed, so nothing was changed: {0}")]
    Store(String),
    /// Too much is waiting already.
    #[error("too many requests are waiting; try again in a second")]
    Busy,
    /// No answer in time; it may or may not be done.
    #[error("no answer within {0} s")]
    Late(u64),
    /// The daemon is on its way down.
    #[error("the daemon is stopping")]
    Stopping,
}

impl AskError {
    /// Which it is, in a word.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Refused(refusal) => refusal.kind(),
            Self::Store(_) => "store",
            Self::Busy => "busy",
            Self::Late(_) => "late",
            Self::Stopping => "stopping",
        }
    }
}

impl From<Refusal> for AskError {
    fn from(refusal: Refusal) -> Self {
        Self::Refused(refusal)
    }
}

/// The answer to a command.
pub type Answered = Result<Applied, AskError>;

/// The writer's state.
pub struct Keeper {
    ledger: Snapshot,
    store: Box<dyn Store>,
    rules: Rules,
    clock: Arc<dyn Clock>,
    publisher: watch::Sender<Snapshot>,
    /// What the store says of the GPUs' health.
    written_health: BTreeMap<PartId, HealthRecord>,
    trouble: Trouble,
    /// Set while memory and store may differ: when to try again, monotonic milliseconds.
    reopen_at: Option<u64>,
    figures: Arc<Figures>,
}

/// What is wrong with the store, for readiness.
pub type Trouble = Arc<Mutex<Option<String>>>;

impl Keeper {
    /// Reads the ledger back from its store.
    ///
    /// # Errors
    /// If the store cannot be read.
    pub fn open(mut store: Box<dyn Store>, rules: Rules, clock: Arc<dyn Clock>) -> Result<Self, StoreError> {
        let records = store.load()?;
        let written_health = health_of(&records);
        let ledger = Arc::new(restore(records, clock.now()));
        let (publisher, _) = watch::channel(Arc::clone(&ledger));
        let figures = Arc::<Figures>::default();
        figures.keeper.set_store_bytes(store.bytes());
        Ok(Self {
            ledger,
            store,
            rules,
            clock,
            publisher,
            written_health,
            trouble: Trouble::default(),
            reopen_at: None,
            figures,
        })
    }

    /// The newest snapshot.
    #[must_use]
    pub fn snapshot(&self) -> Snapshot {
        Arc::clone(&self.ledger)
    }

    /// What is wrong with the store, if anything: until it is read back, memory and disk may differ.
    #[must_use]
    pub fn store_trouble(&self) -> Option<String> {
        self.trouble.lock().clone()
    }

    /// One turn: decide, append, apply, publish. Record before apply, apply before publish, publish
    /// before reply.
    ///
    /// # Errors
    /// If the command is refused, or the store does not take it.
    pub fn turn(&mut self, command: &Command) -> Answered {
        let now = self.clock.now();
        if matches!(command, Command::Look(_) | Command::Triaged { .. }) {
            self.publish_derived(&decide(&self.ledger, &self.rules, command, now).entry);
        }
        if self.reopen_at.is_some_and(|at| now.mono_ms >= at) {
            self.reopen();
        }
        let Verdict { entry, refusal } = decide(&self.ledger, &self.rules, command, now);
        let entry = Arc::new(entry);
        if !entry.changes.is_empty() {
            self.commit(&entry)?;
        }
        // The kubelet's calls do not wait for what concerns history alone.
        if !matches!(command, Command::Allocate { .. }) {
            let written = self.write_health();
            // An operator's word is given in writing.
            if matches!(command, Command::Heal { .. }) {
                written?;
            }
        }
        match refusal {
            Some(refusal) => Err(refusal.into()),
            None => Ok(Applied { snapshot: self.snapshot(), entry }),
        }
    }

    /// A GPU that died is shown at once: health is derived, so it need not wait for a disk that may
    /// be slow or full. Applying those changes twice is harmless.
    fn publish_derived(&mut self, entry: &Entry) {
        let derived: Vec<_> = entry.changes.iter().filter(|c| !c.is_durable()).cloned().collect();
        if !derived.is_empty() {
            let mut next = Ledger::clone(&self.ledger);
            next.apply(&Entry { at: entry.at, changes: derived });
            self.publish(next);
        }
    }

    fn commit(&mut self, entry: &Entry) -> Result<(), AskError> {
        let mut next = Ledger::clone(&self.ledger);
        next.apply(entry);
        if entry.is_durable() {
            if self.reopen_at.is_some() {
                return Err(AskError::Store(self.trouble_now()));
            }
            self.append(&writes(&self.ledger, entry, &next))?;
        }
        self.count(entry);
        self.publish(next);
        Ok(())
    }

    /// Counts what begins and ends with an entry that is about to be applied.
    fn count(&self, entry: &Entry) {
        let figures = &self.figures.keeper;
        for change in &entry.changes {
            match change {
                Change::Granted(allocation) => {
                    let adopted = allocation.decision.by.iter().any(|by| by == ADOPTED);
                    figures.granted(allocation.resource.as_str(), if adopted { ADOPTED } else { "granted" });
                }
                Change::Ended { id, reason } => {
                    if let Some(allocation) = self.ledger.live.get(id) {
                        figures.ended(allocation.resource.as_str(), reason.as_str());
                    }
                }
                _ => {}
            }
        }
    }

    fn append(&mut self, writes: &[Write]) -> Result<(), AskError> {
        pass(Step::BeforeAppend);
        let began = Instant::now();
        let span = spans::append(writes.len());
        let Err(error) = span.in_scope(|| self.store.append(writes)) else {
            pass(Step::AfterAppend);
            self.figures.keeper.appends.add(began.elapsed());
            self.figures.keeper.set_store_bytes(self.store.bytes());
            return Ok(());
        };
        self.figures.keeper.append_failed();
        let said = chain(&error);
        // Too large is known before anything was written.
        if !matches!(error, StoreError::TooLarge { .. }) {
            tracing::error!(error = said, "the store failed");
            self.set_trouble(Some(said.clone()));
            self.reopen();
        }
        Err(AskError::Store(said))
    }

    /// Brings the store up to date with how the GPUs fare. What fails is tried again with the next
    /// command.
    fn write_health(&mut self) -> Result<(), AskError> {
        let now = health_records(&self.ledger);
        let writes = health_writes(&self.written_health, &now);
        if writes.is_empty() {
            return Ok(());
        }
        if self.reopen_at.is_some() {
            return Err(AskError::Store(self.trouble_now()));
        }
        self.append(&writes)?;
        self.written_health = now;
        Ok(())
    }

    /// After a failed append nobody knows what the disk holds: read it back and go on from there. A
    /// grant that was written after all becomes an allocation that nobody was told of, and ends as
    /// `neverStarted`.
    fn reopen(&mut self) {
        let now = self.clock.now();
        match self.store.load() {
            Ok(records) => {
                self.written_health = health_of(&records);
                let next = carry_over(restore(records, now), &self.ledger);
                tracing::info!(allocations = next.live.len(), "the store was read back after a failure");
                self.publish(next);
                self.reopen_at = None;
                self.set_trouble(None);
            }
            Err(error) => {
                self.set_trouble(Some(chain(&error)));
                self.reopen_at = Some(now.mono_ms + REOPEN_MS);
            }
        }
    }

    fn publish(&mut self, next: Ledger) {
        for (gpu, state) in &next.gpus {
            let health = state.health.state;
            let before = self.ledger.gpus.get(gpu).map(|old| old.health.state);
            if before.is_some_and(|before| before != health) {
                self.figures.keeper.turned(health.as_str());
            }
        }
        self.ledger = Arc::new(next);
        pass(Step::AfterApply);
        self.publisher.send_replace(Arc::clone(&self.ledger));
        pass(Step::AfterPublish);
    }

    fn set_trouble(&self, trouble: Option<String>) {
        *self.trouble.lock() = trouble;
    }

    fn trouble_now(&self) -> String {
        let trouble = self.trouble.lock();
        trouble.clone().unwrap_or_else(|| "it is being read back".into())
    }
}

/// What records say of the GPUs' health.
fn health_of(records: &[Record]) -> BTreeMap<PartId, HealthRecord> {
    let health = |record: &Record| match record {
        Record::Health(health) => Some((health.gpu.clone(), health.clone())),
        _ => None,
    };
    records.iter().filter_map(health).collect()
}

/// An error with its causes, for the last reader.
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(next) = cause {
        text.push_str(": ");
        text.push_str(&next.to_string());
        cause = next.source();
    }
    text
}

#[cfg(test)]
mod tests;
