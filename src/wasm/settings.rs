//! Settings of this crate.

use super::compile::CompileLimits;
use berth_kernel::mig::MigStrategy;
use berth_kernel::names::Resource;
use std::path::PathBuf;

/// The configuration of this crate.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The folder that contains `policies/`.
    pub state_dir: PathBuf,
    /// The program to start as the compiler, usually this one; its `main` calls [`super::compiler_process`].
    pub compiler: PathBuf,
    /// Limits of one compilation.
    pub compile: CompileLimits,
    /// Memory of a part that may be granted, percent of its size.
    pub memory_overcommit_percent: u32,
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
            compiler: PathBuf::from("/proc/self/exe"),
            compile: CompileLimits::default(),
            memory_overcommit_percent: 100,
            resource: Resource::nvidia_gpu(),
            mig: MigStrategy::default(),
        }
    }
}
