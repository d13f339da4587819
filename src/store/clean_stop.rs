//! Detects whether the store's files are unchanged since a clean stop.
//!
//! A clean stop writes the digest of all files into the counter's file. If the digest matches at the
//! next start, the store is opened without checking a copy first: sled has nothing to repair in it.

use super::counter::Counter;
use super::folder::Folder;
use sha2::{Digest as _, Sha256};
use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};

/// The digest of a store's files and of the number of acknowledged appends.
pub(super) type Digest = [u8; 32];
/// Bytes of one read.
const BUFFER_BYTES: usize = 256 * 1024;

impl Folder {
    /// Whether the files are unchanged since a clean stop after `count` appends.
    pub(super) fn is_unchanged_since_clean_stop(&self, counter: &Counter, count: u64) -> bool {
        counter
            .clean_stop_digest()
            .is_some_and(|expected| self.digest(count).is_ok_and(|digest| digest == expected))
    }

    /// The digest of the current files.
    pub(super) fn digest(&self, count: u64) -> io::Result<Digest> {
        let (data, counter) = (self.data(), self.counter());
        let mut paths = Vec::new();
        collect_files(&data, &mut paths)?;
        paths.retain(|path| *path != counter);
        paths.sort();
        let mut sha = Sha256::new();
        sha.update(count.to_le_bytes());
        let mut buffer = vec![0; BUFFER_BYTES];
        for path in paths {
            let mut file = File::open(&path)?;
            let name = path.strip_prefix(&data).unwrap_or(&path).as_os_str().as_encoded_bytes();
            sha.update((name.len() as u64).to_le_bytes());
            sha.update(name);
            sha.update(file.metadata()?.len().to_le_bytes());
            loop {
                let read = file.read(&mut buffer)?;
                if read == 0 {
                    break;
                }
                sha.update(&buffer[..read]);
            }
        }
        Ok(sha.finalize().into())
    }
}

/// Adds every regular file below a folder to `paths`.
fn collect_files(folder: &Path, paths: &mut Vec<PathBuf>) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let kind = entry.file_type()?;
        if kind.is_dir() {
            collect_files(&entry.path(), paths)?;
        } else if kind.is_file() {
            paths.push(entry.path());
        }
    }
    Ok(())
}
