//! The composition root. Parts that must work at once are built first, then those that may have to wait; they stop in
//! the reverse order.

mod access;
mod admin_api;
mod configuration;
mod exit_signals;
mod memory;
mod progress;
mod reload;
mod serve;
mod setup;

pub(crate) use exit_signals::exit_on_signals;
pub use serve::{serve, serve_with};

use admin_api::StartingApi;
use anyhow::Context;
use berth_admin::Step;
use berth_checks::policy_settings;
use berth_cluster::{ApiServer, LabelChannels};
use berth_config::Config;
use berth_config::new_stack;
use berth_core::keeper::{CommandError, Keeper, Snapshot};
use berth_core::policies::PolicyLoader;
use berth_core::transition_log;
use berth_core::transition_stream::{Batches, TransitionStream};
use berth_core::{
    ActivateError, FileStack, GpuWatch, InventoryScanner, KernelHandle, PolicyService, RunningCore,
    SystemClock,
};
use berth_kernel::hardware::gpu::Inventory;
use berth_kernel::node::ports::{Gpus, GpusError, StoreError};
use berth_kernel::node::refusal::Refusal;
use berth_store::SledStore;
use berth_strategy::{StrategySettings, StrategyTask};
use berth_wasm::WasmPolicies;
use configuration::Configuration;
use progress::Progress;
use setup::{create_state_dir, open_journal};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use tokio::task::JoinSet;
use tokio::time::Instant;

/// The longest time of opening the store. The largest one (a copy and a read of about 60 MiB) takes under 1 s on a slow
/// disk.
const STORE_OPEN_MAX: Duration = Duration::from_secs(15);
/// Interval of attempts to read the GPUs or the kubelet's checkpoint during the start.
const RETRY_INTERVAL: Duration = Duration::from_secs(2);
/// Interval of attempts to make the active stack callable.
const STACK_RETRY_INTERVAL: Duration = Duration::from_secs(30);
/// The start reports to the API server that there are no GPUs after this long.
const GPUS_WAIT_MAX: Duration = Duration::from_secs(30);
/// The longest time of a stop; then the process exits without its remaining steps.
const STOP_MAX: Duration = Duration::from_millis(900);

/// Options for programs other than `berth serve`.
#[derive(Clone)]
pub struct Options {
    /// The program that compiles policies; its `main` must call
    /// [`berth_wasm::compiler_process`] first.
    pub compiler: PathBuf,
    /// The timeouts and intervals of the kubelet front end.
    pub waits: berth_kubelet::Waits,
    /// Interval of the attempts to make the active stack callable, if it is not at the start.
    pub stack_again: Duration,
    /// The GPUs, instead of those of the configuration.
    pub gpus: Option<Arc<dyn Gpus>>,
    /// The longest time of a stop; then [`Daemon::stop`] returns before its remaining steps are done. If the process
    /// does not exit, the state folder stays in use until they are.
    pub stop_max: Duration,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            compiler: berth_wasm::default_compiler(),
            waits: berth_kubelet::Waits::default(),
            stack_again: STACK_RETRY_INTERVAL,
            gpus: None,
            stop_max: STOP_MAX,
        }
    }
}

/// The daemon.
pub struct Daemon {
    config: Config,
    options: Options,
    middle: RunningCore,
    wasm: Arc<WasmPolicies>,
    progress: Arc<Progress>,
    admin_address: SocketAddr,
    /// The admin API before [`Self::bring_up`], and after it.
    starting_admin: Option<StartingApi>,
    admin: Option<berth_http::Running>,
    /// The search for GPUs, one task, before [`Self::bring_up`].
    finding: JoinSet<anyhow::Result<(InventoryScanner, Inventory)>>,
    gpus: Option<GpuWatch>,
    /// To the task that decides how GPUs are passed to containers.
    strategy: Option<StrategySettings>,
    cluster: Option<berth_cluster::Running>,
    /// For the cluster, until it is started.
    cluster_batches: Option<Batches>,
    /// The ledger as the last process stored it.
    stored: Snapshot,
    kubelet: Option<berth_kubelet::Running>,
    labels: LabelChannels,
    configuration: Option<Configuration>,
    /// Tasks that run until the stop.
    tasks: JoinSet<()>,
}

impl Daemon {
    /// Builds the parts that must work at once: state folder, store, policies, the admin API's port.
    ///
    /// # Errors
    /// If one of them fails.
    pub async fn build(config: Config, options: Options) -> anyhow::Result<Self> {
        create_state_dir(&config)?;
        let configuration = Configuration::new(&config);
        let progress = Arc::new(Progress::new(&config));
        let mut admin = berth_admin::Server::bind(access::settings(&config))?;
        if let Some(check) = access::eviction_check(&config) {
            admin = admin.with_eviction_check(check);
        }
        // GPUs, store and policies are opened side by side.
        let mut finding = JoinSet::new();
        finding.spawn(find_gpus(config.clone(), options.gpus.clone(), Arc::clone(&progress)));
        let settings = berth_wasm::Settings {
            compiler: options.compiler.clone(),
            ..policy_settings(&config, config.state_dir.clone())
        };
        let policies = tokio::task::spawn_blocking(move || WasmPolicies::new(settings));
        let clock = Arc::new(SystemClock::default());
        let keeper = open_store(&config, clock.clone()).await?;
        let stored = keeper.snapshot();
        let policies = policies.await.context("opening the policies")??;
        policies.tidy(|digest| stored.policies.contains_key(digest));
        let policies = Arc::new(policies);
        let middle = berth_core::start(keeper, &policies, clock, config.baseline(), open_journal(&config))
            .context("cannot start the keeper")?;
        let loader = PolicyLoader::new(middle.core.policies.clone(), config.rules.trusted_keys.clone());
        let core = middle.core.clone();
        // Its first batch has what changed while no daemon ran.
        let mut stream = TransitionStream::since(Arc::clone(&stored));
        let (logged, cluster_batches) = (stream.subscribe(), Some(stream.subscribe()));
        let token_file = &config.token_file;
        let admin = StartingApi::new(admin, core, stream.subscribe(), Arc::clone(&progress), token_file)?;
        let labels = LabelChannels::new(config.labels.clone());
        let mut daemon = Self {
            config,
            options,
            middle,
            wasm: policies,
            progress,
            admin_address: admin.address,
            starting_admin: Some(admin),
            admin: None,
            finding,
            gpus: None,
            strategy: None,
            cluster: None,
            cluster_batches,
            stored,
            kubelet: None,
            labels,
            configuration,
            tasks: JoinSet::new(),
        };
        daemon.tasks.spawn(transition_log::run(daemon.kernel().clone(), logged));
        // It ends with the kernel: the event streams of the admin API name the stop as their end, not that of a task.
        tokio::spawn(stream.run(daemon.kernel()));
        daemon.show_configuration();
        daemon.tasks.spawn(progress::run_heartbeat(Arc::clone(daemon.kernel().counters())));
        if let Some(cause) = loader.load_all().await? {
            let progress = Arc::clone(&daemon.progress);
            let report = move |reason| progress.update(|facts| facts.uncallable = reason);
            daemon.tasks.spawn(loader.retry_until_callable(report, cause, daemon.options.stack_again));
        }
        daemon.resolve_file_stack()?;
        Ok(daemon)
    }

    /// The handle of the kernel.
    #[must_use]
    pub fn kernel(&self) -> &KernelHandle {
        &self.middle.core.kernel
    }

    /// The daemon's policies.
    fn policies(&self) -> &PolicyService {
        &self.middle.core.policies
    }

    /// The address of the admin API.
    #[must_use]
    pub fn admin_address(&self) -> SocketAddr {
        self.admin_address
    }

    /// Finds the GPUs, adopts the allocations of running pods, activates the stack and registers. Logs the reasons of
    /// waits.
    ///
    /// # Errors
    /// If the configuration's stack cannot be used, or a thread cannot be started.
    pub async fn bring_up(&mut self) -> anyhow::Result<()> {
        let starting = self.starting_admin.take().context("the daemon is up already")?;
        let start_now = Arc::clone(&starting.start_now);
        let register = async {
            self.register().await?;
            let mut registrations =
                self.kubelet.as_ref().context("the device plugin was not started")?.registrations();
            let registered = registrations
                .wait_for(|all| all.values().any(|state| *state == berth_kubelet::Registration::Registered));
            // The kubelet calls ListAndWatch right after Register; the start of the API's threads would delay the
            // answer.
            let _ = tokio::time::timeout(admin_api::DELAY_MAX, registered).await;
            start_now.notify_one();
            Ok(())
        };
        let ((), admin) = tokio::try_join!(Box::pin(register), starting.started())?;
        self.admin = Some(admin);
        self.tasks.spawn(memory::trim_periodically());
        Ok(())
    }

    /// The steps of [`Self::bring_up`] that the kubelet waits for.
    async fn register(&mut self) -> anyhow::Result<()> {
        let found = match tokio::time::timeout(GPUS_WAIT_MAX, self.finding.join_next()).await {
            Ok(found) => found,
            Err(_) => {
                // A node without GPUs is reported, too. The search goes on: a GPU may take a minute to start.
                self.start_cluster();
                self.finding.join_next().await
            }
        };
        let (scanner, inventory) = found.context("the search for GPUs was not started")???;
        self.progress.update(|facts| {
            facts.gpu_source = scanner.gpus().describe();
            facts.driver_version.clone_from(&inventory.driver_version);
            facts.cuda_version.clone_from(&inventory.cuda_version);
            facts.gpus = Step::Done;
        });
        self.record_inventory(inventory).await?;
        transition_log::log_unchanged(&self.stored, &self.kernel().snapshot());
        self.middle.core.driver.set_scanner(scanner.clone());
        self.gpus = Some(
            GpuWatch::start(&scanner, self.kernel(), self.config.poll)
                .context("cannot start the GPU threads")?,
        );
        let is_simulated = self.options.gpus.is_some();
        let progress = Arc::clone(&self.progress);
        let on_change =
            Box::new(move |strategy| progress.update(|facts| facts.device_list_strategy = Some(strategy)));
        let (mut strategy, strategy_settings) =
            StrategyTask::new(self.config.clone(), is_simulated, on_change, self.kernel().clone());
        self.strategy = Some(strategy_settings);
        let settings = berth_kubelet::Settings {
            waits: self.options.waits.clone(),
            device_plugins: self.config.device_plugins_dir.clone(),
            root_dir: self.config.kubelet_root_dir.clone(),
            edits: strategy.edits(),
            reconcile: self.config.rounds.clone(),
        };
        let front = berth_kubelet::Front::new(settings, self.kernel().clone());
        // Adoption may wait indefinitely for a readable checkpoint.
        self.start_cluster();
        // Adoption before the stack offers devices, so that adopted devices keep their share numbers. The strategy
        // before devices are listed, since the kubelet may start a pod at once.
        tokio::join!(self.adopt(&front), strategy.look_first());
        self.activate_file_stack().await?;
        if let Err(error) = self.kernel().reoffer().await {
            // The policy thread tries again by itself.
            tracing::warn!(
                "the policies' first offers could not be recorded; they will be requested again: {error}"
            );
        }
        let running = front.start();
        self.progress.set_registrations(running.registrations());
        self.kubelet = Some(running);
        self.start_labels();
        self.tasks.spawn(strategy.run());
        Ok(())
    }

    fn start_labels(&mut self) {
        let progress = Arc::clone(&self.progress);
        let report = move |reason: Option<String>| {
            progress.update(|facts| facts.labels = Some(reason.map_or(Step::Done, Step::Waiting)));
        };
        self.labels
            .set_sharing(self.config.mig_strategy, self.config.edits.mps_sockets().into_keys().collect());
        let has_api_server = self.config.api_server != ApiServer::Off;
        if let Some(task) = self.labels.task(has_api_server, self.kernel(), report) {
            self.tasks.spawn(task);
        }
    }

    /// Returns once the node's label selects another configuration; never if no label is used. Borrows nothing.
    fn wait_for_reconfiguration(&self) -> impl Future<Output = ()> + use<> {
        let (configuration, policies) = (self.configuration.clone(), self.policies().clone());
        let (folder, compiler) = (self.config.state_dir.clone(), self.options.compiler.clone());
        async move {
            match configuration {
                Some(configuration) => configuration.changed(policies, folder, compiler).await,
                None => std::future::pending().await,
            }
        }
    }

    /// Called after the GPUs are scanned, or after [`GPUS_WAIT_MAX`], since a node that starts has not lost its GPUs.
    fn start_cluster(&mut self) {
        if let Some(batches) = self.cluster_batches.take() {
            let (api_server, node) = (self.config.api_server.clone(), self.config.node_name.clone());
            let mut settings = berth_cluster::Settings::new(api_server, node);
            settings.labels = self.labels.node_task();
            settings.other_writer = self.labels.other_writer();
            settings.followed = self.configuration.as_ref().map(Configuration::watched_label);
            let cluster = berth_cluster::start(settings, self.kernel().clone(), batches);
            self.progress.set_cluster_status(cluster.link());
            self.cluster = Some(cluster);
        }
    }

    /// Records the first inventory. Retries while the disk is slow during the node's start.
    async fn record_inventory(&self, inventory: Inventory) -> anyhow::Result<()> {
        let mut retry = Retry::default();
        loop {
            let (kernel, inventory) = (self.kernel().clone(), inventory.clone());
            let recorded = tokio::task::spawn_blocking(move || kernel.record_scan(inventory));
            match recorded.await.context("recording the GPUs")? {
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
    async fn adopt(&self, front: &berth_kubelet::Front) {
        let mut retry = Retry::default();
        // A store with allocations is more reliable than the checkpoint, which is then read only for devices that
        // another plugin granted meanwhile, without waiting for it.
        let ledger = self.kernel().snapshot();
        let is_required = ledger.live.is_empty() && ledger.ended.is_empty();
        let finish = || self.progress.update(|facts| facts.adoption = Step::Done);
        if self.config.skip_adoption {
            tracing::warn!("the devices of running pods are not adopted (--skip-adoption)");
            return finish();
        }
        loop {
            match front.adopt().await.map_err(anyhow::Error::new) {
                Ok(holdings) => {
                    tracing::info!(holdings, "adopted the devices of running pods");
                    return finish();
                }
                Err(error) if !is_required => {
                    tracing::warn!("the devices of running pods are not adopted: {error:#}");
                    return finish();
                }
                Err(error) => {
                    let message = format!("{error:#}");
                    self.progress.update(|facts| facts.adoption = Step::Waiting(message.clone()));
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
            Err(error) if snapshot.stack.from_api => {
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
            if active.from_api && active.entries != *entries {
                tracing::warn!(
                    "stackShadowed: the stack that was activated through the API is used, not the file's; \
                     `berth policy reset` activates the file's"
                );
            }
            if active.from_api || active.entries == *entries {
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

    /// Stops all parts: tasks, GPU threads, the connection to the API server, both front ends, and the keeper with its
    /// store.
    pub async fn stop(self) {
        let Self {
            middle,
            options,
            admin,
            starting_admin,
            mut finding,
            gpus,
            cluster,
            kubelet,
            mut tasks,
            ..
        } = self;
        let RunningCore { core, threads } = middle;
        drop(starting_admin);
        finding.abort_all();
        tasks.shutdown().await;
        if let Some(gpus) = gpus {
            gpus.stop();
        }
        if let Some(cluster) = cluster {
            cluster.stop();
        }
        let fronts = async {
            let kubelet = async {
                if let Some(kubelet) = kubelet {
                    kubelet.stop().await;
                }
            };
            let admin = tokio::task::spawn_blocking(move || admin.map(berth_http::Running::stop));
            let _ = tokio::join!(kubelet, admin);
        };
        // One deadline for all steps: by default a stop takes at most a second.
        let end = Instant::now() + options.stop_max;
        if tokio::time::timeout_at(end, fronts).await.is_err() {
            tracing::warn!("the admin API or the device plugin did not stop in time");
        }
        drop(core);
        let join = tokio::task::spawn_blocking(move || threads.into_iter().for_each(|t| drop(t.join())));
        if tokio::time::timeout_at(end, join).await.is_err() {
            // Acknowledged changes are durable, so nothing is lost.
            tracing::warn!("the thread that writes the ledger did not stop in time");
        }
    }
}

/// Opens the store, and restores the ledger from it.
async fn open_store(config: &Config, clock: Arc<SystemClock>) -> anyhow::Result<Keeper> {
    let (path, rules) = (config.state_dir.join("store"), config.rules.clone());
    let folder = path.display().to_string();
    let open = move || Keeper::open(Box::new(SledStore::open(&path)?), rules, clock);
    match tokio::time::timeout(STORE_OPEN_MAX, tokio::task::spawn_blocking(open)).await {
        Ok(opened) => Ok(opened.context("opening the store")??),
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
    let processes = Arc::new(config.processes.source());
    loop {
        let (source, given) = (config.gpus.clone(), given.clone());
        let (processes, health_checks) = (Arc::clone(&processes), config.health_checks);
        let excluded = config.excluded_gpus.clone();
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
            Ok(Err(error)) if config.fail_on_init_error => {
                return Err(error).context("GPUs cannot be read, and failOnInitError is set");
            }
            Ok(Err(error)) => {
                progress.update(|facts| facts.gpus = Step::Waiting(error.to_string()));
                let message = format!("no GPUs: {error}; {RETRIED} (run `berth node check` for details)");
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
    for selector in inventory.clone().exclude(&config.excluded_gpus) {
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
