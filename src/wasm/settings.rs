//! Settings of this crate, and a temporary state folder.

use super::compile::CompileLimits;
use berth_kernel::hardware::mig::MigStrategy;
use berth_kernel::ids::names::Resource;
use std::fs::{DirBuilder, remove_dir_all};
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};

/// The configuration of this crate.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The folder that contains `policies/`.
    pub state_dir: PathBuf,
    /// The program to start as the compiler, usually this one; its `main` calls [`super::compiler_process`].
    pub compiler: PathBuf,
    /// Limits of one compilation.
    pub compile: CompileLimits,
    /// A folder in which compiled modules are kept for other processes of this user; `None` in a daemon.
    pub compile_cache: Option<PathBuf>,
    /// The resource of whole GPUs without policies.
    pub resource: Resource,
    /// How MIG instances are offered without policies.
    pub mig: MigStrategy,
}

impl Settings {
    /// The default settings: this program is the compiler, with the default limits.
    #[must_use]
    pub fn new(state_dir: PathBuf) -> Self {
        Self {
            state_dir,
            compiler: default_compiler(),
            compile: CompileLimits::default(),
            compile_cache: None,
            resource: Resource::nvidia_gpu(),
            mig: MigStrategy::default(),
        }
    }
}

/// This program, whose `main` calls [`super::compiler_process`] first. In a debug build, the environment variable
/// `BERTH_TEST_COMPILER` can name another program: tests start hundreds of daemons, and with a program that keeps the
/// compiler's replies each policy is compiled only once.
#[must_use]
pub fn default_compiler() -> PathBuf {
    let own = PathBuf::from("/proc/self/exe");
    if cfg!(debug_assertions) {
        std::env::var_os("BERTH_TEST_COMPILER").map_or(own, PathBuf::from)
    } else {
        own
    }
}

/// A private temporary state folder, for calls of policies without a daemon. It is deleted on drop.
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
