//! The counter: a file beside sled's that says how many appends were acknowledged.
//!
//! It is written after each append and before its answer, into the page cache only, so it costs
//! about a microsecond and survives a killed process; the system brings it to the disk within about
//! half a minute, and it is synced when the store is opened and closed. It is never ahead of what
//! is durable in sled, so a store behind its counter has lost something. What it cannot show: the
//! loss of appends of the last half minute after a power failure, if the drive, asked to make them
//! durable, only said so.

use super::closed::Digest;
use super::folder::is_in_place;
use berth_files::{self, Links};
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

use sha2::{Digest as _, Sha256};

/// Two numbers, written in turns, each in a sector of its own: a torn write spoils one of them.
const SLOTS: u64 = 2;
/// A sector, bytes; drives write at least so much as one.
const SECTOR: u64 = 512;
/// The number and its digest, bytes.
const SLOT_BYTES: usize = 16;

/// Where the digest that a clean stop leaves is ([`super::closed`]): in a sector of its own, in the
/// block that the file has anyway, so that it needs no room on a full disk.
const CLOSED_AT: u64 = SLOTS * SECTOR;

/// See the module.
#[derive(Debug)]
pub(super) struct Counter {
    file: File,
}

impl Counter {
    /// Makes the file.
    pub(super) fn create(path: &Path, count: u64) -> io::Result<()> {
        let file = OpenOptions::new().write(true).create_new(true).open(path)?;
        for slot in 0..SLOTS {
            file.write_all_at(&encoded(count), slot * SECTOR)?;
        }
        file.sync_all()
    }

    /// Opens the file and reads it.
    ///
    /// # Errors
    /// Of kind `InvalidData` if neither number can be read.
    pub(super) fn open(path: &Path) -> io::Result<(Self, u64)> {
        let file = berth_files::open_with(OpenOptions::new().read(true).write(true), path, Links::Refuse)?;
        let newest = (0..SLOTS)
            .filter_map(|slot| {
                let mut bytes = [0; SLOT_BYTES];
                file.read_exact_at(&mut bytes, slot * SECTOR).ok()?;
                decoded(&bytes)
            })
            .max();
        match newest {
            Some(count) => Ok((Self { file }, count)),
            None => Err(io::ErrorKind::InvalidData.into()),
        }
    }

    /// Notes that `count` appends are durable.
    pub(super) fn set(&self, count: u64) -> io::Result<()> {
        self.file.write_all_at(&encoded(count), count % SLOTS * SECTOR)
    }

    /// The digest that the last clean stop left.
    pub(super) fn closed(&self) -> Option<Digest> {
        let mut digest = Digest::default();
        self.file.read_exact_at(&mut digest, CLOSED_AT).ok()?;
        Some(digest)
    }

    /// Leaves the digest of a clean stop.
    pub(super) fn close(&self, digest: &Digest) -> io::Result<()> {
        self.file.write_all_at(digest, CLOSED_AT)
    }

    /// Whether this is still the file of that name.
    pub(super) fn is_in_place(&self, path: &Path) -> io::Result<bool> {
        is_in_place(&self.file, path)
    }

    /// Brings the note to the disk.
    pub(super) fn sync(&self) -> io::Result<()> {
        self.file.sync_data()
    }
}

fn encoded(count: u64) -> [u8; SLOT_BYTES] {
    let number = count.to_le_bytes();
    let digest: [u8; 32] = Sha256::digest(number).into();
    let mut bytes = [0; SLOT_BYTES];
    bytes[..8].copy_from_slice(&number);
    bytes[8..].copy_from_slice(&digest[..8]);
    bytes
}

fn decoded(bytes: &[u8; SLOT_BYTES]) -> Option<u64> {
    let mut number = [0; 8];
    number.copy_from_slice(&bytes[..8]);
    let count = u64::from_le_bytes(number);
    (encoded(count) == *bytes).then_some(count)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_readable_number_counts() {
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
