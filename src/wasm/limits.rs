//! Every limit that a policy meets, with its arithmetic.
//!
//! Sizes are what guests of four languages were measured to need (Rust, C, JavaScript on QuickJS and
//! on StarlingMonkey, Python), times a margin; times are what a kubelet can be kept waiting.

/// Largest module that is taken, bytes. The largest measured, Python's, has 18.4 MB.
pub const MODULE_BYTES_MAX: usize = 32 << 20;
/// Largest compiled artifact, bytes. The largest measured has 37 MB: three times that.
pub const ARTIFACT_BYTES_MAX: usize = 128 << 20;

/// Fuel of one call, about one unit an instruction. `place` on the largest node (16 x 128) took
/// 1.7e6 in Rust, 6.3e7 in Python, 6.9e7 in JavaScript on QuickJS and 1.7e8 on StarlingMonkey: a bit
/// over twice that. The tightest loop uses 2.2 units a nanosecond, so this is at least 180 ms of
/// the machine of the measurements, and well below the wall time that backs it up.
pub const FUEL_PER_CALL: u64 = 400_000_000;
/// The clock's tick for the wall-time backstop, milliseconds. A call is stopped at most two ticks
/// after its time.
pub const EPOCH_TICK_MS: u64 = 5;
/// Wall time of `describe`, milliseconds. Fuel bounds it; this is for a machine that does not get to
/// it, and long, since nobody waits but the uploader.
pub const DESCRIBE_WALL_MS_MAX: u64 = 10_000;

/// Linear memory of one call, all memories together, bytes. StarlingMonkey starts with 9 MiB,
/// Python with 30.
pub const GUEST_MEMORY_BYTES_MAX: usize = 128 << 20;
/// Elements of one table. The largest measured is 7,688.
pub const GUEST_TABLE_ELEMENTS_MAX: usize = 16_384;
/// Elements of all tables of one call together: 64 Ki x 8 bytes = 512 KiB.
pub const GUEST_TABLES_ELEMENTS_MAX: usize = 65_536;
/// Stack of a call, bytes: half of what Rust gives a thread at least by default, on which the
/// daemon's own frames also lie.
pub const GUEST_STACK_BYTES_MAX: usize = 256 << 10;
/// Core instances of one component. Python's has 38.
pub const CORE_INSTANCES_MAX: u32 = 64;
/// Linear memories of one component. QuickJS' has 3.
pub const MEMORIES_MAX: u32 = 8;
/// Tables of one component: one a core instance.
pub const TABLES_MAX: u32 = 64;

/// Calls that may run at once: the policy thread, the `describe` of two uploads, a replay, a shadow, a
/// trial and a stack that is about to be activated, so that Allocate never waits for a place; and one to
/// spare. Others wait.
pub const CALLS_AT_ONCE_MAX: u32 = 8;
/// Of each memory, what is cleared after a call and not given back to Linux, bytes: a shipped policy
/// touches some 200 KiB, and taking those pages anew costs a fifth of its call.
pub const MEMORY_KEPT_BYTES: usize = 256 << 10;
/// The same of each table, bytes.
pub const TABLE_KEPT_BYTES: usize = 64 << 10;
/// What a call may hand to the host at once, bytes. The largest sensible answer, an offer of 512
/// parts in 16 lines of 100 bytes, has 0.8 MB.
pub const ANSWER_BYTES_MAX: usize = 1 << 20;

/// Lines that a call may log.
pub const LOG_LINES_MAX: usize = 32;
/// Bytes of a line that are kept.
pub const LOG_LINE_BYTES_MAX: usize = 1024;
/// Fuel that logging one line costs: the way to the host and back takes 130 ns, 300 units of loop.
/// Several times that, so that nobody waits for a flood of lines.
pub const LOG_LINE_FUEL: u64 = 2_000;
/// Fuel that logging one byte costs: a line of 1 MiB is copied and checked in some 100 us, 0.2 units
/// of loop a byte. Far more, so that long lines end a call before the clock does; 32 lines of 1 KiB
/// cost 5e5.
pub const LOG_BYTE_FUEL: u64 = 16;

/// Wall time of one compilation, seconds. Python's guest takes 17.
pub const COMPILE_WALL_S_MAX: u64 = 90;
/// Processor time of one compilation, seconds.
pub const COMPILE_CPU_S_MAX: u64 = 60;
/// Address space of the compiler, bytes. Python's guest and StarlingMonkey's need up to 512 MiB.
pub const COMPILE_MEMORY_BYTES_MAX: u64 = 768 << 20;
/// Below this the compiler does not start. A shipped policy needs 32 MiB, QuickJS 128.
pub const COMPILE_MEMORY_BYTES_MIN: u64 = 128 << 20;
/// What the daemon keeps for itself of the memory limit of its cgroup, bytes: its budget of 28 MB
/// and as much again.
pub const DAEMON_MEMORY_BYTES: u64 = 64 << 20;
/// How long an upload waits for the one before it, seconds. A module in Rust or C compiles in under
/// one second.
pub const COMPILE_WAIT_S_MAX: u64 = 10;
/// What is read of the compiler's messages, bytes.
pub const COMPILE_MESSAGES_BYTES_MAX: usize = 4096;

/// Longest summary of a policy, bytes: a sentence.
pub const SUMMARY_BYTES_MAX: usize = 512;
/// Longest version of a policy, bytes: `123.456.789-rc.10+abcdef` and room.
pub const VERSION_BYTES_MAX: usize = 64;
