//! Every write, sync and name change below one folder, recorded as it is made.
//!
//! This program defines the C library's own functions of that kind; the linker then gives these to
//! the standard library and to sled, as a preloaded library would. Each does the system call and, if a
//! recording is on and the file lies in its folder, notes it. One lock is held over both, so the order
//! noted is the order made. Whether anything slipped past is not a matter of belief: after each
//! recording the notes must give the very tree that is there (`super::history`).
//!
//! Not noted are `copy_file_range` and `sendfile`: only the copy that the store opens first is made
//! with them, and it is removed unread at each start.

#![allow(unsafe_code)] // The C library's functions are C's.

use libc::{c_char, c_int, c_uint, c_void, mode_t, off_t, size_t, ssize_t};
use std::collections::HashMap;
use std::ffi::{CStr, OsStr};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// A file or folder, for as long as it lives: inode numbers are used again.
pub(crate) type Id = usize;
/// The folder that is recorded.
pub(crate) const ROOT: Id = 0;

/// Something that was done.
#[derive(Clone, Debug)]
pub(crate) enum Op {
    /// A new file or folder.
    Made { folder: Id, name: String, id: Id, is_folder: bool },
    /// Bytes of a file.
    Written { id: Id, at: u64, bytes: Vec<u8> },
    /// A file's length.
    Cut { id: Id, len: u64 },
    /// `fsync` or `fdatasync` of a file, or `fsync` of a folder, that came back with success.
    Synced { id: Id },
    /// A new name in the same folder, over whatever had it.
    Renamed { folder: Id, from: String, to: String },
    /// A name that went.
    Removed { folder: Id, name: String },
    /// From the recorded program: this many appends are acknowledged.
    Acknowledged(usize),
}

struct Recording {
    root: PathBuf,
    ops: Vec<Op>,
    /// Known files, by device and inode number.
    known: HashMap<(u64, u64), Id>,
    next: Id,
}

static RECORDING: Mutex<Option<Recording>> = Mutex::new(None);

fn recording() -> MutexGuard<'static, Option<Recording>> {
    RECORDING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Starts to record. `known` are the files that are there already, as [`super::disk::Disk`] names them.
pub(crate) fn start(root: &Path, known: &[(PathBuf, Id)]) {
    let mut ids = HashMap::new();
    for (path, id) in known {
        if let Some(key) = by_path(&c_path(path)) {
            ids.insert(key, *id);
        }
    }
    let next = known.iter().map(|(_, id)| id + 1).max().unwrap_or(ROOT + 1);
    *recording() = Some(Recording { root: root.to_owned(), ops: Vec::new(), known: ids, next });
}

/// Ends the recording and gives what was noted.
pub(crate) fn stop() -> Vec<Op> {
    recording().take().map(|r| r.ops).unwrap_or_default()
}

/// So many appends were answered with success.
pub(crate) fn acknowledged(appends: usize) {
    if let Some(recording) = recording().as_mut() {
        recording.ops.push(Op::Acknowledged(appends));
    }
}

fn c_path(path: &Path) -> Vec<u8> {
    [path.as_os_str().as_bytes(), b"\0"].concat()
}

fn key_of(stat: &libc::stat) -> (u64, u64) {
    (stat.st_dev, stat.st_ino)
}

fn by_path(path: &[u8]) -> Option<(u64, u64)> {
    // SAFETY: the path ends with a zero byte, and `stat` is plain data that the call fills.
    unsafe {
        let mut stat: libc::stat = std::mem::zeroed();
        (libc::lstat(path.as_ptr().cast(), &raw mut stat) == 0).then(|| key_of(&stat))
    }
}

fn by_fd(fd: c_int) -> Option<(u64, u64)> {
    // SAFETY: `stat` is plain data that the call fills.
    unsafe {
        let mut stat: libc::stat = std::mem::zeroed();
        (libc::fstat(fd, &raw mut stat) == 0).then(|| key_of(&stat))
    }
}

impl Recording {
    /// The folder and the name of a path below the root.
    fn place(&self, path: &Path) -> Option<(Id, String)> {
        path.strip_prefix(&self.root).ok()?;
        let folder = *self.known.get(&by_path(&c_path(path.parent()?))?)?;
        Some((folder, path.file_name()?.to_str()?.to_owned()))
    }

    fn open(&self, fd: c_int) -> Option<Id> {
        self.known.get(&by_fd(fd)?).copied()
    }

    fn made(&mut self, path: &Path, is_folder: bool) {
        let Some((folder, name)) = self.place(path) else { return };
        let Some(key) = by_path(&c_path(path)) else { return };
        let id = self.next;
        self.next += 1;
        self.known.insert(key, id);
        self.ops.push(Op::Made { folder, name, id, is_folder });
    }

    fn written(&mut self, fd: c_int, at: u64, bytes: &[u8]) {
        if let Some(id) = self.open(fd) {
            self.ops.push(Op::Written { id, at, bytes: bytes.to_vec() });
        }
    }

    fn synced(&mut self, fd: c_int) {
        if let Some(id) = self.open(fd) {
            self.ops.push(Op::Synced { id });
        }
    }

    fn removed(&mut self, path: &Path) {
        if let Some((folder, name)) = self.place(path) {
            self.ops.push(Op::Removed { folder, name });
        }
    }

    fn renamed(&mut self, from: &Path, to: &Path) {
        if let (Some((folder, from)), Some((same, to))) = (self.place(from), self.place(to)) {
            assert_eq!(folder, same, "the model knows renames within one folder");
            self.ops.push(Op::Renamed { folder, from, to });
        }
    }
}

/// Does `call`, and notes it if it went well.
fn noted(call: impl FnOnce() -> i64, note: impl FnOnce(&mut Recording, i64)) -> i64 {
    let mut recording = recording();
    let done = call();
    if done >= 0
        && let Some(recording) = recording.as_mut()
    {
        // The caller reads errno only after an error.
        note(recording, done);
    }
    done
}

/// # Safety
/// `path` is a C string.
unsafe fn path<'p>(path: *const c_char) -> &'p Path {
    // SAFETY: guaranteed by the caller.
    Path::new(OsStr::from_bytes(unsafe { CStr::from_ptr(path) }.to_bytes()))
}

/// The path of a name below an open folder.
///
/// # Safety
/// `name` is a C string.
unsafe fn path_at(folder: c_int, name: *const c_char) -> PathBuf {
    // SAFETY: guaranteed by the caller.
    let name = unsafe { path(name) };
    if name.is_absolute() || folder == libc::AT_FDCWD {
        return name.to_owned();
    }
    std::fs::read_link(format!("/proc/self/fd/{folder}")).unwrap_or_default().join(name)
}

#[allow(clippy::cast_possible_truncation)] // a system call's answer to a caller who expects an int
fn int(answer: i64) -> c_int {
    answer as c_int
}

#[allow(clippy::cast_possible_truncation)] // the same where a ssize_t is as long as a long
fn size(answer: i64) -> ssize_t {
    answer as ssize_t
}

#[allow(clippy::cast_sign_loss)] // offsets that the system took are not negative
fn unsigned(offset: i64) -> u64 {
    offset as u64
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
    // SAFETY: the caller guarantees what the callee requires.
    let call = || unsafe { libc::syscall(libc::SYS_openat, folder, name, flags, c_uint::from(mode)) };
    if flags & (libc::O_CREAT | libc::O_TRUNC) == 0 {
        return int(call());
    }
    // SAFETY: guaranteed by the caller.
    let path = unsafe { path_at(folder, name) };
    let was_there = std::cell::Cell::new(false);
    int(noted(
        || {
            was_there.set(by_path(&c_path(&path)).is_some());
            call()
        },
        |recording, fd| match was_there.get() {
            false => recording.made(&path, false),
            true if flags & libc::O_TRUNC != 0 => {
                if let Some(id) = recording.open(int(fd)) {
                    recording.ops.push(Op::Cut { id, len: 0 });
                }
            }
            true => {}
        },
    ))
}

/// # Safety
/// As `pwrite(2)`.
#[unsafe(no_mangle)]
unsafe extern "C" fn pwrite64(fd: c_int, bytes: *const c_void, len: size_t, at: off_t) -> ssize_t {
    size(noted(
        // SAFETY: the caller guarantees what the callee requires.
        || unsafe { libc::syscall(libc::SYS_pwrite64, fd, bytes, len, at) },
        |recording, done| {
            // SAFETY: the system has just read so many bytes from there.
            let bytes =
                unsafe { std::slice::from_raw_parts(bytes.cast::<u8>(), usize::try_from(done).unwrap_or(0)) };
            recording.written(fd, unsigned(at), bytes);
        },
    ))
}

/// # Safety
/// As `write(2)`.
#[unsafe(no_mangle)]
unsafe extern "C" fn write(fd: c_int, bytes: *const c_void, len: size_t) -> ssize_t {
    // SAFETY: the caller guarantees what the callee requires.
    let call = || unsafe { libc::syscall(libc::SYS_write, fd, bytes, len) };
    if fd <= libc::STDERR_FILENO {
        return size(call());
    }
    size(noted(call, |recording, done| {
        // SAFETY: asks where the file stands now, which is behind what was written.
        let end = unsafe { libc::syscall(libc::SYS_lseek, fd, 0, libc::SEEK_CUR) };
        if end < done {
            return; // a pipe or a socket
        }
        // SAFETY: the system has just read so many bytes from there.
        let bytes =
            unsafe { std::slice::from_raw_parts(bytes.cast::<u8>(), usize::try_from(done).unwrap_or(0)) };
        recording.written(fd, unsigned(end - done), bytes);
    }))
}

/// # Safety
/// As `ftruncate(2)`.
#[unsafe(no_mangle)]
unsafe extern "C" fn ftruncate64(fd: c_int, len: off_t) -> c_int {
    int(noted(
        // SAFETY: the caller guarantees what the callee requires.
        || unsafe { libc::syscall(libc::SYS_ftruncate, fd, len) },
        |recording, _| {
            if let Some(id) = recording.open(fd) {
                recording.ops.push(Op::Cut { id, len: unsigned(len) });
            }
        },
    ))
}

/// # Safety
/// As `fsync(2)`.
#[unsafe(no_mangle)]
unsafe extern "C" fn fsync(fd: c_int) -> c_int {
    // SAFETY: the caller guarantees what the callee requires.
    int(noted(|| unsafe { libc::syscall(libc::SYS_fsync, fd) }, |recording, _| recording.synced(fd)))
}

/// # Safety
/// As `fdatasync(2)`.
#[unsafe(no_mangle)]
unsafe extern "C" fn fdatasync(fd: c_int) -> c_int {
    // SAFETY: the caller guarantees what the callee requires.
    int(noted(|| unsafe { libc::syscall(libc::SYS_fdatasync, fd) }, |recording, _| recording.synced(fd)))
}

/// # Safety
/// As `rename(2)`.
#[unsafe(no_mangle)]
unsafe extern "C" fn rename(from: *const c_char, to: *const c_char) -> c_int {
    int(noted(
        // SAFETY: the caller guarantees what the callee requires.
        || unsafe { libc::syscall(libc::SYS_renameat2, libc::AT_FDCWD, from, libc::AT_FDCWD, to, 0) },
        // SAFETY: guaranteed by the caller.
        |recording, _| unsafe { recording.renamed(path(from), path(to)) },
    ))
}

/// # Safety
/// As `mkdir(2)`.
#[unsafe(no_mangle)]
unsafe extern "C" fn mkdir(name: *const c_char, mode: mode_t) -> c_int {
    int(noted(
        // SAFETY: the caller guarantees what the callee requires.
        || unsafe { libc::syscall(libc::SYS_mkdirat, libc::AT_FDCWD, name, c_uint::from(mode)) },
        // SAFETY: guaranteed by the caller.
        |recording, _| unsafe { recording.made(path(name), true) },
    ))
}

/// # Safety
/// As `unlink(2)`.
#[unsafe(no_mangle)]
unsafe extern "C" fn unlink(name: *const c_char) -> c_int {
    // SAFETY: handed on as it came.
    unsafe { unlinkat(libc::AT_FDCWD, name, 0) }
}

/// # Safety
/// As `rmdir(2)`.
#[unsafe(no_mangle)]
unsafe extern "C" fn rmdir(name: *const c_char) -> c_int {
    // SAFETY: handed on as it came.
    unsafe { unlinkat(libc::AT_FDCWD, name, libc::AT_REMOVEDIR) }
}

/// # Safety
/// As `unlinkat(2)`.
#[unsafe(no_mangle)]
unsafe extern "C" fn unlinkat(folder: c_int, name: *const c_char, flags: c_int) -> c_int {
    int(noted(
        // SAFETY: the caller guarantees what the callee requires.
        || unsafe { libc::syscall(libc::SYS_unlinkat, folder, name, flags) },
        // SAFETY: guaranteed by the caller.
        |recording, _| unsafe { recording.removed(&path_at(folder, name)) },
    ))
}
