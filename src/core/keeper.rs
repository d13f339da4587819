//! The keeper, the ledger's single writer. One thread, one `turn()`: decide, append, apply, publish, reply, in that
//! order. It never runs guest code and never waits for NVML. If the disk does not answer in time, another keeper takes
//! over.
//!
//! Readers only see snapshots, so a slow reader cannot delay an Allocate. What is absent here: locks around the ledger.
//! No other code changes it.

mod disk;
mod inbox;

pub use disk::DISK_WAIT;
pub use inbox::{Handle, KUBELET_INBOX, OTHER_INBOX, Running, spawn};

use berth_kernel::ids::names::GpuId;
use berth_kernel::node::change::{Change, Entry};
use berth_kernel::node::command::{Command, Verdict};
use berth_kernel::node::decide::decide;
use berth_kernel::node::ledger::Ledger;
use berth_kernel::node::ports::{Clock, Store, StoreError};
use berth_kernel::node::record::{HealthRecord, Record, Write, health_records, health_writes, writes};
use berth_kernel::node::refusal::Refusal;
use berth_kernel::node::restore::{carry_over, restore};
use berth_kernel::node::rules::Rules;
use berth_kernel::node::steps::{Step, pass};
use berth_kernel::node::tick::next_tick;
use berth_observe::counters::Counters;
use berth_observe::spans;
use disk::{Disk, DiskError};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::watch;

/// The ledger as readers see it: an immutable value.
pub type Snapshot = Arc<Ledger>;

/// Pause before a store that failed is read again, milliseconds.
const REOPEN_MS: u64 = 500;

/// Result of an applied command.
#[derive(Clone, Debug)]
pub struct Applied {
    /// The ledger after the command.
    pub snapshot: Snapshot,
    /// The changes; empty if none were needed.
    pub entry: Arc<Entry>,
}

/// Error of a command that was not applied. A refusal is distinct from a failure.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CommandError {
    /// The kernel refused the command.
    #[error("{0}")]
    Refused(Refusal),
    /// The store failed; nothing was changed.
    #[error("the allocation store failed, so nothing was changed: {0}")]
    Store(String),
    /// The inbox is full.
    #[error("too many requests are waiting; try again in a second")]
    Busy,
    /// No answer within this many seconds; the command may or may not have been applied.
    #[error("no answer within {0} s; the change may still take effect")]
    Late(u64),
    /// The daemon is stopping.
    #[error("the daemon is stopping")]
    Stopping,
}

impl CommandError {
    /// The error's kind, or the refusal's.
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

impl From<Refusal> for CommandError {
    fn from(refusal: Refusal) -> Self {
        Self::Refused(refusal)
    }
}

/// The keeper's answer to a command.
pub type CommandResult = Result<Applied, CommandError>;

/// The keeper's state.
pub struct Keeper {
    ledger: Snapshot,
    disk: Arc<Disk>,
    clock: Arc<dyn Clock>,
    publisher: Arc<watch::Sender<Snapshot>>,
    /// The GPUs' health as the store holds it.
    persisted_health: BTreeMap<GpuId, HealthRecord>,
    store_failure: StoreFailure,
    /// When to read the store again, monotonic milliseconds; set while memory and store may differ.
    reopen_at: Option<u64>,
    counters: Arc<Counters>,
    /// Whether a snapshot was published for which readers have not been woken.
    has_news: bool,
    /// Whether another keeper has taken over: this one only ends.
    is_replaced: bool,
}

/// Error of the store, for readiness; `None` while the store works.
pub type StoreFailure = Arc<Mutex<Option<String>>>;

impl Keeper {
    /// Restores the ledger from its store.
    ///
    /// # Errors
    /// If the store cannot be read.
    pub fn open(mut store: Box<dyn Store>, rules: Rules, clock: Arc<dyn Clock>) -> Result<Self, StoreError> {
        let records = store.load()?;
        let persisted_health = health_of(&records);
        let ledger = Arc::new(restore(records, clock.now()).with_rules(&Arc::new(rules)));
        let (publisher, _) = watch::channel(Arc::clone(&ledger));
        let counters = Arc::<Counters>::default();
        let disk = Arc::new(Disk::new(store, DISK_WAIT));
        counters.keeper.set_store_bytes(disk.bytes());
        Ok(Self {
            ledger,
            disk,
            clock,
            publisher: Arc::new(publisher),
            persisted_health,
            store_failure: StoreFailure::default(),
            reopen_at: None,
            counters,
            has_news: false,
            is_replaced: false,
        })
    }

    /// The keeper that takes over when a call of the store is late. It works on the published snapshot, and reads the
    /// store before it writes.
    fn successor(&self) -> Self {
        Self {
            ledger: self.snapshot(),
            disk: Arc::clone(&self.disk),
            clock: Arc::clone(&self.clock),
            publisher: Arc::clone(&self.publisher),
            persisted_health: BTreeMap::new(),
            store_failure: Arc::clone(&self.store_failure),
            reopen_at: None,
            counters: Arc::clone(&self.counters),
            has_news: false,
            is_replaced: false,
        }
    }

    /// Takes over from a keeper whose call of the store failed with this error.
    fn take_over(mut self, error: &StoreError) -> Self {
        self.ledger = Arc::clone(&self.publisher.borrow());
        self.store_failed(with_causes(error));
        self.reopen_at = Some(self.clock.now().mono_ms + REOPEN_MS);
        self
    }

    /// The newest snapshot.
    #[must_use]
    pub fn snapshot(&self) -> Snapshot {
        Arc::clone(&self.ledger)
    }

    /// Error of the store, if it failed: until it is read again, memory and disk may differ.
    #[must_use]
    pub fn store_error(&self) -> Option<String> {
        self.store_failure.lock().clone()
    }

    /// One turn: decide, append, apply, publish. Record before apply, apply before publish, publish
    /// before reply.
    ///
    /// # Errors
    /// If the command is refused, or the store fails.
    pub fn turn(&mut self, command: &Command) -> CommandResult {
        let now = self.clock.now();
        let mut verdict = decide(&self.ledger, command, now);
        let command_itself = command.unconditional();
        // Without an append nothing can delay the publication of the whole entry.
        let may_wait = verdict.entry.is_durable() || self.reopen_at.is_some();
        if may_wait && matches!(command_itself, Command::RecordScan(_) | Command::ApplyTriage(_)) {
            self.publish_derived(&verdict.entry);
        }
        if self.reopen_at.is_some_and(|at| now.mono_ms >= at) {
            self.reopen();
            // The store may hold other records than this ledger did.
            verdict = decide(&self.ledger, command, now);
        }
        if self.is_replaced {
            return Err(CommandError::Stopping);
        }
        let Verdict { entry, refusal } = verdict;
        let entry = Arc::new(entry);
        if !entry.changes.is_empty() {
            self.commit(&entry)?;
        }
        // A grant does not wait for health records, which only the history needs.
        if !matches!(command_itself, Command::Allocate { .. } | Command::Prepare { .. }) {
            // The append can take long.
            self.wake_readers();
            let written = self.write_health();
            // An operator's command is durable before it is answered.
            if matches!(command_itself, Command::MarkHealthy { .. }) {
                written?;
            }
        }
        match refusal {
            Some(refusal) => Err(refusal.into()),
            None => Ok(Applied { snapshot: self.snapshot(), entry }),
        }
    }

    /// Publishes changes of health before they are durable: health is derived, so a failed GPU is withdrawn
    /// even while the disk is slow or full. Applying those changes twice is harmless.
    fn publish_derived(&mut self, entry: &Entry) {
        let derived: Vec<_> = entry.changes.iter().filter(|c| !c.is_durable()).cloned().collect();
        if !derived.is_empty() {
            let mut next = Ledger::clone(&self.ledger);
            next.apply(&Entry { at: entry.at, changes: derived });
            self.publish(next);
            // The append that may follow can take long.
            self.wake_readers();
        }
    }

    fn commit(&mut self, entry: &Entry) -> Result<(), CommandError> {
        let mut next = Ledger::clone(&self.ledger);
        next.apply(entry);
        if entry.is_durable() {
            if self.reopen_at.is_some() {
                return Err(CommandError::Store(self.failure_message()));
            }
            self.append(&writes(&self.ledger, entry, &next), false)?;
        }
        self.count(entry);
        self.publish(next);
        Ok(())
    }

    /// Counts the allocations that an entry starts and ends, before it is applied.
    fn count(&self, entry: &Entry) {
        let counters = &self.counters.keeper;
        for change in &entry.changes {
            match change {
                Change::Granted(allocation) => {
                    let how = if allocation.decision.is_adoption() { "adopted" } else { "granted" };
                    counters.granted(allocation.resource.as_str(), how);
                }
                Change::Ended { id, reason } => {
                    if let Some(allocation) = self.ledger.live.get(id) {
                        counters.ended(allocation.resource.as_str(), reason.as_str());
                    }
                }
                _ => {}
            }
        }
    }

    /// `is_applied`: the command that the writes belong to has been applied.
    fn append(&mut self, writes: &[Write], is_applied: bool) -> Result<(), CommandError> {
        pass(Step::BeforeAppend);
        let began = Instant::now();
        let span = spans::append(writes.len());
        let error = match span.in_scope(|| self.disk.append(writes, is_applied)) {
            Ok(()) => {
                pass(Step::AfterAppend);
                self.counters.keeper.append_durations.add(began.elapsed());
                self.counters.keeper.set_store_bytes(self.disk.bytes());
                return Ok(());
            }
            Err(DiskError::TakenOver) => {
                self.is_replaced = true;
                return Err(CommandError::Stopping);
            }
            Err(DiskError::Store(error)) => error,
        };
        let message = with_causes(&error);
        // `TooLarge` is returned before anything is written.
        if matches!(error, StoreError::TooLarge { .. }) {
            self.counters.keeper.append_failed();
        } else {
            self.store_failed(message.clone());
            self.reopen();
        }
        Err(CommandError::Store(message))
    }

    fn store_failed(&self, message: String) {
        self.counters.keeper.append_failed();
        tracing::error!(error = message, "the store failed");
        self.set_store_failure(Some(message));
    }

    /// Writes changed health records to the store. A failed write is repeated with the next command.
    fn write_health(&mut self) -> Result<(), CommandError> {
        let now = health_records(&self.ledger);
        let writes = health_writes(&self.persisted_health, &now);
        if writes.is_empty() {
            return Ok(());
        }
        if self.reopen_at.is_some() {
            return Err(CommandError::Store(self.failure_message()));
        }
        self.append(&writes, true)?;
        self.persisted_health = now;
        Ok(())
    }

    /// Reads the store again after a failed append, when the disk's content is unknown. A grant that was
    /// written after all becomes an allocation without a reply to the kubelet, and ends as `neverStarted`.
    fn reopen(&mut self) {
        let now = self.clock.now();
        match self.disk.load() {
            Ok(records) => {
                self.persisted_health = health_of(&records);
                let next = carry_over(restore(records, now), &self.ledger);
                tracing::info!(allocations = next.live.len(), "the store was loaded again after a failure");
                self.publish(next);
                self.reopen_at = None;
                self.set_store_failure(None);
            }
            Err(DiskError::TakenOver) => self.is_replaced = true,
            Err(DiskError::Store(error)) => {
                self.set_store_failure(Some(with_causes(&error)));
                self.reopen_at = Some(now.mono_ms + REOPEN_MS);
            }
        }
    }

    fn publish(&mut self, next: Ledger) {
        for (gpu, state) in &next.gpus {
            let health = state.health.state;
            let before = self.ledger.gpus.get(gpu).map(|old| old.health.state);
            if before.is_some_and(|before| before != health) {
                self.counters.keeper.health_changed(health.as_str());
            }
        }
        self.ledger = Arc::new(next);
        pass(Step::AfterApply);
        let ledger = Arc::clone(&self.ledger);
        self.publisher.send_if_modified(|current| {
            *current = ledger;
            false
        });
        self.has_news = true;
        pass(Step::AfterPublish);
    }

    /// Wakes the readers that wait for a new snapshot. Separate from its publication, so that an Allocate is answered
    /// before they compete with its caller for a processor.
    fn wake_readers(&mut self) {
        if std::mem::take(&mut self.has_news) {
            self.publisher.send_if_modified(|_| true);
        }
    }

    fn set_store_failure(&self, store_failure: Option<String>) {
        *self.store_failure.lock() = store_failure;
    }

    /// Whether the store has to be read again, which a tick does.
    fn has_store_failed(&self) -> bool {
        self.reopen_at.is_some()
    }

    /// Time until a tick has something to do; `None` if nothing is pending.
    fn until_next_tick(&self) -> Option<Duration> {
        if self.has_store_failed() || self.persisted_health != health_records(&self.ledger) {
            return Some(Duration::ZERO);
        }
        let now = self.clock.now();
        let due = next_tick(&self.ledger, now)?;
        Some(Duration::from_millis(due.saturating_sub(now.mono_ms)))
    }

    fn failure_message(&self) -> String {
        let failure = self.store_failure.lock();
        failure.clone().unwrap_or_else(|| "it is being read back".into())
    }
}

/// The health records among `records`, by GPU.
fn health_of(records: &[Record]) -> BTreeMap<GpuId, HealthRecord> {
    let health = |record: &Record| match record {
        Record::Health(health) => Some((health.gpu.clone(), health.clone())),
        _ => None,
    };
    records.iter().filter_map(health).collect()
}

/// An error's message with those of its causes.
fn with_causes(error: &dyn std::error::Error) -> String {
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
