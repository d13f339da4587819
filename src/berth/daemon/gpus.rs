//! What a look goes through: the GPUs, and who the processes on them are.

use crate::config::{Config, GpuSource};
use berth_gpus::nvml::{NvmlGpus, NvmlOptions};
use berth_gpus::procfs::ProcFs;
use berth_gpus::sim::SimGpus;
use berth_kernel::ports::{Gpus, GpusError, Processes as _};
use berth_kernel::process::Sight;
use std::sync::Arc;

/// The GPU backend of the configuration.
///
/// # Errors
/// If it cannot be opened; says what to do.
pub fn open_gpus(source: GpuSource) -> Result<Arc<dyn Gpus>, GpusError> {
    Ok(match source {
        GpuSource::Nvml { library, driver_root } => Arc::new(NvmlGpus::open(NvmlOptions {
            library,
            driver_root: driver_root.unwrap_or_else(|| "/".into()),
            ..NvmlOptions::default()
        })?),
        GpuSource::Sim(profile) => Arc::new(SimGpus::open(&profile)?),
    })
}

/// Who processes are, as the configuration says where to look.
#[must_use]
pub fn processes(config: &Config) -> ProcFs {
    ProcFs::new(config.processes.proc_root.clone(), &config.processes.ignore)
}

/// How far a daemon that is started here could tell whose processes are.
#[must_use]
pub fn sight(config: &Config) -> Sight {
    processes(config).sight()
}
