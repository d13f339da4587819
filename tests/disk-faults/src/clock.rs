//! A system clock that shows a time before 1970, for as long as a file is there.

#![allow(unsafe_code)] // The C library's functions are C's.

use crate::control::library;
use std::ffi::CString;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::OnceLock;

/// Names the file.
const CLOCK: &str = "DISK_FAULTS_CLOCK";
/// 1 January 1969, seconds.
const BEFORE: libc::time_t = -365 * 24 * 3600;

/// The environment of a program whose clock is wrong while this file is there.
///
/// # Errors
/// If the library is not where cargo leaves it: beside the running test.
pub fn wrong_clock(while_there: &Path) -> io::Result<Vec<(String, String)>> {
    let file = while_there.display().to_string();
    Ok(vec![("LD_PRELOAD".into(), library()?), (CLOCK.into(), file)])
}

fn is_wrong() -> bool {
    static FILE: OnceLock<Option<CString>> = OnceLock::new();
    let named = || CString::new(std::env::var_os(CLOCK)?.as_bytes()).ok();
    FILE.get_or_init(named).as_ref().is_some_and(|file| {
        // SAFETY: the path is a C string.
        unsafe { libc::access(file.as_ptr(), libc::F_OK) == 0 }
    })
}

/// # Safety
/// As `clock_gettime(2)`.
#[unsafe(no_mangle)]
unsafe extern "C" fn clock_gettime(clock: libc::clockid_t, time: *mut libc::timespec) -> libc::c_int {
    // SAFETY: the caller guarantees what the callee requires.
    let done = unsafe { libc::syscall(libc::SYS_clock_gettime, clock, time) };
    if done != 0 {
        return -1;
    }
    if clock == libc::CLOCK_REALTIME && is_wrong() {
        // SAFETY: the call succeeded, so the place is the caller's and valid.
        unsafe { (*time).tv_sec = BEFORE };
    }
    0
}
