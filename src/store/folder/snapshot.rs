//! sled's snapshot: the table of its pages as of the last opening that checked a copy, a file in `data/`.
//!
//! sled cannot always read its log without one. While it opens a log, it overwrites each segment of which no page is in
//! use with zeros. The header of the newest segment may name a position in such a segment as the last one that was
//! durable, and the next opening then takes all that follows for lost, unless a snapshot names a later position. So if
//! several segments are in use, a snapshot must be durable before sled opens the log itself; it is taken from the copy
//! that sled opened before.
//!
//! A full disk must not prevent that: a second file has blocks for the next snapshot. It is renamed to the name of the
//! new snapshot, and the replaced snapshot then takes its place.

use super::{BLOCK_BYTES, Folder, SEGMENT_BYTES, sync_folder};
use berth_files::{self, Links};
use berth_kernel::node::ports::StoreError;
use rustix::fs::FallocateFlags;
use std::ffi::{OsStr, OsString};
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// Prefix of the names of sled's snapshots; the position in the log follows, as 16 hexadecimal digits.
const PREFIX: &str = "snap.";
/// Length of a position in a snapshot's name.
const POSITION_DIGITS: usize = 16;
/// The file that becomes the next snapshot. Its name lacks sled's prefix, since sled reads every file with it as a
/// snapshot.
pub(super) const NEXT: &str = "next-snapshot";
/// Bytes of blocks of the next snapshot: at least enough for the pages of a few thousand records, at most for those of
/// the longest history.
const ROOM_BYTES: std::ops::RangeInclusive<u64> = 64 * 1024..=1024 * 1024;
/// Bytes of the header of a segment of sled's log: a checksum and two positions.
const SEGMENT_HEADER_BYTES: usize = 20;

/// Whether this is the name of a finished snapshot; sled adds `.generating` to the name of an unfinished one.
pub(super) fn is_snapshot(name: &OsStr) -> bool {
    let position = name.to_str().and_then(|name| name.strip_prefix(PREFIX));
    position.is_some_and(|digits| {
        digits.len() == POSITION_DIGITS && digits.bytes().all(|digit| digit.is_ascii_hexdigit())
    })
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
    /// The number of segments of this log that do not begin with zeros. sled zeroes a segment of which no page is in
    /// use only when it opens the log, so the number may include such segments. If it is above one, an opening may zero
    /// some of them.
    pub(crate) fn segments_in_use(&self, log: &File) -> Result<usize, StoreError> {
        let count = || -> io::Result<usize> {
            let (mut count, mut at) = (0, 0);
            while at < log.metadata()?.len() {
                let mut header = [0; SEGMENT_HEADER_BYTES];
                let read = log.read_at(&mut header, at)?;
                count += usize::from(header[..read].iter().any(|byte| *byte != 0));
                at += SEGMENT_BYTES as u64;
            }
            Ok(count)
        };
        count().map_err(|e| self.errors.io("reading its file data/db", &e))
    }

    /// Makes the snapshot of a copy that sled has opened the store's own, durably, with the log that it belongs to.
    ///
    /// # Errors
    /// If it cannot be written: then sled must not open the log itself.
    pub(crate) fn keep_snapshot(&self, copy: &Path, log: &File) -> Result<(), StoreError> {
        let kept = self.replace_snapshot(copy, log);
        kept.map_err(|e| self.errors.io("writing the snapshot of its log", &e))?;
        if let Err(error) = self.reuse_snapshots() {
            tracing::debug!(%error, "cannot reuse the blocks of older snapshots of the store's log");
        }
        Ok(())
    }

    fn replace_snapshot(&self, copy: &Path, log: &File) -> io::Result<()> {
        let (data, next) = (self.data(), self.next_snapshot());
        let Some(taken) = newest_snapshot(copy)? else { return Ok(()) };
        let kept = data.join(taken.file_name().unwrap_or_default());
        // A killed daemon may have left bytes of the log in the page cache only, and the copy may include them.
        log.sync_data()?;
        if !fs::exists(&kept)? {
            let bytes = fs::read(&taken)?;
            let mut file = open_next(&next)?;
            file.write_all(&bytes)?;
            if file.metadata()?.len() > bytes.len() as u64 {
                // `set_len` frees all blocks after the new end.
                file.set_len(bytes.len() as u64)?;
                let _ = allocate(&file, bytes.len() as u64);
            }
            file.sync_all()?;
            fs::rename(&next, &kept)?;
        }
        // A killed start may have renamed the snapshot without syncing the folder.
        sync_folder(&data)
    }

    /// Renames a replaced snapshot to the file of the next one, so that its blocks stay allocated.
    fn reuse_snapshots(&self) -> io::Result<()> {
        let data = self.data();
        let newest = newest_snapshot(&data)?;
        for name in names(&data)?.filter(|name| is_snapshot(name)) {
            let path = data.join(name);
            if Some(&path) != newest.as_ref() {
                fs::rename(&path, self.next_snapshot())?;
            }
        }
        self.ensure_room_of_snapshot()
    }

    /// Makes sure that the next snapshot has blocks, which no other program can take.
    ///
    /// # Errors
    /// Of kind `StorageFull` if the disk is full.
    pub(crate) fn ensure_room_of_snapshot(&self) -> io::Result<()> {
        let newest = newest_snapshot(&self.data())?;
        let bytes = newest.map_or(Ok(0), |newest| fs::metadata(newest).map(|file| file.len()))?;
        allocate(&open_next(&self.next_snapshot())?, bytes * 2)
    }

    fn next_snapshot(&self) -> PathBuf {
        self.data().join(NEXT)
    }
}

/// Allocates blocks for this number of bytes, within [`ROOM_BYTES`].
fn allocate(file: &File, bytes: u64) -> io::Result<()> {
    let wanted = bytes.clamp(*ROOM_BYTES.start(), *ROOM_BYTES.end());
    if file.metadata()?.blocks() * BLOCK_BYTES >= wanted {
        return Ok(());
    }
    Ok(rustix::fs::fallocate(file, FallocateFlags::KEEP_SIZE, 0, wanted)?)
}

/// Opens the file that becomes the next snapshot, and keeps its blocks.
fn open_next(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.write(true).create(true).truncate(false).mode(0o600);
    berth_files::open_with(&mut options, path, Links::Refuse)
}
