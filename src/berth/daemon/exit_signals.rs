//! SIGTERM and SIGINT while no daemon runs: before its start, and between two configurations.

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::flag;
use std::sync::atomic::{AtomicBool, Ordering};

/// No daemon runs, so a signal ends the process in its handler.
static EXIT_AT_ONCE: AtomicBool = AtomicBool::new(true);
/// SIGTERM or SIGINT has arrived.
static RECEIVED: AtomicBool = AtomicBool::new(false);
/// SIGHUP has arrived; the start reads the configuration anyway.
static HANGUP: AtomicBool = AtomicBool::new(false);

/// From now on SIGTERM and SIGINT end the process with code 0, as they end the daemon, and SIGHUP does not end it. Process 1
/// of a container would ignore them without a handler.
///
/// # Errors
/// If a handler cannot be installed.
pub fn exit_on_signals() -> std::io::Result<()> {
    for signal in [SIGTERM, SIGINT] {
        flag::register(signal, &RECEIVED)?;
        flag::register_conditional_shutdown(signal, 0, &EXIT_AT_ONCE)?;
    }
    flag::register(SIGHUP, &HANGUP).map(drop)
}

/// The daemon has its own handlers and stops in order.
pub(super) fn leave_to_daemon() {
    EXIT_AT_ONCE.store(false, Ordering::SeqCst);
}

/// The daemon has stopped: from now on a signal ends the process. Returns true if one has arrived before, which is no longer
/// received by anybody.
pub(super) fn take_back() -> bool {
    // In this order, as the handler sets the one and then reads the other: a signal is seen here or ends the process.
    EXIT_AT_ONCE.store(true, Ordering::SeqCst);
    RECEIVED.load(Ordering::SeqCst)
}
