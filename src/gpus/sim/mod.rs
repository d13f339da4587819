//! Simulated GPUs, behind the port [`Gpus`]: for laptops, tests and clusters without GPUs.
//!
//! `sim:8xh100` (or `sim:2xa100+2xl4`) is a machine that never changes; `sim:FILE` is one that changes with its file
//! (for the format see [`Machine`]); and [`SimGpus::change`] changes one from Rust.

mod inventory;
mod machine;
mod model;

pub use machine::{Machine, SimEvent, SimGpu, SimGroup, SimKind, SimProcess};

use berth_kernel::gpu::{Inventory, Reading};
use berth_kernel::ports::{Gpus, GpusError};
use parking_lot::{Condvar, Mutex, MutexGuard};
use std::collections::{BTreeSet, VecDeque};
use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// How often the file is checked for changes while a caller waits for an event.
const FILE_POLL: Duration = Duration::from_millis(20);

/// The largest file that is read, bytes: twice the size of one with 16 GPUs and ten thousand events.
const FILE_BYTES_MAX: u64 = 1024 * 1024;

/// Most readings in the queue (16 GPUs with 64 each); the oldest is dropped when there are more.
const READINGS_MAX: usize = 1024;

/// Simulated GPUs.
pub struct SimGpus {
    file: Option<PathBuf>,
    state: Mutex<State>,
    /// Notified when a reading arrives.
    arrived: Condvar,
}

struct State {
    machine: Machine,
    /// Identifies the version of the file that was read last.
    stamp: Option<Stamp>,
    /// Why the newest version of the file cannot be used, if so.
    error: Option<String>,
    /// `seq` of the newest event that became a reading.
    last_event: u64,
    /// GPUs whose loss became a reading.
    lost: BTreeSet<u32>,
    readings: VecDeque<Reading>,
}

/// Device, inode, size and modification time of a file.
type Stamp = (u64, u64, u64, i64, i64);

impl SimGpus {
    /// Whether the text after `sim:` is a profile and not the name of a file.
    #[must_use]
    pub fn is_profile(spec: &str) -> bool {
        Machine::is_profile(spec)
    }

    /// Simulates the machine given after `sim:` in `--gpus`: a profile such as `8xh100`, or a file.
    ///
    /// # Errors
    /// If the profile is invalid, or the file cannot be used.
    pub fn open(spec: &str) -> Result<Self, GpusError> {
        if Machine::is_profile(spec) {
            let machine = Machine::from_profile(spec).map_err(|why| simulation_error(spec, &why))?;
            return Ok(Self::from_machine(machine));
        }
        let path = PathBuf::from(spec);
        let (stamp, machine) = match (stamp(&path), read(&path)) {
            (stamp, Ok(machine)) => (stamp, machine),
            (_, Err(why)) => return Err(simulation_error(spec, &why)),
        };
        let mut gpus = Self::from_machine(machine);
        gpus.file = Some(path);
        gpus.state.lock().stamp = stamp;
        Ok(gpus)
    }

    /// Simulates a machine that [`SimGpus::change`] can change. Its present events do not become readings.
    #[must_use]
    pub fn from_machine(machine: Machine) -> Self {
        let state = State {
            last_event: machine.newest_event(),
            lost: lost_gpus(&machine),
            machine,
            stamp: None,
            error: None,
            readings: VecDeque::new(),
        };
        Self { file: None, state: Mutex::new(state), arrived: Condvar::new() }
    }

    /// Changes the machine.
    ///
    /// # Errors
    /// If the changed machine is invalid; then nothing is changed.
    pub fn change(&self, change: impl FnOnce(&mut Machine)) -> Result<(), String> {
        let mut state = self.state.lock();
        let mut machine = state.machine.clone();
        change(&mut machine);
        machine.check()?;
        state.set_machine(machine);
        self.arrived.notify_all();
        Ok(())
    }

    /// The state, after a reload of the file if it has changed.
    fn current(&self) -> MutexGuard<'_, State> {
        let mut state = self.state.lock();
        if let Some(path) = &self.file {
            state.reload(path);
        }
        state
    }
}

impl State {
    /// Reads the file if it has changed.
    fn reload(&mut self, path: &Path) {
        let stamp = stamp(path);
        if stamp.is_some() && stamp == self.stamp {
            return;
        }
        self.stamp = stamp;
        match read(path) {
            Ok(machine) => {
                self.error = None;
                self.set_machine(machine);
            }
            Err(why) => self.error = Some(why),
        }
    }

    /// Replaces the machine; its new events and losses become readings.
    fn set_machine(&mut self, machine: Machine) {
        self.machine = machine;
        let mut new: Vec<_> = self.machine.events.iter().filter(|e| e.seq > self.last_event).collect();
        new.sort_by_key(|event| event.seq);
        let events = new.into_iter().map(|event| {
            let detail = "simulated".to_owned();
            (event.gpu, "xid", event.xid, detail)
        });
        let now_lost = lost_gpus(&self.machine);
        let losses = now_lost.difference(&self.lost).map(|&gpu| {
            let detail = "the GPU fell off the bus (simulated)".to_owned();
            (gpu, "lost", 0, detail)
        });
        for (gpu, source, code, detail) in events.chain(losses).collect::<Vec<_>>() {
            let Some(part) = inventory::gpu_id(&self.machine, gpu) else {
                continue;
            };
            if self.readings.len() == READINGS_MAX {
                self.readings.pop_front();
            }
            self.readings.push_back(Reading { part, source: source.to_owned(), code, detail });
        }
        self.last_event = self.last_event.max(self.machine.newest_event());
        self.lost = now_lost;
    }
}

impl Gpus for SimGpus {
    fn scan(&self) -> Result<Inventory, GpusError> {
        let state = self.current();
        if let (Some(why), Some(path)) = (&state.error, &self.file) {
            return Err(simulation_error(&path.display().to_string(), why));
        }
        inventory::inventory(&state.machine)
            .ok_or_else(|| simulation_error(&state.machine.model, "this model is not known"))
    }

    fn next_reading(&self, wait: Duration) -> Result<Option<Reading>, GpusError> {
        let until = Instant::now() + wait;
        let mut state = self.current();
        loop {
            if let Some(reading) = state.readings.pop_front() {
                return Ok(Some(reading));
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(None);
            }
            let timeout = if self.file.is_some() { left.min(FILE_POLL) } else { left };
            self.arrived.wait_for(&mut state, timeout);
            if let Some(path) = &self.file {
                state.reload(path);
            }
        }
    }

    fn describe(&self) -> String {
        let state = self.state.lock();
        let groups = state.machine.groups().map(|(model, count)| format!("{count} simulated {model}"));
        let groups = groups.collect::<Vec<_>>().join(" and ");
        match &self.file {
            Some(path) => format!("{groups}, from {}", path.display()),
            None => groups,
        }
    }
}

fn lost_gpus(machine: &Machine) -> BTreeSet<u32> {
    let lost = machine.gpus.iter().filter(|gpu| gpu.lost && !gpu.absent);
    lost.map(|gpu| gpu.index).collect()
}

fn stamp(path: &Path) -> Option<Stamp> {
    let file = fs::metadata(path).ok()?;
    Some((file.dev(), file.ino(), file.size(), file.mtime(), file.mtime_nsec()))
}

fn read(path: &Path) -> Result<Machine, String> {
    let text = berth_files::read_text(path, FILE_BYTES_MAX).map_err(|error| error.to_string())?;
    Machine::from_text(&text)
}

fn simulation_error(spec: &str, why: &str) -> GpusError {
    GpusError {
        what: format!(
            "sim:{spec} cannot be simulated ({why}): give a profile such as sim:8xh100, or a file with model and count"
        ),
        source: None,
    }
}
