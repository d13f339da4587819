//! Events, in a thread of their own: XIDs and double bit errors become readings.

use super::fence::{Fence, Lane};
use super::map;
use super::raw::{self, Event, EventSet};
use berth_kernel::gpu::{Reading, XID};
use berth_kernel::names::PartId;
use crossbeam_channel::{Receiver, SendTimeoutError, Sender, bounded};
use nvml_wrapper::Nvml;
use nvml_wrapper::error::NvmlError;
use parking_lot::{Condvar, Mutex};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// Readings that wait to be fetched: 16 GPUs with 64 each. When it is full the thread waits, and
/// NVML keeps what comes meanwhile.
const READINGS_MAX: usize = 1024;

/// How long one wait of NVML's lasts. Between two of them the thread looks for GPUs that are new
/// and for its end.
const WAIT_MS: u32 = 1000;

/// After an error the thread rests so long: NVML answers at once as long as a GPU is lost.
const REST: Duration = Duration::from_secs(1);

/// A wait that has not come back after this hangs: ten times what it was asked for.
const WAIT_MAX: Duration = Duration::from_millis(10 * WAIT_MS as u64);

/// A GPU whose events are wanted, and how to know it in one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Watched {
    /// Its handle, as a number.
    pub(super) handle: usize,
    /// Its NVML index.
    pub(super) index: u32,
    pub(super) gpu: PartId,
    /// Its MIG instances by GPU instance and compute instance.
    pub(super) instances: BTreeMap<(u32, u32), PartId>,
}

/// What the thread and the looks share.
#[derive(Default)]
struct Shared {
    watched: Mutex<Vec<Watched>>,
    /// Notified when `watched` changes or the end comes.
    changed: Condvar,
    stop: AtomicBool,
    /// Why there are no events at present.
    trouble: Mutex<Option<String>>,
    /// When the wait began that the thread is in.
    waiting_since: Mutex<Option<Instant>>,
}

/// The events of one opened library.
pub(super) struct Events {
    shared: Arc<Shared>,
    readings: Receiver<Reading>,
}

impl Events {
    /// Starts the thread on a set that is empty yet.
    pub(super) fn start(
        nvml: Arc<Nvml>,
        fence: Fence,
        set: Result<EventSet, NvmlError>,
        deadline: Duration,
    ) -> Self {
        let shared = Arc::new(Shared::default());
        let (tell, readings) = bounded(READINGS_MAX);
        let watch = Watch {
            nvml,
            fence,
            shared: Arc::clone(&shared),
            tell,
            deadline,
            registered: BTreeSet::new(),
            lost: BTreeSet::new(),
        };
        let started = thread::Builder::new().name("nvml-events".to_owned()).spawn(move || watch.run(set));
        if let Err(error) = started {
            *shared.trouble.lock() = Some(format!("no thread can be started: {error}"));
        }
        Self { shared, readings }
    }

    /// Tells which GPUs are there.
    pub(super) fn watch(&self, gpus: Vec<Watched>) {
        *self.shared.watched.lock() = gpus;
        self.shared.changed.notify_all();
    }

    /// Where readings arrive.
    pub(super) fn readings(&self) -> Receiver<Reading> {
        self.readings.clone()
    }

    /// Why there are no events at present, if there are none.
    pub(super) fn trouble(&self) -> Option<String> {
        if let Some(text) = self.shared.trouble.lock().clone() {
            return Some(text);
        }
        let waiting = (*self.shared.waiting_since.lock())?.elapsed();
        (waiting > WAIT_MAX).then(|| {
            let seconds = waiting.as_secs();
            format!("nvmlEventSetWait_v2 has not answered for {seconds} s")
        })
    }
}

impl Drop for Events {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        self.shared.changed.notify_all();
    }
}

/// The thread's own.
struct Watch {
    nvml: Arc<Nvml>,
    fence: Fence,
    shared: Arc<Shared>,
    tell: Sender<Reading>,
    deadline: Duration,
    /// Handles of the GPUs in the set.
    registered: BTreeSet<usize>,
    /// GPUs whose loss was told.
    lost: BTreeSet<PartId>,
}

impl Watch {
    fn run(mut self, first: Result<EventSet, NvmlError>) {
        let mut set = first.map(Arc::new);
        while !self.stopped() {
            match set {
                Ok(good) => {
                    self.trouble(None);
                    set = self.collect(good);
                }
                Err(error) => {
                    self.trouble(Some(format!("NVML gives no events: {error}")));
                    self.rest();
                    set = self.new_set();
                }
            }
        }
        if let Ok(good) = set {
            self.free(good);
        }
    }

    /// One wait on the set. Answers the set to go on with.
    fn collect(&mut self, set: Arc<EventSet>) -> Result<Arc<EventSet>, NvmlError> {
        self.register(&set);
        if self.registered.is_empty() {
            self.rest();
            return Ok(set);
        }
        *self.shared.waiting_since.lock() = Some(Instant::now());
        let waited = set.wait(&self.nvml, WAIT_MS);
        *self.shared.waiting_since.lock() = None;
        match waited {
            Ok(None) => return Ok(set),
            Ok(Some(event)) => {
                self.happened(event);
                return Ok(set);
            }
            Err(NvmlError::GpuLost) => self.find_lost(),
            Err(error) => self.trouble(Some(format!("NVML gives no events: {error}"))),
        }
        // NVML answers "lost" as long as a lost GPU is in the set: go on with a set of the others.
        self.free(set);
        self.rest();
        self.new_set()
    }

    fn new_set(&mut self) -> Result<Arc<EventSet>, NvmlError> {
        self.registered.clear();
        EventSet::new(&self.nvml).map(Arc::new)
    }

    /// A registration that hangs holds the set for ever; then it is left to it.
    fn free(&self, set: Arc<EventSet>) {
        if let Some(set) = Arc::into_inner(set) {
            set.free(&self.nvml);
        }
    }

    /// Puts GPUs into the set that are not in it. Only this thread touches the set, and it waits
    /// behind the fence: NVML does not say that a set may be used by two threads at once.
    fn register(&mut self, set: &Arc<EventSet>) {
        let watched = self.shared.watched.lock().clone();
        self.registered.retain(|handle| watched.iter().any(|gpu| gpu.handle == *handle));
        for gpu in &watched {
            if self.registered.contains(&gpu.handle) {
                continue;
            }
            let (nvml, set, index) = (Arc::clone(&self.nvml), Arc::clone(set), gpu.index);
            let done = self.fence.run(Lane::Gpu(index), self.deadline, move |steps| {
                steps.at("nvmlDeviceRegisterEvents");
                set.register(&nvml.device_by_index(index)?)
            });
            match done {
                Ok(Ok(())) => {
                    self.registered.insert(gpu.handle);
                    self.lost.remove(&gpu.gpu);
                }
                // A model that is too old for events: there will never be any.
                Ok(Err(NvmlError::NotSupported)) => drop(self.registered.insert(gpu.handle)),
                Ok(Err(NvmlError::GpuLost)) => self.tell_lost(&gpu.gpu),
                // Tried again after the next wait; a look finds out what is wrong with it.
                Ok(Err(_)) | Err(_) => {}
            }
        }
    }

    fn happened(&self, event: Event) {
        let watched = self.shared.watched.lock().clone();
        let (source, detail) = match event.kind {
            raw::EVENT_XID => (XID, map::xid_text(event.data)),
            raw::EVENT_DOUBLE_BIT_ECC => ("ecc", "double bit ECC error"),
            // Nothing else was asked for.
            _ => return,
        };
        let code = if event.kind == raw::EVENT_XID { event.data } else { 0 };
        let named: Vec<&Watched> = watched.iter().filter(|gpu| gpu.handle == event.device).collect();
        // An event whose GPU is not known may concern any: then every GPU is told of.
        let concerned = if named.is_empty() { watched.iter().collect() } else { named };
        for gpu in concerned {
            let instance = event.instance.and_then(|ids| gpu.instances.get(&ids));
            self.send(Reading {
                part: instance.unwrap_or(&gpu.gpu).clone(),
                source: source.to_owned(),
                code,
                detail: detail.to_owned(),
            });
        }
    }

    /// NVML says that a GPU of the set is lost and not which: asks each.
    fn find_lost(&mut self) {
        let watched = self.shared.watched.lock().clone();
        for gpu in watched {
            let (nvml, index) = (Arc::clone(&self.nvml), gpu.index);
            let answer = self.fence.run(Lane::Gpu(index), self.deadline, move |steps| {
                steps.at("nvmlDeviceGetUUID");
                nvml.device_by_index(index)?.uuid()
            });
            if matches!(answer, Ok(Err(NvmlError::GpuLost))) {
                self.tell_lost(&gpu.gpu);
            }
        }
    }

    /// Tells of a loss once, until the GPU is back.
    fn tell_lost(&mut self, gpu: &PartId) {
        if self.lost.insert(gpu.clone()) {
            self.send(Reading {
                part: gpu.clone(),
                source: "lost".to_owned(),
                code: 0,
                detail: "the GPU fell off the bus".to_owned(),
            });
        }
    }

    /// Hands a reading over, waiting while the queue is full.
    fn send(&self, mut reading: Reading) {
        while !self.stopped() {
            match self.tell.send_timeout(reading, REST) {
                Ok(()) | Err(SendTimeoutError::Disconnected(_)) => return,
                Err(SendTimeoutError::Timeout(back)) => reading = back,
            }
        }
    }

    fn trouble(&self, text: Option<String>) {
        *self.shared.trouble.lock() = text;
    }

    fn stopped(&self) -> bool {
        self.shared.stop.load(Ordering::Acquire)
    }

    /// Waits a little, or until GPUs are told or the end comes.
    fn rest(&self) {
        let mut watched = self.shared.watched.lock();
        if !self.stopped() {
            self.shared.changed.wait_for(&mut watched, REST);
        }
    }
}
