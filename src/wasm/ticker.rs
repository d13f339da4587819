//! The clock of the wall-time backstop: moves the epoch on while calls run, and sleeps otherwise.

use parking_lot::{Condvar, Mutex, MutexGuard};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use wasmtime::Engine;

use super::limits::EPOCH_TICK_MS;

/// Owns the thread that ticks; dropping it stops the thread. Whoever turns epoch interruption on
/// must have one, or no call would ever be interrupted.
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
    /// The thread sleeps until a call begins. Only then is it woken: a wake-up between two ticks
    /// would bring the next tick forward, and with it the deadline of every call.
    parked: bool,
    stop: bool,
}

/// Keeps the clock running.
#[derive(Debug)]
pub(super) struct Running<'a>(&'a Shared);

impl Ticker {
    /// # Errors
    /// If no thread can be had.
    pub(super) fn start(engine: &Engine) -> std::io::Result<Self> {
        let shared = Arc::new(Shared::default());
        let thread = std::thread::Builder::new().name("policy-clock".into()).spawn({
            let (shared, engine) = (Arc::clone(&shared), engine.clone());
            move || tick(&shared, &engine)
        })?;
        Ok(Self { shared, thread: Some(thread) })
    }

    /// The clock runs until the answer is dropped.
    pub(super) fn run(&self) -> Running<'_> {
        let mut state = self.shared.lock();
        state.calls += 1;
        if state.parked {
            self.shared.changed.notify_one();
        }
        Running(&self.shared)
    }

    /// How many ticks are at least `wall_ms`: one more, since the next may come at once.
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
    // Nothing under the lock can leave the state half changed.
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
            tracing::error!("the clock of policy calls had panicked");
        }
    }
}
