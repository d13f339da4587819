//! Bounds how long the keeper waits for a disk.
//!
//! The store lives on a thread of its own. A call that is not over in time answers
//! [`StoreError::Slow`], and the store is stuck until that call ends: nothing is asked of it
//! meanwhile, so calls never queue up behind a dead disk. What a late append answered is not used;
//! whether its writes are there is what the next [`Store::load`] finds out. What a late load read is
//! what the next one answers.

use super::trouble::Trouble;
use berth_kernel::ports::{Store, StoreError, Waker};
use berth_kernel::record::{Record, Write};
use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, TryRecvError, bounded};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long an append may take. A healthy drive needs under a millisecond, one that stalls for its
/// own housekeeping some hundred; the kubelet has no timeout of its own and admits no pod meanwhile.
pub const APPEND_WAIT: Duration = Duration::from_secs(2);
/// How long opening and the first reading may take; a later reading has [`APPEND_WAIT`], as the
/// keeper waits for it. At the largest (a copy and a read of some 60 MiB)
/// under a second on a slow disk.
pub const LOAD_WAIT: Duration = Duration::from_secs(15);

/// How often the store's thread looks at the size of its files: some twenty microseconds, after an answer.
const BYTES_EVERY: Duration = Duration::from_secs(10);

/// Any store, with deadlines.
#[derive(Debug)]
pub struct Deadline {
    trouble: Trouble,
    append_wait: Duration,
    load_wait: Duration,
    /// Whether it was read before. Only the first reading may take its time: nothing is served yet.
    loaded: bool,
    /// `None` only while it is dropped.
    asks: Option<Sender<Ask>>,
    answers: Receiver<Answer>,
    state: State,
    thread: Option<JoinHandle<()>>,
    waker: NoDebug,
    /// How often a late call was looked at since it is late.
    looks: u32,
    /// The size of the store's files; 0 where it is not known.
    bytes: Arc<AtomicU64>,
}

/// The store's waker, if it has one.
struct NoDebug(Option<Waker>);

impl std::fmt::Debug for NoDebug {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Waker")
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Nothing is under way.
    Ready,
    /// A call is late and not over.
    Stuck,
    /// A late call is over; only a `load` makes good for it.
    Late,
}

enum Ask {
    Load,
    Append(Vec<Write>),
}

enum Answer {
    Opened(Result<Option<Waker>, StoreError>),
    Loaded(Result<Vec<Record>, StoreError>),
    Appended(Result<(), StoreError>),
}

impl Deadline {
    /// Opens a store, in its own thread, with the product's deadlines. `path` is for errors.
    ///
    /// # Errors
    /// As `open`, or [`StoreError::Slow`].
    pub fn open<S, F>(path: &Path, open: F) -> Result<Self, StoreError>
    where
        S: Store + 'static,
        F: FnOnce() -> Result<S, StoreError> + Send + 'static,
    {
        Self::open_within(path, APPEND_WAIT, LOAD_WAIT, open)
    }

    /// The same with other deadlines.
    ///
    /// # Errors
    /// As `open`, or [`StoreError::Slow`].
    pub fn open_within<S, F>(
        path: &Path,
        append_wait: Duration,
        load_wait: Duration,
        open: F,
    ) -> Result<Self, StoreError>
    where
        S: Store + 'static,
        F: FnOnce() -> Result<S, StoreError> + Send + 'static,
    {
        let trouble = Trouble::new(path);
        // One ask is under way at a time, and its answer never waits for a reader.
        let (asks, asked) = bounded(1);
        let (answer, answers) = bounded(1);
        let words = trouble.clone();
        let bytes = Arc::new(AtomicU64::new(0));
        let seen = Arc::clone(&bytes);
        let thread = std::thread::Builder::new()
            .name("store".into())
            .spawn(move || serve(open, &words, &asked, &answer, &seen))
            .map_err(|e| trouble.io("starting its thread", &e))?;
        let mut this = Self {
            trouble,
            append_wait,
            load_wait,
            loaded: false,
            asks: Some(asks),
            answers,
            state: State::Ready,
            thread: Some(thread),
            waker: NoDebug(None),
            looks: 0,
            bytes,
        };
        match this.wait(load_wait)? {
            Answer::Opened(Ok(waker)) => {
                this.waker = NoDebug(waker);
                Ok(this)
            }
            Answer::Opened(Err(e)) => Err(e),
            Answer::Loaded(_) | Answer::Appended(_) => Err(this.confused()),
        }
    }

    fn ask(&mut self, ask: Ask, wait: Duration) -> Result<Answer, StoreError> {
        let sent = self.asks.as_ref().is_some_and(|asks| asks.send(ask).is_ok());
        if sent { self.wait(wait) } else { Err(self.ended()) }
    }

    fn wait(&mut self, wait: Duration) -> Result<Answer, StoreError> {
        match self.answers.recv_timeout(wait) {
            Ok(answer) => Ok(answer),
            Err(RecvTimeoutError::Timeout) => {
                self.state = State::Stuck;
                self.looks = 0;
                Err(self.trouble.slow(wait))
            }
            Err(RecvTimeoutError::Disconnected) => Err(self.ended()),
        }
    }

    /// Looks, without waiting, whether a late call is over, and what it answered.
    fn look(&mut self) -> Option<Answer> {
        if self.state != State::Stuck {
            return None;
        }
        let answer = match self.answers.try_recv() {
            Ok(answer) => Some(answer),
            Err(TryRecvError::Disconnected) => None,
            Err(TryRecvError::Empty) => {
                self.looks += 1;
                // Ever more seldom: each may be a thread that waits, too.
                if self.looks.is_power_of_two()
                    && let Some(wake) = &self.waker.0
                {
                    wake();
                }
                return None;
            }
        };
        self.state = State::Late;
        answer
    }

    fn ended(&self) -> StoreError {
        self.trouble.failed("its thread has ended: restart berth")
    }

    /// Cannot come about while each ask waits for its own answer.
    fn confused(&self) -> StoreError {
        self.trouble.failed("its thread answered something else")
    }
}

impl Store for Deadline {
    fn load(&mut self) -> Result<Vec<Record>, StoreError> {
        let wait = if self.loaded { self.append_wait } else { self.load_wait };
        let late = self.look();
        if self.state == State::Stuck {
            return Err(self.trouble.slow(wait));
        }
        let answer = match late {
            // A reading that is over by now is as good as a new one: nothing was written since.
            Some(loaded @ Answer::Loaded(_)) => loaded,
            _ => self.ask(Ask::Load, wait)?,
        };
        match answer {
            Answer::Loaded(loaded) => {
                if loaded.is_ok() {
                    self.state = State::Ready;
                    self.loaded = true;
                }
                loaded
            }
            Answer::Opened(_) | Answer::Appended(_) => Err(self.confused()),
        }
    }

    fn append(&mut self, writes: &[Write]) -> Result<(), StoreError> {
        let _ = self.look();
        match self.state {
            State::Ready => {}
            State::Stuck => return Err(self.trouble.slow(self.append_wait)),
            State::Late => return Err(self.trouble.unread()),
        }
        match self.ask(Ask::Append(writes.to_vec()), self.append_wait)? {
            Answer::Appended(appended) => appended,
            Answer::Opened(_) | Answer::Loaded(_) => Err(self.confused()),
        }
    }

    fn bytes(&self) -> Option<u64> {
        Some(self.bytes.load(Ordering::Relaxed)).filter(|bytes| *bytes > 0)
    }
}

impl Drop for Deadline {
    fn drop(&mut self) {
        let _ = self.look();
        // The thread ends once nobody can ask it any more, and closes the store.
        self.asks = None;
        if self.state != State::Stuck
            && let Some(thread) = self.thread.take()
        {
            // Its panics were caught, and one in closing is nobody's to hear.
            let _ = thread.join();
        }
    }
}

fn serve<S: Store>(
    open: impl FnOnce() -> Result<S, StoreError>,
    trouble: &Trouble,
    asked: &Receiver<Ask>,
    answer: &Sender<Answer>,
    bytes: &AtomicU64,
) {
    let (mut store, opened) = match open() {
        Ok(store) => {
            let waker = store.waker();
            (Some(store), Ok(waker))
        }
        Err(e) => (None, Err(e)),
    };
    if answer.send(Answer::Opened(opened)).is_err() {
        return;
    }
    let Some(store) = &mut store else { return };
    let mut measured: Option<Instant> = None;
    for ask in asked {
        let answered = catch_unwind(AssertUnwindSafe(|| match &ask {
            Ask::Load => Answer::Loaded(store.load()),
            Ask::Append(writes) => Answer::Appended(store.append(writes)),
        }));
        let answered = answered.unwrap_or_else(|_| {
            let error = trouble.failed("its thread panicked");
            match ask {
                Ask::Load => Answer::Loaded(Err(error)),
                Ask::Append(_) => Answer::Appended(Err(error)),
            }
        });
        // Before the answer of the first reading, which nobody waits for yet; later after it.
        let first = measured.is_none();
        if first {
            bytes.store(store.bytes().unwrap_or(0), Ordering::Relaxed);
            measured = Some(Instant::now());
        }
        if answer.send(answered).is_err() {
            return;
        }
        if !first && measured.is_some_and(|at| at.elapsed() >= BYTES_EVERY) {
            bytes.store(store.bytes().unwrap_or(0), Ordering::Relaxed);
            measured = Some(Instant::now());
        }
    }
}

#[cfg(test)]
mod tests;
