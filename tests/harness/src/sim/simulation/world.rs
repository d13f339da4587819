//! One run: the node, its kubelet, its operator, and the daemon between them.

use super::checks::{Checks, Heard};
use super::claims::{Claims, first_api, has_claims};
use super::clock::Hands;
use super::containers::{Runtime, has_guard};
use super::daemon::{Daemon, Surroundings};
use super::disk::Disk;
use super::ends::{Cause, Sight, Truth};
use super::event::{CrashAt, Event, Lost};
use super::evictions::Evictions;
use super::kubelet::{Kubelet, RECORD_MS_MAX};
use super::machine::Machine;
use super::people::People;
use super::pods::Wish;
use super::policies::{ScriptedPolicies, resource};
use super::rng::Rng;
use super::views::{Views, has_sources};
use super::violation::Violation;
use berth_core::keeper::{Applied, CommandError, Snapshot};
use berth_core::stack::Baseline;
use berth_kernel::evidence::kubelet_view::CheckpointEntry;
use berth_kernel::grants::history::{HISTORY_ALLOCATIONS_MAX, HistoryLimit};
use berth_kernel::hardware::gpu::{Inventory, Reading};
use berth_kernel::hardware::mig::MigStrategy;
use berth_kernel::hardware::triage::XidRules;
use berth_kernel::node::command::Command;
use berth_kernel::node::ledger::Ledger;
use berth_kernel::node::ports::Clock;
use berth_kernel::node::rules::Rules;
use berth_kernel::sharing::listing::listing;
use berth_kernel::sharing::via::KubeletApi;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Scans and views that may wait to be submitted.
const WAITING_MAX: usize = 6;

/// Everything there is.
pub(crate) struct World {
    pub(crate) around: Surroundings,
    pub(crate) machine: Machine,
    pub(crate) kubelet: Kubelet,
    pub(crate) daemon: Option<Daemon>,
    pub(crate) checks: Checks,
    /// Whether this run has sources of pods, and GPUs that list their processes.
    pub(crate) sources: bool,
    pub(crate) shows: Views,
    pub(crate) runtime: Runtime,
    /// Whether this run has a guard.
    pub(crate) guarded: bool,
    /// Whether this run has claims.
    pub(crate) has_claims: bool,
    pub(crate) claims: Claims,
    pub(crate) evictions: Evictions,
    pub(crate) people: People,
    /// The last ledger that anybody saw.
    last: Snapshot,
    /// A snapshot of some time ago, as a policy thread that was slow would have.
    pub(crate) older: Snapshot,
    /// A round under way, and the checkpoint file that it found.
    pub(crate) round: Option<(Sight, u64)>,
    /// Reconcile passes that wait to be submitted.
    pub(crate) views: Vec<Sight>,
    /// Which of the kubelet's accounts is lost, and its checkpoint of when that began.
    pub(crate) lost: (Option<Lost>, Vec<CheckpointEntry>),
    looks: Vec<Inventory>,
    /// Whether the kubelet reads new device lists at once.
    eager: bool,
    /// Grants and ends, for the figures.
    pub(crate) granted: u64,
}

impl World {
    /// The world of a seed, with the daemon up.
    pub(crate) fn new(seed: u64) -> Self {
        let mut rng = Rng::new(!seed);
        let machine = Machine::new(&mut rng);
        // By the seed itself: other draws stay as they were.
        let kept = if seed.is_multiple_of(2) { 8 } else { HISTORY_ALLOCATIONS_MAX };
        let rules = Rules {
            overcommit_percent: rng.of(&[100, 100, 150, 200]),
            history: HistoryLimit { allocations: kept, ..HistoryLimit::default() },
            via: first_api(seed),
            ..Rules::default()
        };
        let baseline = Baseline {
            resource: resource(0),
            mig: rng.of(&[MigStrategy::None, MigStrategy::Single, MigStrategy::Mixed, MigStrategy::Mixed]),
            mps_sockets: BTreeMap::new(),
            xids: XidRules::default(),
            quiet_ms: rules.timing.quiet_ms,
        };
        let around = Surroundings {
            hands: Arc::new(Hands::new()),
            disk: Disk::new(),
            policies: ScriptedPolicies::default(),
            rules,
            baseline,
        };
        let mut kubelet = Kubelet::default();
        kubelet.start(true, 1_699_999_000_000, 1);
        let eager = rng.chance(50);
        let mut world = Self {
            around,
            machine,
            kubelet,
            daemon: None,
            checks: Checks::default(),
            sources: has_sources(seed),
            shows: Views::default(),
            runtime: Runtime::default(),
            guarded: has_guard(seed),
            has_claims: has_claims(seed),
            claims: Claims::default(),
            evictions: Evictions::default(),
            people: People::default(),
            last: Snapshot::default(),
            older: Snapshot::default(),
            round: None,
            views: Vec::new(),
            lost: (None, Vec::new()),
            looks: Vec::new(),
            eager,
            granted: 0,
        };
        if rng.chance(30) {
            world.former_plugin(&mut rng);
        }
        world.start();
        world.first_stack(&mut rng);
        world
    }

    /// One event, with every check.
    pub(crate) fn step(&mut self, event: &Event) {
        match event {
            Event::Wait { ms } => self.wait(*ms),
            Event::ClockJump { ms } => self.around.hands.jump(*ms),
            Event::Start { resource, count, pick, fate, stale, init } => {
                let wish = Wish { count: *count, pick: *pick, fate: *fate, stale: *stale, init: *init };
                self.start_pod(*resource, &wish);
            }
            Event::App { which, subset } => self.start_app(*which, *subset),
            Event::Reissue { which, stale } => self.reissue(*which, *stale),
            Event::Record => self.kubelet.record_slow(),
            Event::Stop { which } => self.kubelet.stop_pod(*which),
            Event::Odd { resource: r, part, share, twice } => self.odd(&resource(*r), *part, *share, *twice),
            Event::Foreign { which, held, times } => self.foreign_client(*which, *held, *times),
            Event::Pair { resource, count, pick } => self.start_pair(*resource, *count, *pick),
            Event::Successor { which, devices } => self.successor(*which, *devices),
            Event::Twice { which } => self.start_on_held(*which),
            Event::Evidence { lost } => self.lose_evidence(*lost),
            Event::Stream => self.stream(),
            Event::KubeletStops => self.kubelet.stop(),
            Event::KubeletStarts { ready } => self.start_kubelet(*ready),
            Event::KubeletReady => self.kubelet.ready = true,
            Event::Round(look) => self.whole_round(*look),
            Event::RoundBegins { list } => self.begin_round(*list),
            Event::RoundReads { write, read } => self.read_round(*write, *read),
            Event::RoundArrives { which, keep } => self.hand_in_round(*which, *keep),
            Event::Glance { list, read } => self.glance(*list, *read),
            Event::Vanish { part } => self.machine.vanish(*part),
            Event::Return { part } => self.machine.come_back(*part),
            Event::Trouble { part, on } => self.machine.trouble(*part, *on),
            Event::Driver(state) => self.machine.driver = *state,
            Event::KubeletForgets { which } => self.kubelet.forgets(*which),
            Event::Status => self.write_status(),
            Event::Containers(how) => self.show_containers(*how),
            Event::LeaveContainers { which } => self.leave_containers(*which),
            Event::LimitDrifts { which, to_mib } => self.drift(*which, *to_mib),
            Event::EndLeftContainers => self.end_left_containers(),
            Event::DeletePod { which, force } => self.delete_pod(*which, *force),
            Event::Pods { how, later } => self.show_pods(*how, *later),
            Event::PodsArrive { which, keep } => self.pods_arrive(*which, *keep),
            Event::Evict { which, refusal, stale } => self.evict(*which, *refusal, *stale),
            Event::EvictAnswered { keep } => self.evict_answered(*keep),
            Event::HostProcess { part, on } => self.host_process(*part, *on),
            Event::Tells { part, on } => self.tells(*part, *on),
            Event::LeaveBehind { which } => self.leave_behind(*which),
            Event::GpuLook => self.look(self.inventory()),
            Event::GpuLookBegins if self.looks.len() < WAITING_MAX => {
                self.looks.push(self.inventory());
            }
            Event::GpuLookBegins => {}
            Event::GpuLookArrives { which, keep } => self.look_arrives(*which, *keep),
            Event::Xid { part, code } => self.xid(*part, *code),
            Event::Disk { fault } => self.around.disk.set_fault(*fault),
            Event::Crash { at: CrashAt::Now } => self.die(),
            Event::Crash { at } => self.around.disk.set_crash(Some(*at)),
            Event::DaemonStarts => self.start(),
            Event::Mood { policy, mood } => self.around.policies.set_mood(*policy, *mood),
            Event::Offer => self.reoffer(),
            Event::Claim { count, pick, contested, stale } => {
                self.start_claim(*count, *pick, *contested, *stale);
            }
            Event::PrepareAgain { which, more, stale } => self.prepare_again(*which, *more, *stale),
            Event::Unprepare { which } => self.unprepare(*which),
            Event::Via { gpu, dra } => {
                let api = if *dra { KubeletApi::Dra } else { KubeletApi::DevicePlugin };
                self.set_via(self.machine.part(*gpu).gpu.clone(), api);
            }
            Event::FinishMove { gpu } => drop(self.finish_move(self.machine.part(*gpu).gpu.clone())),
            Event::Cordon { .. }
            | Event::Drain { .. }
            | Event::StopDrain { .. }
            | Event::Heal { .. }
            | Event::Uncordon { .. }
            | Event::Forget { .. }
            | Event::End { .. }
            | Event::Upload { .. }
            | Event::Delete { .. }
            | Event::Activate { .. } => self.operator(event),
        }
        if self.eager {
            self.stream();
        }
    }

    /// The newest ledger that anybody saw.
    pub(crate) fn ledger(&self) -> &Ledger {
        &self.last
    }

    /// The same, to keep.
    pub(crate) fn newest(&self) -> Snapshot {
        Arc::clone(&self.last)
    }

    /// What there is, in one line for people.
    pub(crate) fn in_words(&self) -> String {
        let live = self.last.live.values().map(|a| {
            let overlapped = if a.overlapped { " overlapped" } else { "" };
            format!("{} {:?}{overlapped}", a.id, a.devices)
        });
        let kubelet = self.kubelet.held().map(|h| format!("pod-{}/{} {:?}", h.pod, h.container, h.devices));
        format!(
            "     t={} daemon={} live=[{}] kubelet=[{}]",
            self.around.hands.true_ms(),
            if self.daemon.is_some() { "up" } else { "down" },
            live.collect::<Vec<_>>().join(", "),
            kubelet.collect::<Vec<_>>().join(", ")
        )
    }

    /// One turn of the keeper, with every check. `None` if there is no daemon (any more).
    pub(crate) fn turn(&mut self, command: &Command, cause: Cause) -> Option<Result<Applied, CommandError>> {
        let daemon = self.daemon.as_mut()?;
        let before = daemon.snapshot();
        let Some(answered) = daemon.turn(command) else {
            self.checks.unsure(command, cause);
            self.die();
            return None;
        };
        let after = daemon.snapshot();
        if matches!(answered, Err(CommandError::Store(_))) {
            self.checks.unsure(command, cause.clone());
        }
        let heard = Heard {
            command,
            cause,
            taken_in: answered.is_ok(),
            may_differ: daemon.may_differ(),
            now: self.around.hands.now(),
            true_ms: self.around.hands.true_ms(),
        };
        let truth = Truth { kubelet: &self.kubelet, views: &self.shows };
        self.checks.turn(&before, &after, &heard, &self.around.rules, truth, &self.around.disk);
        if let (Command::RecordScan(look), true) = (command, heard.taken_in) {
            let (timing, true_ms) = (&self.around.rules.timing, heard.true_ms);
            self.checks.note(self.people.looked(&before, &after, look, timing, true_ms));
        }
        self.last = after;
        Some(answered)
    }

    /// Takes an answer, or notes what is wrong with it.
    pub(crate) fn take<T>(&mut self, checked: Result<T, Violation>) -> Option<T> {
        checked.map_err(|violation| self.checks.violations.push(violation)).ok()
    }

    fn wait(&mut self, ms: u64) {
        let late = |since: u64| since + RECORD_MS_MAX < self.around.hands.true_ms() + ms;
        if self.kubelet.slow_since().is_some_and(late) {
            self.kubelet.record_slow();
        }
        self.around.hands.pass(ms);
        if self.daemon.is_none() {
            self.start();
        }
        self.older = Arc::clone(&self.last);
        let before = self.newest();
        if let Some(Ok(_)) = self.turn(&Command::Tick, Cause::Nothing) {
            self.evictions_ticked(&before);
        }
    }

    /// The process is killed.
    fn die(&mut self) {
        self.daemon = None;
        // What it was about to hand in died with it, and its streams ended.
        self.views.clear();
        self.looks.clear();
        self.round = None;
        self.shows.forget();
        self.evictions.forget();
        self.kubelet.lists.clear();
        self.around.disk.set_crash(None);
    }

    /// A daemon that is down starts, as `Starting::open` and `bring_up` do.
    pub(crate) fn start(&mut self) {
        if self.daemon.is_some() {
            return;
        }
        let Some(daemon) = Daemon::open(&self.around) else {
            return self.die();
        };
        let after = daemon.snapshot();
        let heard = Heard {
            command: &Command::Tick,
            cause: Cause::Nothing,
            taken_in: true,
            may_differ: false,
            now: self.around.hands.now(),
            true_ms: self.around.hands.true_ms(),
        };
        let before = Arc::clone(&self.last);
        let (rules, disk) = (&self.around.rules, &self.around.disk);
        let truth = Truth { kubelet: &self.kubelet, views: &self.shows };
        self.checks.restarted(&before, &after, &heard, rules, truth, disk);
        self.last = Arc::clone(&after);
        self.older = after;
        self.daemon = Some(daemon);
        let is_up = self.bring_up();
        if !is_up {
            self.die();
        }
        self.stream();
    }

    fn bring_up(&mut self) -> bool {
        let look = Command::RecordScan(self.inventory());
        if !matches!(self.turn(&look, Cause::Nothing), Some(Ok(_))) {
            return false;
        }
        self.report_cdi() && self.offer_now() && self.adopt()
    }

    /// The kubelet reads the device lists of a daemon that is up.
    pub(crate) fn stream(&mut self) {
        if self.daemon.is_none() || !self.kubelet.running {
            return;
        }
        let resources = self.last.resources().into_iter();
        let lists = resources.map(|r| (r.clone(), listing(&self.last, &r))).collect();
        if lists != self.kubelet.lists {
            self.kubelet.lists = lists;
            self.kubelet.write();
        }
    }

    fn start_kubelet(&mut self, ready: bool) {
        let now = self.around.hands.now();
        self.kubelet.start(ready, now.wall_ms, self.around.hands.true_ms());
        self.stream();
    }

    fn look(&mut self, inventory: Inventory) {
        self.turn(&Command::RecordScan(inventory), Cause::Nothing);
    }

    fn look_arrives(&mut self, which: u32, keep: bool) {
        if self.looks.is_empty() {
            return;
        }
        let at = which as usize % self.looks.len();
        let inventory = if keep { self.looks[at].clone() } else { self.looks.remove(at) };
        self.look(inventory);
    }

    fn xid(&mut self, part: u32, code: u32) {
        let part = self.machine.part(part).id.clone();
        let reading =
            Reading { part, source: "xid".into(), code: u64::from(code), detail: "simulated".into() };
        let Some(daemon) = &mut self.daemon else { return };
        let triaged = daemon.triage(&self.around, &reading);
        if let Some(triaged) = self.take(triaged) {
            self.turn(&Command::ApplyTriage(triaged), Cause::Nothing);
        }
    }

    fn reoffer(&mut self) {
        self.offer_now();
    }

    /// Evaluates the stack for offers and submits them. Returns whether they were accepted.
    fn offer_now(&mut self) -> bool {
        let Some(daemon) = &mut self.daemon else { return false };
        let offers = daemon.offers(&self.around);
        let Some(offers) = self.take(offers) else { return false };
        matches!(self.turn(&Command::Offer(offers), Cause::Nothing), Some(Ok(_)))
    }
}
