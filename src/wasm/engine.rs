//! The wasmtime configuration: WebAssembly features and the pool of call memories.

use std::hash::{DefaultHasher, Hash, Hasher};

use wasmtime::{
    Config, Enabled, Engine, InstanceAllocationStrategy, PoolingAllocationConfig, Result, WasmFeatures,
};

use super::limits::{
    CALLS_AT_ONCE_MAX, CORE_INSTANCES_MAX, GUEST_MEMORY_BYTES_MAX, GUEST_STACK_BYTES_MAX,
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn compiler_and_runner_are_compatible() {
        let (compiler, runner) = (compiler().unwrap(), runner().unwrap());
        assert_eq!(compatibility(&compiler), compatibility(&runner));
    }
}
