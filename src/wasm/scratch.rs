//! A state folder for a moment: where policies are asked without a daemon.

use std::fs::{DirBuilder, remove_dir_all};
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};

/// A folder of one's own that is deleted in the end.
#[derive(Debug)]
pub struct Scratch(PathBuf);

impl Scratch {
    /// Makes one in the system's place for such (`TMPDIR` names another).
    ///
    /// # Errors
    /// If that cannot be done.
    pub fn new() -> std::io::Result<Self> {
        let mut random = [0; 8];
        getrandom::fill(&mut random).map_err(std::io::Error::other)?;
        let path = std::env::temp_dir().join(format!("berth-check-{:016x}", u64::from_ne_bytes(random)));
        // Fails if it is there: nobody else chooses what is in it.
        DirBuilder::new().mode(0o700).create(&path)?;
        Ok(Self(path))
    }

    /// Where it is.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // What is left over is a folder in the system's own place for such.
        let _ = remove_dir_all(&self.0);
    }
}
