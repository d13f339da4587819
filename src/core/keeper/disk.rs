//! The store with deadlines, used on the keeper's own thread: each hand-over to another thread costs an Allocate a
//! wake-up.
//!
//! A call that exceeds its deadline keeps its thread. The watcher then takes the request from it, answers it with
//! [`StoreError::Slow`], and starts the next keeper on the snapshot that was published last (see [`super::inbox`]).
//! Until the late call ends, all other calls fail at once, so that calls never queue behind a hung disk. Its result is
//! discarded: the next keeper loads the store before it appends, and so finds out what is stored.

use super::{CommandError, CommandResult};
use berth_kernel::node::ports::{Store, StoreError, Waker};
use berth_kernel::node::record::{Record, Write};
use parking_lot::{Condvar, Mutex};
use std::time::{Duration, Instant};
use tokio::sync::oneshot;

/// Deadline of a call. A healthy drive takes under 1 ms, one that stalls for internal maintenance about 100 ms. The
/// kubelet waits without a timeout and admits no other pod meanwhile.
pub const DISK_WAIT: Duration = Duration::from_secs(2);
/// Interval at which the size of the store's files is measured, which takes about 20 us.
const MEASURE_INTERVAL: Duration = Duration::from_secs(10);

/// Why a call has no result.
#[derive(Debug)]
pub(super) enum DiskError {
    /// The store failed, or a late call is still in progress.
    Store(StoreError),
    /// The call was late, and another keeper has taken over: this one must change nothing more.
    TakenOver,
}

/// A request that is being answered.
pub(super) type Reply = oneshot::Sender<CommandResult>;

/// The store of all keepers of this process, of which at most one is not taken over.
pub(super) struct Disk {
    state: Mutex<State>,
    /// Wakes the watcher.
    changed: Condvar,
    path: String,
    wait: Duration,
}

struct State {
    slot: Slot,
    /// Calls so far.
    calls: u64,
    /// Whether the watcher looks at the next call by itself.
    is_watching: bool,
    /// Whether the last keeper has ended.
    is_closed: bool,
    /// The request that the current keeper answers.
    reply: Option<Reply>,
    /// Size of the files in bytes, and when it was measured.
    bytes: Option<(u64, Instant)>,
    waker: Option<Waker>,
}

enum Slot {
    Idle(Box<dyn Store>),
    /// A call is in progress. `is_applied`: the command that it belongs to has been applied.
    Busy {
        since: Instant,
        is_applied: bool,
    },
    /// A late call is in progress. `refused`: calls that were refused meanwhile.
    Late {
        refused: u32,
    },
    Closed,
}

impl Disk {
    pub(super) fn new(store: Box<dyn Store>, wait: Duration) -> Self {
        let (waker, path) = (store.waker(), store.path());
        let bytes = store.bytes().map(|bytes| (bytes, Instant::now()));
        let state = State {
            slot: Slot::Idle(store),
            calls: 0,
            is_watching: false,
            is_closed: false,
            reply: None,
            bytes,
            waker,
        };
        Self { state: Mutex::new(state), changed: Condvar::new(), path, wait }
    }

    /// As [`Store::load`].
    pub(super) fn load(&self) -> Result<Vec<Record>, DiskError> {
        self.call(false, |store| store.load())
    }

    /// As [`Store::append`]. `is_applied`: the command that the writes belong to has been applied.
    pub(super) fn append(&self, writes: &[Write], is_applied: bool) -> Result<(), DiskError> {
        self.call(is_applied, |store| store.append(writes))
    }

    /// As [`Store::bytes`], measured in intervals.
    pub(super) fn bytes(&self) -> Option<u64> {
        let mut state = self.state.lock();
        if state.bytes.is_none_or(|(_, at)| at.elapsed() >= MEASURE_INTERVAL)
            && let Slot::Idle(store) = &state.slot
        {
            state.bytes = store.bytes().map(|bytes| (bytes, Instant::now()));
        }
        state.bytes.map(|(bytes, _)| bytes)
    }

    fn call<T>(
        &self,
        is_applied: bool,
        call: impl FnOnce(&mut dyn Store) -> Result<T, StoreError>,
    ) -> Result<T, DiskError> {
        let mut store = self.take(is_applied).map_err(DiskError::Store)?;
        let result = call(&mut *store);
        let mut state = self.state.lock();
        match std::mem::replace(&mut state.slot, Slot::Idle(store)) {
            Slot::Late { .. } => Err(DiskError::TakenOver),
            Slot::Idle(_) | Slot::Busy { .. } | Slot::Closed => result.map_err(DiskError::Store),
        }
    }

    fn take(&self, is_applied: bool) -> Result<Box<dyn Store>, StoreError> {
        let mut state = self.state.lock();
        let busy = Slot::Busy { since: Instant::now(), is_applied };
        match std::mem::replace(&mut state.slot, busy) {
            Slot::Idle(store) => {
                state.calls += 1;
                if !std::mem::replace(&mut state.is_watching, true) {
                    self.changed.notify_one();
                }
                Ok(store)
            }
            Slot::Late { refused } => {
                let refused = refused + 1;
                state.slot = Slot::Late { refused };
                // At growing intervals, since each call may start a thread that blocks, too.
                if refused.is_power_of_two()
                    && let Some(wake) = &state.waker
                {
                    wake();
                }
                Err(self.slow())
            }
            other @ (Slot::Busy { .. } | Slot::Closed) => {
                state.slot = other;
                Err(StoreError::Io { path: self.path.clone(), what: "it is closed".into() })
            }
        }
    }

    fn slow(&self) -> StoreError {
        let ms = u64::try_from(self.wait.as_millis()).unwrap_or(u64::MAX);
        StoreError::Slow { path: self.path.clone(), ms }
    }

    /// Notes the request that the current keeper answers, for a keeper that takes over.
    pub(super) fn begin(&self, reply: Reply) {
        self.state.lock().reply = Some(reply);
    }

    /// The request noted last; of a keeper that was taken over, it is gone.
    pub(super) fn end(&self) -> Option<Reply> {
        self.state.lock().reply.take()
    }

    /// Waits for a late call, and takes the request from its thread: the error, and the answer to the request. `None`
    /// once the store is closed.
    pub(super) fn wait_for_late_call(&self) -> Option<(StoreError, Option<(Reply, CommandError)>)> {
        let mut state = self.state.lock();
        loop {
            if state.is_closed {
                return None;
            }
            match state.slot {
                Slot::Busy { since, is_applied } => match self.wait.checked_sub(since.elapsed()) {
                    Some(left) if !left.is_zero() => {
                        let _ = self.changed.wait_for(&mut state, left);
                    }
                    _ => {
                        state.slot = Slot::Late { refused: 0 };
                        let error = self.slow();
                        let answer = match is_applied {
                            true => CommandError::Late(self.wait.as_secs()),
                            false => CommandError::Store(error.to_string()),
                        };
                        return Some((error, state.reply.take().map(|reply| (reply, answer))));
                    }
                },
                Slot::Idle(_) | Slot::Late { .. } | Slot::Closed => {
                    // While calls come, one wake-up of the watcher in each interval is enough.
                    let calls = state.calls;
                    let _ = self.changed.wait_for(&mut state, self.wait);
                    if state.calls == calls && !state.is_closed {
                        state.is_watching = false;
                        self.changed.wait(&mut state);
                    }
                }
            }
        }
    }

    /// Closes the store, unless a call is in progress, and ends the watcher.
    pub(super) fn close(&self) {
        let mut state = self.state.lock();
        state.is_closed = true;
        if matches!(state.slot, Slot::Idle(_)) {
            let store = std::mem::replace(&mut state.slot, Slot::Closed);
            drop(state);
            drop(store);
        }
        self.changed.notify_one();
    }
}
