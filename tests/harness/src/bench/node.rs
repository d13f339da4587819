//! A node on simulated GPUs: keeper, policy thread, store and kubelet front end, as the daemon puts
//! them together, the stand-in kubelet that they register with, and a client on their socket.

use crate::bench::{disk, history};
use anyhow::{Context as _, Result};
use berth_core::keeper::Keeper;
use berth_core::stack::Baseline;
use berth_core::{Core, KernelHandle, PolicyService};
use berth_gpus::sim::SimGpus;
use berth_kernel::hardware::gpu::Inventory;
use berth_kernel::hardware::mig::MigStrategy;
use berth_kernel::hardware::triage::XidRules;
use berth_kernel::ids::names::Resource;
use berth_kernel::ids::time::Now;
use berth_kernel::node::command::{Command, NewStack};
use berth_kernel::node::ports::{Clock, Gpus as _, Store};
use berth_kernel::node::rules::Rules;
use berth_kernel::policy::stack::{OnFault, Permissions, StackEntry};
use berth_kernel::policy::version::PolicyVersion;
use berth_kernel::sharing::listing::listing;
use berth_kubelet::{DevicePlugins, RunningPlugins, Settings, Timeouts};
use berth_kubelet::{Edits, ReconcileTiming};
use berth_wasm::{self, WasmPolicies};
use fakes::{plugin, program};
use kubelet_standin::proto::v1beta1::device_plugin_client::DevicePluginClient;
use kubelet_standin::{CheckpointMode, Kubelet, Options};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use tempfile::TempDir;
use tokio::runtime::{Builder, Runtime};
use tokio::sync::watch;
use tonic::transport::Channel;

pub(crate) const GPU: &str = "nvidia.com/gpu";
pub(crate) const SHARED: &str = "nvidia.com/gpu.shared";
/// Shares of a GPU where a policy shares.
pub(crate) const SHARES: u32 = 10;
/// Longer than any step here takes on any machine.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// What all nodes share.
pub(crate) struct House {
    /// As in the daemon: two workers.
    daemon: Runtime,
    pub(crate) kubelet: Runtime,
    /// Runs only while a call is waited for.
    pub(crate) client: Runtime,
    pub(crate) policies: Arc<WasmPolicies>,
    pub(crate) versions: Vec<PolicyVersion>,
    clock: Arc<dyn Clock>,
    state: TempDir,
}

struct SystemClock(Instant);

impl Clock for SystemClock {
    fn now(&self) -> Now {
        let ms = |d: Duration| u64::try_from(d.as_millis()).unwrap_or(u64::MAX);
        let wall = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Now { wall_ms: ms(wall), mono_ms: ms(self.0.elapsed()) }
    }
}

impl House {
    /// Compiles the shipped policies, which takes a second or two.
    pub(crate) fn new() -> Result<Self> {
        let workers = |n| Builder::new_multi_thread().worker_threads(n).enable_all().build();
        let state = disk::folder()?;
        let settings = berth_wasm::Settings {
            compiler: program::beside_this("berth")?,
            ..berth_wasm::Settings::new(state.path().to_owned())
        };
        let clock = Arc::new(SystemClock(Instant::now()));
        let policies = Arc::new(WasmPolicies::new(settings)?);
        let versions = policies.restore_shipped(clock.now())?;
        Ok(Self {
            daemon: workers(2)?,
            kubelet: workers(1)?,
            client: Builder::new_current_thread().enable_all().build()?,
            policies,
            versions,
            clock,
            state,
        })
    }

    /// Where stores and bare files lie.
    pub(crate) fn folder(&self, name: &str) -> Result<PathBuf> {
        let folder = self.state.path().join(name);
        std::fs::create_dir_all(&folder)?;
        Ok(folder)
    }

    pub(crate) fn disk(&self) -> Result<String> {
        crate::bench::disk::describe(self.state.path())
    }

    pub(crate) fn version(&self, name: &str) -> Result<&PolicyVersion> {
        self.versions.iter().find(|v| v.name == name).with_context(|| format!("no policy {name} is shipped"))
    }

    pub(crate) fn now(&self) -> Now {
        self.clock.now()
    }
}

/// How a node is made.
pub(crate) struct Recipe<'a> {
    /// As after `sim:`.
    pub(crate) gpus: &'a str,
    pub(crate) store: Box<dyn Store>,
    /// The one policy of its stack, and its parameters.
    pub(crate) policy: Option<(&'a str, &'a str)>,
    /// The resource that is called.
    pub(crate) resource: &'a str,
}

/// A node at work.
pub(crate) struct Node<'h> {
    house: &'h House,
    pub(crate) kernel: KernelHandle,
    pub(crate) inventory: Inventory,
    pub(crate) resource: Resource,
    pub(crate) client: Client,
    pub(crate) kubelet: Kubelet,
    running: Option<RunningPlugins>,
    _folder: TempDir,
}

impl<'h> Node<'h> {
    /// Starts it, and waits until its kubelet watches the resource.
    pub(crate) fn start(house: &'h House, recipe: Recipe<'_>) -> Result<Self> {
        // Not below the state folder: the path of a unix socket has 107 bytes.
        let folder = tempfile::tempdir()?;
        let resource = Resource::parse(recipe.resource)?;
        let mut rules = Rules::default();
        // A GPU that failed for a sample works again in the next scan.
        rules.timing.quiet_ms = 0;
        rules.history.allocations = history::RECORDS;
        let keeper = Keeper::open(recipe.store, rules, Arc::clone(&house.clock))?;
        let baseline = Baseline {
            resource: Resource::parse(GPU)?,
            mig: MigStrategy::default(),
            mps_sockets: BTreeMap::new(),
            xids: XidRules { ignored: Vec::new(), counted: Vec::new() },
            quiet_ms: 0,
        };
        let Core { kernel, policies, .. } =
            berth_core::start(keeper, &house.policies, Arc::clone(&house.clock), baseline, None)?.core;
        let inventory = SimGpus::open(recipe.gpus)?.scan()?;
        kernel.record_scan(inventory.clone())?;
        match recipe.policy {
            Some((name, parameters)) => activate(house, &policies, name, parameters)?,
            None => drop(house.daemon.block_on(kernel.reoffer())?),
        }
        let kubelet = Kubelet::new(Options::new(folder.path()));
        // Its own writes to the disk are not what is measured.
        kubelet.set_faults(|faults| faults.checkpoint = CheckpointMode::Frozen);
        house.kubelet.block_on(kubelet.start())?;
        let running = house.daemon.block_on(async {
            let settings = Settings {
                device_plugins: folder.path().join("device-plugins"),
                root_dir: folder.path().to_owned(),
                edits: watch::Sender::new(Arc::new(Edits::default())).subscribe(),
                // The stand-in has no pods, so a reconcile pass would find fault with every allocation.
                reconcile: ReconcileTiming { list_interval: PATIENCE, ..ReconcileTiming::default() },
                timeouts: Timeouts::default(),
            };
            DevicePlugins::new(settings, kernel.clone()).start()
        });
        let served = |k: &Kubelet| k.is_served(recipe.resource);
        house.kubelet.block_on(kubelet.wait_for("the registration", PATIENCE, served))?;
        let client = Client::dial(house, &plugin::socket(folder.path(), recipe.resource))?;
        Ok(Self {
            house,
            kernel,
            inventory,
            resource,
            client,
            kubelet,
            running: Some(running),
            _folder: folder,
        })
    }

    /// The ids of the resource, sorted.
    pub(crate) fn ids(&self) -> Vec<String> {
        let listed = listing(&self.kernel.snapshot(), &self.resource);
        listed.into_iter().map(|listed| listed.id.to_string()).collect()
    }

    /// Ends the newest allocation, as if its pod had ended.
    pub(crate) fn end_newest(&self) -> Result<()> {
        let snapshot = self.kernel.snapshot();
        let (id, _) = snapshot.live.last_key_value().context("nothing is allocated")?;
        self.house.daemon.block_on(self.kernel.execute(Command::End { id: *id, force: true }))?;
        Ok(())
    }
}

impl Drop for Node<'_> {
    fn drop(&mut self) {
        if let Some(running) = self.running.take() {
            self.house.daemon.block_on(running.stop());
        }
        self.house.kubelet.block_on(self.kubelet.stop());
    }
}

fn activate(house: &House, policies: &PolicyService, name: &str, parameters: &str) -> Result<()> {
    let version = house.version(name)?.clone();
    let entry = StackEntry {
        name: version.name.clone(),
        digest: version.digest.clone(),
        parameters: parameters.to_owned(),
        permissions: Permissions::default(),
        on_fault: OnFault::Deny,
    };
    policies.kernel().execute_blocking(Command::RecordUpload(version))?;
    let stack = NewStack {
        origin: berth_kernel::policy::stack::StackOrigin::Api,
        failed: None,
        by: "bench".into(),
        why: String::new(),
        entries: vec![entry],
    };
    house.daemon.block_on(policies.activate(stack, None))?;
    Ok(())
}

/// The kubelet's end of one plugin socket.
pub(crate) struct Client(pub(crate) DevicePluginClient<Channel>);

impl Client {
    pub(crate) fn dial(house: &House, socket: &Path) -> Result<Self> {
        Ok(Self(house.client.block_on(plugin::dial(socket))?))
    }

    /// One Allocate for one container. Answers how long it took.
    pub(crate) fn allocate(&mut self, house: &House, ids: &[String]) -> Result<Duration> {
        Ok(house.client.block_on(plugin::allocate(&mut self.0, ids))?.0)
    }

    /// One GetPreferredAllocation for one container. Answers how long it took.
    pub(crate) fn prefer(&mut self, house: &House, from: &[String], size: usize) -> Result<Duration> {
        house.client.block_on(plugin::prefer(&mut self.0, from, size))
    }
}
