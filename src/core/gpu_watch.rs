//! Two threads that watch the GPUs: one scans all of them every few seconds, one waits for events.
//! Only they may wait for NVML.

use crate::keeper::CommandError;
use crate::kernel_handle::{BUSY_RETRY, KernelHandle};
use crate::release::Released;
use crate::shared::Shared;
use crate::wake::Wake;
use berth_kernel::hardware::gpu::{Inventory, Part, Reading, ScanError};
use berth_kernel::hardware::gpu_selector::GpuSelector;
use berth_kernel::hardware::process::{Owner, ProcessIdentity, UnknownReason};
use berth_kernel::node::ports::{Gpus, GpusError, Processes};
use berth_observe::counters::{Counters, GpuCounters};
use parking_lot::{Mutex, MutexGuard};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Longest wait for one event: after it, that events cannot be read is noticed.
const EVENT_WAIT: Duration = Duration::from_secs(10);
/// How often the end of a release of the driver is looked for: a file shows that another driver was loaded.
const RELEASE_CHECK_INTERVAL: Duration = Duration::from_millis(200);
/// Pause after events could not be read.
const EVENT_RETRY: Duration = Duration::from_secs(5);

/// The running threads.
pub struct GpuWatch {
    gpus: Arc<dyn Gpus>,
    wake: Arc<Wake>,
    interval: Shared<Duration>,
    kernel: KernelSlot,
    counters: Arc<Counters>,
    threads: Vec<JoinHandle<()>>,
}

/// The handle of the kernel until the stop. A thread that waits for NVML has none, so that the kernel ends without it.
#[derive(Clone)]
struct KernelSlot(Arc<Mutex<Option<KernelHandle>>>);

impl KernelSlot {
    /// The handle, for one command; `None` after the stop.
    fn get(&self) -> Option<KernelHandle> {
        self.0.lock().clone()
    }

    fn is_stopped(&self) -> bool {
        self.0.lock().is_none()
    }
}

impl GpuWatch {
    /// Starts both threads; the first scan comes after one interval, since the caller has already scanned.
    ///
    /// # Errors
    /// If a thread cannot be started.
    pub fn start(
        scanner: &InventoryScanner,
        kernel: &KernelHandle,
        interval: Duration,
    ) -> std::io::Result<Self> {
        let interval = Shared::new(interval);
        let counters = Arc::clone(kernel.counters());
        counters.gpus.start_scanning(*interval.get());
        let kernel = KernelSlot(Arc::new(Mutex::new(Some(kernel.clone()))));
        let spawn = |name: &str, work: Box<dyn FnOnce() + Send>| {
            std::thread::Builder::new().name(name.into()).spawn(work)
        };
        let scans = {
            let (scanner, kernel, counters) = (scanner.clone(), kernel.clone(), Arc::clone(&counters));
            let interval = interval.clone();
            spawn("gpu-scan", Box::new(move || run_scans(&scanner, &kernel, &counters.gpus, &interval)))?
        };
        let mut threads = vec![scans];
        if scanner.has_health_checks() {
            let (gpus, kernel, wake) =
                (Arc::clone(scanner.gpus()), kernel.clone(), Arc::clone(&scanner.wake));
            threads.push(spawn("gpu-events", Box::new(move || run_events(&*gpus, &kernel, &wake)))?);
        }
        let (gpus, wake) = (Arc::clone(scanner.gpus()), Arc::clone(&scanner.wake));
        Ok(Self { gpus, wake, interval, kernel, counters, threads })
    }

    /// Changes the interval of the scans. The pause that is under way ends by the new one, too.
    pub fn set_interval(&self, interval: Duration) {
        let before = self.interval.replace(interval);
        // Liveness expects the next scan by the longer one; that scan sets the new one.
        self.counters.gpus.set_scan_interval(interval.max(*before));
        self.wake.notify();
    }
}

/// Signals both threads to end. Does not wait: a thread in a hung NVML call ends with the process.
impl Drop for GpuWatch {
    fn drop(&mut self) {
        *self.kernel.0.lock() = None;
        self.wake.notify();
        self.gpus.interrupt();
        for thread in self.threads.drain(..).filter(JoinHandle::is_finished) {
            let _ = thread.join();
        }
    }
}

fn run_scans(
    scanner: &InventoryScanner,
    kernel: &KernelSlot,
    counters: &GpuCounters,
    interval: &Shared<Duration>,
) {
    let mut failing = false;
    while pause_until_resumed(interval, kernel, scanner) {
        // Held for the whole iteration: `/livez` fails if this thread panics while it handles a scan, as if it hangs.
        let _busy = counters.heartbeat.begin();
        counters.set_scan_interval(*interval.get());
        let _scans = scanner.lock_scans();
        let began = Instant::now();
        let scan = scanner.scan();
        counters.scan_ended(began.elapsed(), scan.as_ref().err().map(ToString::to_string));
        counters.set_restart_reason(scanner.gpus.restart_reason());
        match scan {
            Ok(inventory) => {
                if std::mem::take(&mut failing) {
                    tracing::info!("GPUs can be read again");
                }
                let Some(kernel) = kernel.get() else { return };
                if let Err(error) = kernel.record_scan(inventory) {
                    tracing::warn!(%error, "a GPU scan could not be recorded");
                }
            }
            Err(error) => {
                let Some(kernel) = kernel.get() else { return };
                kernel.gpu_history().scan_failed();
                if !std::mem::replace(&mut failing, true) {
                    tracing::error!(%error, "GPUs cannot be read; their last known state is kept");
                }
            }
        }
    }
}

fn run_events(gpus: &dyn Gpus, kernel: &KernelSlot, wake: &Wake) {
    let mut failing = false;
    while !kernel.is_stopped() {
        match gpus.next_reading(EVENT_WAIT) {
            Ok(None) => failing = false,
            Ok(Some(reading)) => {
                failing = false;
                submit_event(&reading, kernel, wake);
            }
            Err(error) => {
                if !std::mem::replace(&mut failing, true) {
                    tracing::warn!(%error, "GPU events cannot be read; only scans find errors now");
                }
                let end = Instant::now() + EVENT_RETRY;
                while Instant::now() < end && !kernel.is_stopped() {
                    wake.wait_until(end, || kernel.is_stopped());
                }
            }
        }
    }
}

/// Submits an event, which comes once. While the policy thread's inbox is full this waits, and NVML keeps the events
/// that come meanwhile.
fn submit_event(event: &Reading, kernel: &KernelSlot, wake: &Wake) {
    while let Some(handle) = kernel.get() {
        match handle.submit_reading(event.clone()) {
            Ok(()) => return,
            Err(CommandError::Busy) => {
                wake.wait_until(Instant::now() + BUSY_RETRY, || kernel.is_stopped());
            }
            Err(error) => {
                tracing::error!(%error, "an event of a GPU was lost, since it could not be passed on");
                return;
            }
        }
    }
}

/// Waits for the newest interval, but not past a stop, or the begin or the end of a release of the driver. Returns
/// whether to continue.
fn pause_until_resumed(interval: &Shared<Duration>, kernel: &KernelSlot, scanner: &InventoryScanner) -> bool {
    let (began, was_released) = (Instant::now(), scanner.is_released());
    let is_over =
        || kernel.is_stopped() || was_released != scanner.is_released() || began.elapsed() >= *interval.get();
    while !is_over() {
        let mut end = began + *interval.get();
        if was_released {
            end = end.min(Instant::now() + RELEASE_CHECK_INTERVAL);
        }
        scanner.wake.wait_until(end, is_over);
    }
    !kernel.is_stopped()
}

/// Combines the GPUs' inventory with the owners of their processes. Cheap to clone.
#[derive(Clone)]
pub struct InventoryScanner {
    gpus: Arc<dyn Gpus>,
    processes: Arc<dyn Processes>,
    health_checks: bool,
    /// GPUs that are excluded.
    excluded: Arc<[GpuSelector]>,
    pub(crate) released: Arc<Released>,
    /// Notified when a release begins or ends, the interval changes, or the threads have to stop.
    wake: Arc<Wake>,
    /// The last inventory that was read.
    last: Arc<Mutex<Inventory>>,
    /// Held while a scan is made and recorded, so that a release is not overtaken by an older scan.
    turn: Arc<Mutex<()>>,
}

impl InventoryScanner {
    /// A scanner of these GPUs and processes, with health checks.
    #[must_use]
    pub fn new(gpus: Arc<dyn Gpus>, processes: Arc<dyn Processes>) -> Self {
        let wake = Arc::<Wake>::default();
        Self {
            gpus,
            processes,
            health_checks: true,
            excluded: Arc::default(),
            released: Arc::new(Released::new(Arc::clone(&wake))),
            wake,
            last: Arc::default(),
            turn: Arc::default(),
        }
    }

    /// Sets whether failing calls, signs and events make a GPU unhealthy. Without health checks only a vanished GPU is
    /// not granted.
    #[must_use]
    pub fn with_health_checks(self, health_checks: bool) -> Self {
        Self { health_checks, ..self }
    }

    /// Sets the GPUs that are excluded: nothing is offered or granted on them.
    #[must_use]
    pub fn with_excluded(self, excluded: &[GpuSelector]) -> Self {
        Self { excluded: excluded.into(), ..self }
    }

    /// See [`Self::with_health_checks`].
    #[must_use]
    pub fn has_health_checks(&self) -> bool {
        self.health_checks
    }

    /// The GPUs, without the owners of their processes.
    #[must_use]
    pub fn gpus(&self) -> &Arc<dyn Gpus> {
        &self.gpus
    }

    /// Waits for a scan that is under way, and prevents others until the guard is dropped.
    pub(crate) fn lock_scans(&self) -> MutexGuard<'_, ()> {
        self.turn.lock()
    }

    /// Whether the driver is released at present.
    fn is_released(&self) -> bool {
        self.released.current(|| self.gpus.loaded_driver()).is_some()
    }

    /// All GPUs as they were last, each with this error.
    fn last_with_error(&self, reason: &str) -> Inventory {
        let mut inventory = self.last.lock().clone();
        let error = |part: &Part| (part.gpu.clone(), ScanError::not_ready(reason));
        inventory.scan_errors = inventory.parts.iter().map(error).collect();
        inventory
    }

    /// Scans the GPUs, and resolves the owners of their processes. Blocks, as [`Gpus::scan`] does. While the driver is
    /// released, all GPUs have that as their error.
    ///
    /// A process may end between the two steps, and its id may be reused: then one scan is wrong about it, and
    /// the next one, which finds another start time or no such process, corrects that. A process is reported
    /// only after several scans have found it.
    ///
    /// # Errors
    /// If the GPUs cannot be read.
    pub fn scan(&self) -> Result<Inventory, GpusError> {
        if let Some(release) = self.released.current(|| self.gpus.loaded_driver()) {
            return Ok(self.last_with_error(&release.reason()));
        }
        let mut inventory = self.gpus.scan()?;
        inventory.exclude(&self.excluded);
        *self.last.lock() = Inventory {
            parts: inventory.parts.clone(),
            links: inventory.links.clone(),
            unidentified: inventory.unidentified.clone(),
            incomplete: inventory.incomplete.clone(),
            excluded: inventory.excluded.clone(),
            driver_version: inventory.driver_version.clone(),
            cuda_version: inventory.cuda_version.clone(),
            ..Inventory::default()
        };
        if !self.health_checks {
            inventory.scan_errors.clear();
            inventory.signs.clear();
        }
        let pids: BTreeSet<u32> = inventory.processes.values().flatten().map(|p| p.pid).collect();
        inventory.process_visibility = self.processes.process_visibility();
        let owners = self.processes.identify(&pids);
        for process in inventory.processes.values_mut().flatten() {
            let unknown = || ProcessIdentity {
                owner: Owner::Unknown(UnknownReason::NotLookedUp),
                ..ProcessIdentity::default()
            };
            process.identity = owners.get(&process.pid).cloned().unwrap_or_else(unknown);
        }
        Ok(inventory)
    }
}
