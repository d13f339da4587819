//! Bounds how long the keeper waits for the disk.
//!
//! The store runs on a separate thread. A call that exceeds its deadline returns [`StoreError::Slow`],
//! and until it ends all other calls fail at once, so that calls never queue behind a hung disk. The
//! result of a late append is discarded: the next [`Store::load`] finds out whether its writes are
//! stored. The result of a late load is that of the next load.

use super::errors::ErrorFactory;
use berth_kernel::ports::{Store, StoreError, Waker};
use berth_kernel::record::{Record, Write};
use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, TryRecvError, bounded};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Deadline of an append. A healthy drive takes under 1 ms, one that stalls for internal maintenance
/// about 100 ms. The kubelet waits without a timeout and admits no other pod meanwhile.
pub const APPEND_WAIT: Duration = Duration::from_secs(2);
/// Deadline of opening and of the first load. A later load has [`APPEND_WAIT`], since the keeper waits
/// for it. The largest store (a copy and a read of about 60 MiB) takes under 1 s on a slow disk.
pub const LOAD_WAIT: Duration = Duration::from_secs(15);

/// Interval at which the store's thread measures the size of its files: about 20 us, after a response.
const MEASURE_INTERVAL: Duration = Duration::from_secs(10);

/// A store with deadlines.
pub struct Deadline {
    errors: ErrorFactory,
    append_wait: Duration,
    load_wait: Duration,
    /// Whether a load succeeded. Only the first one has the long deadline: nothing is served before it.
    has_loaded: bool,
    /// `None` only during drop.
    requests: Option<Sender<Request>>,
    responses: Receiver<Response>,
    state: State,
    thread: Option<JoinHandle<()>>,
    waker: Option<Waker>,
    /// How often the late call was polled.
    late_polls: u32,
    /// The size of the store's files in bytes; 0 if unknown.
    bytes: Arc<AtomicU64>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// No call is in progress.
    Ready,
    /// A late call is still in progress.
    Stuck,
    /// A late call has ended; only a `load` may follow.
    NeedsLoad,
}

enum Request {
    Load,
    Append(Vec<Write>),
}

enum Response {
    Opened(Result<Option<Waker>, StoreError>),
    Loaded(Result<Vec<Record>, StoreError>),
    Appended(Result<(), StoreError>),
}

impl Deadline {
    /// Opens a store on its own thread with the default deadlines. `path` is for errors.
    ///
    /// # Errors
    /// As `open`, or [`StoreError::Slow`].
    pub fn open<S: Store + 'static>(
        path: &Path,
        open: impl FnOnce() -> Result<S, StoreError> + Send + 'static,
    ) -> Result<Self, StoreError> {
        Self::open_within(path, APPEND_WAIT, LOAD_WAIT, open)
    }

    /// As [`Deadline::open`], with other deadlines.
    ///
    /// # Errors
    /// As `open`, or [`StoreError::Slow`].
    pub fn open_within<S: Store + 'static>(
        path: &Path,
        append_wait: Duration,
        load_wait: Duration,
        open: impl FnOnce() -> Result<S, StoreError> + Send + 'static,
    ) -> Result<Self, StoreError> {
        let errors = ErrorFactory::new(path);
        // At most one request is in progress, and sending its response never blocks.
        let (requests, request_receiver) = bounded(1);
        let (response_sender, responses) = bounded(1);
        let thread_errors = errors.clone();
        let bytes = Arc::new(AtomicU64::new(0));
        let thread_bytes = Arc::clone(&bytes);
        let thread = std::thread::Builder::new()
            .name("store".into())
            .spawn(move || serve(open, &thread_errors, &request_receiver, &response_sender, &thread_bytes))
            .map_err(|e| errors.io("starting its thread", &e))?;
        let mut this = Self {
            errors,
            append_wait,
            load_wait,
            has_loaded: false,
            requests: Some(requests),
            responses,
            state: State::Ready,
            thread: Some(thread),
            waker: None,
            late_polls: 0,
            bytes,
        };
        match this.receive(load_wait)? {
            Response::Opened(Ok(waker)) => {
                this.waker = waker;
                Ok(this)
            }
            Response::Opened(Err(e)) => Err(e),
            Response::Loaded(_) | Response::Appended(_) => Err(this.mismatched_response()),
        }
    }

    fn call(&mut self, request: Request, wait: Duration) -> Result<Response, StoreError> {
        let is_sent = self.requests.as_ref().is_some_and(|requests| requests.send(request).is_ok());
        if is_sent { self.receive(wait) } else { Err(self.thread_ended()) }
    }

    fn receive(&mut self, wait: Duration) -> Result<Response, StoreError> {
        match self.responses.recv_timeout(wait) {
            Ok(response) => Ok(response),
            Err(RecvTimeoutError::Timeout) => {
                self.state = State::Stuck;
                self.late_polls = 0;
                Err(self.errors.slow(wait))
            }
            Err(RecvTimeoutError::Disconnected) => Err(self.thread_ended()),
        }
    }

    /// Checks, without blocking, whether a late call has ended, and returns its response.
    fn poll_late_call(&mut self) -> Option<Response> {
        if self.state != State::Stuck {
            return None;
        }
        let response = match self.responses.try_recv() {
            Ok(response) => Some(response),
            Err(TryRecvError::Disconnected) => None,
            Err(TryRecvError::Empty) => {
                self.late_polls += 1;
                // At growing intervals, since each call may start a thread that blocks, too.
                if self.late_polls.is_power_of_two()
                    && let Some(wake) = &self.waker
                {
                    wake();
                }
                return None;
            }
        };
        self.state = State::NeedsLoad;
        response
    }

    fn thread_ended(&self) -> StoreError {
        self.errors.failed("its thread has ended: restart berth")
    }

    /// A bug: each call waits for its own response.
    fn mismatched_response(&self) -> StoreError {
        self.errors.failed("its thread returned the response of another call")
    }
}

impl Store for Deadline {
    fn load(&mut self) -> Result<Vec<Record>, StoreError> {
        let wait = if self.has_loaded { self.append_wait } else { self.load_wait };
        let late = self.poll_late_call();
        if self.state == State::Stuck {
            return Err(self.errors.slow(wait));
        }
        let response = match late {
            // A late load is still current: nothing was written since.
            Some(loaded @ Response::Loaded(_)) => loaded,
            _ => self.call(Request::Load, wait)?,
        };
        match response {
            Response::Loaded(loaded) => {
                if loaded.is_ok() {
                    self.state = State::Ready;
                    self.has_loaded = true;
                }
                loaded
            }
            Response::Opened(_) | Response::Appended(_) => Err(self.mismatched_response()),
        }
    }

    fn append(&mut self, writes: &[Write]) -> Result<(), StoreError> {
        let _ = self.poll_late_call();
        match self.state {
            State::Ready => {}
            State::Stuck => return Err(self.errors.slow(self.append_wait)),
            State::NeedsLoad => return Err(self.errors.not_reloaded()),
        }
        match self.call(Request::Append(writes.to_vec()), self.append_wait)? {
            Response::Appended(appended) => appended,
            Response::Opened(_) | Response::Loaded(_) => Err(self.mismatched_response()),
        }
    }

    fn bytes(&self) -> Option<u64> {
        Some(self.bytes.load(Ordering::Relaxed)).filter(|bytes| *bytes > 0)
    }
}

impl Drop for Deadline {
    fn drop(&mut self) {
        let _ = self.poll_late_call();
        // The thread ends when the sender is dropped, and closes the store.
        self.requests = None;
        if self.state != State::Stuck
            && let Some(thread) = self.thread.take()
        {
            // Panics of calls were caught; one during closing is ignored.
            let _ = thread.join();
        }
    }
}

fn serve<S: Store>(
    open: impl FnOnce() -> Result<S, StoreError>,
    errors: &ErrorFactory,
    requests: &Receiver<Request>,
    responses: &Sender<Response>,
    bytes: &AtomicU64,
) {
    let mut store = match open() {
        Ok(store) => store,
        Err(e) => {
            let _ = responses.send(Response::Opened(Err(e)));
            return;
        }
    };
    if responses.send(Response::Opened(Ok(store.waker()))).is_err() {
        return;
    }
    let mut measured_at: Option<Instant> = None;
    for request in requests {
        let response = catch_unwind(AssertUnwindSafe(|| match &request {
            Request::Load => Response::Loaded(store.load()),
            Request::Append(writes) => Response::Appended(store.append(writes)),
        }));
        let response = response.unwrap_or_else(|_| {
            let error = errors.failed("its thread panicked");
            match request {
                Request::Load => Response::Loaded(Err(error)),
                Request::Append(_) => Response::Appended(Err(error)),
            }
        });
        // The first time before the response, since nothing is served yet; later after it.
        let is_first = measured_at.is_none();
        if is_first {
            bytes.store(store.bytes().unwrap_or(0), Ordering::Relaxed);
            measured_at = Some(Instant::now());
        }
        if responses.send(response).is_err() {
            return;
        }
        if !is_first && measured_at.is_some_and(|at| at.elapsed() >= MEASURE_INTERVAL) {
            bytes.store(store.bytes().unwrap_or(0), Ordering::Relaxed);
            measured_at = Some(Instant::now());
        }
    }
}

#[cfg(test)]
mod tests;
