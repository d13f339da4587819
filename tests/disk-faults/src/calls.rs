//! The functions that are stood before. Each does the system call, or fails as the disk would.

#![allow(unsafe_code)] // The C library's functions are C's.

use crate::control::{CONTROL, Fault, UNDER, parse};
use libc::{c_char, c_int, c_uint, c_void, mode_t, off_t, size_t, ssize_t};
use std::ffi::{CStr, CString, OsStr};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, OnceLock, PoisonError};

struct Settings {
    under: PathBuf,
    control: CString,
}

fn settings() -> Option<&'static Settings> {
    static SETTINGS: OnceLock<Option<Settings>> = OnceLock::new();
    let read = || {
        let under = PathBuf::from(std::env::var_os(UNDER)?);
        let control = CString::new(std::env::var_os(CONTROL)?.as_bytes()).ok()?;
        Some(Settings { under, control })
    };
    SETTINGS.get_or_init(read).as_ref()
}

/// The control file's line, without the functions below.
fn line(control: &CStr) -> Option<(Fault, u32)> {
    let mut text = [0_u8; 32];
    // SAFETY: the path is a C string, and the buffer is as long as is said.
    let read = unsafe {
        let fd = libc::syscall(libc::SYS_openat, libc::AT_FDCWD, control.as_ptr(), libc::O_RDONLY, 0);
        if fd < 0 {
            return None;
        }
        let read = libc::syscall(libc::SYS_read, fd, text.as_mut_ptr(), text.len());
        libc::syscall(libc::SYS_close, fd);
        read
    };
    parse(text.get(..usize::try_from(read).ok()?)?)
}

/// The error that a call which changes something below the folder ends with, if any.
fn fault(path: impl FnOnce() -> Option<PathBuf>) -> Option<c_int> {
    static COUNTED: Mutex<(Option<(Fault, u32)>, u32)> = Mutex::new((None, 0));
    let settings = settings()?;
    let (fault, after) = line(&settings.control)?;
    if !path()?.starts_with(&settings.under) {
        return None;
    }
    let mut counted = COUNTED.lock().unwrap_or_else(PoisonError::into_inner);
    if counted.0 != Some((fault, after)) {
        *counted = (Some((fault, after)), 0);
    }
    counted.1 += 1;
    (counted.1 > after).then_some(match fault {
        Fault::Full | Fault::NoData => libc::ENOSPC,
        Fault::ReadOnly => libc::EROFS,
    })
}

/// As [`fault`], for a call that makes an empty file or folder.
fn fault_of_new(path: impl FnOnce() -> Option<PathBuf>) -> Option<c_int> {
    let present = settings().and_then(|settings| line(&settings.control)).map(|(fault, _)| fault);
    if present == Some(Fault::NoData) { None } else { fault(path) }
}

fn read_only(path: impl FnOnce() -> Option<PathBuf>) -> Option<c_int> {
    fault(path).filter(|error| *error == libc::EROFS)
}

fn fail(error: c_int) -> c_int {
    // SAFETY: errno is this thread's own.
    unsafe { *libc::__errno_location() = error };
    -1
}

fn of_fd(fd: c_int) -> Option<PathBuf> {
    std::fs::read_link(format!("/proc/self/fd/{fd}")).ok()
}

/// # Safety
/// `name` is a C string.
unsafe fn of_name(folder: c_int, name: *const c_char) -> Option<PathBuf> {
    // SAFETY: guaranteed by the caller.
    let name = Path::new(OsStr::from_bytes(unsafe { CStr::from_ptr(name) }.to_bytes())).to_owned();
    if name.is_absolute() || folder == libc::AT_FDCWD { Some(name) } else { Some(of_fd(folder)?.join(name)) }
}

#[allow(clippy::cast_possible_truncation)] // a system call's answer to a caller who expects an int
fn int(answer: i64) -> c_int {
    answer as c_int
}

#[allow(clippy::cast_possible_truncation)] // the same where a ssize_t is as long as a long
fn size(answer: i64) -> ssize_t {
    answer as ssize_t
}

/// # Safety
/// As `open(2)`. In C its last argument is optional; on Linux it is passed alike.
#[unsafe(no_mangle)]
unsafe extern "C" fn open64(name: *const c_char, flags: c_int, mode: mode_t) -> c_int {
    // SAFETY: handed on as it came.
    unsafe { openat64(libc::AT_FDCWD, name, flags, mode) }
}

/// # Safety
/// As `openat(2)`.
#[unsafe(no_mangle)]
unsafe extern "C" fn openat64(folder: c_int, name: *const c_char, flags: c_int, mode: mode_t) -> c_int {
    let writes = flags & libc::O_ACCMODE != libc::O_RDONLY;
    // SAFETY: guaranteed by the caller.
    let path = || unsafe { of_name(folder, name) };
    // A full disk still opens what is there.
    let makes = flags & libc::O_CREAT != 0 && path().is_some_and(|p| !p.exists());
    let error = if makes {
        fault_of_new(path)
    } else if writes {
        read_only(path)
    } else {
        None
    };
    match error {
        Some(error) => fail(error),
        // SAFETY: the caller guarantees what the callee requires.
        None => int(unsafe { libc::syscall(libc::SYS_openat, folder, name, flags, c_uint::from(mode)) }),
    }
}

/// # Safety
/// As `pwrite(2)`.
#[unsafe(no_mangle)]
unsafe extern "C" fn pwrite64(fd: c_int, bytes: *const c_void, len: size_t, at: off_t) -> ssize_t {
    match fault(|| of_fd(fd)) {
        Some(error) => fail(error) as ssize_t,
        // SAFETY: the caller guarantees what the callee requires.
        None => size(unsafe { libc::syscall(libc::SYS_pwrite64, fd, bytes, len, at) }),
    }
}

/// # Safety
/// As `write(2)`.
#[unsafe(no_mangle)]
unsafe extern "C" fn write(fd: c_int, bytes: *const c_void, len: size_t) -> ssize_t {
    let error = if fd <= libc::STDERR_FILENO { None } else { fault(|| of_fd(fd)) };
    match error {
        Some(error) => fail(error) as ssize_t,
        // SAFETY: the caller guarantees what the callee requires.
        None => size(unsafe { libc::syscall(libc::SYS_write, fd, bytes, len) }),
    }
}

/// # Safety
/// As `ftruncate(2)`.
#[unsafe(no_mangle)]
unsafe extern "C" fn ftruncate64(fd: c_int, len: off_t) -> c_int {
    match read_only(|| of_fd(fd)) {
        Some(error) => fail(error),
        // SAFETY: the caller guarantees what the callee requires.
        None => int(unsafe { libc::syscall(libc::SYS_ftruncate, fd, len) }),
    }
}

/// # Safety
/// As `fdatasync(2)`. With delayed allocation it is here that a full disk shows.
#[unsafe(no_mangle)]
unsafe extern "C" fn fdatasync(fd: c_int) -> c_int {
    match fault(|| of_fd(fd)) {
        Some(error) => fail(error),
        // SAFETY: the caller guarantees what the callee requires.
        None => int(unsafe { libc::syscall(libc::SYS_fdatasync, fd) }),
    }
}

/// # Safety
/// As `fsync(2)`.
#[unsafe(no_mangle)]
unsafe extern "C" fn fsync(fd: c_int) -> c_int {
    match fault(|| of_fd(fd)) {
        Some(error) => fail(error),
        // SAFETY: the caller guarantees what the callee requires.
        None => int(unsafe { libc::syscall(libc::SYS_fsync, fd) }),
    }
}

/// # Safety
/// As `sync_file_range(2)`.
#[unsafe(no_mangle)]
unsafe extern "C" fn sync_file_range(fd: c_int, at: off_t, len: off_t, flags: c_uint) -> c_int {
    match fault(|| of_fd(fd)) {
        Some(error) => fail(error),
        // SAFETY: the caller guarantees what the callee requires.
        None => int(unsafe { libc::syscall(libc::SYS_sync_file_range, fd, at, len, flags) }),
    }
}

/// # Safety
/// As `rename(2)`.
#[unsafe(no_mangle)]
unsafe extern "C" fn rename(from: *const c_char, to: *const c_char) -> c_int {
    // SAFETY: guaranteed by the caller.
    match read_only(|| unsafe { of_name(libc::AT_FDCWD, from) }) {
        Some(error) => fail(error),
        None => {
            // SAFETY: the caller guarantees what the callee requires.
            int(unsafe { libc::syscall(libc::SYS_renameat2, libc::AT_FDCWD, from, libc::AT_FDCWD, to, 0) })
        }
    }
}

/// # Safety
/// As `mkdir(2)`.
#[unsafe(no_mangle)]
unsafe extern "C" fn mkdir(name: *const c_char, mode: mode_t) -> c_int {
    // SAFETY: guaranteed by the caller.
    let path = || unsafe { of_name(libc::AT_FDCWD, name) };
    // An existing folder is reported on any disk.
    let makes = path().is_some_and(|p| !p.exists());
    match makes.then(|| fault_of_new(path)).flatten() {
        Some(error) => fail(error),
        // SAFETY: the caller guarantees what the callee requires.
        None => int(unsafe { libc::syscall(libc::SYS_mkdirat, libc::AT_FDCWD, name, c_uint::from(mode)) }),
    }
}

/// # Safety
/// As `unlinkat(2)`.
#[unsafe(no_mangle)]
unsafe extern "C" fn unlinkat(folder: c_int, name: *const c_char, flags: c_int) -> c_int {
    // SAFETY: guaranteed by the caller.
    match read_only(|| unsafe { of_name(folder, name) }) {
        Some(error) => fail(error),
        // SAFETY: the caller guarantees what the callee requires.
        None => int(unsafe { libc::syscall(libc::SYS_unlinkat, folder, name, flags) }),
    }
}

/// # Safety
/// As `unlink(2)`.
#[unsafe(no_mangle)]
unsafe extern "C" fn unlink(name: *const c_char) -> c_int {
    // SAFETY: handed on as it came.
    unsafe { unlinkat(libc::AT_FDCWD, name, 0) }
}
