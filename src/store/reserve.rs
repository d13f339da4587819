//! Room on the disk that opening the store may use while the disk is full.
//!
//! sled writes when it opens a store: it fills the newest segment of its log with zeros and writes a
//! snapshot. What it has not read yet is not touched by either, so a disk that is full in the middle of
//! it loses nothing; but the daemon could not start. So a file beside the store holds that room, and is
//! given up where there is no other.

use super::folder::Folder;
use rustix::fs::FallocateFlags;
use std::fs::{self, OpenOptions};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

/// What is held, bytes: a segment of sled's log (2 MiB) and a snapshot of some ten thousand records.
const RESERVE_BYTES: u64 = 3 * 1024 * 1024;
/// The unit of a file's blocks, as the system counts them.
const BLOCK_BYTES: u64 = 512;

impl Folder {
    /// Removes the reserve if the disk has no other room for opening the store.
    pub(super) fn release_reserve_if_full(&self) {
        let is_full = free(&self.path).is_ok_and(|bytes| bytes < RESERVE_BYTES);
        if is_full && let Err(error) = fs::remove_file(self.path.join("reserve")) {
            // Opening the store says what is missing.
            tracing::debug!(%error, "no reserve to open the store with");
        }
    }

    /// Allocates the reserve, or as much as fits. It has priority over appends: a failed append returns a clear
    /// error, but a daemon that cannot start returns none. Best effort: some file systems cannot.
    pub(super) fn reserve(&self) {
        if let Err(error) = self.try_reserve() {
            tracing::debug!(%error, "no room is held for opening the store on a full disk");
        }
    }

    fn try_reserve(&self) -> io::Result<()> {
        let path = self.path.join("reserve");
        let held = fs::symlink_metadata(&path).map_or(0, |file| file.blocks() * BLOCK_BYTES);
        let most = RESERVE_BYTES.min(held + free(&self.path)?);
        if held >= most {
            return Ok(());
        }
        remove_file(&path)?;
        let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path)?;
        rustix::fs::fallocate(&file, FallocateFlags::KEEP_SIZE, 0, most).map_err(|error| {
            let _ = remove_file(&path);
            error.into()
        })
    }
}

/// Bytes that a user who is not root may still write to the disk of this folder.
pub(super) fn free(folder: &Path) -> io::Result<u64> {
    let about = rustix::fs::statvfs(folder)?;
    Ok(about.f_bavail.saturating_mul(about.f_frsize))
}

fn remove_file(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}
