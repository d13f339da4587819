//! Simulated GPUs, behind the port [`Gpus`]: for laptops, tests and clusters without GPUs.
//!
//! `sim:8xh100` (or `sim:2xa100+2xl4`) is a machine that never changes; `sim:FILE` is one that changes with its file
//! (for the format see [`Machine`]); and [`SimGpus::change`] changes one from Rust.

mod inventory;
mod load;
mod machine;

pub use machine::{Machine, SimEvent, SimGpu, SimGroup, SimKind, SimProcess};

use berth_kernel::hardware::gpu::{Inventory, RECOVERED, RECOVERY, Reading, XID};
use berth_kernel::node::ports::{Gpus, GpusError};
use parking_lot::{Condvar, Mutex, MutexGuard};
use std::collections::{BTreeSet, VecDeque};
use std::fs;
use std::mem;
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
    state: Mutex<State>,
    /// Notified when a reading arrives, or a wait for one is to end.
    arrived: Condvar,
}

struct State {
    machine: Machine,
    /// The file that describes the machine, if it is one that changes with a file.
    file: Option<PathBuf>,
    /// Identifies the version of the file that was read last.
    stamp: Option<Stamp>,
    /// Why the newest version of the file cannot be used, if so.
    error: Option<String>,
    /// `seq` of the newest event that became a reading.
    last_event: u64,
    /// GPUs whose loss became a reading.
    lost: BTreeSet<u32>,
    readings: VecDeque<Reading>,
    /// Number of scans, by which the load moves.
    scans: u64,
    /// Whether a wait for a reading is to end.
    interrupted: bool,
}

/// Device, inode, size and modification time of a file.
type Stamp = (u64, u64, u64, i64, i64);

impl SimGpus {
    /// Whether the text after `sim:` is a profile and not the name of a file.
    #[must_use]
    pub fn is_profile(spec: &str) -> bool {
        // `-1xh100` counts as a profile, so that its error is that of an invalid count and not of a missing file.
        let spec = spec.trim_start_matches(['-', '+']);
        let digits = spec.bytes().take_while(u8::is_ascii_digit).count();
        digits > 0 && spec[digits..].starts_with('x') && !spec.contains(['/', '.'])
    }

    /// Simulates the machine given after `sim:` in `--gpus`: a profile such as `8xh100`, or a file.
    ///
    /// # Errors
    /// If the profile is invalid, or the file cannot be used.
    pub fn open(spec: &str) -> Result<Self, GpusError> {
        let invalid = |why: String| simulation_error(spec, &why);
        if Self::is_profile(spec) {
            return Ok(Self::from_machine(Machine::from_profile(spec).map_err(invalid)?));
        }
        let path = PathBuf::from(spec);
        let stamp = stamp(&path);
        let mut gpus = Self::from_machine(read(&path).map_err(invalid)?);
        let state = gpus.state.get_mut();
        (state.file, state.stamp) = (Some(path), stamp);
        Ok(gpus)
    }

    /// Simulates a machine that [`SimGpus::change`] can change. Its present events do not become readings.
    #[must_use]
    pub fn from_machine(machine: Machine) -> Self {
        let state = State {
            last_event: machine.newest_event(),
            lost: lost_gpus(&machine),
            machine,
            file: None,
            stamp: None,
            error: None,
            readings: VecDeque::new(),
            scans: 0,
            interrupted: false,
        };
        Self { state: Mutex::new(state), arrived: Condvar::new() }
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
        state.reload();
        state
    }
}

impl State {
    /// Reads the file, if there is one and it has changed.
    fn reload(&mut self) {
        let Some(path) = &self.file else { return };
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

    /// Replaces the machine; its new events, losses and ends of troubles become readings.
    fn set_machine(&mut self, machine: Machine) {
        let had_trouble = gpus_in_trouble(&self.machine);
        self.machine = machine;
        let has_trouble = gpus_in_trouble(&self.machine);
        let recovered = had_trouble.difference(&has_trouble);
        let recovered = recovered.map(|&gpu| (gpu, RECOVERY, RECOVERED, "the GPU was reset (simulated)"));
        let mut new: Vec<_> = self.machine.events.iter().filter(|e| e.seq > self.last_event).collect();
        new.sort_by_key(|event| event.seq);
        let events = new.into_iter().map(|event| (event.gpu, XID, event.xid, "simulated"));
        let now_lost = lost_gpus(&self.machine);
        let losses = now_lost.difference(&self.lost);
        let losses = losses.map(|&gpu| (gpu, "lost", 0, "the GPU fell off the bus (simulated)"));
        for (gpu, source, code, detail) in events.chain(losses).chain(recovered) {
            let Some(part) = inventory::gpu_id(&self.machine, gpu).map(|gpu| gpu.as_part().clone()) else {
                continue;
            };
            if self.readings.len() == READINGS_MAX {
                self.readings.pop_front();
            }
            let (source, detail) = (source.to_owned(), detail.to_owned());
            self.readings.push_back(Reading { part, source, code, detail });
        }
        self.last_event = self.last_event.max(self.machine.newest_event());
        self.lost = now_lost;
    }
}

impl Gpus for SimGpus {
    fn scan(&self) -> Result<Inventory, GpusError> {
        let mut state = self.current();
        if let (Some(why), Some(path)) = (&state.error, &state.file) {
            return Err(simulation_error(&path.display().to_string(), why));
        }
        state.scans += 1;
        inventory::inventory(&state.machine, state.scans)
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
            if left.is_zero() || mem::take(&mut state.interrupted) {
                return Ok(None);
            }
            let timeout = if state.file.is_some() { left.min(FILE_POLL) } else { left };
            self.arrived.wait_for(&mut state, timeout);
            state.reload();
        }
    }

    fn interrupt(&self) {
        self.state.lock().interrupted = true;
        self.arrived.notify_all();
    }

    fn describe(&self) -> String {
        let state = self.state.lock();
        let groups = state.machine.groups().map(|(model, count)| format!("{count} simulated {model}"));
        let groups = groups.collect::<Vec<_>>().join(" and ");
        match &state.file {
            Some(path) => format!("{groups}, from {}", path.display()),
            None => groups,
        }
    }
}

fn lost_gpus(machine: &Machine) -> BTreeSet<u32> {
    let lost = machine.gpus.iter().filter(|gpu| gpu.lost && !gpu.absent);
    lost.map(|gpu| gpu.index).collect()
}

/// The GPUs that report a problem, which only a reset ends.
fn gpus_in_trouble(machine: &Machine) -> BTreeSet<u32> {
    machine.gpus.iter().filter(|gpu| gpu.trouble.is_some()).map(|gpu| gpu.index).collect()
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
