//! A simulated node: the real keeper over a store in memory, simulated GPUs, a clock that is told to
//! go on, and the same walk over the stack that the daemon takes.

use super::clock::StepClock;
use super::format::{Group, Health, State};
use berth_core::admission::{Baseline, Ear, Faults, Heard, Offers, Walk};
use berth_core::keeper::{Applied, AskError, Keeper, Snapshot};
use berth_gpus::sim::{Machine, SimGpu, SimGpus, SimGroup};
use berth_kernel::command::{Command, NewStack, Rules};
use berth_kernel::drain::Mark;
use berth_kernel::gpu::Reading;
use berth_kernel::health::APPLICATION_XIDS;
use berth_kernel::listing::free_devices;
use berth_kernel::mig::MigStrategy;
use berth_kernel::names::{DeviceId, PartId, Resource};
use berth_kernel::policy::{PolicyVersion, Severity, TriageAnswer};
use berth_kernel::ports::{Clock as _, Gpus as _};
use berth_kernel::stack::{Stack, StackEntry};
use berth_store::MemoryDisk;
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

/// The store's name in allocation ids.
const STORE: u32 = 0x5ce0_0001;
/// Offers are asked again until nothing moves; a policy that answers something else each time is
/// asked no more than so often a step.
const SETTLE_MAX: usize = 4;

/// The node of one scenario.
pub(super) struct Node<'p> {
    pub(super) policies: &'p Ear<'p>,
    pub(super) clock: Arc<StepClock>,
    keeper: Keeper,
    gpus: SimGpus,
    rules: Rules,
    baseline: Baseline,
    faults: Faults,
    /// Faults since they were last taken, each with its policy's label.
    faulted: Vec<String>,
    /// The generation for which offers were last asked.
    offered: u64,
    /// When a policy wants to be asked for its offers again, monotonic milliseconds.
    again_mono_ms: Option<u64>,
}

impl<'p> Node<'p> {
    /// A node with these GPUs and these versions of policies, and the baseline alone.
    ///
    /// # Errors
    /// In words, if there is no such machine.
    pub(super) fn new(
        groups: &[Group],
        versions: &[PolicyVersion],
        policies: &'p Ear<'p>,
    ) -> Result<Self, String> {
        let gpus = SimGpus::from_machine(machine(groups)?);
        let clock = Arc::new(StepClock::default());
        let rules = Rules::default();
        let whole = Resource::parse("nvidia.com/gpu").map_err(|error| error.to_string())?;
        let baseline = Baseline {
            resource: whole,
            mig: MigStrategy::default(),
            mps_sockets: BTreeMap::new(),
            ignored_xids: APPLICATION_XIDS.into(),
            quiet_ms: rules.timing.quiet_ms,
        };
        let store = MemoryDisk::new(STORE).open().map_err(|error| error.to_string())?;
        let as_clock = Arc::clone(&clock);
        let keeper =
            Keeper::open(Box::new(store), rules.clone(), as_clock).map_err(|error| error.to_string())?;
        let mut node = Self {
            policies,
            clock,
            keeper,
            gpus,
            rules,
            baseline,
            faults: Faults::default(),
            faulted: Vec::new(),
            offered: 0,
            again_mono_ms: None,
        };
        for version in versions {
            node.turn(&Command::KeepPolicy(version.clone())).map_err(|error| error.to_string())?;
        }
        node.look()?;
        Ok(node)
    }

    /// Activates a stack as the daemon does: asked on this node, swapped in if all answer well.
    /// Answers the faults that kept it from that.
    ///
    /// # Errors
    /// In words, if the kernel refuses it.
    pub(super) fn activate(&mut self, entries: Vec<StackEntry>) -> Result<Vec<String>, String> {
        let stack = NewStack { from_api: false, by: "scenario".into(), why: String::new(), entries };
        let candidate = stack.clone().into_stack(0, 0);
        let offers = self.walk_on(&candidate, |walk| walk.offers());
        let faults = std::mem::take(&mut self.faulted);
        if !faults.is_empty() {
            return Ok(faults);
        }
        self.note(&offers);
        let command = Command::Activate { stack, expected: None, offers: offers.parts };
        self.turn(&command).map_err(|error| error.to_string())?;
        self.faults.reset();
        Ok(Vec::new())
    }

    /// The newest snapshot.
    pub(super) fn snapshot(&self) -> Snapshot {
        self.keeper.snapshot()
    }

    /// One turn of the keeper.
    pub(super) fn turn(&mut self, command: &Command) -> Result<Applied, AskError> {
        self.keeper.turn(command)
    }

    /// Asks the active stack.
    pub(super) fn walk<T>(&mut self, ask: impl FnOnce(Walk<'_>) -> T) -> T {
        let stack = Arc::clone(&self.snapshot().stack);
        self.walk_on(&stack, ask)
    }

    fn walk_on<T>(&mut self, stack: &Stack, ask: impl FnOnce(Walk<'_>) -> T) -> T {
        let node = self.snapshot();
        let faults = |faults: &Faults| -> Vec<u64> {
            let records = stack.entries.iter().enumerate().map(|(place, e)| faults.record(place, e));
            records.map(|record| record.failed()).collect()
        };
        let before = faults(&self.faults);
        let answer = ask(Walk {
            stack,
            policies: self.policies,
            node: &node,
            now: self.clock.now(),
            faults: &mut self.faults,
            baseline: &self.baseline,
            overcommit_percent: self.rules.overcommit_percent,
            calls: &mut Vec::new(),
            leisure: 1,
        });
        // An entry is asked once a walk, so its last fault is the one.
        let after = faults(&self.faults);
        for (place, entry) in stack.entries.iter().enumerate() {
            if after[place] > before[place] {
                let record = self.faults.record(place, entry);
                let suspended = if record.suspended { "; the entry is suspended now" } else { "" };
                let last = record.last.unwrap_or_default();
                self.faulted.push(format!("{} {last}{suspended}", entry.label()));
            }
        }
        answer
    }

    /// Faults since the last time.
    pub(super) fn faulted(&mut self) -> Vec<String> {
        std::mem::take(&mut self.faulted)
    }

    /// What policies were asked since the last time.
    pub(super) fn told(&self) -> VecDeque<Heard> {
        self.policies.take()
    }

    /// Asks for offers where the ledger moved since they were last asked, until it rests.
    ///
    /// # Errors
    /// In words, if the kernel does not take them.
    pub(super) fn settle(&mut self) -> Result<(), String> {
        for _ in 0..SETTLE_MAX {
            let due = self.again_mono_ms.is_some_and(|at| self.clock.now().mono_ms >= at);
            if !due && self.offered == self.snapshot().generation {
                break;
            }
            self.offered = self.snapshot().generation;
            let offers = self.walk(|walk| walk.offers());
            self.note(&offers);
            let applied = self.turn(&Command::Offer(offers.parts));
            applied.map_err(|error| format!("offers stay as they were: {error}"))?;
        }
        Ok(())
    }

    fn note(&mut self, offers: &Offers) {
        let now = self.clock.now().mono_ms;
        self.again_mono_ms = offers.again_after_s.map(|s| now + 1000 * u64::from(s.max(1)));
    }

    /// Lets time pass, second by second as the daemon does: a tick, a look, and offers where they
    /// are due.
    ///
    /// # Errors
    /// As [`Node::settle`].
    pub(super) fn pass(&mut self, seconds: u32) -> Result<(), String> {
        for _ in 0..seconds {
            self.clock.pass(1000);
            self.turn(&Command::Tick).map_err(|error| error.to_string())?;
            self.look()?;
            self.settle()?;
        }
        Ok(())
    }

    /// A look at the GPUs.
    fn look(&mut self) -> Result<(), String> {
        let inventory = self.gpus.look().map_err(|error| error.to_string())?;
        self.turn(&Command::Look(inventory)).map(drop).map_err(|error| error.to_string())
    }

    /// The GPU with this index.
    pub(super) fn gpu(&self, index: u32) -> Result<PartId, String> {
        let node = self.snapshot();
        let mut parts = node.parts.values().map(|state| &state.part);
        let found = parts.find(|part| part.parent.is_none() && part.gpu_index == index);
        found.map(|part| part.id.clone()).ok_or_else(|| format!("there is no GPU {index}"))
    }

    /// The index of a device's GPU.
    pub(super) fn index_of(&self, id: &DeviceId) -> u32 {
        // A device that was granted is of a part that is known.
        self.snapshot().part(&id.part).map_or(u32::MAX, |state| state.part.gpu_index)
    }

    /// Devices to be had: listed Healthy, and nobody's.
    pub(super) fn free(&self, resource: &Resource) -> Vec<DeviceId> {
        free_devices(&self.snapshot(), resource, self.rules.overcommit_percent)
    }

    /// Devices that nobody holds and that are offered, whether or not they may be granted: what a
    /// kubelet may name that did not hear yet.
    pub(super) fn unheld(&self, resource: &Resource) -> Vec<DeviceId> {
        let node = self.snapshot();
        let mut found = Vec::new();
        for state in node.parts.values() {
            for ((name, share), device) in &state.devices {
                if name == resource && !device.held() && device.offered() {
                    found.push(DeviceId { part: state.part.id.clone(), share: *share });
                }
            }
        }
        found
    }

    /// Turns a GPU's health.
    ///
    /// # Errors
    /// In words, if the kernel refuses.
    pub(super) fn turn_health(&mut self, health: Health) -> Result<(), String> {
        let id = self.gpu(health.gpu)?;
        self.gpus.change(|machine| machine.gpu(health.gpu).absent = health.state == State::Vanished)?;
        self.look()?;
        let severity = match health.state {
            State::Vanished => return Ok(()),
            State::Healthy => None,
            State::Degraded => Some(Severity::Degraded),
            State::Unhealthy => Some(Severity::Unhealthy),
        };
        // From any state to any other: a worse one is not made better by a lesser sign.
        let heal = Command::Heal { gpu: id.clone(), by: "the scenario".into(), why: String::new() };
        self.turn(&heal).map_err(|error| error.to_string())?;
        if let Some(severity) = severity {
            let (source, detail) = ("scenario".into(), String::new());
            let reading = Reading { part: id, source, code: 0, detail };
            let reason = "the scenario says so".into();
            let answer = TriageAnswer { severity, reason, again_after_s: None };
            self.turn(&Command::Triaged { reading, answer }).map_err(|error| error.to_string())?;
        }
        Ok(())
    }

    /// Cordons a GPU, or lets it be granted again.
    ///
    /// # Errors
    /// In words, if the kernel refuses.
    pub(super) fn cordon(&mut self, gpu: u32, on: bool) -> Result<(), String> {
        let gpu = self.gpu(gpu)?;
        let since_wall_ms = self.clock.now().wall_ms;
        let mark = Mark { by: "the scenario".into(), why: String::new(), since_wall_ms };
        let command = if on { Command::Cordon { gpu, mark } } else { Command::Uncordon { gpu } };
        self.turn(&command).map(drop).map_err(|error| error.to_string())
    }
}

fn machine(groups: &[Group]) -> Result<Machine, String> {
    let of = |group: &Group| SimGroup { model: group.model.clone(), count: group.count };
    let mut machine = Machine::from_groups(groups.iter().map(of).collect())?;
    let mut first = 0;
    for group in groups {
        for index in first..first + group.count {
            if !group.mig.is_empty() {
                machine.gpus.push(SimGpu { index, mig: group.mig.clone(), ..SimGpu::default() });
            }
        }
        first += group.count;
    }
    // Profiles are checked as a change is.
    let trial = SimGpus::from_machine(machine.clone());
    trial.change(|_| {}).map(|()| machine)
}
