//! SIGTERM and SIGINT while no daemon runs: before its start, and between two configurations.
#![allow(unsafe_code, reason = "blocks signals by the C library")]

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::flag;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, Ordering};

/// Whether SIGTERM and SIGINT end the process in their handler: while no daemon runs.
static EXIT_AT_ONCE: AtomicBool = AtomicBool::new(true);
/// Whether SIGTERM or SIGINT has arrived since the start of the program.
static RECEIVED: AtomicBool = AtomicBool::new(false);
/// Never read: SIGHUP has a handler so that it does not end the process. A configuration that changes after it was read
/// is found by the daemon's periodic check.
static HANGUP: AtomicBool = AtomicBool::new(false);

/// From now on SIGTERM and SIGINT end the process with code 0, as they end the daemon, and SIGHUP does not end it.
/// Without handlers process 1 of a container would ignore them. Called before threads start.
///
/// # Errors
/// If a handler cannot be installed.
pub(crate) fn exit_on_signals() -> std::io::Result<()> {
    // The handlers are installed one after the other: a signal waits until all of them are.
    change_mask(libc::SIG_BLOCK);
    for signal in [SIGTERM, SIGINT] {
        flag::register(signal, &RECEIVED)?;
        flag::register_conditional_shutdown(signal, 0, &EXIT_AT_ONCE)?;
    }
    flag::register(SIGHUP, &HANGUP)?;
    // Also those that the program before this one has blocked.
    change_mask(libc::SIG_UNBLOCK);
    Ok(())
}

/// From now on a signal does not end the process: daemon and guard have handlers of their own, and stop in order.
pub(crate) fn let_daemon_handle_signals() {
    EXIT_AT_ONCE.store(false, Ordering::SeqCst);
}

/// Called after the daemon has stopped: from now on a signal ends the process. A signal that arrives while the next
/// program is loaded ends that program. Returns whether a signal arrived earlier; the stopped daemon did not act on it.
pub(super) fn exit_on_signals_again() -> bool {
    // A handler sets RECEIVED and then reads EXIT_AT_ONCE. This does the reverse, so that no signal is missed.
    EXIT_AT_ONCE.store(true, Ordering::SeqCst);
    // A blocked signal stays pending in the program that replaces this one.
    change_mask(libc::SIG_BLOCK);
    RECEIVED.load(Ordering::SeqCst)
}

/// Blocks or unblocks the signals in this thread.
fn change_mask(how: libc::c_int) {
    // SAFETY: the set is initialised by sigemptyset(3) before it is read, and the former mask is not asked for.
    unsafe {
        let mut signals = std::mem::zeroed();
        libc::sigemptyset(&raw mut signals);
        for signal in [SIGTERM, SIGINT, SIGHUP] {
            libc::sigaddset(&raw mut signals, signal);
        }
        // Fails only if `how` is invalid.
        libc::pthread_sigmask(how, &raw const signals, null_mut());
    }
}
