//! The recorder: puts decisions down and asks shadows, in a thread of its own, off everybody's path.

use super::shadow::Shadows;
use berth_kernel::decision::Note;
use berth_kernel::ports::{Input, Journal, JournalError, Policies};
use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, TrySendError, bounded};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Decisions that may wait: half a second of the busiest node measured. Each holds a snapshot, which
/// shares nearly all of the next one's memory.
const NOTES: usize = 256;
/// With so many waiting, shadows are not asked: the record goes first.
const NOTES_WITHOUT_SHADOWS: usize = NOTES / 2;
/// What lies in memory is written at least so often.
const FLUSH: Duration = Duration::from_secs(1);

/// How much a thread steps back behind the daemon's others; 19 would be the most.
const NICE: i32 = 10;

/// Lets the daemon's other threads go first where processors are few: this thread, and the threads and
/// processes that it starts from now on, step back behind whoever waits for an Allocate. Of a thread alone,
/// as Linux counts it (setpriority(2)), and against the daemon's own threads alone where it has a cgroup of
/// its own. It needs no right; where it is not taken, the thread is as quick as the others.
pub(super) fn step_back() {
    let _ = rustix::process::setpriority_process(None, NICE);
}

/// Work of a thread for what may block that takes its time: compiling, installing, trying a stack. The
/// thread stays behind the others, whatever it does next.
pub(super) fn aside<T>(work: impl FnOnce() -> T) -> impl FnOnce() -> T {
    || {
        step_back();
        work()
    }
}

/// The way to the recorder. Never waits.
#[derive(Clone)]
pub(super) struct Recorder {
    notes: Sender<Note>,
    lost: Arc<AtomicU64>,
}

/// The recorder's thread; ends when every [`Recorder`] is gone.
pub(super) struct Recording {
    pub(super) recorder: Recorder,
    /// How many decisions were lost.
    pub(super) lost: Arc<AtomicU64>,
    pub(super) thread: JoinHandle<()>,
}

impl Recorder {
    /// Hands a decision over. One that finds no room is counted and lost.
    pub(super) fn note(&self, note: Note) {
        if let Err(TrySendError::Full(_)) = self.notes.try_send(note) {
            self.lost.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// Starts it.
///
/// # Errors
/// If the system gives no thread.
pub(super) fn start(
    policies: Arc<dyn Policies>,
    journal: Option<Arc<dyn Journal>>,
    shadows: Arc<Shadows>,
) -> std::io::Result<Recording> {
    let (send, notes) = bounded(NOTES);
    let lost = Arc::new(AtomicU64::new(0));
    let work = Work { policies, journal, shadows, flushed: Instant::now(), said: false };
    let record = move || {
        step_back();
        work.run(&notes);
    };
    let thread = std::thread::Builder::new().name("recorder".into()).spawn(record)?;
    Ok(Recording { recorder: Recorder { notes: send, lost: Arc::clone(&lost) }, lost, thread })
}

struct Work {
    policies: Arc<dyn Policies>,
    journal: Option<Arc<dyn Journal>>,
    shadows: Arc<Shadows>,
    flushed: Instant,
    /// Whether the log has been told that the journal fails.
    said: bool,
}

impl Work {
    fn run(mut self, notes: &Receiver<Note>) {
        loop {
            match notes.recv_timeout(FLUSH) {
                Ok(note) => {
                    let seq = if note.again { None } else { self.put_down(&note) };
                    // Also where notes never cease to come.
                    if self.flushed.elapsed() >= FLUSH {
                        self.flush();
                    }
                    let busy = notes.len() > NOTES_WITHOUT_SHADOWS;
                    self.shadows.consider(&note, seq, &*self.policies, busy);
                }
                Err(RecvTimeoutError::Timeout) => self.flush(),
                Err(RecvTimeoutError::Disconnected) => {
                    self.flush();
                    return;
                }
            }
        }
    }

    /// The decision's number, if it is on the record now.
    fn put_down(&mut self, note: &Note) -> Option<u64> {
        let journal = self.journal.clone()?;
        let input = self.input(note);
        // What the disk does not take is counted by the journal.
        let put = journal.append(&note.decision(), input.as_ref());
        let seq = put.as_ref().ok().copied();
        self.tell(put.err());
        seq
    }

    /// A question about something that has just gone cannot be put in indices; it is kept without.
    fn input(&self, note: &Note) -> Option<Input> {
        self.policies.input(&note.node, note.now, note.asked.question()).ok()
    }

    fn flush(&mut self) {
        self.flushed = Instant::now();
        let Some(journal) = self.journal.clone() else { return };
        let flushed = journal.flush();
        self.tell(flushed.err());
    }

    fn tell(&mut self, error: Option<JournalError>) {
        match error {
            Some(error) if !std::mem::replace(&mut self.said, true) => {
                tracing::error!("decisions are not put down: {error}");
            }
            Some(_) => {}
            None => self.said = false,
        }
    }
}
