//! Reserved disk space, so that the store can be opened while the disk is full.
//!
//! sled writes when it opens a store: it fills the newest segment of its log with zeros and writes a
//! snapshot. Neither overwrites unread data, so a full disk loses nothing, but the daemon could not
//! start. So a file next to the store reserves that space and is deleted if there is no other.

use super::folder::Folder;
use rustix::fs::FallocateFlags;
use std::fs::{self, OpenOptions};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

/// Bytes reserved: a segment of sled's log (2 MiB) and a snapshot of about ten thousand records.
const RESERVE_BYTES: u64 = 3 * 1024 * 1024;
/// The unit of `st_blocks`.
const BLOCK_BYTES: u64 = 512;

impl Folder {
    /// Removes the reserve if the disk has no other space for opening the store.
    pub(super) fn release_reserve_if_full(&self) {
        let is_full = free_bytes(&self.path).is_ok_and(|bytes| bytes < RESERVE_BYTES);
        if is_full && let Err(error) = fs::remove_file(self.path.join("reserve")) {
            // Opening the store then fails with the cause.
            tracing::debug!(%error, "cannot release the disk space reserve");
        }
    }

    /// Allocates the reserve, or as much as fits. It has priority over appends: a failed append returns a clear
    /// error, but a daemon that cannot start returns none. Best effort: some file systems cannot.
    pub(super) fn reserve(&self) {
        if let Err(error) = self.try_reserve() {
            tracing::debug!(%error, "cannot reserve disk space for opening the store on a full disk");
        }
    }

    fn try_reserve(&self) -> io::Result<()> {
        let path = self.path.join("reserve");
        let reserved = fs::symlink_metadata(&path).map_or(0, |file| file.blocks() * BLOCK_BYTES);
        let wanted = RESERVE_BYTES.min(reserved + free_bytes(&self.path)?);
        if reserved >= wanted {
            return Ok(());
        }
        remove_file(&path)?;
        let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path)?;
        rustix::fs::fallocate(&file, FallocateFlags::KEEP_SIZE, 0, wanted).map_err(|error| {
            let _ = remove_file(&path);
            error.into()
        })
    }
}

/// Free bytes on the file system of this folder, for users other than root.
pub(super) fn free_bytes(folder: &Path) -> io::Result<u64> {
    let stats = rustix::fs::statvfs(folder)?;
    Ok(stats.f_bavail.saturating_mul(stats.f_frsize))
}

fn remove_file(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}
