//! The parts and settings of the daemon that are derived from the configuration, and its clock.

use anyhow::Context;
use berth_config::{Config, GpuSource};
use berth_core::stack::Baseline;
use berth_files::{Exposure, WRITABLE_BY_OTHERS};
use berth_gpus::nvml::{NvmlGpus, NvmlOptions};
use berth_gpus::procfs::ProcFs;
use berth_gpus::sim::SimGpus;
use berth_kernel::hardware::process::ProcessVisibility;
use berth_kernel::ids::time::Now;
use berth_kernel::node::command::NewStack;
use berth_kernel::node::ports::{Clock, Gpus, GpusError, Journal, Processes as _};
use berth_kernel::policy::stack::StackEntry;
use berth_store::journal::FileJournal;
use std::os::unix::fs::DirBuilderExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Interval of checks whether the clock is set.
const CLOCK_CHECK_INTERVAL: Duration = Duration::from_secs(1);

pub(super) fn baseline(config: &Config) -> Baseline {
    Baseline {
        resource: config.resource.clone(),
        mig: config.mig_strategy,
        mps_sockets: config.edits.mps_sockets(),
        xids: config.xids.clone(),
        quiet_ms: config.rules.timing.quiet_ms,
    }
}

/// The settings of the policy runtime, with the policies of this state folder.
pub(super) fn policies(config: &Config, folder: PathBuf) -> berth_wasm::Settings {
    berth_wasm::Settings {
        resource: config.resource.clone(),
        mig: config.mig_strategy,
        ..berth_wasm::Settings::new(folder)
    }
}

pub(super) fn create_state_dir(config: &Config) -> anyhow::Result<()> {
    let path = &config.state_dir;
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(path).with_context(|| {
        format!(
            "cannot create the state folder {} (set --state-dir to a folder that this user can write)",
            path.display()
        )
    })?;
    for Exposure { what, fix } in berth_files::exposures(path, &path.metadata()?, WRITABLE_BY_OTHERS) {
        tracing::warn!("{what}, and all state of Berth with it; run `{fix}`");
    }
    Ok(())
}

/// The command that activates the configuration's stack.
pub(super) fn new_stack(entries: Vec<StackEntry>) -> NewStack {
    NewStack { from_api: false, by: "config".into(), why: String::new(), entries }
}

/// Opens the journal of decisions. Without it the daemon still runs, so an error is only logged.
pub(super) fn open_journal(config: &Config) -> Option<Arc<dyn Journal>> {
    let limits = config.decisions?;
    match FileJournal::open(&config.state_dir.join("decisions"), limits) {
        Ok(journal) => Some(Arc::new(journal)),
        Err(error) => {
            let cause = error.source.as_ref().map_or_else(String::new, |source| format!(": {source}"));
            tracing::error!("decisions are not recorded: {error}{cause}");
            None
        }
    }
}

/// Opens the GPU backend of the configuration.
///
/// # Errors
/// If it cannot be opened; the error has the fix.
pub(crate) fn open_gpus(source: GpuSource) -> Result<Arc<dyn Gpus>, GpusError> {
    Ok(match source {
        GpuSource::Nvml { library, driver_root } => Arc::new(NvmlGpus::open(NvmlOptions {
            library,
            driver_root: driver_root.unwrap_or_else(|| "/".into()),
            in_container: std::env::var_os("KUBERNETES_SERVICE_HOST").is_some(),
            ..NvmlOptions::default()
        })?),
        GpuSource::Sim(profile) => Arc::new(SimGpus::open(&profile)?),
    })
}

/// The source of processes and their owners.
pub(super) fn process_source(config: &Config) -> ProcFs {
    ProcFs::new(config.processes.proc_root.clone(), &config.processes.ignore)
}

/// Whether a daemon that is started here could find the owners of processes.
pub(crate) fn process_visibility(config: &Config) -> ProcessVisibility {
    process_source(config).process_visibility()
}

/// Waits while the clock shows a time before 1970, as on a node without a battery until its time is set: the libraries
/// of the store and of the admin API panic at such times.
pub(super) async fn wait_until_clock_is_set() {
    let mut is_logged = false;
    while SystemTime::now() < UNIX_EPOCH {
        if !std::mem::replace(&mut is_logged, true) {
            tracing::error!("the system's clock shows a time before 1970: waiting until it is set");
        }
        tokio::time::sleep(CLOCK_CHECK_INTERVAL).await;
    }
}

/// Wall time, and monotonic time since the clock's creation.
pub(super) struct SystemClock {
    start: Instant,
}

impl Default for SystemClock {
    fn default() -> Self {
        Self { start: Instant::now() }
    }
}

impl Clock for SystemClock {
    fn now(&self) -> Now {
        let ms = |d: Duration| u64::try_from(d.as_millis()).unwrap_or(u64::MAX);
        let wall = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Now { wall_ms: ms(wall), mono_ms: ms(self.start.elapsed()) }
    }
}
