//! The node's GPUs through NVML, behind the port [`Gpus`].
//!
//! Absent on purpose: any decision. What a GPU is, how it is wired and what befell it is read here;
//! what that means is for the kernel and the policies. No call of NVML's is made outside the
//! fence, so a driver that hangs costs GPUs their health and never the daemon its answers.

mod events;
mod facts;
mod fence;
mod library;
mod links;
mod look;
mod map;
mod raw;
mod running;

use berth_kernel::gpu::{Inventory, Reading};
use berth_kernel::ports::{Gpus, GpusError};
use events::Events;
use fence::Fence;
use look::Memory;
use nvml_wrapper::Nvml;
use parking_lot::Mutex;
use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};
use std::thread;
use std::time::{Duration, Instant};

/// How long the end of a session is waited for: one wait of its event thread, and as much again.
const RETIRE_MAX: Duration = Duration::from_secs(2);
/// How often its end is looked for.
const RETIRE_POLL: Duration = Duration::from_millis(10);

/// How NVML is found and used.
#[derive(Clone, Debug)]
pub struct NvmlOptions {
    /// `--nvml-library`: the library, instead of the usual places.
    pub library: Option<PathBuf>,
    /// Root under which the driver's files lie.
    pub driver_root: PathBuf,
    /// Where sysfs is; it knows the NUMA nodes.
    pub sysfs: PathBuf,
    /// Where the kernel driver lists its GPUs by bus id.
    pub attached: PathBuf,
    /// How long the calls on one GPU may take in one look before it counts as hung.
    pub deadline: Duration,
}

impl Default for NvmlOptions {
    fn default() -> Self {
        Self {
            library: None,
            driver_root: "/".into(),
            sysfs: "/sys".into(),
            attached: "/proc/driver/nvidia/gpus".into(),
            // A look at a GPU takes some milliseconds. With two seconds, a GPU that hangs is seen
            // within one poll, and a driver that is busy waking one up is not taken for it.
            deadline: Duration::from_secs(2),
        }
    }
}

/// One opened library. Dropped and opened anew when the driver under it goes away.
struct Session {
    nvml: Arc<Nvml>,
    library: PathBuf,
    driver_version: Option<String>,
    cuda_version: Option<String>,
    /// What the driver listed just before: NVML counts its GPUs once, when it is opened.
    attached: Option<BTreeSet<OsString>>,
    events: Events,
}

/// NVML as the port [`Gpus`].
pub struct NvmlGpus {
    options: NvmlOptions,
    fence: Fence,
    session: Mutex<Option<Arc<Session>>>,
    /// The library of the last session, as long as anybody still uses it.
    retired: Mutex<Weak<Nvml>>,
    memory: Mutex<Memory>,
}

impl NvmlGpus {
    /// Opens NVML.
    ///
    /// # Errors
    /// If the library is not found or does not work; says what to do. Worth trying again, since
    /// drivers are loaded late on some nodes.
    pub fn open(options: NvmlOptions) -> Result<Self, GpusError> {
        let gpus = Self {
            options,
            fence: Fence::default(),
            session: Mutex::default(),
            retired: Mutex::default(),
            memory: Mutex::default(),
        };
        gpus.session()?;
        Ok(gpus)
    }

    /// The library in use, opened if there is none.
    fn session(&self) -> Result<Arc<Session>, GpusError> {
        let mut slot = self.session.lock();
        if let Some(session) = &*slot {
            return Ok(Arc::clone(session));
        }
        self.wait_for_the_last_one();
        let attached = attached(&self.options.attached);
        let library = self.options.library.as_deref();
        let opened = library::open(&self.fence, library, &self.options.driver_root)?;
        let nvml = Arc::new(opened.nvml);
        let events =
            Events::start(Arc::clone(&nvml), self.fence.clone(), opened.events, self.options.deadline);
        let session = Arc::new(Session {
            nvml,
            library: opened.path,
            driver_version: opened.driver_version,
            cuda_version: opened.cuda_version,
            attached,
            events,
        });
        *slot = Some(Arc::clone(&session));
        Ok(session)
    }

    /// Ends the session: the next look starts from the beginning.
    fn retire(&self) {
        if let Some(session) = self.session.lock().take() {
            *self.retired.lock() = Arc::downgrade(&session.nvml);
        }
    }

    /// NVML counts those who opened it, and looks for GPUs only for the first. So the last session must be
    /// over before a new one; its event thread may still be in a wait. A call that hangs keeps it for
    /// longer than anybody can wait: then the new one sees what the old one saw.
    fn wait_for_the_last_one(&self) {
        let until = Instant::now() + RETIRE_MAX;
        while self.retired.lock().strong_count() > 0 && Instant::now() < until {
            thread::sleep(RETIRE_POLL);
        }
    }

    fn look_once(&self) -> Result<Inventory, GpusError> {
        let mut session = self.session()?;
        let now = attached(&self.options.attached);
        if now.is_some() && now != session.attached {
            tracing::info!("GPUs were attached to the driver or detached from it: NVML is opened anew");
            drop(session);
            self.retire();
            session = self.session()?;
        }
        self.memory.lock().look(&session, &self.fence, &self.options)
    }
}

/// The GPUs that the kernel driver lists; `None` where it does not say.
fn attached(folder: &Path) -> Option<BTreeSet<OsString>> {
    Some(fs::read_dir(folder).ok()?.filter_map(|entry| Some(entry.ok()?.file_name())).collect())
}

impl Gpus for NvmlGpus {
    fn look(&self) -> Result<Inventory, GpusError> {
        self.look_once().or_else(|error| {
            // The driver is gone or was replaced.
            self.retire();
            self.memory.lock().all_in_trouble(&error.what).ok_or(error)
        })
    }

    fn next_reading(&self, wait: Duration) -> Result<Option<Reading>, GpusError> {
        let until = Instant::now() + wait;
        // Not opened here: that is for a look, which says what is wrong.
        let Some(session) = self.session.lock().clone() else {
            thread::sleep(wait);
            return Err(no_events("NVML is not open"));
        };
        if let Ok(reading) = session.events.readings().recv_deadline(until) {
            return Ok(Some(reading));
        }
        match session.events.trouble() {
            Some(text) => Err(no_events(&text)),
            None => Ok(None),
        }
    }

    fn describe(&self) -> String {
        let Some(session) = self.session.lock().clone() else {
            return "NVML (not open at present)".to_owned();
        };
        let driver = session.driver_version.as_deref().unwrap_or("unknown");
        format!("NVML at {}, driver {driver}", session.library.display())
    }
}

impl Drop for NvmlGpus {
    fn drop(&mut self) {
        self.fence.close();
    }
}

fn no_events(why: &str) -> GpusError {
    GpusError { what: format!("no GPU events at present, health is polled: {why}"), source: None }
}
