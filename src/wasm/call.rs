//! One call: a fresh instance, its limits, the question, and what it cost.

use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use wasmtime::component::{Component, InstancePre, Linker};
use wasmtime::{Engine, Result, Store};

use super::bindings::PolicyPre;
use super::engine;
use super::fault::{self, Stage};
use super::guest::{self, Guest};
use super::limits::{ANSWER_BYTES_MAX, CALLS_AT_ONCE_MAX, FUEL_PER_CALL};
use super::ticker::Ticker;
use crate::kernel::decision::Cost;
use crate::kernel::policy::{Fault, FaultKind};

/// All that calls need and that outlives them.
pub(super) struct Runner {
    pub(super) engine: Engine,
    linker: Linker<Guest>,
    ticker: Ticker,
    free: Mutex<u32>,
    freed: Condvar,
}

/// What came of a call.
pub(super) struct Called<R> {
    pub(super) answer: Result<R, Fault>,
    pub(super) cost: Cost,
    /// Lines that the guest logged, escaped and cut.
    pub(super) said: Vec<String>,
}

/// A place among the calls that may run at once.
struct Place<'a>(&'a Runner);

impl Runner {
    /// # Errors
    /// If the pool cannot be reserved, or no thread can be had.
    pub(super) fn new() -> Result<Self> {
        let engine = engine::runner()?;
        let mut linker = Linker::new(&engine);
        guest::add_to_linker(&mut linker)?;
        Ok(Self {
            ticker: Ticker::start(&engine)?,
            engine,
            linker,
            free: Mutex::new(CALLS_AT_ONCE_MAX),
            freed: Condvar::new(),
        })
    }

    /// Checks a component's imports and exports against the world, once for all calls.
    ///
    /// # Errors
    /// If it imports what is not given, or does not export what is asked.
    pub(super) fn prepare(&self, component: &Component) -> Result<PolicyPre<Guest>> {
        let instance: InstancePre<Guest> = self.linker.instantiate_pre(component)?;
        PolicyPre::new(instance)
    }

    /// Asks in a fresh instance: nothing is carried from one call to the next, not even after a
    /// trap, and a decision can be replayed alone.
    ///
    /// `make` makes the instance, `ask` asks it; `who` is for the log.
    pub(super) fn call<I, R>(
        &self,
        who: &str,
        wall_ms: u64,
        make: impl FnOnce(&mut Store<Guest>) -> Result<I>,
        ask: impl FnOnce(&I, &mut Store<Guest>) -> Result<R>,
    ) -> Called<R> {
        let Some(_place) = self.place(Duration::from_millis(wall_ms)) else {
            let words = "too many calls at once; none ended in time".to_owned();
            let answer = Err(Fault { kind: FaultKind::Time, detail: words });
            return Called { answer, cost: Cost::default(), said: Vec::new() };
        };
        let _running = self.ticker.run();
        let started = Instant::now();
        let mut store = Store::new(&self.engine, Guest::default());
        store.limiter(|guest| guest);
        store.set_hostcall_fuel(ANSWER_BYTES_MAX);
        // Before the instance is made: `start` functions are guest code, too.
        store.set_epoch_deadline(Ticker::ticks(wall_ms));
        let mut stage = Stage::Instance;
        let answer = store.set_fuel(FUEL_PER_CALL).and_then(|()| {
            let instance = make(&mut store)?;
            stage = Stage::Hook;
            ask(&instance, &mut store)
        });
        let cost = Cost {
            fuel: FUEL_PER_CALL.saturating_sub(store.get_fuel().unwrap_or(0)),
            wall_us: u64::try_from(started.elapsed().as_micros()).unwrap_or(u64::MAX),
        };
        let guest = store.data();
        for line in &guest.said {
            tracing::debug!(target: "policy", who, "{line}");
        }
        if guest.unheard > 0 {
            tracing::debug!(target: "policy", who, lines = guest.unheard, "more lines than are kept");
        }
        let answer = answer.map_err(|error| {
            // With the guest's backtrace: for whoever writes the policy.
            tracing::debug!(target: "policy", who, ?error, "the call failed");
            fault::fault(&error, guest, stage, wall_ms)
        });
        let said = std::mem::take(&mut store.data_mut().said);
        Called { answer, cost, said }
    }

    /// Waits for a place: the pool has room for so many calls, and a call that finds none would be
    /// taken for the policy's fault.
    fn place(&self, wait_max: Duration) -> Option<Place<'_>> {
        let free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        let (mut free, waited) = self
            .freed
            .wait_timeout_while(free, wait_max, |free| *free == 0)
            .unwrap_or_else(PoisonError::into_inner);
        if waited.timed_out() {
            return None;
        }
        *free -= 1;
        Some(Place(self))
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        *self.0.free.lock().unwrap_or_else(PoisonError::into_inner) += 1;
        self.0.freed.notify_one();
    }
}
