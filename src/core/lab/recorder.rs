//! The recorder: writes decisions to the journal and calls shadows, on a thread of its own that no caller waits for.

use super::shadow::Shadows;
use crate::priority::lower_priority;
use crate::stack::policy_stats::PolicyStats;
use berth_kernel::node::ports::{Input, Journal, JournalError, PolicyRuntime};
use berth_kernel::policy::decision::NewDecision;
use crossbeam_channel::{Receiver, Sender, TrySendError, bounded};
use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Capacity of the queue: a second of the busiest node measured, and as much again. Each decision holds a snapshot,
/// which shares nearly all of its memory with the next one.
const QUEUE: usize = 1024;
/// Number of decisions in one batch above which shadows are skipped, so that recording catches up.
const BATCH_WITHOUT_SHADOWS: usize = QUEUE / 4;
/// Time for which decisions are gathered before they are written, so that the calls of the kubelet do not share their
/// processor with the encoding, and many decisions cost one wake-up.
const GATHER: Duration = Duration::from_millis(100);
/// Least time between two log lines about failures of the journal.
const FAILURE_LOG_INTERVAL: Duration = Duration::from_secs(60);

/// A handle to the recorder. Never blocks.
#[derive(Clone)]
pub(crate) struct Recorder {
    decisions: Sender<NewDecision>,
    /// Wakes the recorder's thread; full while there is a signal that it has not seen.
    signal: Sender<()>,
    /// Nothing is sent: tells the recorder's thread that a handle exists.
    _alive: Sender<Infallible>,
    lost: Arc<AtomicU64>,
}

/// The running recorder; its thread ends when every [`Recorder`] is dropped.
pub(crate) struct Recording {
    pub(crate) recorder: Recorder,
    /// Number of decisions lost because the queue was full.
    pub(crate) lost: Arc<AtomicU64>,
    pub(crate) thread: JoinHandle<()>,
}

impl Recorder {
    /// Counts a decision, and queues it.
    pub(crate) fn record(&self, stats: &PolicyStats, decision: NewDecision) {
        stats.record_outcome(decision.question.hook(), decision.outcome.as_str());
        self.submit(decision);
    }

    /// Queues a decision. If the queue is full, the decision is lost and counted.
    pub(crate) fn submit(&self, decision: NewDecision) {
        if let Err(TrySendError::Full(_)) = self.decisions.try_send(decision) {
            self.lost.fetch_add(1, Ordering::Relaxed);
        }
        let _ = self.signal.try_send(());
    }
}

/// Starts the recorder.
///
/// # Errors
/// If the thread cannot be started.
pub(crate) fn start(
    policies: Arc<dyn PolicyRuntime>,
    journal: Option<Arc<dyn Journal>>,
    shadows: Arc<Shadows>,
) -> std::io::Result<Recording> {
    let (decisions, queue) = bounded(QUEUE);
    let (signal, signals) = bounded(1);
    let (alive, handles) = bounded(0);
    let lost = Arc::new(AtomicU64::new(0));
    let worker = Worker { policies, journal, shadows, failure_logged: None };
    let record = move || {
        lower_priority();
        worker.run(&queue, &signals, &handles);
    };
    let thread = std::thread::Builder::new().name("recorder".into()).spawn(record)?;
    let recorder = Recorder { decisions, signal, _alive: alive, lost: Arc::clone(&lost) };
    Ok(Recording { recorder, lost, thread })
}

struct Worker {
    policies: Arc<dyn PolicyRuntime>,
    journal: Option<Arc<dyn Journal>>,
    shadows: Arc<Shadows>,
    /// When a failure of the journal was last logged.
    failure_logged: Option<Instant>,
}

impl Worker {
    fn run(mut self, queue: &Receiver<NewDecision>, signals: &Receiver<()>, handles: &Receiver<Infallible>) {
        while signals.recv().is_ok() {
            // Ends early once the last handle is dropped.
            let _ = handles.recv_timeout(GATHER);
            let is_busy = queue.len() > BATCH_WITHOUT_SHADOWS;
            for decision in queue.try_iter() {
                let seq = if decision.is_repeat { None } else { self.record(&decision) };
                self.shadows.compare(&decision, seq, &*self.policies, is_busy);
            }
            self.flush();
        }
    }

    /// Writes a decision to the journal. Returns its number, if it was recorded.
    fn record(&mut self, note: &NewDecision) -> Option<u64> {
        let journal = self.journal.clone()?;
        let input = self.input(note);
        // The journal counts failed appends itself.
        let result = journal.append(&note.decision(), input.as_ref());
        let seq = result.as_ref().ok().copied();
        self.log_failure(result.err());
        seq
    }

    /// The input of the decision's calls; `None` if it concerns a device that is no longer part of the node, which the
    /// input's indices cannot express.
    fn input(&self, note: &NewDecision) -> Option<Input> {
        self.policies.record_input(&note.node, note.now, note.question.question()).ok()
    }

    fn flush(&mut self) {
        let Some(journal) = self.journal.clone() else { return };
        let result = journal.flush();
        self.log_failure(result.err());
    }

    /// Logs a failure, at most once in [`FAILURE_LOG_INTERVAL`]: a full disk fails each batch.
    fn log_failure(&mut self, error: Option<JournalError>) {
        let Some(error) = error else { return };
        if self.failure_logged.is_none_or(|at| at.elapsed() >= FAILURE_LOG_INTERVAL) {
            self.failure_logged = Some(Instant::now());
            tracing::error!("some decisions are not recorded: {error}");
        }
    }
}
