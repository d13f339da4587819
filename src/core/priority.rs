//! Work that gives way to the calls of the kubelet.

/// Nice value of threads for long work; 19 is the lowest priority.
const NICE: i32 = 10;

/// Lowers the priority of the current thread, and of the threads and processes that it starts later, so that an
/// Allocate is served first on a busy machine. On Linux the call affects a single thread (setpriority(2)), and if the
/// daemon has a cgroup of its own, only relative to the daemon's other threads. It needs no privilege; if it fails, the
/// priority is unchanged.
pub(crate) fn lower_priority() {
    let _ = rustix::process::setpriority_process(None, NICE);
}

/// Wraps long work for a blocking thread: compiling, installing, trying a stack. The thread's priority stays
/// low afterwards.
pub(crate) fn at_low_priority<T>(work: impl FnOnce() -> T) -> impl FnOnce() -> T {
    || {
        lower_priority();
        work()
    }
}
