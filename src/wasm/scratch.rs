//! A temporary state folder, for calls of policies without a daemon.

use std::fs::{DirBuilder, remove_dir_all};
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};

/// A private temporary folder. It is deleted on drop.
#[derive(Debug)]
pub struct Scratch(PathBuf);

impl Scratch {
    /// Creates a folder in `TMPDIR`, by default `/tmp`.
    ///
    /// # Errors
    /// If the folder cannot be created.
    pub fn new() -> std::io::Result<Self> {
        let mut random = [0; 8];
        getrandom::fill(&mut random).map_err(std::io::Error::other)?;
        let path = std::env::temp_dir().join(format!("berth-check-{:016x}", u64::from_ne_bytes(random)));
        // Fails if the path exists, so that no other user chooses the folder's content.
        DirBuilder::new().mode(0o700).create(&path)?;
        Ok(Self(path))
    }

    /// The folder's path.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // A failure leaves files in the temporary folder only.
        let _ = remove_dir_all(&self.0);
    }
}
