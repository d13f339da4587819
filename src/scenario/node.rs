//! A simulated node: the real keeper and stack evaluation, with a store in memory, simulated GPUs and a clock that
//! steps advance.

use super::format::{Group, Health, Usage};
use berth_api::HealthState;
use berth_core::keeper::{Applied, Keeper, Snapshot};
use berth_core::stack::{Baseline, CallRecorder, DryRun, Evaluation, Faults, Offers};
use berth_gpus::sim::{Machine, SimGpu, SimGpus, SimGroup};
use berth_kernel::drain::marks::{Author, Owners};
use berth_kernel::hardware::gpu::Reading;
use berth_kernel::hardware::judgement::TriagedReading;
use berth_kernel::hardware::mig::MigStrategy;
use berth_kernel::hardware::triage::{Severity, TriageAnswer, XidRules};
use berth_kernel::ids::names::{DeviceId, GpuId, Resource};
use berth_kernel::ids::time::Now;
use berth_kernel::node::command::{Activation, Command, NewStack};
use berth_kernel::node::decide::decide;
use berth_kernel::node::ledger::Ledger;
use berth_kernel::node::ports::{Clock, Gpus as _};
use berth_kernel::node::rules::Rules;
use berth_kernel::policy::decider::Decider;
use berth_kernel::policy::stack::{Stack, StackEntry, StackOrigin};
use berth_kernel::policy::version::PolicyVersion;
use berth_kernel::sharing::listing::free_devices;
use berth_store::MemoryDisk;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// The start of every scenario: 2027-01-15, later than any default value; monotonic time begins at one hour, so that
/// times before the start can be expressed.
pub(super) const BEGIN: Now = Now { wall_ms: 1_800_000_000_000, mono_ms: 3_600_000 };
/// The store's name in allocation ids.
const STORE: u32 = 0x5ce0_0001;
/// Most calls of `offer` in one step, for a policy whose offers never settle.
const SETTLE_CALLS_MAX: usize = 4;

/// A clock that only steps advance.
#[derive(Debug, Default)]
pub(super) struct StepClock {
    passed_ms: AtomicU64,
}

impl Clock for StepClock {
    fn now(&self) -> Now {
        let passed = self.passed_ms.load(Ordering::Relaxed);
        Now { wall_ms: BEGIN.wall_ms + passed, mono_ms: BEGIN.mono_ms + passed }
    }
}

/// The node of one scenario.
pub(super) struct Node<'p> {
    pub(super) policies: &'p CallRecorder<'p>,
    pub(super) clock: Arc<StepClock>,
    keeper: Keeper,
    gpus: SimGpus,
    baseline: Baseline,
    faults: Faults,
    /// Faults since the last [`Node::take_faults`], each with its policy's label.
    new_faults: Vec<String>,
    /// The ledger's generation at the last call of `offer`.
    offered_generation: u64,
    /// When a policy requested the next call of `offer`, monotonic milliseconds.
    next_offer_mono_ms: Option<u64>,
}

impl<'p> Node<'p> {
    /// Creates a node with these GPUs and policy versions, and an empty stack.
    ///
    /// # Errors
    /// If the GPUs cannot be simulated.
    pub(super) fn new(
        groups: &[Group],
        versions: &[PolicyVersion],
        policies: &'p CallRecorder<'p>,
    ) -> Result<Self, String> {
        let gpus = SimGpus::from_machine(machine(groups)?);
        let clock = Arc::new(StepClock::default());
        let rules = Rules::default();
        let whole = Resource::parse("nvidia.com/gpu").map_err(|error| error.to_string())?;
        let baseline = Baseline {
            resource: whole,
            mig: MigStrategy::default(),
            mps_sockets: BTreeMap::new(),
            xids: XidRules::default(),
            quiet_ms: rules.timing.quiet_ms,
        };
        let store = MemoryDisk::new(STORE).open().map_err(|error| error.to_string())?;
        let as_clock = Arc::clone(&clock);
        let keeper = Keeper::open(Box::new(store), rules, as_clock).map_err(|error| error.to_string())?;
        let mut node = Self {
            policies,
            clock,
            keeper,
            gpus,
            baseline,
            faults: Faults::default(),
            new_faults: Vec::new(),
            offered_generation: 0,
            next_offer_mono_ms: None,
        };
        for version in versions {
            node.turn(&Command::RecordUpload(version.clone()))?;
        }
        node.scan()?;
        Ok(node)
    }

    /// Activates a stack as the daemon does, if its policies have no fault on this node. Returns their faults.
    ///
    /// # Errors
    /// If the kernel refuses the stack.
    pub(super) fn activate(&mut self, entries: Vec<StackEntry>) -> Result<Vec<String>, String> {
        let stack = NewStack {
            origin: StackOrigin::File,
            failed: None,
            by: "scenario".into(),
            why: String::new(),
            entries,
        };
        let candidate = stack.clone().into_stack(0, 0);
        let offers = self.evaluate_stack(&candidate, |evaluation| evaluation.offers());
        let faults = std::mem::take(&mut self.new_faults);
        if !faults.is_empty() {
            return Ok(faults);
        }
        let snapshot = self.snapshot();
        let mut node = Ledger::clone(&snapshot);
        node.apply(&decide(&snapshot, &Command::Offer(offers.parts.clone()), self.clock.now()).entry);
        let dry_run = DryRun {
            stack: &stack,
            policies: self.policies,
            node: &snapshot,
            now: self.clock.now(),
            baseline: &self.baseline,
            time_factor: 1,
        };
        if let Err((policy, fault)) = dry_run.try_parameters(&Arc::new(node)) {
            return Ok(vec![format!("{policy} {fault}")]);
        }
        let triage = dry_run.judge_again();
        // A step shows its own calls only.
        drop(self.policies.take());
        self.schedule_offers(&offers);
        let command = Command::Activate(Activation { stack, offers: offers.parts, triage });
        self.turn(&command)?;
        self.faults.reset();
        Ok(Vec::new())
    }

    /// The current snapshot.
    pub(super) fn snapshot(&self) -> Snapshot {
        self.keeper.snapshot()
    }

    /// Runs one keeper turn.
    pub(super) fn turn(&mut self, command: &Command) -> Result<Applied, String> {
        self.keeper.turn(command).map_err(|error| error.to_string())
    }

    /// Evaluates the active stack.
    pub(super) fn evaluate<T>(&mut self, call: impl FnOnce(Evaluation<'_>) -> T) -> T {
        let stack = Arc::clone(&self.snapshot().stack);
        self.evaluate_stack(&stack, call)
    }

    fn evaluate_stack<T>(&mut self, stack: &Stack, call: impl FnOnce(Evaluation<'_>) -> T) -> T {
        let node = self.snapshot();
        let faults = |faults: &Faults| -> Vec<u64> {
            let records = stack.entries.iter().enumerate().map(|(index, e)| faults.record(index, e));
            records.map(|record| record.failed()).collect()
        };
        let before = faults(&self.faults);
        let answer = call(Evaluation {
            stack,
            policies: self.policies,
            node: &node,
            now: self.clock.now(),
            faults: &mut self.faults,
            baseline: &self.baseline,
            calls: &mut Vec::new(),
            time_factor: 1,
        });
        // An evaluation calls an entry once, so its last fault is the new one.
        let after = faults(&self.faults);
        for (index, entry) in stack.entries.iter().enumerate() {
            if after[index] > before[index] {
                let record = self.faults.record(index, entry);
                let suspended = if record.suspended { "; the entry is suspended now" } else { "" };
                let last = record.last.unwrap_or_default();
                self.new_faults.push(format!("{} {last}{suspended}", entry.label()));
            }
        }
        answer
    }

    /// Takes the faults since the last call.
    pub(super) fn take_faults(&mut self) -> Vec<String> {
        std::mem::take(&mut self.new_faults)
    }

    /// Calls `offer` until the ledger no longer changes.
    ///
    /// # Errors
    /// If the kernel refuses the offers.
    pub(super) fn settle(&mut self) -> Result<(), String> {
        for _ in 0..SETTLE_CALLS_MAX {
            let due = self.next_offer_mono_ms.is_some_and(|at| self.clock.now().mono_ms >= at);
            if !due && self.offered_generation == self.snapshot().generation {
                break;
            }
            self.offered_generation = self.snapshot().generation;
            let offers = self.evaluate(|evaluation| evaluation.offers());
            self.schedule_offers(&offers);
            let applied = self.turn(&Command::Offer(offers.parts));
            applied.map_err(|error| format!("the offers are refused: {error}"))?;
        }
        Ok(())
    }

    fn schedule_offers(&mut self, offers: &Offers) {
        let now = self.clock.now().mono_ms;
        self.next_offer_mono_ms = offers.again_after_s.map(|s| now + 1000 * u64::from(s.max(1)));
    }

    /// Advances the clock second by second, each with a tick, an inventory scan, and offers if they are due.
    ///
    /// # Errors
    /// As [`Node::settle`].
    pub(super) fn advance(&mut self, seconds: u32) -> Result<(), String> {
        for _ in 0..seconds {
            self.clock.passed_ms.fetch_add(1000, Ordering::Relaxed);
            self.turn(&Command::Tick)?;
            self.scan()?;
            self.settle()?;
        }
        Ok(())
    }

    /// Runs an inventory scan.
    fn scan(&mut self) -> Result<(), String> {
        let inventory = self.gpus.scan().map_err(|error| error.to_string())?;
        self.turn(&Command::RecordScan(inventory)).map(drop)
    }

    /// The GPU with this index.
    pub(super) fn gpu(&self, index: u32) -> Result<GpuId, String> {
        let node = self.snapshot();
        let mut parts = node.parts.values().map(|state| &state.part);
        let gpu = parts.find(|part| part.is_whole_gpu() && part.gpu_index == index);
        gpu.map(|part| part.gpu.clone()).ok_or_else(|| format!("there is no GPU {index}"))
    }

    /// The index of a device's GPU.
    pub(super) fn index_of(&self, id: &DeviceId) -> u32 {
        // The parts of granted devices are known.
        self.snapshot().part(&id.part).map_or(u32::MAX, |state| state.part.gpu_index)
    }

    /// Free devices: listed as healthy, and not held.
    pub(super) fn free(&self, resource: &Resource) -> Vec<DeviceId> {
        free_devices(&self.snapshot(), resource)
    }

    /// Offered devices that are not held, whether or not they may be granted: a kubelet with an outdated list may name
    /// them.
    pub(super) fn unheld(&self, resource: &Resource) -> Vec<DeviceId> {
        let node = self.snapshot();
        let mut devices = Vec::new();
        for state in node.parts.values() {
            for ((name, share), device) in &state.devices {
                if name == resource && !device.held() && device.offered() {
                    devices.push(DeviceId { part: state.part.id.clone(), share: *share });
                }
            }
        }
        devices
    }

    /// Sets a GPU's health.
    ///
    /// # Errors
    /// If the kernel refuses the change.
    pub(super) fn set_health(&mut self, health: &Health) -> Result<(), String> {
        let id = self.gpu(health.gpu)?;
        self.gpus.change(|machine| machine.gpu(health.gpu).absent = health.state == HealthState::Vanished)?;
        self.scan()?;
        let severity = match &health.state {
            HealthState::Vanished => return Ok(()),
            HealthState::Healthy => None,
            HealthState::Degraded => Some(Severity::Degraded),
            HealthState::Unhealthy => Some(Severity::Unhealthy),
            HealthState::Other(state) => return Err(format!("{state:?} is not a state of a GPU")),
        };
        // Marked healthy first, since a milder reading does not improve a worse state.
        let mark_healthy =
            Command::MarkHealthy { gpu: id.clone(), by: "the scenario".into(), why: String::new() };
        self.turn(&mark_healthy)?;
        if let Some(severity) = severity {
            let (source, detail) = ("scenario".into(), String::new());
            let reading = Reading { part: id.as_part().clone(), source, code: 0, detail };
            let reason = "set by the scenario".into();
            let answer = TriageAnswer { severity, reason, again_after_s: None };
            self.turn(&Command::ApplyTriage(TriagedReading { reading, answer, by: Decider::Baseline }))?;
        }
        Ok(())
    }

    /// Sets the memory in use and the number of processes of a GPU, and scans it.
    ///
    /// # Errors
    /// If the GPU has less memory.
    pub(super) fn set_usage(&mut self, usage: &Usage) -> Result<(), String> {
        let id = self.gpu(usage.gpu)?;
        let memory_mib = self.snapshot().part(id.as_part()).map_or(0, |state| state.part.memory_mib);
        if let Some(used) = usage.memory_used_mib.filter(|used| *used > memory_mib) {
            return Err(format!("usage: {used} MiB in use; GPU {} has {memory_mib} MiB", usage.gpu));
        }
        self.gpus.change(|machine| {
            let gpu = machine.gpu(usage.gpu);
            gpu.memory_used_mib = usage.memory_used_mib.unwrap_or(gpu.memory_used_mib);
            gpu.processes = usage.processes.unwrap_or(gpu.processes);
        })?;
        self.scan()
    }

    /// Cordons or uncordons a GPU.
    ///
    /// # Errors
    /// If the kernel refuses the change.
    pub(super) fn cordon(&mut self, gpu: u32, on: bool) -> Result<(), String> {
        let gpu = self.gpu(gpu)?;
        let command = if on {
            Command::Cordon { gpu, author: Author::api("the scenario".into(), String::new()) }
        } else {
            Command::Uncordon { gpu, owners: Owners::All }
        };
        self.turn(&command).map(drop)
    }
}

fn machine(groups: &[Group]) -> Result<Machine, String> {
    let sim_group = |group: &Group| SimGroup { model: group.model.clone(), count: group.count };
    let mut machine = Machine::from_groups(groups.iter().map(sim_group).collect())?;
    let mut first = 0;
    for group in groups {
        for index in first..first + group.count {
            if !group.mig.is_empty() {
                machine.gpus.push(SimGpu { index, mig: group.mig.clone(), ..SimGpu::default() });
            }
        }
        first += group.count;
    }
    // A change checks the MIG profiles.
    let trial = SimGpus::from_machine(machine.clone());
    trial.change(|_| {}).map(|()| machine)
}
