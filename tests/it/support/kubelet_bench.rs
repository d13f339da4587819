//! A node without a cluster: the real keeper, policy thread and kubelet crate between simulated GPUs and the stand-in
//! kubelet.

use crate::support::kubelet_fakes::{MapStore, ScriptedPolicies, SkipClock, scripted_version};
pub(crate) use crate::support::wait::SOON;
use berth_core::keeper::Keeper;
use berth_core::stack::Baseline;
use berth_core::{ActivateError, Core, KernelHandle};
use berth_kernel::drain::marks::Author;
use berth_kernel::grants::allocation::Allocation;
use berth_kernel::hardware::gpu::{Inventory, Links, Part, Reading};
use berth_kernel::hardware::mig::MigStrategy;
use berth_kernel::hardware::triage::XidRules;
use berth_kernel::ids::names::{GpuId, PartId, Resource};
use berth_kernel::ids::pci::PciBusId;
use berth_kernel::ids::time::Timing;
use berth_kernel::node::command::{Command, NewStack};
use berth_kernel::node::ledger::Ledger;
use berth_kernel::node::ports::Clock;
use berth_kernel::node::rules::Rules;
use berth_kernel::policy::stack::{OnFault, Permissions, StackEntry};
use berth_kubelet::{DevicePlugins, Running, Settings, Timeouts};
use berth_kubelet::{Edits, ReconcileTiming};
use kubelet_standin::{Kubelet, Options};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tempfile::TempDir;

pub(crate) const GPU: &str = "nvidia.com/gpu";
pub(crate) const SHARED: &str = "nvidia.com/gpu.shared";
/// Memory of every simulated GPU.
pub(crate) const MEMORY_MIB: u64 = 81_920;

/// A node under test.
pub(crate) struct Node {
    pub(crate) kubelet: Kubelet,
    pub(crate) kernel: KernelHandle,
    pub(crate) core: Core,
    pub(crate) settings: Settings,
    pub(crate) running: Option<Running>,
    pub(crate) clock: Arc<SkipClock>,
    gpus: Vec<Part>,
    _folder: TempDir,
}

/// How a node is made.
pub(crate) struct Recipe {
    pub(crate) gpus: u32,
    pub(crate) numa: bool,
    pub(crate) timing: Timing,
    pub(crate) timeouts: Timeouts,
    pub(crate) rounds: ReconcileTiming,
    pub(crate) edits: Edits,
    pub(crate) kubelet: fn(&mut Options),
    /// The script of the stack's policy; `None` leaves it to the baseline.
    pub(crate) policy: Option<&'static str>,
}

impl Default for Recipe {
    fn default() -> Self {
        Self {
            gpus: 4,
            numa: false,
            timing: Timing {
                retire_ms: 200,
                allocate_grace_ms: 200,
                passes_apart_ms: 100,
                kubelet_settle_ms: 100,
                reply_settle_ms: 100,
                ..Timing::default()
            },
            timeouts: Timeouts { contested_pause: Duration::from_secs(30), ..Timeouts::default() },
            rounds: ReconcileTiming {
                list_interval: Duration::from_millis(50),
                list_interval_cordoned: Duration::from_millis(50),
                full_pass_interval: Duration::from_secs(60),
                checkpoint_wait: Duration::from_secs(1),
            },
            edits: Edits::default(),
            kubelet: |_| {},
            policy: None,
        }
    }
}

pub(crate) fn resource(name: &str) -> Resource {
    Resource::parse(name).unwrap()
}

pub(crate) fn gpu(n: u32) -> PartId {
    PartId::parse(&format!("GPU-{n}")).unwrap()
}

pub(crate) fn gpu_id(n: u32) -> GpuId {
    GpuId::of_whole(&gpu(n))
}

/// An operator's order to cordon a GPU for this reason.
pub(crate) fn cordon(gpu: GpuId, why: &str) -> Command {
    Command::Cordon { gpu, author: Author::api("ada".into(), why.into()) }
}

impl Recipe {
    /// The node, its daemon part not started yet and no kubelet running.
    pub(crate) async fn idle(self) -> Node {
        let policy = self.policy;
        let node = self.looked().await;
        match policy {
            Some(script) => node.activate(script).await,
            None => {
                node.kernel.reoffer().await.unwrap();
            }
        }
        node
    }

    /// The same with GPUs only: no stack is active, and no offers were evaluated.
    pub(crate) async fn looked(self) -> Node {
        let folder = tempfile::tempdir().unwrap();
        let mut options = Options::new(folder.path());
        (self.kubelet)(&mut options);
        let rules = Rules { timing: self.timing, ..Rules::default() };
        let skip = Arc::new(SkipClock::default());
        let clock: Arc<dyn Clock> = skip.clone();
        let store = Box::new(MapStore::default());
        let keeper = Keeper::open(store, rules, Arc::clone(&clock)).unwrap();
        let baseline = Baseline {
            resource: resource(GPU),
            mig: MigStrategy::default(),
            mps_sockets: BTreeMap::new(),
            xids: XidRules::default(),
            quiet_ms: 1000,
        };
        let core =
            berth_core::start(keeper, &Arc::new(ScriptedPolicies), clock, baseline, None).unwrap().core;
        let gpus = (0..self.gpus).map(|n| part(n, self.numa)).collect();
        let settings = Settings {
            device_plugins: folder.path().join("device-plugins"),
            root_dir: folder.path().to_owned(),
            edits: berth_kubelet::fixed_edits(self.edits),
            reconcile: self.rounds,
            timeouts: self.timeouts,
        };
        let node = Node {
            kubelet: Kubelet::new(options),
            kernel: core.kernel.clone(),
            core,
            settings,
            running: None,
            clock: skip,
            gpus,
            _folder: folder,
        };
        node.look(&[]).await;
        node
    }

    /// The node with everything running.
    pub(crate) async fn node(self) -> Node {
        let mut node = self.idle().await;
        node.kubelet.start().await.unwrap();
        node.start();
        node
    }
}

fn part(n: u32, numa: bool) -> Part {
    Part {
        gpu: GpuId::of_whole(&gpu(n)),
        id: gpu(n),
        vendor: "nvidia".into(),
        model: "Simulated".into(),
        gpu_index: n,
        minor: Some(n),
        memory_mib: MEMORY_MIB,
        pci_bus: PciBusId::parse(&format!("00000000:{n:02x}:00.0")).ok(),
        numa_node: numa.then_some(n / 2),
        mig_enabled: false,
        mig: None,
        attributes: BTreeMap::new(),
    }
}

impl Node {
    pub(crate) fn front(&self) -> DevicePlugins {
        DevicePlugins::new(self.settings.clone(), self.kernel.clone())
    }

    pub(crate) fn start(&mut self) {
        self.running = Some(self.front().start());
    }

    pub(crate) async fn stop(&mut self) {
        if let Some(running) = self.running.take() {
            running.stop().await;
        }
    }

    /// A scan in which these GPUs have errors.
    pub(crate) async fn look(&self, failing: &[u32]) {
        self.look_without(&[], failing).await;
    }

    /// A scan in which some GPUs are missing, and others have errors.
    pub(crate) async fn look_without(&self, missing: &[u32], failing: &[u32]) {
        let there = |part: &&Part| missing.iter().all(|n| part.id != gpu(*n));
        let inventory = Inventory {
            parts: self.gpus.iter().filter(there).cloned().collect(),
            links: Links::default(),
            scan_errors: failing.iter().map(|n| (gpu_id(*n), "fell off the bus".into())).collect(),
            ..Inventory::default()
        };
        let kernel = self.kernel.clone();
        let looked = tokio::task::spawn_blocking(move || kernel.record_scan(inventory));
        looked.await.unwrap().unwrap();
    }

    /// A scan of the GPUs, all of them healthy, with these readings.
    pub(crate) async fn look_with(&self, signs: Vec<Reading>) {
        let inventory = Inventory { parts: self.gpus.clone(), signs, ..Inventory::default() };
        let kernel = self.kernel.clone();
        let looked = tokio::task::spawn_blocking(move || kernel.record_scan(inventory));
        looked.await.unwrap().unwrap();
    }

    /// Makes the policy of the stack say something else.
    pub(crate) async fn activate(&self, script: &str) {
        self.try_activate(script).await.unwrap();
    }

    /// The same where it may be refused.
    pub(crate) async fn try_activate(&self, script: &str) -> Result<(), ActivateError> {
        let version = scripted_version();
        let kernel = self.kernel.clone();
        let kept = version.clone();
        tokio::task::spawn_blocking(move || kernel.execute_blocking(Command::RecordUpload(kept)))
            .await
            .unwrap()
            .unwrap();
        let entry = StackEntry {
            name: version.name,
            digest: version.digest,
            parameters: script.to_owned(),
            permissions: Permissions { environment: vec!["TOLD_*".into()], ..Permissions::default() },
            on_fault: OnFault::Deny,
        };
        let stack = NewStack { from_api: true, by: "test".into(), why: String::new(), entries: vec![entry] };
        self.core.policies.activate(stack, None).await.map(drop)
    }

    /// Waits until the kubelet has so many of a resource to give away, and is served.
    pub(crate) async fn allocatable(&self, resource: &str, count: usize) {
        let what = format!("{count} allocatable {resource}");
        let there = |k: &Kubelet| k.allocatable(resource) == Some(count) && k.is_served(resource);
        self.kubelet.wait_for(&what, SOON, there).await.unwrap();
    }

    /// Waits until the ledger says so.
    pub(crate) async fn wait(&self, what: &str, holds: impl Fn(&Ledger) -> bool) {
        let mut snapshots = self.kernel.watch();
        let waited = tokio::time::timeout(SOON, snapshots.wait_for(|s| holds(s))).await;
        assert!(waited.is_ok(), "waited {SOON:?} for {what}; live: {:#?}", self.live());
    }

    /// Runs rounds until `holds` is true, and moves the clock on by `skip_ms` before each. One round may not be enough,
    /// since it waits only briefly for a file of the kubelet.
    pub(crate) async fn rounds_until(&self, what: &str, skip_ms: u64, holds: impl Fn(&Ledger) -> bool) {
        let end = Instant::now() + SOON;
        while !holds(&self.kernel.snapshot()) {
            assert!(Instant::now() < end, "no round within {SOON:?} led to {what}; live: {:#?}", self.live());
            self.clock.skip(skip_ms);
            self.round().await;
        }
    }

    /// Live allocations, oldest first.
    pub(crate) fn live(&self) -> Vec<Allocation> {
        let snapshot = self.kernel.snapshot();
        snapshot.live.values().map(|a| (**a).clone()).collect()
    }

    /// Takes one round now.
    pub(crate) async fn round(&self) {
        self.running.as_ref().unwrap().reconcile().await.unwrap();
    }

    pub(crate) fn plugins_folder(&self) -> PathBuf {
        self.settings.device_plugins.clone()
    }

    /// Nothing that was done would have hurt a real kubelet.
    pub(crate) fn assert_harmless(&self) {
        assert_eq!(self.kubelet.anomalies(), []);
    }
}
