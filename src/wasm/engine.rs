//! The configuration of wasmtime, which sets the WebAssembly features and the pool of the calls' memories, and the
//! clock of the wall-time limit.

use parking_lot::{Condvar, Mutex};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use wasmtime::{
    Config, Enabled, Engine, InstanceAllocationStrategy, PoolingAllocationConfig, Result, WasmFeatures,
};

use super::limits::{
    CALLS_AT_ONCE_MAX, CORE_INSTANCES_MAX, EPOCH_TICK_MS, GUEST_MEMORY_BYTES_MAX, GUEST_STACK_BYTES_MAX,
    GUEST_TABLE_ELEMENTS_MAX, MEMORIES_MAX, MEMORY_RESIDENT_BYTES, TABLE_RESIDENT_BYTES, TABLES_MAX,
};

/// The features that compilers emit by default. Absent on purpose: threads and shared memory (fuel does not count
/// other threads), memory64 (a policy has 128 MiB), garbage collection, exceptions, stack switching, relaxed SIMD
/// (its results differ between processors, and replays must be exact), asynchronous components.
const FEATURES: WasmFeatures = WasmFeatures::MUTABLE_GLOBAL
    .union(WasmFeatures::SATURATING_FLOAT_TO_INT)
    .union(WasmFeatures::SIGN_EXTENSION)
    .union(WasmFeatures::REFERENCE_TYPES)
    .union(WasmFeatures::MULTI_VALUE)
    .union(WasmFeatures::BULK_MEMORY)
    .union(WasmFeatures::SIMD)
    .union(WasmFeatures::FLOATS)
    .union(WasmFeatures::MULTI_MEMORY)
    .union(WasmFeatures::EXTENDED_CONST)
    .union(WasmFeatures::TAIL_CALL)
    .union(WasmFeatures::COMPONENT_MODEL);

/// The engine of the compiler process. It runs no code and reserves no pool, which would exceed the process' limit
/// on address space.
pub(super) fn compiler() -> Result<Engine> {
    Engine::new(&config())
}

/// The daemon's engine, which runs artifacts.
pub(super) fn runner() -> Result<Engine> {
    Engine::new(config().allocation_strategy(InstanceAllocationStrategy::Pooling(pool())))
}

/// A hash of everything that an artifact depends on: the release of wasmtime, the processor's features and this
/// configuration. For file names; wasmtime checks it again when it loads an artifact.
pub(super) fn compatibility(engine: &Engine) -> String {
    let mut hasher = DefaultHasher::new();
    engine.precompile_compatibility_hash().hash(&mut hasher);
    format!("{:016x}", hasher.finish())
}

/// The configuration that artifacts depend on, the same for both engines.
fn config() -> Config {
    let mut config = Config::new();
    config
        .wasm_features(WasmFeatures::all(), false)
        .wasm_features(FEATURES, true)
        // The limit that is the same on every machine and in every replay.
        .consume_fuel(true)
        // Limits wall time, which fuel does not bound on a busy machine.
        .epoch_interruption(true)
        // Gives the same bits on every processor.
        .cranelift_nan_canonicalization(true)
        .max_wasm_stack(GUEST_STACK_BYTES_MAX)
        // Faults show the guest's log lines, not its function names.
        .wasm_backtrace_max_frames(None);
    config
}

fn pool() -> PoolingAllocationConfig {
    let mut pool = PoolingAllocationConfig::new();
    pool.total_component_instances(CALLS_AT_ONCE_MAX)
        .total_core_instances(CALLS_AT_ONCE_MAX * CORE_INSTANCES_MAX)
        .total_memories(CALLS_AT_ONCE_MAX * MEMORIES_MAX)
        .total_tables(CALLS_AT_ONCE_MAX * TABLES_MAX)
        .max_core_instances_per_component(CORE_INSTANCES_MAX)
        .max_memories_per_component(MEMORIES_MAX)
        .max_tables_per_component(TABLES_MAX)
        .max_memory_size(GUEST_MEMORY_BYTES_MAX)
        .table_elements(GUEST_TABLE_ELEMENTS_MAX)
        .linear_memory_keep_resident(MEMORY_RESIDENT_BYTES)
        .table_keep_resident(TABLE_RESIDENT_BYTES)
        // Clears only the pages that were written to, if Linux can list them.
        .pagemap_scan(Enabled::Auto);
    pool
}

/// The clock of the wall-time limit: its thread increments the engine's epoch while calls run, and sleeps otherwise.
/// Dropping it stops the thread. An engine with epoch interruption needs one, since no call is interrupted otherwise.
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
    paused: bool,
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
        let mut state = self.shared.state.lock();
        state.calls += 1;
        if state.paused {
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
    let mut state = shared.state.lock();
    while !state.stop {
        if state.calls == 0 {
            state.paused = true;
            shared.changed.wait(&mut state);
            state.paused = false;
        } else {
            shared.changed.wait_for(&mut state, Duration::from_millis(EPOCH_TICK_MS));
            engine.increment_epoch();
        }
    }
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        self.0.state.lock().calls -= 1;
    }
}

impl Drop for Ticker {
    fn drop(&mut self) {
        self.shared.state.lock().stop = true;
        self.shared.changed.notify_one();
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the clock thread of policy calls has panicked");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn compiler_and_runner_are_compatible() {
        let (compiler, runner) = (compiler().unwrap(), runner().unwrap());
        assert_eq!(compatibility(&compiler), compatibility(&runner));
    }
}
