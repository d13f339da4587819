//! The limits of policies, with their arithmetic.
//!
//! Sizes are the measured needs of guests in four languages (Rust, C, JavaScript on QuickJS and on StarlingMonkey,
//! Python) and a margin; times are bounded by how long a kubelet may wait.

pub use berth_kernel::policy::hooks::MODULE_BYTES_MAX;

/// Largest compiled artifact, bytes: three times the largest measured, 37 MB.
pub const ARTIFACT_BYTES_MAX: usize = 128 << 20;

/// Fuel of one call, about one unit per instruction. `place` on the largest node (16 x 128) used 1.7e6 in Rust,
/// 6.3e7 in Python, 6.9e7 in JavaScript on QuickJS and 1.7e8 on StarlingMonkey; the limit is about twice that. The
/// tightest loop uses 2.2 units per nanosecond, so the limit is at least 180 ms on the measured machine, well below
/// the wall-time limit.
pub const FUEL_PER_CALL: u64 = 400_000_000;
/// Tick of the clock of the wall-time limit, milliseconds. A call is stopped at most two ticks late.
pub const EPOCH_TICK_MS: u64 = 5;
/// Wall time of `describe`, milliseconds. Fuel is the normal limit; this one is for busy machines, and long, since
/// only the upload waits.
pub const DESCRIBE_WALL_MS_MAX: u64 = 10_000;

/// Linear memory of one call, all memories together, bytes. StarlingMonkey starts with 9 MiB, Python with 30 MiB.
pub const GUEST_MEMORY_BYTES_MAX: usize = 128 << 20;
/// Elements of one table. The largest measured is 7,688.
pub const GUEST_TABLE_ELEMENTS_MAX: usize = 16_384;
/// Elements of all tables of one call together: 64 Ki x 8 bytes = 512 KiB.
pub const GUEST_TABLES_ELEMENTS_MAX: usize = 65_536;
/// Stack of a call, bytes. The thread's stack also holds the daemon's own frames.
pub const GUEST_STACK_BYTES_MAX: usize = 256 << 10;
/// Core instances of one component. Python's has 38.
pub const CORE_INSTANCES_MAX: u32 = 64;
/// Linear memories of one component. QuickJS' has 3.
pub const MEMORIES_MAX: u32 = 8;
/// Tables of one component: one per core instance.
pub const TABLES_MAX: u32 = 64;

/// Concurrent calls: the policy thread, `describe` of two uploads, a replay, a shadow, a trial and a stack before its
/// activation, so that Allocate never waits for a permit; and one spare. Further calls wait.
pub const CALLS_AT_ONCE_MAX: u32 = 8;
/// Bytes of each memory that stay resident between calls. A shipped policy touches about 200 KiB, and faulting those
/// pages in again would take a fifth of its call.
pub const MEMORY_RESIDENT_BYTES: usize = 256 << 10;
/// Bytes of each table that stay resident between calls.
pub const TABLE_RESIDENT_BYTES: usize = 64 << 10;
/// Bytes that a guest may pass to the host in one transfer. The largest sensible answer, an offer of 512 parts with
/// 16 lines of 100 bytes each, has 0.8 MB.
pub const ANSWER_BYTES_MAX: usize = 1 << 20;

/// Log lines of one call.
pub const LOG_LINES_MAX: usize = 32;
/// Longest log line, bytes; longer ones are truncated.
pub const LOG_LINE_BYTES_MAX: usize = 1024;
/// Fuel per log line. The call of the host takes 130 ns, as long as 300 units of a loop; several times that bounds a
/// flood of lines.
pub const LOG_LINE_FUEL: u64 = 2_000;
/// Fuel per byte of a log line. A line of 1 MiB is copied and checked in about 100 us, as long as 0.2 units of a loop
/// per byte; far more, so that long lines exhaust the fuel before the wall time. 32 lines of 1 KiB cost 5e5.
pub const LOG_BYTE_FUEL: u64 = 16;

/// Wall time of one compilation, seconds: more than its processor time, for a node whose processors are busy.
pub const COMPILE_WALL_S_MAX: u64 = 300;
/// Processor time of one compilation, seconds. Python's guest takes 17 s on one machine and 43 s on another; in a build
/// for tests, whose compiler is less optimised, over 60 s.
pub const COMPILE_CPU_S_MAX: u64 = 180;
/// Address space of the compiler, bytes. Python's guest and StarlingMonkey's need up to 512 MiB.
pub const COMPILE_MEMORY_BYTES_MAX: u64 = 768 << 20;
/// Least address space with which the compiler is started, bytes. A shipped policy needs 32 MiB, QuickJS 128 MiB.
pub const COMPILE_MEMORY_BYTES_MIN: u64 = 128 << 20;
/// The daemon's own share of its cgroup's memory limit, bytes: over twice its budget of 28 MB.
pub const DAEMON_MEMORY_BYTES: u64 = 64 << 20;
/// How long a compilation waits for another to end, seconds. A module in Rust or C compiles in under one second.
pub const COMPILE_WAIT_S_MAX: u64 = 10;
/// Bytes of the compiler's messages that are read.
pub const COMPILE_MESSAGES_BYTES_MAX: usize = 4096;

/// Longest summary of a policy, bytes.
pub const SUMMARY_BYTES_MAX: usize = 512;
/// Longest version of a policy, bytes: twice that of `123.456.789-rc.10+abcdef`.
pub const VERSION_BYTES_MAX: usize = 64;
