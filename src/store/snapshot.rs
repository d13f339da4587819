//! sled's snapshot: the table of its pages as of the last opening, a file in `data/`.
//!
//! sled cannot always read its log without one. While it opens a log, it overwrites each segment of which no page is in use
//! with zeros. The header of the newest segment may name a position in such a segment as the last one that was durable, and
//! the next opening then takes all that follows for lost, unless a snapshot names a later position. So a snapshot must be
//! durable before sled opens the log itself; it is taken from the copy that sled opened before.
//!
//! A full disk must not prevent that: a second file has blocks for the next snapshot, which replaces it by a rename, and the
//! replaced snapshot becomes the second file.

use super::folder::{BLOCK_BYTES, Folder, sync_folder};
use berth_files::{self, Links};
use berth_kernel::ports::StoreError;
use rustix::fs::FallocateFlags;
use std::ffi::{OsStr, OsString};
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// Prefix of the names of sled's snapshots; the position in the log follows, as 16 hexadecimal digits.
const PREFIX: &str = "snap.";
/// Length of a position in a snapshot's name.
const POSITION_DIGITS: usize = 16;
/// The file that becomes the next snapshot. sled takes every name with its own prefix for a snapshot.
pub(super) const NEXT: &str = "next-snapshot";
/// Bytes of blocks that the next snapshot has at least: pages of a few thousand records.
const ROOM_BYTES: u64 = 64 * 1024;

/// Whether sled reads a file of this name as a snapshot. A name that goes on is that of one which sled had not finished.
fn is_snapshot(name: &OsStr) -> bool {
    let position = name.to_str().and_then(|name| name.strip_prefix(PREFIX));
    position.is_some_and(|digits| {
        digits.len() == POSITION_DIGITS && digits.bytes().all(|digit| digit.is_ascii_hexdigit())
    })
}

/// Whether a file of this name is a snapshot, or one that sled had not finished.
pub(super) fn is_of_snapshots(name: &OsStr) -> bool {
    name.as_encoded_bytes().starts_with(PREFIX.as_bytes())
}

/// The snapshot that sled reads in this folder: the one of the latest position.
pub(super) fn newest_snapshot(folder: &Path) -> io::Result<Option<PathBuf>> {
    let names = names(folder)?;
    Ok(names.filter(|name| is_snapshot(name)).max().map(|name| folder.join(name)))
}

fn names(folder: &Path) -> io::Result<impl Iterator<Item = OsString>> {
    let entries = fs::read_dir(folder)?.collect::<io::Result<Vec<_>>>()?;
    Ok(entries.into_iter().map(|entry| entry.file_name()))
}

impl Folder {
    /// Makes the snapshot of a copy that sled has opened the store's own, durably, with the log that it belongs to.
    ///
    /// # Errors
    /// If it cannot be written: then sled must not open the log itself.
    pub(super) fn keep_snapshot(&self, copy: &Path, log: &File) -> Result<(), StoreError> {
        self.replace_snapshot(copy, log).map_err(|e| self.errors.io("writing the snapshot of its log", &e))
    }

    fn replace_snapshot(&self, copy: &Path, log: &File) -> io::Result<()> {
        let data = self.data();
        let next = data.join(NEXT);
        if let Some(taken) = newest_snapshot(copy)? {
            let kept = data.join(taken.file_name().unwrap_or_default());
            if !fs::exists(&kept)? {
                // The copy may be of bytes that a killed daemon left in the page cache.
                log.sync_data()?;
                let bytes = fs::read(&taken)?;
                let mut file = open_next(&next)?;
                file.write_all(&bytes)?;
                // Only if it is shorter: this gives the blocks after its end back.
                if file.metadata()?.len() > bytes.len() as u64 {
                    file.set_len(bytes.len() as u64)?;
                }
                file.sync_all()?;
                fs::rename(&next, &kept)?;
                sync_folder(&data)?;
            }
            let newest = kept.file_name();
            for name in names(&data)?.filter(|name| is_of_snapshots(name) && Some(name.as_os_str()) != newest)
            {
                fs::rename(data.join(name), &next)?;
            }
        }
        ensure_room(&next);
        Ok(())
    }
}

/// Makes sure that the next snapshot has blocks, so that no other program can take them. Without them it is written if the disk
/// has room then.
fn ensure_room(next: &Path) {
    let ensured = open_next(next).and_then(|file| {
        let metadata = file.metadata()?;
        let wanted = ROOM_BYTES.max(metadata.len() * 2);
        if metadata.blocks() * BLOCK_BYTES >= wanted {
            return Ok(());
        }
        Ok(rustix::fs::fallocate(&file, FallocateFlags::KEEP_SIZE, 0, wanted)?)
    });
    if let Err(error) = ensured {
        tracing::debug!(%error, "cannot make room for the next snapshot of the store's log");
    }
}

/// Opens the file that becomes the next snapshot, and keeps its blocks.
fn open_next(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.write(true).create(true).truncate(false).mode(0o600);
    berth_files::open_with(&mut options, path, Links::Refuse)
}
