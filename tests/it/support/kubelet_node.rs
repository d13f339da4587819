//! A node without a cluster: the real keeper, policy thread and kubelet crate between simulated GPUs and the stand-in
//! kubelet.

use crate::support::admin_fakes::SwitchStore;
use crate::support::gpus::{WHOLE, gpu, gpu_id, part, resource};
use crate::support::guests::{NOW, policies, shared_policies};
use crate::support::kubelet_fakes::{ScriptedPolicies, SkipClock, scripted_version};
use crate::support::wait::SOON;
use berth_core::keeper::Keeper;
use berth_core::stack::Baseline;
use berth_core::{ActivateError, Core, KernelHandle};
use berth_kernel::drain::marks::Author;
use berth_kernel::evidence::pods::{Pod, PodsSource, PodsView, Stage};
use berth_kernel::grants::allocation::Allocation;
use berth_kernel::hardware::gpu::{Inventory, Link, Links, Part, Path, Reading};
use berth_kernel::hardware::mig::MigStrategy;
use berth_kernel::hardware::triage::XidRules;
use berth_kernel::ids::names::GpuId;
use berth_kernel::ids::time::Timing;
use berth_kernel::node::command::{Command, NewStack};
use berth_kernel::node::ledger::Ledger;
use berth_kernel::node::ports::Clock;
use berth_kernel::node::rules::Rules;
use berth_kernel::policy::stack::{OnFault, Permissions, StackEntry};
use berth_kernel::policy::version::PolicyVersion;
use berth_kernel::sharing::via::KubeletApi;
use berth_kubelet::{DevicePlugins, RunningPlugins, Settings, Timeouts};
use berth_kubelet::{Edits, ReconcileTiming};
use kubelet_standin::{Kubelet, Options, PodSpec};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};
use tempfile::TempDir;
use tokio::sync::watch;

/// A node with a stand-in kubelet and without an admin API. Its policies are [`ScriptedPolicies`], or shipped ones.
pub(crate) struct KubeletNode {
    pub(crate) kubelet: Kubelet,
    pub(crate) kernel: KernelHandle,
    pub(crate) core: Core,
    pub(crate) settings: Settings,
    pub(crate) running: Option<RunningPlugins>,
    pub(crate) clock: Arc<SkipClock>,
    gpus: Vec<Part>,
    links: Links,
    /// While true, the store takes nothing.
    pub(crate) store_fails: Arc<AtomicBool>,
    _folder: TempDir,
}

/// The settings of a [`KubeletNode`].
pub(crate) struct NodeOptions {
    pub(crate) gpus: u32,
    pub(crate) numa: bool,
    pub(crate) timing: Timing,
    pub(crate) timeouts: Timeouts,
    pub(crate) reconcile: ReconcileTiming,
    pub(crate) edits: Edits,
    /// The API through which the GPUs are granted.
    pub(crate) via: KubeletApi,
    pub(crate) kubelet: fn(&mut Options),
    /// The script of the stack's policy; `None` leaves it to the baseline.
    pub(crate) policy: Option<&'static str>,
    /// Shipped policies as the stack, by name and parameters.
    pub(crate) stack: &'static [(&'static str, &'static str)],
    /// Pairs of GPUs with NVLinks between them.
    pub(crate) nvlinks: &'static [(u32, u32)],
}

impl Default for NodeOptions {
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
            timeouts: Timeouts::default(),
            reconcile: ReconcileTiming {
                list_interval: Duration::from_millis(50),
                list_interval_cordoned: Duration::from_millis(50),
                full_pass_interval: Duration::from_secs(60),
                checkpoint_wait: Duration::from_secs(1),
            },
            edits: Edits::default(),
            via: KubeletApi::default(),
            kubelet: |_| {},
            policy: None,
            stack: &[],
            nvlinks: &[],
        }
        .with_timeouts(|t| t.loss.contested_pause = Duration::from_secs(30))
    }
}

/// An operator's order to cordon a GPU for this reason.
pub(crate) fn cordon(gpu: GpuId, why: &str) -> Command {
    Command::Cordon { gpu, author: Author::api("ada".into(), why.into()) }
}

impl NodeOptions {
    /// The options with other timeouts.
    pub(crate) fn with_timeouts(mut self, change: impl FnOnce(&mut Timeouts)) -> Self {
        change(&mut self.timeouts);
        self
    }

    /// The node before its device plugins and its kubelet are started.
    pub(crate) async fn unstarted(self) -> KubeletNode {
        let (policy, stack) = (self.policy, self.stack);
        let node = self.scanned().await;
        match policy {
            Some(script) => node.activate(script).await,
            None if !stack.is_empty() => node.activate_shipped(stack).await,
            None => {
                node.kernel.reoffer().await.unwrap();
            }
        }
        node
    }

    /// The node after its first scan of the GPUs: no stack is active, and no offers were evaluated.
    pub(crate) async fn scanned(self) -> KubeletNode {
        let folder = tempfile::tempdir().unwrap();
        let mut options = Options::new(folder.path());
        (self.kubelet)(&mut options);
        let rules = Rules { timing: self.timing, via: self.via, ..Rules::default() };
        let skip = Arc::new(SkipClock::default());
        let clock: Arc<dyn Clock> = skip.clone();
        let store = Box::new(SwitchStore::default());
        let store_fails = Arc::clone(&store.fails);
        let keeper = Keeper::open(store, rules, Arc::clone(&clock)).unwrap();
        let baseline = Baseline {
            resource: resource(WHOLE),
            mig: MigStrategy::default(),
            mps_sockets: BTreeMap::new(),
            xids: XidRules::default(),
            quiet_ms: 1000,
        };
        let running = match self.stack {
            [] => berth_core::start(keeper, &Arc::new(ScriptedPolicies), clock, baseline, None),
            _ => berth_core::start(keeper, shared_policies(), clock, baseline, None),
        };
        let core = running.unwrap().core;
        let gpus = (0..self.gpus)
            .map(|n| Part { numa_node: self.numa.then_some(n / 2), ..part(n, gpu(n)) })
            .collect();
        let mut links = Links::default();
        for (a, b) in self.nvlinks {
            links.set(&gpu_id(*a), &gpu_id(*b), Link { path: Path::SameNuma, nvlinks: 18 });
        }
        let settings = Settings {
            device_plugins: folder.path().join("device-plugins"),
            root_dir: folder.path().to_owned(),
            edits: watch::Sender::new(Arc::new(self.edits)).subscribe(),
            reconcile: self.reconcile,
            timeouts: self.timeouts,
        };
        let node = KubeletNode {
            kubelet: Kubelet::new(options),
            kernel: core.kernel.clone(),
            core,
            settings,
            running: None,
            clock: skip,
            gpus,
            links,
            store_fails,
            _folder: folder,
        };
        node.scan_failing(&[]).await;
        node
    }

    /// The node with its device plugins and its kubelet.
    pub(crate) async fn started(self) -> KubeletNode {
        let mut node = self.unstarted().await;
        node.kubelet.start().await.unwrap();
        node.start();
        node
    }
}

impl KubeletNode {
    pub(crate) fn device_plugins(&self) -> DevicePlugins {
        DevicePlugins::new(self.settings.clone(), self.kernel.clone())
    }

    pub(crate) fn start(&mut self) {
        self.running = Some(self.device_plugins().start());
    }

    pub(crate) async fn stop(&mut self) {
        if let Some(running) = self.running.take() {
            running.stop().await;
        }
    }

    /// Records a scan in which these GPUs have errors.
    pub(crate) async fn scan_failing(&self, failing: &[u32]) {
        self.scan_without(&[], failing).await;
    }

    /// Records a scan in which some GPUs are missing, and others have errors.
    pub(crate) async fn scan_without(&self, missing: &[u32], failing: &[u32]) {
        let is_present = |part: &&Part| missing.iter().all(|n| part.id != gpu(*n));
        self.record_scan(Inventory {
            parts: self.gpus.iter().filter(is_present).cloned().collect(),
            scan_errors: failing.iter().map(|n| (gpu_id(*n), "fell off the bus".into())).collect(),
            ..Inventory::default()
        })
        .await;
    }

    /// Records a scan without errors and with these readings.
    pub(crate) async fn scan_with_readings(&self, signs: Vec<Reading>) {
        self.record_scan(Inventory { parts: self.gpus.clone(), signs, ..Inventory::default() }).await;
    }

    async fn record_scan(&self, inventory: Inventory) {
        let inventory = Inventory { links: self.links.clone(), ..inventory };
        let kernel = self.kernel.clone();
        let recorded = tokio::task::spawn_blocking(move || kernel.record_scan(inventory));
        recorded.await.unwrap().unwrap();
    }

    /// Admits a pod, starts its containers, and returns its UID.
    pub(crate) async fn run(&self, spec: PodSpec) -> String {
        let uid = spec.uid.clone();
        self.kubelet.admit(spec).await.unwrap();
        self.kubelet.run(&uid).await.unwrap();
        uid
    }

    /// Activates the scripted policy with this script.
    pub(crate) async fn activate(&self, script: &str) {
        self.try_activate(script).await.unwrap();
    }

    /// Activates the scripted policy with this script, unless that is refused.
    pub(crate) async fn try_activate(&self, script: &str) -> Result<(), ActivateError> {
        let permissions = Permissions { environment: vec!["TOLD_*".into()], ..Permissions::default() };
        self.activate_versions(vec![(scripted_version(), script)], &permissions).await
    }

    /// Activates these shipped policies, by name and parameters.
    pub(crate) async fn activate_shipped(&self, stack: &[(&str, &str)]) {
        let shipped = policies().restore_shipped(NOW).unwrap();
        let named = |name: &str| shipped.iter().find(|version| version.name == name).unwrap().clone();
        let stack = stack.iter().map(|(name, parameters)| (named(name), *parameters)).collect();
        let permissions = Permissions { resources: vec!["nvidia.com/*".into()], ..Permissions::default() };
        self.activate_versions(stack, &permissions).await.unwrap();
    }

    async fn activate_versions(
        &self,
        stack: Vec<(PolicyVersion, &str)>,
        permissions: &Permissions,
    ) -> Result<(), ActivateError> {
        let mut entries = Vec::new();
        for (version, parameters) in stack {
            let (kernel, kept) = (self.kernel.clone(), version.clone());
            tokio::task::spawn_blocking(move || kernel.execute_blocking(Command::RecordUpload(kept)))
                .await
                .unwrap()
                .unwrap();
            entries.push(StackEntry {
                name: version.name,
                digest: version.digest,
                parameters: parameters.to_owned(),
                permissions: permissions.clone(),
                on_fault: OnFault::Deny,
            });
        }
        let stack = NewStack {
            origin: berth_kernel::policy::stack::StackOrigin::Api,
            failed: None,
            by: "test".into(),
            why: String::new(),
            entries,
        };
        self.core.policies.activate(stack, None).await.map(drop)
    }

    /// Waits until this number of devices of a resource is allocatable, and the kubelet watches them.
    pub(crate) async fn allocatable(&self, resource: &str, count: usize) {
        let what = format!("{count} allocatable {resource}");
        let there = |k: &Kubelet| k.allocatable(resource) == Some(count) && k.is_served(resource);
        self.kubelet.wait_for(&what, SOON, there).await.unwrap();
    }

    /// Waits until `holds` is true of the ledger.
    pub(crate) async fn wait(&self, what: &str, holds: impl Fn(&Ledger) -> bool) {
        let mut snapshots = self.kernel.watch();
        let waited = tokio::time::timeout(SOON, snapshots.wait_for(|s| holds(s))).await;
        assert!(waited.is_ok(), "waited {SOON:?} for {what}; live: {:#?}", self.live());
    }

    /// Runs reconcile passes until `holds` is true, and advances the clock by `skip_ms` before each. One may not be
    /// enough, since it waits only briefly for a file of the kubelet.
    pub(crate) async fn reconcile_until(&self, what: &str, skip_ms: u64, holds: impl Fn(&Ledger) -> bool) {
        let end = Instant::now() + SOON;
        while !holds(&self.kernel.snapshot()) {
            assert!(
                Instant::now() < end,
                "no reconcile pass within {SOON:?} led to {what}; live: {:#?}",
                self.live()
            );
            self.clock.skip(skip_ms);
            self.reconcile().await;
        }
    }

    /// Live allocations, oldest first.
    pub(crate) fn live(&self) -> Vec<Allocation> {
        let snapshot = self.kernel.snapshot();
        snapshot.live.values().map(|a| (**a).clone()).collect()
    }

    /// Runs one reconcile pass now.
    pub(crate) async fn reconcile(&self) {
        self.running.as_ref().unwrap().reconcile().await.unwrap();
    }

    pub(crate) fn plugins_folder(&self) -> PathBuf {
        self.settings.device_plugins.clone()
    }

    /// Fails if something that was done would have harmed a real kubelet.
    pub(crate) fn assert_harmless(&self) {
        assert_eq!(self.kubelet.anomalies(), []);
    }
}

/// The API server's view of one pod, which was admitted and is not finished.
pub(crate) fn api_server_shows(uid: &str, is_deleting: bool) -> PodsView {
    let pod = Pod {
        uid: uid.into(),
        namespace: "default".into(),
        name: "p".into(),
        labels: Vec::new(),
        is_static: false,
        owner: None,
        stage: Stage::Admitted,
        deletion_wall_ms: is_deleting.then_some(1),
        created_wall_ms: 0,
        containers: Vec::new(),
        bypass: None,
        has_claims: false,
        named_claims: Vec::new(),
    };
    let mut view = PodsView::empty(PodsSource::ApiServer);
    view.current = true;
    view.pods.insert(pod.uid.clone(), Arc::new(pod));
    view
}
