//! The start of the daemon. Parts that must work at once are opened first, then those that may have to wait.

use super::admin_api::{self, StartingApi};
use super::configuration::Configuration;
use super::dra::DraChannels;
use super::progress::{self, Progress};
use super::running::Parts;
use super::setup::{create_state_dir, open_journal};
use super::{Base, Options, Running, access};
use anyhow::Context;
use berth_admin::StartStep;
use berth_checks::policy_settings;
use berth_cluster::{ApiServer, FleetTask, LabelChannels, NodeStackState};
use berth_config::{Config, new_stack};
use berth_core::keeper::{CommandError, Keeper, Snapshot};
use berth_core::memory;
use berth_core::policies::PolicyLoader;
use berth_core::transition_log;
use berth_core::transition_stream::{Batches, TransitionStream};
use berth_core::{ActivateError, FileStack, GpuWatch, InventoryScanner, KernelHandle, SystemClock};
use berth_guard::GuardStatus;
use berth_kernel::hardware::gpu::Inventory;
use berth_kernel::node::ports::{Gpus, GpusError, StoreError};
use berth_kernel::node::refusal::Refusal;
use berth_kernel::policy::stack::StackOrigin;
use berth_kubelet::dra::{adopt_claims, grants_folder};
use berth_oci::Puller;
use berth_store::SledStore;
use berth_strategy::{StrategySettings, StrategyTask};
use berth_wasm::WasmPolicies;
use std::convert::Infallible;
use std::net::SocketAddr;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;
use tokio::task::{JoinError, JoinSet};

/// The longest time of opening the store. The largest one (a copy and a read of about 60 MiB) takes under 1 s on a slow
/// disk.
const STORE_OPEN_MAX: Duration = Duration::from_secs(15);
/// Interval of attempts to read the GPUs or the kubelet's checkpoint during the start.
const RETRY_INTERVAL: Duration = Duration::from_secs(2);
/// The start reports to the API server that there are no GPUs after this long.
const GPUS_WAIT_MAX: Duration = Duration::from_secs(30);

/// The GPUs that were found, and what scans them again.
type FoundGpus = anyhow::Result<(InventoryScanner, Inventory)>;

/// A daemon whose files, store and policies are open, and whose API may answer already.
pub struct Starting {
    base: Base,
    api: StartingApi,
    /// The search for GPUs, one task.
    gpu_search: JoinSet<FoundGpus>,
    /// It collects transitions, and connects to the API server later.
    cluster: berth_cluster::ClusterTasks,
    /// The ledger as the last process stored it.
    stored: Snapshot,
}

impl Starting {
    /// Opens the parts that must work at once: state folder, store, policies, the admin API's port.
    ///
    /// # Errors
    /// If one of them fails. If the policies are at fault, what was opened is closed in order.
    pub async fn open(config: Config, options: Options) -> anyhow::Result<Self> {
        create_state_dir(&config)?;
        let configuration = Configuration::new(&config);
        let progress = Arc::new(Progress::new(&config));
        let mut admin = berth_admin::AdminServer::bind(access::settings(&config))?;
        if let Some(dry_run) = access::eviction_dry_run(&config) {
            admin = admin.with_eviction_dry_run(dry_run);
        }
        // GPUs, store and policies are opened side by side.
        let mut gpu_search = JoinSet::new();
        gpu_search.spawn(find_gpus(config.clone(), options.gpus.clone(), Arc::clone(&progress)));
        let settings = berth_wasm::Settings {
            compiler: options.compiler.clone(),
            ..policy_settings(&config, config.node.state_dir.clone())
        };
        let policies = tokio::task::spawn_blocking(move || WasmPolicies::new(settings));
        let clock = Arc::new(SystemClock::default());
        let keeper = open_store(&config, clock.clone()).await?;
        let stored = keeper.snapshot();
        let wasm = Arc::new(policies.await.context("the thread that opens the policies panicked")??);
        wasm.tidy(|digest| stored.policies.contains_key(digest));
        let core = berth_core::start(keeper, &wasm, clock, config.baseline(), open_journal(&config))
            .context("cannot start the keeper")?;
        // It begins at the stored ledger, so that the batch of the first scan has what changed while no daemon ran.
        let mut stream = TransitionStream::since(Arc::clone(&stored));
        let (logged, published) = (stream.subscribe(), stream.subscribe());
        let (handles, token_file) = (core.core.clone(), &config.admin.token_file);
        let api = StartingApi::new(admin, handles, stream.subscribe(), Arc::clone(&progress), token_file)?;
        let mut base = Base {
            labels: LabelChannels::new(config.cluster.labels.clone()),
            admin_address: api.address,
            dra: DraChannels::new(),
            may_activate: watch::Sender::new(false),
            config,
            options,
            core,
            wasm,
            progress,
            configuration,
            tasks: JoinSet::new(),
        };
        base.tasks.spawn(transition_log::run(base.kernel().clone(), logged));
        // Not one of `tasks`: if it ended with them, the event streams would say that the ledger has ended, not that
        // the daemon stops.
        tokio::spawn(stream.run(base.kernel()));
        base.show_loaded(&[]);
        base.show_driver();
        base.tasks.spawn(progress::run_heartbeat(Arc::clone(base.kernel().counters())));
        let cluster = base.start_cluster(published);
        base.follow_guard();
        let mut starting = Self { base, api, gpu_search, cluster, stored };
        if let Err(error) = starting.base.load_policies().await {
            Box::pin(starting.stop()).await;
            return Err(error);
        }
        Ok(starting)
    }

    /// The handle of the kernel.
    #[must_use]
    pub fn kernel(&self) -> &KernelHandle {
        self.base.kernel()
    }

    /// The address of the admin API.
    #[must_use]
    pub fn admin_address(&self) -> SocketAddr {
        self.base.admin_address
    }

    /// Returns once the node's label selects another configuration; never if no label is used. Borrows nothing.
    pub(super) fn wait_for_reconfiguration(&self) -> impl Future<Output = ()> + use<> {
        let (configuration, policies) = (self.base.configuration.clone(), self.base.policies().clone());
        let (folder, compiler) =
            (self.base.config.node.state_dir.clone(), self.base.options.compiler.clone());
        async move {
            match configuration {
                Some(configuration) => configuration.changed(policies, folder, compiler).await,
                None => std::future::pending().await,
            }
        }
    }

    /// Finds the GPUs, adopts the allocations of running pods, activates the stack and registers. Logs the reasons of
    /// waits. If `interrupted` completes first, stops the daemon and returns its result.
    ///
    /// # Errors
    /// If the configuration's stack cannot be used, or a thread cannot be started. The daemon is stopped then.
    pub async fn bring_up<T>(
        self,
        interrupted: impl Future<Output = T>,
    ) -> anyhow::Result<ControlFlow<T, Running>> {
        let Self { mut base, api, gpu_search, cluster, stored } = self;
        let interruption = tokio::select! {
            started = base.start_parts(api, gpu_search, cluster, &stored) => match started {
                Ok(parts) => return Ok(ControlFlow::Continue(Running { base, parts })),
                Err(error) => {
                    tracing::info!("stopping");
                    Err(error)
                }
            },
            interruption = interrupted => Ok(ControlFlow::Break(interruption)),
        };
        base.stop(std::future::ready(())).await;
        interruption
    }

    /// Stops the daemon, which was not brought up.
    pub async fn stop(self) {
        let Self { base, api, gpu_search, cluster, .. } = self;
        drop((api, gpu_search, cluster));
        base.stop(std::future::ready(())).await;
    }

    /// As [`Self::bring_up`], without interruption.
    ///
    /// # Errors
    /// As [`Self::bring_up`].
    pub async fn bring_up_uninterrupted(self) -> anyhow::Result<Running> {
        match Box::pin(self.bring_up(std::future::pending::<Infallible>())).await? {
            ControlFlow::Continue(running) => Ok(running),
            ControlFlow::Break(never) => match never {},
        }
    }
}

/// The parts whose start the kubelet waits for.
struct Registered {
    gpus: GpuWatch,
    strategy: StrategySettings,
    kubelet: berth_kubelet::RunningPlugins,
    driver: Option<berth_kubelet::dra::RunningDriver>,
}

impl Base {
    /// Makes the policies callable, and resolves the versions of the file's stack. Those of the active stack that are
    /// not callable yet are tried again by a task.
    async fn load_policies(&mut self) -> anyhow::Result<()> {
        let loader = PolicyLoader::new(self.policies().clone(), self.config.rules.trusted_keys.clone());
        if let Some(cause) = loader.load_all().await? {
            let progress = Arc::clone(&self.progress);
            let report = move |reason| progress.update(|facts| facts.uncallable = reason);
            self.tasks.spawn(loader.retry_until_callable(report, cause, self.options.stack_retry_interval));
        }
        self.resolve_file_stack()
    }

    async fn start_parts(
        &mut self,
        api: StartingApi,
        gpu_search: JoinSet<FoundGpus>,
        cluster: berth_cluster::ClusterTasks,
        stored: &Snapshot,
    ) -> anyhow::Result<Parts> {
        let start_now = Arc::clone(&api.start_now);
        let register = async {
            let registered = self.register(gpu_search, &cluster, stored).await?;
            let mut registrations = registered.kubelet.registrations();
            let is_registered = registrations
                .wait_for(|all| all.values().any(|state| *state == berth_kubelet::Registration::Registered));
            // The kubelet calls ListAndWatch right after Register; the start of the API's threads would delay the
            // answer.
            let _ = tokio::time::timeout(admin_api::DELAY_MAX, is_registered).await;
            start_now.notify_one();
            Ok(registered)
        };
        let (registered, admin) = tokio::try_join!(Box::pin(register), api.started())?;
        self.tasks.spawn(memory::trim_periodically());
        let Registered { gpus, strategy, kubelet, driver } = registered;
        Ok(Parts { admin, gpus, strategy, cluster, kubelet, driver })
    }

    async fn register(
        &mut self,
        mut gpu_search: JoinSet<FoundGpus>,
        cluster: &berth_cluster::ClusterTasks,
        stored: &Snapshot,
    ) -> anyhow::Result<Registered> {
        let found = match tokio::time::timeout(GPUS_WAIT_MAX, gpu_search.join_next()).await {
            Ok(found) => found,
            Err(_) => {
                // A node without GPUs is reported, too. The search goes on: a GPU may take a minute to start.
                cluster.allow_connection();
                gpu_search.join_next().await
            }
        };
        let scanner = self.record_found(found, stored).await?;
        cluster.allow_connection();
        self.core.core.driver.set_scanner(scanner.clone());
        let gpus = GpuWatch::start(&scanner, self.kernel(), self.config.health.scan_interval)
            .context("cannot start the GPU threads")?;
        // Only tests and tools pass GPUs, and theirs are not real.
        let has_substitute_gpus = self.options.gpus.is_some();
        let progress = Arc::clone(&self.progress);
        let on_change =
            Box::new(move |strategy| progress.update(|facts| facts.device_list_strategy = Some(strategy)));
        let (mut task, strategy) =
            StrategyTask::new(self.config.clone(), has_substitute_gpus, on_change, self.kernel().clone());
        let settings = berth_kubelet::Settings {
            timeouts: self.options.timeouts.clone(),
            device_plugins: self.config.kubelet.device_plugins_dir.clone(),
            root_dir: self.config.kubelet.root_dir.clone(),
            edits: task.edits(),
            reconcile: self.config.reconcile.clone(),
        };
        let edits = task.edits();
        let front = berth_kubelet::DevicePlugins::new(settings, self.kernel().clone());
        // The adoption, which may wait for a readable checkpoint, ends before the stack offers devices, so that adopted
        // devices keep their share numbers. The strategy is decided before devices are listed, since the kubelet may
        // start a pod at once.
        let adopt = async {
            self.adopt(&front).await;
            self.adopt_claims().await;
            self.remove_marks_of_rules().await;
            self.warn_without_driver();
            self.progress.update(|facts| facts.adoption = StartStep::Done);
        };
        tokio::join!(adopt, task.check_first());
        self.activate_file_stack().await?;
        self.may_activate.send_replace(true);
        if let Err(error) = self.kernel().reoffer().await {
            // The policy thread tries again by itself.
            tracing::warn!(
                "the policies' first offers could not be recorded; they will be requested again: {error}"
            );
        }
        let kubelet = front.start();
        let driver = self.start_driver(cluster.claims(), edits);
        self.progress.set_registrations(kubelet.registrations());
        self.start_labels();
        self.tasks.spawn(task.run());
        Ok(Registered { gpus, strategy, kubelet, driver })
    }

    /// Records what the search for GPUs has found.
    async fn record_found(
        &self,
        found: Option<Result<FoundGpus, JoinError>>,
        stored: &Snapshot,
    ) -> anyhow::Result<InventoryScanner> {
        let (scanner, inventory) = found.context("the search for GPUs was not started")???;
        self.progress.update(|facts| {
            facts.backend.source = scanner.gpus().describe();
            facts.backend.driver_version.clone_from(&inventory.driver_version);
            facts.backend.cuda_version.clone_from(&inventory.cuda_version);
            facts.gpus = StartStep::Done;
        });
        self.record_inventory(inventory).await?;
        transition_log::log_unchanged(stored, &self.kernel().snapshot());
        Ok(scanner)
    }

    fn start_cluster(&self, batches: Batches) -> berth_cluster::ClusterTasks {
        let (api_server, node) = (self.config.cluster.api_server.clone(), self.config.node.name.clone());
        let mut settings = berth_cluster::Settings::new(api_server, node);
        settings.labels = self.labels.node_task();
        settings.other_writer = self.labels.other_writer();
        settings.dra = self.dra_task();
        if let Some(pull) = self.config.cluster.fleet.clone() {
            let state = watch::Sender::default();
            let stack = NodeStackState::before_reading(&self.kernel().snapshot());
            let stack = watch::Sender::new(stack);
            self.progress.set_fleet(state.subscribe(), stack.subscribe());
            let (policies, lab) = (self.policies().clone(), self.core.core.lab.clone());
            let may_activate = self.may_activate.subscribe();
            let puller = Puller::new(pull);
            settings.fleet = Some(FleetTask { policies, lab, puller, may_activate, state, stack });
        }
        settings.watched_label = self.configuration.as_ref().map(Configuration::watched_label);
        let cluster = berth_cluster::start(settings, self.kernel().clone(), batches);
        self.progress.set_cluster_status(cluster.link());
        cluster
    }

    fn follow_guard(&mut self) {
        let (sender, status) = watch::channel(GuardStatus::default());
        let (socket, kernel) = (self.config.guard.socket.clone(), self.kernel().clone());
        let has_pods_source = self.config.cluster.api_server != ApiServer::Off;
        let driver = self.core.core.driver.guard.clone();
        self.tasks.spawn(berth_guard::follow(socket, kernel, has_pods_source, driver, sender));
        self.progress.set_guard_status(status);
    }

    fn start_labels(&mut self) {
        let progress = Arc::clone(&self.progress);
        let report = move |reason: Option<String>| {
            progress.update(|facts| facts.labels = Some(reason.map_or(StartStep::Done, StartStep::Waiting)));
        };
        self.labels.set_sharing(
            self.config.offers.mig_strategy,
            self.config.containers.edits.mps_sockets().into_keys().collect(),
        );
        let has_api_server = self.config.cluster.api_server != ApiServer::Off;
        if let Some(task) = self.labels.task(has_api_server, self.kernel(), report) {
            self.tasks.spawn(task);
        }
    }

    /// Records the first inventory. Retries while the disk is slow during the node's start.
    async fn record_inventory(&self, inventory: Inventory) -> anyhow::Result<()> {
        let mut retry = Retry::default();
        loop {
            let (kernel, inventory) = (self.kernel().clone(), inventory.clone());
            let recorded = tokio::task::spawn_blocking(move || kernel.record_scan(inventory));
            match recorded.await.context("the thread that records the GPUs panicked")? {
                Ok(_) => return Ok(()),
                Err(error @ (CommandError::Store(_) | CommandError::Busy | CommandError::Late(_))) => {
                    retry.wait(&format!("the GPUs cannot be recorded: {error}; {RETRIED}")).await;
                }
                Err(error) => return Err(error).context("the GPUs that were found could not be recorded"),
            }
        }
    }

    /// Adopts the devices of running pods before the first registration, since a device in use must not be offered as
    /// free.
    async fn adopt(&self, front: &berth_kubelet::DevicePlugins) {
        let mut retry = Retry::default();
        // A store with allocations is more reliable than the checkpoint, which is then read only for devices that
        // another plugin granted meanwhile, without waiting for it.
        let ledger = self.kernel().snapshot();
        let is_required = ledger.live.is_empty() && ledger.ended.is_empty();
        if self.config.kubelet.skip_adoption {
            tracing::warn!("the devices of running pods are not adopted (--skip-adoption)");
            return;
        }
        loop {
            match front.adopt().await.map_err(anyhow::Error::new) {
                Ok(entries) => {
                    tracing::info!(
                        entries,
                        "the kubelet's checkpoint was read; devices in it without a record were adopted"
                    );
                    return;
                }
                Err(error) if !is_required => {
                    tracing::warn!("the devices of running pods are not adopted: {error:#}");
                    return;
                }
                Err(error) => {
                    let message = format!("{error:#}");
                    self.progress.update(|facts| facts.adoption = StartStep::Waiting(message.clone()));
                    retry.wait(&message).await;
                }
            }
        }
    }

    /// Adopts the claims that an earlier store granted: their containers may run. Without the driver nothing would end them.
    async fn adopt_claims(&self) {
        if self.config.kubelet.skip_adoption || !self.config.dra.enabled {
            return;
        }
        let mut retry = Retry::default();
        loop {
            let folder = grants_folder(&self.config.kubelet.root_dir, &self.config.dra.driver);
            match adopt_claims(folder, self.kernel()).await {
                Ok(0) => return,
                Ok(allocations) => {
                    return tracing::info!(
                        allocations,
                        "allocations of prepared claims that the store did not have were adopted"
                    );
                }
                Err(error) => {
                    let message = format!("the prepared claims cannot be adopted: {error}; {RETRIED}");
                    self.progress.update(|facts| facts.adoption = StartStep::Waiting(message.clone()));
                    retry.wait(&message).await;
                }
            }
        }
    }

    /// Resolves the versions of the file's stack. An invalid stack stops the start, unless a stack of the API is
    /// active: then the error is only shown.
    fn resolve_file_stack(&self) -> anyhow::Result<()> {
        let snapshot = self.kernel().snapshot();
        let stack = match self.config.resolve_stack(&snapshot) {
            Ok(entries) => FileStack { entries, error: None },
            Err(error) if !snapshot.stack.is_of_file() => {
                tracing::error!("the stack of the configuration cannot be used: {error}");
                FileStack { entries: Vec::new(), error: Some(error.to_string()) }
            }
            Err(error) => anyhow::bail!("the stack of the configuration cannot be used: {error}"),
        };
        self.policies().set_file_stack(stack);
        Ok(())
    }

    /// Activates the file's stack, unless a stack of the API is active, which takes precedence until it is reset.
    async fn activate_file_stack(&self) -> anyhow::Result<()> {
        let entries = &self.policies().file_stack().entries;
        let mut retry = Retry::default();
        loop {
            let active = &self.kernel().snapshot().stack;
            // Without the fleet nothing would end a break-glass.
            let has_ended = active.is_break_glass() && self.config.cluster.fleet.is_none();
            let is_of_file = active.is_of_file() || has_ended;
            if !is_of_file && active.entries != *entries {
                let why = match active.origin {
                    StackOrigin::Fleet { .. } => {
                        "the node's GPUNode named another one: remove `spec.stack` from the GPUNode and run `berth policy reset`"
                    }
                    StackOrigin::BreakGlass { .. } => {
                        "a break-glass is active; `berth policy stack` shows its end, and `berth policy reset` ends it"
                    }
                    StackOrigin::File | StackOrigin::Api => {
                        "another one was activated through the API; `berth policy reset` activates the file's"
                    }
                };
                tracing::warn!("the configuration file's stack is not used, since {why}");
            }
            if !is_of_file || (active.entries == *entries && !has_ended) {
                return Ok(());
            }
            match self.policies().activate(new_stack(entries.clone()), Some(active.revision)).await {
                Ok(_) => return Ok(()),
                // The API, which runs already, was given another stack meanwhile.
                Err(ActivateError::Command(CommandError::Refused(Refusal::StackChanged { .. }))) => {}
                // A starting node is busy and its disks are slow, so a timeout does not mean that the stack is bad.
                Err(error) if error.is_passing() => {
                    retry.wait(&format!("{error}; {RETRIED}")).await;
                }
                Err(error) => return Err(error).context("the stack of the configuration cannot be used"),
            }
        }
    }
}

/// Opens the store, and restores the ledger from it.
async fn open_store(config: &Config, clock: Arc<SystemClock>) -> anyhow::Result<Keeper> {
    let (path, rules) = (config.node.state_dir.join("store"), config.rules.clone());
    let folder = path.display().to_string();
    let open = move || Keeper::open(Box::new(SledStore::open(&path)?), rules, clock);
    match tokio::time::timeout(STORE_OPEN_MAX, tokio::task::spawn_blocking(open)).await {
        Ok(opened) => Ok(opened.context("the thread that opens the store panicked")??),
        Err(_) => Err(StoreError::Slow { path: folder, ms: 1000 * STORE_OPEN_MAX.as_secs() }.into()),
    }
}

/// Scans the GPUs until a scan succeeds, since some nodes load their drivers late. Borrows nothing of the daemon, which
/// goes on meanwhile.
///
/// # Errors
/// If the scan fails and the configuration has `failOnInitError`.
async fn find_gpus(
    config: Config,
    given: Option<Arc<dyn Gpus>>,
    progress: Arc<Progress>,
) -> anyhow::Result<(InventoryScanner, Inventory)> {
    let mut retry = Retry::default();
    let processes = Arc::new(config.gpus.processes.source());
    loop {
        let (source, given) = (config.gpus.source.clone(), given.clone());
        let (processes, health_checks) = (Arc::clone(&processes), config.gpus.health_checks);
        let excluded = config.gpus.excluded.clone();
        let open = move || -> Result<(InventoryScanner, Inventory), GpusError> {
            let gpus = given.map_or_else(|| source.open(), Ok)?;
            let scanner = InventoryScanner::new(gpus, processes)
                .with_health_checks(health_checks)
                .with_excluded(&excluded);
            let inventory = scanner.scan()?;
            Ok((scanner, inventory))
        };
        match tokio::task::spawn_blocking(open).await {
            Ok(Ok((scanner, inventory))) => {
                log_found(&scanner, &inventory, &config);
                return Ok((scanner, inventory));
            }
            Ok(Err(error)) if config.gpus.fail_on_init_error => {
                return Err(error).context("GPUs cannot be read, and failOnInitError is set");
            }
            Ok(Err(error)) => {
                progress.update(|facts| facts.gpus = StartStep::Waiting(error.to_string()));
                let message = format!(
                    "the GPUs cannot be read: {error}; {RETRIED}; `berth node check` shows the details"
                );
                retry.wait(&message).await;
            }
            Err(error) => {
                tracing::error!(%error, "the GPU scan failed");
                tokio::time::sleep(RETRY_INTERVAL).await;
            }
        }
    }
}

/// Logs how many GPUs were found, and what the configuration excludes of them.
fn log_found(scanner: &InventoryScanner, inventory: &Inventory, config: &Config) {
    let identified = inventory.parts.iter().filter(|part| part.is_whole_gpu()).count();
    let (unidentified, excluded) = (inventory.unidentified.len(), inventory.excluded.len());
    let gpus = identified + unidentified;
    tracing::info!(backend = scanner.gpus().describe(), gpus, unidentified, excluded, "found GPUs");
    for selector in inventory.clone().exclude(&config.gpus.excluded) {
        tracing::warn!("gpus.exclude: no GPU of this node is {selector}");
    }
}

/// The end of messages about failures that [`Retry`] waits for; see [`RETRY_INTERVAL`].
const RETRIED: &str = "trying again every 2 s";

/// The wait between attempts of one step, of which only the first failure is logged.
#[derive(Default)]
struct Retry {
    is_logged: bool,
}

impl Retry {
    async fn wait(&mut self, message: &str) {
        if !std::mem::replace(&mut self.is_logged, true) {
            tracing::error!("{message}");
        }
        tokio::time::sleep(RETRY_INTERVAL).await;
    }
}
