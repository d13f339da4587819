//! One call of a policy: a fresh instance with its limits, the question, the answer and its cost.

use parking_lot::{Condvar, Mutex};
use std::io;
use std::time::{Duration, Instant};

use wasmtime::component::Linker;
use wasmtime::{Engine, Result, Store};

use super::engine::{self, Ticker};
use super::fault::{self, Stage};
use super::guest::{Guest, add_log};
use super::limits::{ANSWER_BYTES_MAX, CALLS_AT_ONCE_MAX, FUEL_PER_CALL};
use berth_kernel::policy::decision::Cost;
use berth_kernel::policy::hooks::{Fault, FaultKind};

/// Attempts to create an instance while the system is busy, see [`is_busy`]. Each waits up to 0.1 s.
const ATTEMPTS_MAX: u32 = 3;

/// The engine, linker and clock that all calls share.
pub(super) struct Runner {
    pub(super) engine: Engine,
    pub(super) linker: Linker<Guest>,
    ticker: Ticker,
    free_permits: Mutex<u32>,
    permit_freed: Condvar,
}

/// The result of a call.
pub(super) struct CallResult<R> {
    pub(super) answer: Result<R, Fault>,
    pub(super) cost: Cost,
    /// Lines that the guest logged, escaped and truncated.
    pub(super) log_lines: Vec<String>,
}

/// A permit for one of the concurrent calls.
struct Permit<'a>(&'a Runner);

impl Runner {
    /// # Errors
    /// If the pool cannot be reserved or the clock's thread cannot be started.
    pub(super) fn new() -> Result<Self> {
        let engine = engine::runner()?;
        let mut linker = Linker::new(&engine);
        add_log(&mut linker)?;
        Ok(Self {
            ticker: Ticker::start(&engine)?,
            engine,
            linker,
            free_permits: Mutex::new(CALLS_AT_ONCE_MAX),
            permit_freed: Condvar::new(),
        })
    }

    /// Creates an instance in a store of its own, and tries again while the system is busy.
    fn instance<I>(
        &self,
        wall_ms: u64,
        instantiate: impl Fn(&mut Store<Guest>) -> Result<I>,
    ) -> (Store<Guest>, Result<I>) {
        let mut attempts_left = ATTEMPTS_MAX;
        loop {
            let mut store = Store::new(&self.engine, Guest::default());
            store.limiter(|guest| guest);
            store.set_hostcall_fuel(ANSWER_BYTES_MAX);
            // Set before instantiation: `start` functions are guest code, too.
            store.set_epoch_deadline(Ticker::ticks(wall_ms));
            let instance = store.set_fuel(FUEL_PER_CALL).and_then(|()| instantiate(&mut store));
            attempts_left -= 1;
            match instance {
                Err(error) if attempts_left > 0 && is_busy(&error) => {
                    tracing::debug!(?error, "cannot instantiate: the system is busy; retrying");
                }
                instance => return (store, instance),
            }
        }
    }

    /// Calls a hook in a fresh instance. No state passes from one call to the next, so that a decision can be
    /// replayed by itself.
    ///
    /// `instantiate` creates the instance, `run` calls the hook; `label` is for the log.
    pub(super) fn call<I, R>(
        &self,
        label: &str,
        wall_ms: u64,
        instantiate: impl Fn(&mut Store<Guest>) -> Result<I>,
        run: impl FnOnce(&I, &mut Store<Guest>) -> Result<R>,
    ) -> CallResult<R> {
        let Some(_permit) = self.acquire_permit(Duration::from_millis(wall_ms)) else {
            let detail = "too many calls at once; none ended in time".to_owned();
            let answer = Err(Fault { kind: FaultKind::Time, detail });
            return CallResult { answer, cost: Cost::default(), log_lines: Vec::new() };
        };
        let _running = self.ticker.run();
        let started = Instant::now();
        let (mut store, instance) = self.instance(wall_ms, instantiate);
        let mut stage = Stage::Instance;
        let answer = instance.and_then(|instance| {
            stage = Stage::Hook;
            run(&instance, &mut store)
        });
        let cost = Cost {
            fuel: FUEL_PER_CALL.saturating_sub(store.get_fuel().unwrap_or(0)),
            wall_us: u64::try_from(started.elapsed().as_micros()).unwrap_or(u64::MAX),
        };
        let guest = store.data();
        for line in &guest.log_lines {
            tracing::debug!(target: "policy", label, "{line}");
        }
        if guest.dropped_lines > 0 {
            tracing::debug!(target: "policy", label, lines = guest.dropped_lines, "log lines dropped");
        }
        let answer = answer.map_err(|error| {
            // Includes the guest's backtrace, for the policy's author.
            tracing::debug!(target: "policy", label, ?error, "the call failed");
            fault::fault(&error, guest, stage, wall_ms)
        });
        let log_lines = std::mem::take(&mut store.data_mut().log_lines);
        CallResult { answer, cost, log_lines }
    }

    /// Waits for a permit. The pool has memory for a fixed number of calls, and the failure of a call beyond them
    /// would be reported as a fault of the policy.
    fn acquire_permit(&self, wait_max: Duration) -> Option<Permit<'_>> {
        let mut free = self.free_permits.lock();
        let waited = self.permit_freed.wait_while_for(&mut free, |free| *free == 0, wait_max);
        if waited.timed_out() {
            return None;
        }
        *free -= 1;
        Some(Permit(self))
    }
}

impl Drop for Permit<'_> {
    fn drop(&mut self) {
        *self.0.free_permits.lock() += 1;
        self.0.permit_freed.notify_one();
    }
}

/// Whether an instantiation failed only because the system was busy. The first instance of a module has its memory
/// image in a file that is sealed against writing. Linux refuses the seal (`EBUSY`, fcntl(2), `F_SEAL_WRITE`) while
/// it holds one of the file's pages itself, as memory compaction and access monitoring do.
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
    struct SealError(#[source] io::Error);

    #[test]
    fn an_instantiation_is_retried_only_while_the_system_is_busy() {
        let runner = Runner::new().unwrap();
        let attempt = |failures: u32, os_error: i32| {
            let attempts = Cell::new(0);
            let instantiate = |_: &mut Store<Guest>| {
                attempts.set(attempts.get() + 1);
                match attempts.get() <= failures {
                    true => {
                        let error = SealError(io::Error::from_raw_os_error(os_error));
                        Err(wasmtime::Error::new(error).context("no memory image"))
                    }
                    false => Ok(()),
                }
            };
            let result = runner.call("test", 500, instantiate, |(), _| Ok(()));
            (attempts.get(), result.answer.is_ok())
        };
        assert_eq!(attempt(0, libc::EBUSY), (1, true));
        assert_eq!(attempt(2, libc::EBUSY), (3, true));
        assert_eq!(attempt(9, libc::EBUSY), (ATTEMPTS_MAX, false));
        assert_eq!(attempt(1, libc::ENOMEM), (1, false));
    }
}
