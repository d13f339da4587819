//! The node's GPUs through NVML, behind the port [`Gpus`].
//!
//! Absent on purpose: any decision. This module reads the GPUs, their links and their events; the kernel and the
//! policies decide what they mean. Every NVML call runs behind the fence: if the driver hangs, GPUs become unhealthy,
//! but the daemon continues to answer.

mod events;
mod facts;
mod fence;
mod library;
mod links;
mod map;
mod processes;
mod raw;
mod scan;

use berth_kernel::gpu::{Inventory, Reading};
use berth_kernel::ports::{Gpus, GpusError};
use events::Events;
use fence::Fence;
use library::Library;
use nvml_wrapper::Nvml;
use parking_lot::Mutex;
use scan::Scanner;
use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};
use std::thread;
use std::time::{Duration, Instant};

/// The longest wait for the end of a session: twice the duration of one wait of its event thread.
const RETIRE_MAX: Duration = Duration::from_secs(2);
/// How often the end of a session is checked for during that wait.
const RETIRE_POLL: Duration = Duration::from_millis(10);

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
    /// How long all calls on one GPU may take in one scan before it counts as hung.
    pub deadline: Duration,
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
            // A scan of a GPU takes some milliseconds. With two seconds, a GPU that hangs is detected within one poll,
            // and one that the driver is waking up does not count as hung.
            deadline: Duration::from_secs(2),
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
    attached: Option<BTreeSet<OsString>>,
    events: Events,
}

/// NVML as the port [`Gpus`].
pub struct NvmlGpus {
    options: NvmlOptions,
    fence: Fence,
    session: Mutex<Option<Arc<Session>>>,
    /// The library of the last session, as long as something still uses it.
    retired: Mutex<Weak<Nvml>>,
    scanner: Mutex<Scanner>,
}

impl NvmlGpus {
    /// Opens NVML.
    ///
    /// # Errors
    /// If the library is not found or does not work; the error names the remedy. A retry can succeed, since drivers are
    /// loaded late on some nodes.
    pub fn open(options: NvmlOptions) -> Result<Self, GpusError> {
        let gpus = Self {
            scanner: Mutex::new(Scanner::new(options.links_interval)),
            options,
            fence: Fence::default(),
            session: Mutex::default(),
            retired: Mutex::default(),
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
        self.wait_for_retired();
        let attached = attached(&self.options.attached);
        let (fence, options) = (self.fence.clone(), self.options.clone());
        let (library, set) = library::open(&fence, options.library.as_deref(), &options.driver_root)?;
        let events = Events::start(Arc::clone(&library.nvml), fence.clone(), set, options.deadline);
        let session = Arc::new(Session { library, fence, options, attached, events });
        *slot = Some(Arc::clone(&session));
        Ok(session)
    }

    /// Ends the session: the next scan opens the library again.
    fn retire(&self) {
        if let Some(session) = self.session.lock().take() {
            *self.retired.lock() = Arc::downgrade(&session.library.nvml);
        }
    }

    /// Waits until the last session has ended. NVML counts its users, and enumerates the GPUs only for the first one;
    /// the event thread of the last session may still be in a wait. If a call hangs, the wait ends before the session
    /// does: then the new session has the GPUs of the old one.
    fn wait_for_retired(&self) {
        let until = Instant::now() + RETIRE_MAX;
        while self.retired.lock().strong_count() > 0 && Instant::now() < until {
            thread::sleep(RETIRE_POLL);
        }
    }

    fn scan(&self) -> Result<Inventory, GpusError> {
        let mut session = self.session()?;
        let now = attached(&self.options.attached);
        if now.is_some() && now != session.attached {
            tracing::info!("GPUs were attached to the driver or detached from it: NVML is opened again");
            drop(session);
            self.retire();
            session = self.session()?;
        }
        self.scanner.lock().scan(&session)
    }
}

/// The GPUs that the kernel driver lists, by bus id; `None` if the folder cannot be read.
fn attached(folder: &Path) -> Option<BTreeSet<OsString>> {
    Some(fs::read_dir(folder).ok()?.filter_map(|entry| Some(entry.ok()?.file_name())).collect())
}

impl Gpus for NvmlGpus {
    fn scan(&self) -> Result<Inventory, GpusError> {
        self.scan().or_else(|error| {
            // The driver was unloaded or replaced.
            self.retire();
            self.scanner.lock().last_with_error(&error.what).ok_or(error)
        })
    }

    fn next_reading(&self, wait: Duration) -> Result<Option<Reading>, GpusError> {
        let until = Instant::now() + wait;
        // Not opened here but by the next scan, which reports what is wrong.
        let Some(session) = self.session.lock().clone() else {
            thread::sleep(wait);
            return Err(no_events("NVML is not open"));
        };
        if let Ok(reading) = session.events.readings.recv_deadline(until) {
            return Ok(Some(reading));
        }
        match session.events.error() {
            Some(text) => Err(no_events(&text)),
            None => Ok(None),
        }
    }

    fn describe(&self) -> String {
        let Some(session) = self.session.lock().clone() else {
            return "NVML (not open at present)".to_owned();
        };
        let driver = session.library.driver_version.as_deref().unwrap_or("unknown");
        format!("NVML at {}, driver {driver}", session.library.path.display())
    }
}

fn no_events(why: &str) -> GpusError {
    GpusError { what: format!("no GPU events at present, health is polled: {why}"), source: None }
}
