//! The counter: a file next to sled's with the number of acknowledged appends.
//!
//! It is written after each append and before the append returns, into the page cache only: this takes
//! about a microsecond and survives a killed process. The system writes it back within about 30 s, and
//! it is synced when the store is opened and closed. It is never ahead of what is durable in sled, so a
//! store that is behind its counter has lost appends. It cannot detect that a power failure lost
//! appends of the last 30 s, if the drive acknowledged a flush that it did not perform.
//!
//! A clean stop writes the digest of all the store's files into the counter's file, if the log has only one segment in
//! use ([`super::folder`]) and the files are small enough to be kept in memory. If the digest matches at the next
//! start, the store is opened without checking a copy first: sled has nothing to repair in it, unless it was damaged in
//! use.

use super::folder::is_in_place;
use berth_files::{self, Links};
use sha2::{Digest as _, Sha256};
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// Two copies of the number, written alternately, each in its own sector: a torn write destroys only one.
const SLOTS: u64 = 2;
/// Bytes of a sector, the smallest unit that a drive writes.
const SECTOR: u64 = 512;
/// Bytes of a number with its digest.
const SLOT_BYTES: usize = 16;

/// Offset of the digest of a clean stop: its own sector, in the file's first
/// block, so that it needs no space on a full disk.
const CLEAN_STOP_OFFSET: u64 = SLOTS * SECTOR;

/// The digest of a store's files and of the number of acknowledged appends.
pub(super) type Digest = [u8; 32];

/// The open counter file; see the module.
#[derive(Debug)]
pub(super) struct Counter {
    file: File,
}

impl Counter {
    /// Creates the file.
    pub(super) fn create(path: &Path, count: u64) -> io::Result<()> {
        let file = OpenOptions::new().write(true).create_new(true).open(path)?;
        for slot in 0..SLOTS {
            file.write_all_at(&encode(count), slot * SECTOR)?;
        }
        file.sync_all()
    }

    /// Opens the file and reads it.
    ///
    /// # Errors
    /// Of kind `InvalidData` if neither number is valid.
    pub(super) fn open(path: &Path) -> io::Result<(Self, u64)> {
        let file = berth_files::open_with(OpenOptions::new().read(true).write(true), path, Links::Refuse)?;
        let newest = (0..SLOTS)
            .filter_map(|slot| {
                let mut bytes = [0; SLOT_BYTES];
                file.read_exact_at(&mut bytes, slot * SECTOR).ok()?;
                decode(&bytes)
            })
            .max();
        match newest {
            Some(count) => Ok((Self { file }, count)),
            None => Err(io::ErrorKind::InvalidData.into()),
        }
    }

    /// Records that `count` appends are durable.
    pub(super) fn set(&self, count: u64) -> io::Result<()> {
        self.file.write_all_at(&encode(count), count % SLOTS * SECTOR)
    }

    /// The digest of the last clean stop.
    pub(super) fn clean_stop_digest(&self) -> Option<Digest> {
        let mut digest = Digest::default();
        self.file.read_exact_at(&mut digest, CLEAN_STOP_OFFSET).ok()?;
        Some(digest)
    }

    /// Records the digest of a clean stop.
    pub(super) fn set_clean_stop_digest(&self, digest: &Digest) -> io::Result<()> {
        self.file.write_all_at(digest, CLEAN_STOP_OFFSET)
    }

    /// Whether `path` still names this file.
    pub(super) fn is_in_place(&self, path: &Path) -> io::Result<bool> {
        is_in_place(&self.file, path)
    }

    /// Syncs the file to disk.
    pub(super) fn sync(&self) -> io::Result<()> {
        self.file.sync_data()
    }
}

fn encode(count: u64) -> [u8; SLOT_BYTES] {
    let number = count.to_le_bytes();
    let digest: [u8; 32] = Sha256::digest(number).into();
    let mut bytes = [0; SLOT_BYTES];
    bytes[..8].copy_from_slice(&number);
    bytes[8..].copy_from_slice(&digest[..8]);
    bytes
}

fn decode(bytes: &[u8; SLOT_BYTES]) -> Option<u64> {
    let mut number = [0; 8];
    number.copy_from_slice(&bytes[..8]);
    let count = u64::from_le_bytes(number);
    (encode(count) == *bytes).then_some(count)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_valid_number_is_used() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("counter");
        Counter::create(&path, 1).unwrap();
        for count in 2..=9 {
            let (counter, before) = Counter::open(&path).unwrap();
            assert_eq!(before, count - 1);
            counter.set(count).unwrap();
        }
        let file = OpenOptions::new().write(true).open(&path).unwrap();
        // 9 is in the second sector.
        file.write_all_at(b"x", SECTOR + 3).unwrap();
        assert_eq!(Counter::open(&path).unwrap().1, 8);
        file.write_all_at(b"x", 3).unwrap();
        let error = Counter::open(&path).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
    }
}
