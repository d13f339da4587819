//! The node's GPUs through NVML, behind the port [`Gpus`].
//!
//! Absent on purpose: any decision. This module reads the GPUs, their links and their events; the kernel and the
//! policies decide what they mean. Every NVML call runs behind the fence: if the driver hangs, GPUs become unhealthy,
//! but the daemon continues to answer.

mod events;
mod facts;
mod fence;
mod invoke;
mod library;
mod limits;
mod links;
mod map;
mod processes;
mod raw;
mod scan;

use berth_kernel::hardware::gpu::{Inventory, Reading};
use berth_kernel::ids::pci::PciBusId;
use berth_kernel::node::ports::{Gpus, GpusError};
use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, bounded, select};
use events::Events;
use fence::Fence;
use library::Library;
pub use limits::{LimitError, NvmlLimits, ReportedLimit};
use parking_lot::Mutex;
use raw::EventSet;
use scan::Scanner;
use std::collections::BTreeSet;
use std::fs::{self, DirEntry};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The longest wait for the end of a session before the next one: a wait of its event thread, and some time to close.
const CLOSE_WAIT: Duration = Duration::from_millis(events::WAIT_MS as u64 + 1000);

/// Longest wait for an event while NVML is not open.
const NOT_OPEN_WAIT: Duration = Duration::from_millis(200);

/// Paths and limits of the access to NVML.
#[derive(Clone, Debug)]
pub struct NvmlOptions {
    /// `--nvml-library`: the library to open; `None`: search the usual folders.
    pub library: Option<PathBuf>,
    /// Root folder of the driver's files.
    pub driver_root: PathBuf,
    /// Mount point of sysfs, which has the NUMA nodes.
    pub sysfs: PathBuf,
    /// Folder in which the kernel driver lists its GPUs by bus id.
    pub attached: PathBuf,
    /// File in which the kernel driver shows its version.
    pub driver_version: PathBuf,
    /// The device by which WSL2 passes GPUs.
    pub dxg: PathBuf,
    /// How the paths of the driver's device nodes begin.
    pub device_nodes: PathBuf,
    /// Whether the driver's files are mounts of a container, which may be those of a former driver.
    pub in_container: bool,
    /// How long a scan waits for all calls on one GPU.
    pub deadline: Duration,
    /// The same for the first scan after the library was opened: the first handle starts a GPU (nvml.h,
    /// `nvmlDeviceGetHandleByIndex_v2`), which takes seconds without a persistence daemon.
    pub first_contact: Duration,
    /// How long one call may run before its GPU counts as hung. Two calls in a row that exceed the deadline do, too.
    pub hung_after: Duration,
    /// How long NVML may fail to open, after it worked, before a container has to be started again; see
    /// [`Gpus::restart_reason`].
    pub restart_after: Duration,
    /// How long NVLinks that were read are used: they come up some time after the driver.
    pub links_interval: Duration,
}

impl Default for NvmlOptions {
    fn default() -> Self {
        Self {
            library: None,
            driver_root: "/".into(),
            sysfs: "/sys".into(),
            attached: "/proc/driver/nvidia/gpus".into(),
            driver_version: "/proc/driver/nvidia/version".into(),
            dxg: "/dev/dxg".into(),
            device_nodes: "/dev/nvidia".into(),
            in_container: false,
            // A scan of a GPU takes some milliseconds.
            deadline: Duration::from_secs(2),
            first_contact: Duration::from_secs(60),
            hung_after: Duration::from_secs(10),
            restart_after: Duration::from_secs(120),
            links_interval: Duration::from_secs(60),
        }
    }
}

/// One opened library. Dropped and opened again when its driver is unloaded or replaced.
struct Session {
    library: Library,
    fence: Fence,
    options: NvmlOptions,
    /// The GPUs that the driver listed just before the library was opened: NVML enumerates GPUs only then.
    attached: Option<BTreeSet<PciBusId>>,
    /// NVML indices of the GPUs that have answered.
    started: Mutex<BTreeSet<u32>>,
    events: Events,
}

impl Session {
    /// Whether the GPU with this index has answered since the library was opened.
    fn is_started(&self, index: u32) -> bool {
        self.started.lock().contains(&index)
    }

    fn start_gpu(&self, index: u32) {
        self.started.lock().insert(index);
    }
}

/// NVML as the port [`Gpus`].
pub struct NvmlGpus {
    options: NvmlOptions,
    fence: Fence,
    session: Mutex<Option<Arc<Session>>>,
    /// Disconnected once the library of the last session is closed.
    closing: Mutex<Option<Receiver<()>>>,
    scanner: Mutex<Scanner>,
    /// Since when the library could not be opened, and the error.
    failing: Mutex<Option<(Instant, String)>>,
    /// Ends a wait for an event.
    interrupt: Sender<()>,
    interrupted: Receiver<()>,
}

impl NvmlGpus {
    /// Opens NVML.
    ///
    /// # Errors
    /// If the library is not found or does not work; the error names the remedy. A retry can succeed, since drivers are
    /// loaded late on some nodes.
    pub fn open(options: NvmlOptions) -> Result<Self, GpusError> {
        let (interrupt, interrupted) = bounded(1);
        let gpus = Self {
            scanner: Mutex::new(Scanner::new(options.links_interval)),
            options,
            fence: Fence::default(),
            session: Mutex::default(),
            closing: Mutex::default(),
            failing: Mutex::default(),
            interrupt,
            interrupted,
        };
        gpus.session()?;
        Ok(gpus)
    }

    /// The present session; opens the library if there is none.
    fn session(&self) -> Result<Arc<Session>, GpusError> {
        let mut slot = self.session.lock();
        if let Some(session) = &*slot {
            return Ok(Arc::clone(session));
        }
        if is_wsl2(&self.options.dxg, &self.options.driver_version) {
            return Err(GpusError { what: WSL2.to_owned(), source: None });
        }
        // NVML counts its users, and enumerates the GPUs only for the first one; the event thread of the last session
        // may still be in a wait. If a call hangs, the new session has the GPUs of the old one.
        self.wait_until_closed(CLOSE_WAIT);
        let attached = attached(&self.options);
        let (fence, options) = (self.fence.clone(), self.options.clone());
        // The set is created before anything is read, so that no event is missed between its creation and the first scan.
        let (library, set) =
            library::open(&fence, options.library.as_deref(), &options.driver_root, EventSet::new)?;
        let events = Events::start(Arc::clone(&library.nvml), fence.clone(), set, options.deadline);
        let session =
            Arc::new(Session { library, fence, options, attached, started: Mutex::default(), events });
        *slot = Some(Arc::clone(&session));
        Ok(session)
    }

    /// Ends the session: the next scan opens the library again.
    fn retire(&self) {
        if let Some(session) = self.session.lock().take() {
            *self.closing.lock() = Some(session.library.closing.clone());
        }
    }

    /// Waits until the library of the last session is closed. Returns whether it is.
    fn wait_until_closed(&self, wait: Duration) -> bool {
        let mut closing = self.closing.lock();
        let is_closed = match &*closing {
            Some(closing) => closing.recv_timeout(wait) == Err(RecvTimeoutError::Disconnected),
            None => true,
        };
        if is_closed {
            *closing = None;
        }
        is_closed
    }

    fn scan(&self) -> Result<Inventory, GpusError> {
        let mut session = self.session()?;
        let now = attached(&self.options);
        if now.is_some() && now != session.attached {
            tracing::info!("GPUs were attached to the driver or detached from it: NVML is opened again");
            drop(session);
            self.retire();
            session = self.session()?;
        }
        self.scanner.lock().scan(&session)
    }
}

/// Why no GPU is offered on WSL2, with the remedy.
pub const WSL2: &str = "the GPUs of WSL2 are not supported, since they have no device nodes that containers could be given \
     (/dev/dxg instead of /dev/nvidia0): run Berth on a Linux host; or try it without a GPU with \
     `berth serve --gpus sim:8xh100 --kubelet-dir /tmp/k --state-dir /tmp/s`";

/// Whether this is WSL2: it has the device `dxg` (`/dev/dxg`) and no kernel driver of NVIDIA, whose version would be in
/// `driver_version`.
#[must_use]
pub fn is_wsl2(dxg: &Path, driver_version: &Path) -> bool {
    dxg.exists() && !driver_version.exists()
}

/// The GPUs that the kernel driver has, by bus id: as it lists them, or by its devices in sysfs, since NVIDIA's
/// container runtime hides that list. `None` if neither can be read.
fn attached(options: &NvmlOptions) -> Option<BTreeSet<PciBusId>> {
    let gpus = |folder: &Path| -> Option<BTreeSet<PciBusId>> {
        // Beside its devices the folder of sysfs has files such as `bind`.
        let bus_id = |entry: io::Result<DirEntry>| PciBusId::parse(entry.ok()?.file_name().to_str()?).ok();
        Some(fs::read_dir(folder).ok()?.filter_map(bus_id).collect())
    };
    let listed = gpus(&options.attached).filter(|gpus| !gpus.is_empty());
    listed.or_else(|| gpus(&options.sysfs.join("bus/pci/drivers/nvidia")))
}

impl Gpus for NvmlGpus {
    fn scan(&self) -> Result<Inventory, GpusError> {
        let scan = self.scan();
        let mut failing = self.failing.lock();
        match scan {
            Ok(inventory) => {
                *failing = None;
                Ok(inventory)
            }
            Err(error) => {
                // The driver was unloaded or replaced.
                self.retire();
                let since = failing.as_ref().map_or_else(Instant::now, |(since, _)| *since);
                *failing = Some((since, error.what.clone()));
                self.scanner.lock().last_with_error(&error.what).ok_or(error)
            }
        }
    }

    fn close(&self, wait: Duration) -> Result<(), GpusError> {
        self.retire();
        *self.failing.lock() = None;
        let error = |what| Err(GpusError { what, source: None });
        if !self.wait_until_closed(wait) {
            let call = self.fence.longest().unwrap_or("nvmlShutdown");
            return error(format!("NVML cannot be closed: {call} does not answer"));
        }
        match open_files(&self.options.device_nodes) {
            open if open.is_empty() => Ok(()),
            open => error(format!("NVML was closed, but this process still has {} open", open.join(", "))),
        }
    }

    fn loaded_driver(&self) -> Option<String> {
        fs::read_to_string(&self.options.driver_version).ok()
    }

    fn restart_reason(&self) -> Option<String> {
        if !self.options.in_container {
            return None;
        }
        let failing = self.failing.lock();
        let (since, error) =
            failing.as_ref().filter(|(since, _)| since.elapsed() >= self.options.restart_after)?;
        let seconds = since.elapsed().as_secs();
        Some(format!(
            "NVML could not be opened for {seconds} s, and this container may have the files of the former driver: {error}"
        ))
    }

    fn next_reading(&self, wait: Duration) -> Result<Option<Reading>, GpusError> {
        // Without the session: NVML is closed once that is dropped.
        let readings = self.session.lock().as_ref().map(|session| session.events.readings.clone());
        // Not opened here but by the next scan, which reports what is wrong.
        let Some(readings) = readings else {
            let _ = self.interrupted.recv_timeout(wait.min(NOT_OPEN_WAIT));
            return Err(no_events("NVML is not open"));
        };
        select! {
            recv(readings) -> reading => if let Ok(reading) = reading {
                return Ok(Some(reading));
            },
            recv(self.interrupted) -> _ => return Ok(None),
            default(wait) => {}
        }
        match self.session.lock().as_ref().and_then(|session| session.events.error()) {
            Some(text) => Err(no_events(&text)),
            None => Ok(None),
        }
    }

    fn interrupt(&self) {
        // A full channel already holds a signal.
        let _ = self.interrupt.try_send(());
    }

    fn describe(&self) -> String {
        let Some(session) = self.session.lock().clone() else {
            return "NVML (not open at present)".to_owned();
        };
        let driver = session.library.driver_version.as_deref().unwrap_or("unknown");
        format!("NVML at {}, driver {driver}", session.library.path.display())
    }
}

/// The open files of this process whose paths begin so.
fn open_files(prefix: &Path) -> Vec<String> {
    let prefix = prefix.to_string_lossy();
    let entries = fs::read_dir("/proc/self/fd").into_iter().flatten().flatten();
    let paths = entries.filter_map(|entry| Some(fs::read_link(entry.path()).ok()?.display().to_string()));
    paths.filter(|path| path.starts_with(&*prefix)).collect::<BTreeSet<_>>().into_iter().collect()
}

fn no_events(why: &str) -> GpusError {
    GpusError { what: format!("no GPU events at present, health is polled: {why}"), source: None }
}
