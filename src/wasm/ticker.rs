//! The clock of the wall-time limit: increments the epoch while calls run, and sleeps otherwise.

use parking_lot::{Condvar, Mutex, MutexGuard};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use wasmtime::Engine;

use super::limits::EPOCH_TICK_MS;

/// Owns the clock's thread; dropping it stops the thread. An engine with epoch interruption needs one, or no call is
/// ever interrupted.
#[derive(Debug)]
pub(super) struct Ticker {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    calls: u32,
    /// The thread waits for a call. A call wakes it only then: a wake-up between two ticks would advance the next
    /// tick, and so the deadline of every call.
    parked: bool,
    stop: bool,
}

/// Keeps the clock running until it is dropped.
#[derive(Debug)]
pub(super) struct Running<'a>(&'a Shared);

impl Ticker {
    /// # Errors
    /// If the thread cannot be started.
    pub(super) fn start(engine: &Engine) -> std::io::Result<Self> {
        let shared = Arc::new(Shared::default());
        let thread = std::thread::Builder::new().name("policy-clock".into()).spawn({
            let (shared, engine) = (Arc::clone(&shared), engine.clone());
            move || tick(&shared, &engine)
        })?;
        Ok(Self { shared, thread: Some(thread) })
    }

    /// Runs the clock until the returned guard is dropped.
    pub(super) fn run(&self) -> Running<'_> {
        let mut state = self.shared.lock();
        state.calls += 1;
        if state.parked {
            self.shared.changed.notify_one();
        }
        Running(&self.shared)
    }

    /// The number of ticks that take at least `wall_ms`, including one more since the next tick may be due already.
    pub(super) fn ticks(wall_ms: u64) -> u64 {
        wall_ms.div_ceil(EPOCH_TICK_MS) + 1
    }
}

fn tick(shared: &Shared, engine: &Engine) {
    let mut state = shared.lock();
    while !state.stop {
        if state.calls == 0 {
            state.parked = true;
            shared.changed.wait(&mut state);
            state.parked = false;
        } else {
            let tick = Duration::from_millis(EPOCH_TICK_MS);
            shared.changed.wait_for(&mut state, tick);
            engine.increment_epoch();
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        self.0.lock().calls -= 1;
    }
}

impl Drop for Ticker {
    fn drop(&mut self) {
        self.shared.lock().stop = true;
        self.shared.changed.notify_one();
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the clock thread of policy calls has panicked");
        }
    }
}
