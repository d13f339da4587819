//! The recorder: writes decisions to the journal and calls shadows, on a thread of its own that no caller waits for.

use super::shadow::Shadows;
use crate::policies::lower_priority;
use berth_kernel::decision::NewDecision;
use berth_kernel::ports::{Input, Journal, JournalError, PolicyRuntime};
use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, TrySendError, bounded};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Capacity of the queue: half a second of the busiest node measured. Each decision holds a snapshot, which
/// shares nearly all of its memory with the next one.
const QUEUE: usize = 256;
/// Queue length above which shadows are skipped, so that recording catches up.
const QUEUE_WITHOUT_SHADOWS: usize = QUEUE / 2;
/// Longest time that decisions stay in memory before they are written.
const FLUSH: Duration = Duration::from_secs(1);

/// A handle to the recorder. Never blocks.
#[derive(Clone)]
pub(crate) struct Recorder {
    notes: Sender<NewDecision>,
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
    /// Queues a decision. If the queue is full, the decision is lost and counted.
    pub(crate) fn submit(&self, note: NewDecision) {
        if let Err(TrySendError::Full(_)) = self.notes.try_send(note) {
            self.lost.fetch_add(1, Ordering::Relaxed);
        }
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
    let (send, notes) = bounded(QUEUE);
    let lost = Arc::new(AtomicU64::new(0));
    let worker = Worker { policies, journal, shadows, flushed: Instant::now(), failure_logged: false };
    let record = move || {
        lower_priority();
        worker.run(&notes);
    };
    let thread = std::thread::Builder::new().name("recorder".into()).spawn(record)?;
    Ok(Recording { recorder: Recorder { notes: send, lost: Arc::clone(&lost) }, lost, thread })
}

struct Worker {
    policies: Arc<dyn PolicyRuntime>,
    journal: Option<Arc<dyn Journal>>,
    shadows: Arc<Shadows>,
    flushed: Instant,
    /// Whether the journal's current failure has been logged.
    failure_logged: bool,
}

impl Worker {
    fn run(mut self, notes: &Receiver<NewDecision>) {
        loop {
            match notes.recv_timeout(FLUSH) {
                Ok(note) => {
                    let seq = if note.is_repeat { None } else { self.record(&note) };
                    // The timeout below never occurs while decisions keep arriving.
                    if self.flushed.elapsed() >= FLUSH {
                        self.flush();
                    }
                    let busy = notes.len() > QUEUE_WITHOUT_SHADOWS;
                    self.shadows.compare(&note, seq, &*self.policies, busy);
                }
                Err(RecvTimeoutError::Timeout) => self.flush(),
                Err(RecvTimeoutError::Disconnected) => {
                    self.flush();
                    return;
                }
            }
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
        self.flushed = Instant::now();
        let Some(journal) = self.journal.clone() else { return };
        let result = journal.flush();
        self.log_failure(result.err());
    }

    /// Logs the first of several failures in a row.
    fn log_failure(&mut self, error: Option<JournalError>) {
        match error {
            Some(error) if !std::mem::replace(&mut self.failure_logged, true) => {
                tracing::error!("decisions are not recorded: {error}");
            }
            Some(_) => {}
            None => self.failure_logged = false,
        }
    }
}
