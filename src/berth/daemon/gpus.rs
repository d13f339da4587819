//! The backends of inventory scans: the GPUs, and the owners of the processes on them.

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
/// If it cannot be opened; the error says what to do.
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

/// Resolves the owners of processes, by the folders of the configuration.
#[must_use]
pub fn processes(config: &Config) -> ProcFs {
    ProcFs::new(config.processes.proc_root.clone(), &config.processes.ignore)
}

/// Which owners of processes a daemon that is started here could see.
#[must_use]
pub fn sight(config: &Config) -> Sight {
    processes(config).sight()
}
