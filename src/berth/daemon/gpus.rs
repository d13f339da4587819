//! The backends of inventory scans: the GPUs, and the owners of the processes on them.

use crate::config::{Config, GpuSource};
use berth_gpus::nvml::{NvmlGpus, NvmlOptions};
use berth_gpus::procfs::ProcFs;
use berth_gpus::sim::SimGpus;
use berth_kernel::ports::{Gpus, GpusError, Processes as _};
use berth_kernel::process::ProcessVisibility;
use std::sync::Arc;

/// Opens the GPU backend of the configuration.
///
/// # Errors
/// If it cannot be opened; the error has the fix.
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

/// The source of processes and their owners, by the settings of the configuration.
#[must_use]
pub fn process_source(config: &Config) -> ProcFs {
    ProcFs::new(config.processes.proc_root.clone(), &config.processes.ignore)
}

/// Whether a daemon that is started here could find the owners of processes.
#[must_use]
pub fn process_visibility(config: &Config) -> ProcessVisibility {
    process_source(config).sight()
}
