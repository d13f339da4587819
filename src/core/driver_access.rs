//! Whether the daemon uses the GPUs' driver. An operator can release it, so that the driver can be unloaded, a GPU
//! reset or its MIG mode changed: while a process has the driver's device files open, all of these fail as "in use".

use crate::gpu_watch::InventoryScanner;
use crate::guard_driver_use::GuardDriverUse;
use crate::kernel_handle::KernelHandle;
use crate::release::Release;
use berth_kernel::ids::names::AllocationId;
use berth_kernel::node::ledger::Ledger;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// How long a release waits for running calls of the driver.
const CLOSE_WAIT: Duration = Duration::from_secs(10);

/// Why the driver was not released.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReleaseError {
    /// The GPUs were not found yet.
    #[error("the GPUs were not scanned yet, so there is no driver to release")]
    NotStarted,
    /// A GPU is held.
    #[error(
        "allocation {by} of {pod} holds a GPU, and an unload or reset of the driver would end its containers"
    )]
    Held {
        /// The allocation.
        by: AllocationId,
        /// Its pod.
        pod: String,
    },
    /// A call of the driver hangs, its files stay open, or the GPUs could not be recorded as unhealthy.
    #[error("the driver was not released: {0}")]
    Failed(String),
}

/// A release that was ordered.
#[derive(Clone, Debug)]
pub struct ReleaseOrder {
    /// The operator.
    pub by: String,
    /// The operator's reason.
    pub why: String,
    /// How long the driver is released at most.
    pub time: Duration,
    /// Whether it is released although GPUs are held.
    pub force: bool,
}

/// Releases and resumes the use of the driver. Cheap to clone.
#[derive(Clone, Default)]
pub struct DriverAccess {
    /// Set once the GPUs were found.
    scanner: Arc<OnceLock<InventoryScanner>>,
    /// The guard's use of the driver.
    pub guard: GuardDriverUse,
}

impl DriverAccess {
    /// Sets the scanner of the GPUs; only the first one counts.
    pub fn set_scanner(&self, scanner: InventoryScanner) {
        let _ = scanner.released.guard.set(self.guard.clone());
        let _ = self.scanner.set(scanner);
    }

    /// The present release.
    #[must_use]
    pub fn current_release(&self) -> Option<Release> {
        self.scanner.get()?.released.release()
    }

    /// Ends the use of the driver: all GPUs become unhealthy, so that nothing is granted, and the driver's library is
    /// closed. Replaces an earlier release. Blocks for the present scan and for calls of the driver, seconds in all.
    ///
    /// # Errors
    /// If a GPU is held and the order has no `force`, or if a call hangs; then the driver stays in use.
    pub fn release_driver(
        &self,
        kernel: &KernelHandle,
        order: ReleaseOrder,
    ) -> Result<Release, ReleaseError> {
        let scanner = self.scanner.get().ok_or(ReleaseError::NotStarted)?;
        let _scans = scanner.lock_scans();
        let find_holder = || if order.force { Ok(()) } else { no_holder(&kernel.snapshot()) };
        find_holder()?;
        let ReleaseOrder { by, why, time, .. } = order;
        let since_wall_ms = kernel.now().wall_ms;
        let ms = u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
        let release = Release { by, why, since_wall_ms, until_wall_ms: since_wall_ms.saturating_add(ms) };
        scanner.released.begin(release.clone(), time, scanner.gpus().loaded_driver());
        let closed = record(scanner, kernel).map_err(ReleaseError::Failed).and_then(|()| {
            // From now on nothing is granted. A grant that came before the scan was recorded is seen now.
            find_holder()?;
            scanner.gpus().close(CLOSE_WAIT).map_err(|error| ReleaseError::Failed(error.to_string()))?;
            if !self.guard.wait_until_closed(CLOSE_WAIT) && !order.force {
                let text = "the guard has not closed NVML within 10 s, because it is away, or a call of NVML does not return: \
                            start it again and run `berth nvml release` once more; if this node has no guard any more, add \
                            --force";
                return Err(ReleaseError::Failed(text.into()));
            }
            let is_resumed = scanner.released.release().as_ref() != Some(&release);
            if is_resumed { Err(ReleaseError::Failed("it was resumed meanwhile".into())) } else { Ok(()) }
        });
        if let Err(error) = closed {
            scanner.released.end();
            if let Err(error) = record(scanner, kernel) {
                tracing::warn!(
                    "the driver was not released, but the GPUs stay unhealthy until the next scan: {error}"
                );
            }
            return Err(error);
        }
        Ok(release)
    }

    /// Uses the driver again: a scan follows at once. Returns whether it was released.
    #[must_use]
    pub fn resume(&self) -> bool {
        self.scanner.get().is_some_and(|scanner| scanner.released.end())
    }
}

fn no_holder(ledger: &Ledger) -> Result<(), ReleaseError> {
    let Some(allocation) = ledger.live.values().next() else { return Ok(()) };
    let holder = &allocation.holder;
    let pod = match (&holder.namespace, &holder.pod) {
        (Some(namespace), Some(pod)) => format!("pod {namespace}/{pod}"),
        _ => "a pod that is not known yet".to_owned(),
    };
    Err(ReleaseError::Held { by: allocation.id, pod })
}

/// Scans the GPUs and records the result.
fn record(scanner: &InventoryScanner, kernel: &KernelHandle) -> Result<(), String> {
    let inventory = scanner.scan().map_err(|error| error.to_string())?;
    let recorded = kernel.record_scan(inventory);
    recorded.map(drop).map_err(|error| format!("a scan of the GPUs could not be recorded: {error}"))
}
