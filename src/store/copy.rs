//! The copy of a store that sled opens first.
//!
//! sled repairs what it opens, by cutting off what it cannot read; a store that it cannot read in full
//! must stay as it is for a better tool. The copy is made in memory, since a full disk has no room for
//! it; where there is no such memory, beside the store. A store that is, byte for byte, what a clean
//! stop left needs none ([`super::closed`]).

use super::folder::{Folder, is_unfinished, remove};
use super::reserve;
use berth_kernel::ports::StoreError;
use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

/// A file system in memory, in every container and on every node.
const MEMORY: &str = "/dev/shm";
/// Room that sled needs to open a copy, bytes: a segment of its log, and a snapshot.
const OPENING_BYTES: u64 = 4 * 1024 * 1024;

impl Folder {
    /// Calls `look` with a copy of `data/`.
    pub(super) fn try_on_copy<T>(
        &self,
        look: impl FnOnce(&Path) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        let io = |e: &io::Error| self.trouble.io("copying it to check it", e);
        let on_disk = self.path.join("data.check");
        remove(&on_disk).map_err(|e| io(&e))?;
        let copy = match self.in_memory().filter(|copy| copy_folder(&self.data(), copy).is_ok()) {
            Some(copy) => copy,
            None => copy_folder(&self.data(), &on_disk).map(|()| on_disk).map_err(|e| io(&e))?,
        };
        let looked = look(&copy);
        match (looked, remove(&copy)) {
            (Ok(_), Err(e)) => Err(io(&e)),
            (looked, _) => looked,
        }
    }

    /// Where the copy is made in memory, if there is room. Called after the lock's file, so that a copy
    /// that a killed process left there is removed by the next one of the same store.
    fn in_memory(&self) -> Option<PathBuf> {
        let lock = self.lock.metadata().ok()?;
        let copy = Path::new(MEMORY).join(format!("berth-check-{:x}-{:x}", lock.dev(), lock.ino()));
        remove(&copy).ok()?;
        let needed = self.bytes().ok()? + OPENING_BYTES;
        (reserve::free(Path::new(MEMORY)).ok()? >= needed).then_some(copy)
    }
}

/// Copies a folder to a new one, which is removed again if that fails.
fn copy_folder(from: &Path, to: &Path) -> io::Result<()> {
    // Not one that is there already: others may make folders in memory, too.
    DirBuilder::new().mode(0o700).create(to)?;
    copy_files(from, to).inspect_err(|_| {
        // Removed before the next copy, if not now.
        let _ = remove(to);
    })
}

/// Folders are copied with what is in them; sled has one, `blobs`, which stays empty here.
fn copy_files(from: &Path, to: &Path) -> io::Result<()> {
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let (source, target) = (entry.path(), to.join(entry.file_name()));
        let kind = entry.file_type()?;
        if kind.is_dir() {
            fs::create_dir(&target)?;
            copy_files(&source, &target)?;
        } else if kind.is_file() && !is_unfinished(&source) {
            fs::copy(&source, &target)?;
        }
    }
    Ok(())
}
