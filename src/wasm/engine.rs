//! How WebAssembly is compiled and run here: what is switched on, and the pool that calls run in.

use std::hash::{DefaultHasher, Hash, Hasher};

use wasmtime::{
    Config, Enabled, Engine, InstanceAllocationStrategy, PoolingAllocationConfig, Result, WasmFeatures,
};

use super::limits::{
    CALLS_AT_ONCE_MAX, CORE_INSTANCES_MAX, GUEST_MEMORY_BYTES_MAX, GUEST_STACK_BYTES_MAX,
    GUEST_TABLE_ELEMENTS_MAX, MEMORIES_MAX, MEMORY_KEPT_BYTES, TABLE_KEPT_BYTES, TABLES_MAX,
};

/// Features beyond the base that compilers emit by default today. Absent on purpose: threads and
/// shared memory (a policy is a function, and other threads would have no meter), memory64 (a
/// policy gets 128 MiB), garbage collection, exceptions, stack switching, relaxed SIMD (its results
/// differ between processors, and a decision must replay), asynchronous components.
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

/// For the compiler's process: makes artifacts, runs nothing, and so reserves no pool, which would
/// not fit into its address space.
pub(super) fn compiler() -> Result<Engine> {
    Engine::new(&config())
}

/// For the daemon: runs artifacts.
pub(super) fn runner() -> Result<Engine> {
    Engine::new(config().allocation_strategy(InstanceAllocationStrategy::Pooling(pool())))
}

/// Names what must be equal for an artifact of one process to run in another: the release of
/// wasmtime, the processor's features, and this file. For file names; wasmtime itself checks it
/// again when it loads one.
pub(super) fn compatibility(engine: &Engine) -> String {
    let mut hasher = DefaultHasher::new();
    engine.precompile_compatibility_hash().hash(&mut hasher);
    format!("{:016x}", hasher.finish())
}

/// All that decides what an artifact looks like; the same for both.
fn config() -> Config {
    let mut config = Config::new();
    config
        .wasm_features(WasmFeatures::all(), false)
        .wasm_features(FEATURES, true)
        // Fuel decides what is too much: the same on every machine and in every replay.
        .consume_fuel(true)
        // The backstop: fuel does not count the time a busy machine takes.
        .epoch_interruption(true)
        // The same bits for the same question on every processor.
        .cranelift_nan_canonicalization(true)
        .max_wasm_stack(GUEST_STACK_BYTES_MAX)
        // A guest's own words, and not its function names, tell what went wrong.
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
        .linear_memory_keep_resident(MEMORY_KEPT_BYTES)
        .table_keep_resident(TABLE_KEPT_BYTES)
        // Where Linux can tell which of them were written to, only those are cleared.
        .pagemap_scan(Enabled::Auto);
    pool
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_compiler_makes_is_what_the_daemon_runs() {
        let (compiler, runner) = (compiler().unwrap(), runner().unwrap());
        assert_eq!(compatibility(&compiler), compatibility(&runner));
    }
}
