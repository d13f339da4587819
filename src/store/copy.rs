//! The copy of a store that sled opens first.
//!
//! sled repairs a store when it opens it, by truncating what it cannot read; a store that it cannot read
//! completely must stay unchanged, so that other tools can recover it. The copy is in memory, since a
//! full disk has no room for it, or next to the store if memory does not suffice. A store that is
//! unchanged since a clean stop needs no copy ([`super::clean_stop`]).

use super::folder::{Folder, is_unfinished, remove};
use super::reserve;
use berth_kernel::ports::StoreError;
use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

/// A file system in memory that every container and node has.
const MEMORY_FOLDER: &str = "/dev/shm";
/// Bytes that sled writes when it opens a copy: a segment of its log and a snapshot.
const OPENING_BYTES: u64 = 4 * 1024 * 1024;

impl Folder {
    /// Calls `check` with a temporary copy of `data/`.
    pub(super) fn check_copy<T>(
        &self,
        check: impl FnOnce(&Path) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        let io = |e: &io::Error| self.errors.io("copying it to check it", e);
        let on_disk = self.path.join("data.check");
        remove(&on_disk).map_err(|e| io(&e))?;
        let copy = match self.path_in_memory().filter(|copy| copy_folder(&self.data(), copy).is_ok()) {
            Some(copy) => copy,
            None => copy_folder(&self.data(), &on_disk).map(|()| on_disk).map_err(|e| io(&e))?,
        };
        let result = check(&copy);
        match (result, remove(&copy)) {
            (Ok(_), Err(e)) => Err(io(&e)),
            (result, _) => result,
        }
    }

    /// The path of a copy in memory, if there is room. Named after the lock file's inode, so that the next
    /// process on the same store removes the copy of a killed one.
    fn path_in_memory(&self) -> Option<PathBuf> {
        let lock = self.lock.metadata().ok()?;
        let copy = Path::new(MEMORY_FOLDER).join(format!("berth-check-{:x}-{:x}", lock.dev(), lock.ino()));
        remove(&copy).ok()?;
        let needed = self.bytes().ok()? + OPENING_BYTES;
        (reserve::free_bytes(Path::new(MEMORY_FOLDER)).ok()? >= needed).then_some(copy)
    }
}

/// Copies a folder to a new one, which is removed if that fails.
fn copy_folder(from: &Path, to: &Path) -> io::Result<()> {
    // Fails if the folder exists: other users can create folders in memory, too.
    DirBuilder::new().mode(0o700).create(to)?;
    copy_files(from, to).inspect_err(|_| {
        // If this fails, it is removed before the next copy.
        let _ = remove(to);
    })
}

/// Copies recursively; sled has one subfolder, `blobs`, which is empty in this store.
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
