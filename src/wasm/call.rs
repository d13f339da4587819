//! One call: a fresh instance, its limits, the question, and what it cost.

use parking_lot::{Condvar, Mutex};
use std::io;
use std::time::{Duration, Instant};

use wasmtime::component::{Component, InstancePre, Linker};
use wasmtime::{Engine, Result, Store};

use super::bindings::PolicyPre;
use super::engine;
use super::fault::{self, Stage};
use super::guest::{self, Guest};
use super::limits::{ANSWER_BYTES_MAX, CALLS_AT_ONCE_MAX, FUEL_PER_CALL};
use super::ticker::Ticker;
use berth_kernel::decision::Cost;
use berth_kernel::policy::{Fault, FaultKind};

/// How often an instance is tried to be made where the system is busy, see [`is_busy`]; it waits up to a tenth of a
/// second itself each time.
const MAKES_MAX: u32 = 3;

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

    /// Makes an instance in a store of its own; once more where the system was busy.
    fn instance<I>(
        &self,
        wall_ms: u64,
        make: impl Fn(&mut Store<Guest>) -> Result<I>,
    ) -> (Store<Guest>, Result<I>) {
        let mut left = MAKES_MAX;
        loop {
            let mut store = Store::new(&self.engine, Guest::default());
            store.limiter(|guest| guest);
            store.set_hostcall_fuel(ANSWER_BYTES_MAX);
            // Before the instance is made: `start` functions are guest code, too.
            store.set_epoch_deadline(Ticker::ticks(wall_ms));
            let made = store.set_fuel(FUEL_PER_CALL).and_then(|()| make(&mut store));
            left -= 1;
            match made {
                Err(error) if left > 0 && is_busy(&error) => {
                    tracing::debug!(?error, "no instance can be made at the moment");
                }
                made => return (store, made),
            }
        }
    }

    /// Asks in a fresh instance: nothing is carried from one call to the next, not even after a
    /// trap, and a decision can be replayed alone.
    ///
    /// `make` makes the instance, `ask` asks it; `who` is for the log.
    pub(super) fn call<I, R>(
        &self,
        who: &str,
        wall_ms: u64,
        make: impl Fn(&mut Store<Guest>) -> Result<I>,
        ask: impl FnOnce(&I, &mut Store<Guest>) -> Result<R>,
    ) -> Called<R> {
        let Some(_place) = self.place(Duration::from_millis(wall_ms)) else {
            let words = "too many calls at once; none ended in time".to_owned();
            let answer = Err(Fault { kind: FaultKind::Time, detail: words });
            return Called { answer, cost: Cost::default(), said: Vec::new() };
        };
        let _running = self.ticker.run();
        let started = Instant::now();
        let (mut store, instance) = self.instance(wall_ms, make);
        let mut stage = Stage::Instance;
        let answer = instance.and_then(|instance| {
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
        let mut free = self.free.lock();
        let waited = self.freed.wait_while_for(&mut free, |free| *free == 0, wait_max);
        if waited.timed_out() {
            return None;
        }
        *free -= 1;
        Some(Place(self))
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        *self.0.free.lock() += 1;
        self.0.freed.notify_one();
    }
}

/// Whether what failed is as likely to work at the next try. The first instance of a module is made with a picture
/// of its memory in a file that is sealed against writing, which the system refuses (`EBUSY`, fcntl(2), `F_SEAL_WRITE`)
/// while something else of the kernel holds one of its pages: a monitor of memory accesses, or compaction.
fn is_busy(error: &wasmtime::Error) -> bool {
    error
        .chain()
        .filter_map(|cause| cause.downcast_ref::<io::Error>())
        .any(|e| e.kind() == io::ErrorKind::ResourceBusy)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;

    /// The error of the library that seals the memory: the system error is its source.
    #[derive(Debug, thiserror::Error)]
    #[error("cannot add seals to the memfd")]
    struct Seals(#[source] io::Error);

    #[test]
    fn an_instance_is_tried_again_where_the_system_was_busy_and_nowhere_else() {
        let runner = Runner::new().unwrap();
        let tries = |fails: u32, os_error: i32| {
            let made = Cell::new(0);
            let make = |_: &mut Store<Guest>| {
                made.set(made.get() + 1);
                match made.get() <= fails {
                    true => {
                        let seals = Seals(io::Error::from_raw_os_error(os_error));
                        Err(wasmtime::Error::new(seals).context("no memory image"))
                    }
                    false => Ok(()),
                }
            };
            let called = runner.call("test", 500, make, |(), _| Ok(()));
            (made.get(), called.answer.is_ok())
        };
        assert_eq!(tries(0, libc::EBUSY), (1, true));
        assert_eq!(tries(2, libc::EBUSY), (3, true));
        assert_eq!(tries(9, libc::EBUSY), (MAKES_MAX, false));
        assert_eq!(tries(1, libc::ENOMEM), (1, false));
    }
}
