//! Whether a store is, byte for byte, what a clean stop left.
//!
//! A clean stop writes the digest of all files into the counter's file. At the next start the digest
//! tells a store that nothing happened to from one that was killed, cut or changed, and the former is
//! opened without a copy: sled has nothing to repair in it.

use super::counter::Counter;
use super::folder::Folder;
use sha2::{Digest as _, Sha256};
use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};

/// The digest of a store's files and of how many appends were acknowledged.
pub(super) type Digest = [u8; 32];
/// Bytes that are read at a time.
const PIECE_BYTES: usize = 256 * 1024;

impl Folder {
    /// Whether its files are those of a clean stop after `count` appends.
    pub(super) fn is_as_closed(&self, counter: &Counter, count: u64) -> bool {
        counter.closed().is_some_and(|noted| self.digest(count).is_ok_and(|found| found == noted))
    }

    /// The digest of the files as they are.
    pub(super) fn digest(&self, count: u64) -> io::Result<Digest> {
        let (data, counter) = (self.data(), self.counter());
        let mut paths = Vec::new();
        list(&data, &mut paths)?;
        paths.retain(|path| *path != counter);
        paths.sort();
        let mut sha = Sha256::new();
        sha.update(count.to_le_bytes());
        let mut piece = vec![0; PIECE_BYTES];
        for path in paths {
            let mut file = File::open(&path)?;
            let name = path.strip_prefix(&data).unwrap_or(&path).as_os_str().as_encoded_bytes();
            sha.update((name.len() as u64).to_le_bytes());
            sha.update(name);
            sha.update(file.metadata()?.len().to_le_bytes());
            loop {
                let read = file.read(&mut piece)?;
                if read == 0 {
                    break;
                }
                sha.update(&piece[..read]);
            }
        }
        Ok(sha.finalize().into())
    }
}

/// Every regular file below a folder.
fn list(folder: &Path, paths: &mut Vec<PathBuf>) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let kind = entry.file_type()?;
        if kind.is_dir() {
            list(&entry.path(), paths)?;
        } else if kind.is_file() {
            paths.push(entry.path());
        }
    }
    Ok(())
}
