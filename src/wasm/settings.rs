//! Settings of this crate.

use super::compile::CompileLimits;
use berth_kernel::mig::MigStrategy;
use berth_kernel::names::Resource;
use std::path::PathBuf;

/// What this room is told by the configuration.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Where `policies/` lies.
    pub state_dir: PathBuf,
    /// The program that is started to compile; its `main` calls [`super::compiler_process`]. Usually this
    /// one.
    pub compiler: PathBuf,
    /// What one compilation may take.
    pub compile: CompileLimits,
    /// Memory that grants may take of a part, percent of what it has.
    pub memory_overcommit_percent: u32,
    /// The resource that whole GPUs have without policies.
    pub resource: Resource,
    /// What becomes of MIG without policies.
    pub mig: MigStrategy,
}

impl Settings {
    /// With this program as the compiler, and the limits of the product.
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
