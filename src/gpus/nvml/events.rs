//! NVML events, collected by a thread of their own: XIDs and double bit ECC errors become readings.

use super::facts;
use super::fence::{Fence, Lane, Steps};
use super::library::OpenNvml;
use super::map;
use super::raw::{self, Event, EventSet};
use berth_kernel::hardware::gpu::{ECC, Reading, XID};
use berth_kernel::ids::names::{GpuId, PartId};
use crossbeam_channel::{Receiver, SendTimeoutError, Sender, bounded};
use nvml_wrapper::error::NvmlError;
use parking_lot::{Condvar, Mutex};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// Most readings in the queue: 16 GPUs with 64 each. When it is full the thread waits, and NVML keeps the events that
/// come meanwhile.
const READINGS_MAX: usize = 1024;

/// The timeout of one wait in NVML, that of NVIDIA's device plugin. Between two waits the thread registers GPUs whose
/// registration failed, and checks whether it has to stop; nothing ends a wait (nvml.h, `nvmlEventSetWait_v2`).
pub(super) const WAIT_MS: u32 = 5000;

/// A wait without an event that ends before this time is followed by a pause.
const WAIT_EARLY: Duration = Duration::from_millis(500);

/// The pause of the thread after an error: as long as a GPU is lost, NVML returns from each wait at once.
const PAUSE: Duration = Duration::from_secs(1);

/// A wait that has not returned after this time counts as hung: twice its timeout.
const WAIT_MAX: Duration = Duration::from_millis(2 * WAIT_MS as u64);

/// A GPU whose events are collected, with what identifies it in an event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct WatchedGpu {
    /// Its handle, as a number.
    pub(super) handle: usize,
    /// Its NVML index.
    pub(super) index: u32,
    pub(super) gpu: GpuId,
    /// Its MIG instances by GPU instance and compute instance.
    pub(super) instances: BTreeMap<(u32, u32), PartId>,
}

impl WatchedGpu {
    /// The parts that an event with these ids concerns: a MIG instance; all of a GPU instance if the event names no
    /// compute instance (nvml.h, `nvmlEventData_t`); the GPU if it names none, or one that the last scan did not find.
    fn parts_of(&self, gpu_instance: Option<u32>, compute_instance: Option<u32>) -> Vec<&PartId> {
        let is_named = |ids: &(u32, u32)| {
            Some(ids.0) == gpu_instance && compute_instance.is_none_or(|compute| compute == ids.1)
        };
        let named: Vec<_> =
            self.instances.iter().filter(|(ids, _)| is_named(ids)).map(|(_, part)| part).collect();
        if named.is_empty() { vec![self.gpu.as_part()] } else { named }
    }
}

/// The state that the thread shares with the scans.
#[derive(Default)]
struct Shared {
    watched: Mutex<Vec<WatchedGpu>>,
    /// Notified when `watched` or `stop` changes.
    changed: Condvar,
    stop: AtomicBool,
    /// Why there are no events at present, if so.
    error: Mutex<Option<String>>,
    /// Start of the thread's present wait in NVML.
    waiting_since: Mutex<Option<Instant>>,
}

/// The events of one opened library.
pub(super) struct Events {
    shared: Arc<Shared>,
    pub(super) readings: Receiver<Reading>,
}

impl Events {
    /// Starts the thread on an empty set.
    pub(super) fn start(
        nvml: Arc<OpenNvml>,
        fence: Fence,
        set: Result<EventSet, NvmlError>,
        deadline: Duration,
    ) -> Self {
        let shared = Arc::new(Shared::default());
        let (sender, readings) = bounded(READINGS_MAX);
        let events = EventThread {
            nvml,
            fence,
            shared: Arc::clone(&shared),
            sender,
            deadline,
            registered: BTreeSet::new(),
            reported_lost: BTreeSet::new(),
        };
        let started = thread::Builder::new().name("nvml-events".to_owned()).spawn(move || events.run(set));
        if let Err(error) = started {
            *shared.error.lock() = Some(format!("no thread can be started: {error}"));
        }
        Self { shared, readings }
    }

    /// Sets the GPUs whose events are collected.
    pub(super) fn set_gpus(&self, gpus: Vec<WatchedGpu>) {
        *self.shared.watched.lock() = gpus;
        self.shared.changed.notify_all();
    }

    /// Why there are no events at present, if so.
    pub(super) fn error(&self) -> Option<String> {
        if let Some(text) = self.shared.error.lock().clone() {
            return Some(text);
        }
        let waiting = (*self.shared.waiting_since.lock())?.elapsed();
        let text = || format!("nvmlEventSetWait_v2 has not answered for {} s", waiting.as_secs());
        (waiting > WAIT_MAX).then(text)
    }
}

impl Drop for Events {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        self.shared.changed.notify_all();
    }
}

/// The thread that collects events.
struct EventThread {
    nvml: Arc<OpenNvml>,
    fence: Fence,
    shared: Arc<Shared>,
    sender: Sender<Reading>,
    deadline: Duration,
    /// Handles of the GPUs in the set.
    registered: BTreeSet<usize>,
    /// GPUs whose loss was reported.
    reported_lost: BTreeSet<GpuId>,
}

impl EventThread {
    fn run(mut self, first: Result<EventSet, NvmlError>) {
        let mut set = first.map(Arc::new);
        while !self.is_stopped() {
            match set {
                Ok(good) => {
                    self.set_error(None);
                    set = self.collect(good);
                }
                Err(error) => {
                    self.set_error(Some(format!("NVML delivers no events: {error}")));
                    self.pause();
                    set = self.new_set();
                }
            }
        }
        if let Ok(good) = set {
            self.free(good);
        }
    }

    /// One wait on the set. Returns the set for the next wait.
    fn collect(&mut self, set: Arc<EventSet>) -> Result<Arc<EventSet>, NvmlError> {
        self.register(&set);
        if self.registered.is_empty() {
            self.pause();
            return Ok(set);
        }
        let began = Instant::now();
        *self.shared.waiting_since.lock() = Some(began);
        let waited = set.wait(&self.nvml, WAIT_MS);
        *self.shared.waiting_since.lock() = None;
        match waited {
            Ok(None) => {
                // A set without a supported event may return at once (nvml.h, `nvmlEventSetWait_v2`).
                if began.elapsed() < WAIT_EARLY {
                    self.pause();
                }
                return Ok(set);
            }
            Ok(Some(event)) => {
                self.handle(event);
                return Ok(set);
            }
            Err(NvmlError::GpuLost) => self.find_lost(),
            Err(error) => self.set_error(Some(format!("NVML delivers no events: {error}"))),
        }
        // NVML returns "lost" as long as a lost GPU is in the set: the next set has only the others.
        self.free(set);
        self.pause();
        self.new_set()
    }

    fn new_set(&mut self) -> Result<Arc<EventSet>, NvmlError> {
        self.registered.clear();
        EventSet::new(&self.nvml).map(Arc::new)
    }

    /// Frees the set, unless a registration that hangs still uses it: then it is leaked.
    fn free(&self, set: Arc<EventSet>) {
        if let Some(set) = Arc::into_inner(set) {
            set.free(&self.nvml);
        }
    }

    /// Registers the GPUs that are not in the set yet. Only this thread uses the set, and it waits for the fence: NVML
    /// does not document that two threads may use a set at once. GPUs whose lane another job holds, and those after
    /// one that hangs, are registered one by one.
    fn register(&mut self, set: &Arc<EventSet>) {
        let watched = self.shared.watched.lock().clone();
        self.registered.retain(|handle| watched.iter().any(|gpu| gpu.handle == *handle));
        let new: Vec<_> = watched.iter().filter(|gpu| !self.registered.contains(&gpu.handle)).collect();
        if new.is_empty() {
            return;
        }
        let (nvml, fence, deadline) = (Arc::clone(&self.nvml), self.fence.clone(), self.deadline);
        let job = |gpu: &WatchedGpu| {
            let (nvml, set, index) = (Arc::clone(&nvml), Arc::clone(set), gpu.index);
            let register = move |steps: &Steps| {
                steps.at("nvmlDeviceRegisterEvents");
                set.register(&nvml.device_by_index(index)?)
            };
            (Lane::Gpu(index), register)
        };
        let (done, _) = fence.run_series(new.iter().map(|gpu| job(gpu)).collect(), deadline);
        let mut done = done.into_iter();
        for gpu in new {
            let done = done.next().flatten().map_or_else(
                || {
                    let (lane, register) = job(gpu);
                    fence.run(lane, deadline, register)
                },
                Ok,
            );
            match done {
                Ok(Ok(())) => {
                    self.registered.insert(gpu.handle);
                    self.reported_lost.remove(&gpu.gpu);
                }
                // The model does not support events.
                Ok(Err(NvmlError::NotSupported)) => drop(self.registered.insert(gpu.handle)),
                Ok(Err(NvmlError::GpuLost)) => self.report_lost(&gpu.gpu),
                // Retried after the next wait; the next scan reports what is wrong with the GPU.
                Ok(Err(_)) | Err(_) => {}
            }
        }
    }

    /// Queues the readings of an event.
    fn handle(&self, event: Event) {
        let watched = self.shared.watched.lock().clone();
        let (source, code, detail) = match event.kind {
            raw::EVENT_XID => (XID, event.data, map::xid_text(event.data)),
            raw::EVENT_DOUBLE_BIT_ECC => (ECC, 0, "double bit ECC error"),
            raw::EVENT_RECOVERY_ACTION => return self.report_recovery_action(event.device),
            // No other event is registered.
            _ => return,
        };
        let named: Vec<&WatchedGpu> = watched.iter().filter(|gpu| gpu.handle == event.device).collect();
        // An event of an unknown GPU may concern any of them: it becomes a reading of each.
        let concerned = if named.is_empty() { watched.iter().collect() } else { named };
        for gpu in concerned {
            for part in gpu.parts_of(event.gpu_instance, event.compute_instance) {
                self.send(Reading {
                    part: part.clone(),
                    source: source.to_owned(),
                    code,
                    detail: detail.to_owned(),
                });
            }
        }
    }

    /// Queues a reading of the recovery action that a GPU now requires, if any. The end of one is seen by the next
    /// scan.
    fn report_recovery_action(&self, handle: usize) {
        let watched = self.shared.watched.lock().clone();
        for gpu in watched.into_iter().filter(|gpu| gpu.handle == handle) {
            let (nvml, index) = (Arc::clone(&self.nvml), gpu.index);
            let answer = self.fence.run(Lane::Gpu(index), self.deadline, move |steps| {
                let device = nvml.device_by_index(index).ok()?;
                facts::recovery_action(&device, steps).ok()?
            });
            if let Ok(Some(action)) = answer
                && let Some(reading) = facts::recovery_reading(&gpu.gpu, action)
            {
                self.send(reading);
            }
        }
    }

    /// Finds the lost GPUs by a call on each: NVML reports only that one of the set is lost.
    fn find_lost(&mut self) {
        let watched = self.shared.watched.lock().clone();
        for gpu in watched {
            let (nvml, index) = (Arc::clone(&self.nvml), gpu.index);
            let answer = self.fence.run(Lane::Gpu(index), self.deadline, move |steps| {
                steps.at("nvmlDeviceGetUUID");
                nvml.device_by_index(index)?.uuid()
            });
            if matches!(answer, Ok(Err(NvmlError::GpuLost))) {
                self.report_lost(&gpu.gpu);
            }
        }
    }

    /// Queues a reading for a lost GPU, once until the GPU is back.
    fn report_lost(&mut self, gpu: &GpuId) {
        if self.reported_lost.insert(gpu.clone()) {
            self.send(Reading {
                part: gpu.as_part().clone(),
                source: "lost".to_owned(),
                code: 0,
                detail: "the GPU fell off the bus".to_owned(),
            });
        }
    }

    /// Queues a reading; waits while the queue is full.
    fn send(&self, mut reading: Reading) {
        while !self.is_stopped() {
            match self.sender.send_timeout(reading, PAUSE) {
                Ok(()) | Err(SendTimeoutError::Disconnected(_)) => return,
                Err(SendTimeoutError::Timeout(back)) => reading = back,
            }
        }
    }

    fn set_error(&self, text: Option<String>) {
        *self.shared.error.lock() = text;
    }

    fn is_stopped(&self) -> bool {
        self.shared.stop.load(Ordering::Acquire)
    }

    /// Waits for [`PAUSE`], or until the GPUs are set or the thread has to stop.
    fn pause(&self) {
        let mut watched = self.shared.watched.lock();
        if !self.is_stopped() {
            self.shared.changed.wait_for(&mut watched, PAUSE);
        }
    }
}
