//! The composition root: the only file that names every crate. Builds first what must work at once, then what may have to
//! wait, and stops in the reverse order.

mod access;
mod adopt;
mod clock;
mod configuration;
mod drains;
mod gpus;
mod labels;
mod memory;
mod policies;
mod progress;
mod rehearsal;
mod serve;
mod setup;
mod stack;

pub use clock::SystemClock;
pub use gpus::{open_gpus, processes, sight};
pub use progress::Progress;
pub use rehearsal::{check_source, rehearse};
pub use serve::{serve, serve_with, stop_requested};

use setup::{baseline, make_state_dir};

use crate::config::Config;
use anyhow::Context;
use berth_admin::{self, FileStack};
use berth_core::admission::{self, Door, GpuWatch, Looker, Middle};
use berth_core::keeper::{AskError, Keeper, Snapshot};
use berth_core::transition_log;
use berth_kernel::command::NewStack;
use berth_kernel::gpu::Inventory;
use berth_kernel::ports::{Gpus, GpusError, Journal, Policies};
use berth_store::journal::FileJournal;
use berth_store::{Deadline, SledStore};
use berth_wasm::{self, WasmPolicies};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use tokio::task::JoinSet;
use tokio::time::Instant;

/// GPUs, or a checkpoint, that are not there yet are asked for again after this long.
const WAIT_AGAIN: Duration = Duration::from_secs(2);
/// A stack that could not be called is tried again after this long.
const STACK_AGAIN: Duration = Duration::from_secs(30);
/// How long the start waits for GPUs before it reports to the API server that there are none.
const GPUS_LATE: Duration = Duration::from_secs(30);
/// The longest that a stop may take before the process goes without the rest of it.
const STOP_MAX: Duration = Duration::from_millis(900);

/// What programs other than `berth serve` set.
#[derive(Clone)]
pub struct Options {
    /// The program that is started to compile policies; its `main` must call
    /// [`berth_wasm::compiler_process`] first.
    pub compiler: PathBuf,
    /// The waits of the kubelet front end.
    pub waits: berth_kubelet::Waits,
    /// Interval of the attempts to make the active stack callable, if it is not at the start.
    pub stack_again: Duration,
    /// GPUs in hand, instead of those of the configuration.
    pub gpus: Option<Arc<dyn Gpus>>,
    /// The longest that a stop may take before it goes without the rest. A process that ends then leaves
    /// nothing behind; one that goes on has its state folder in use until the rest has ended, too.
    pub stop_max: Duration,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            compiler: "/proc/self/exe".into(),
            waits: berth_kubelet::Waits::default(),
            stack_again: STACK_AGAIN,
            gpus: None,
            stop_max: STOP_MAX,
        }
    }
}

/// The daemon.
pub struct Daemon {
    config: Config,
    options: Options,
    middle: Middle,
    progress: Arc<Progress>,
    admin: berth_http::Running,
    gpus: Option<GpuWatch>,
    cluster: Option<berth_cluster::Running>,
    /// The ledger as the last process left it, until the changes since then were published.
    left: Option<Snapshot>,
    kubelet: Option<berth_kubelet::Running>,
    labels: labels::Labelling,
    configuration: Option<configuration::Configuration>,
    /// What goes on until the stop.
    tasks: JoinSet<()>,
}

impl Daemon {
    /// Builds what must work at once: state folder, store, policies, the admin API's port.
    ///
    /// # Errors
    /// If any of it does not.
    pub async fn build(config: Config, options: Options) -> anyhow::Result<Self> {
        make_state_dir(&config)?;
        let configuration = configuration::Configuration::of(&config);
        let progress = Arc::new(Progress::new(&config));
        let admin = berth_admin::Server::bind(access::settings(&config))?;
        let clock = Arc::new(SystemClock::default());
        let path = config.state_dir.join("store");
        // The disk gets a thread of its own, so that one that hangs costs an Allocate two seconds and
        // never the keeper.
        let open = move || {
            let folder = path.clone();
            Deadline::open(&path, move || SledStore::open(&folder))
        };
        let disk = tokio::task::spawn_blocking(open).await.context("opening the store")??;
        let keeper = Keeper::open(Box::new(disk), config.rules.clone(), clock.clone())?;
        let left = Some(keeper.snapshot());
        let settings = berth_wasm::Settings {
            compiler: options.compiler.clone(),
            ..setup::policies(&config, config.state_dir.clone())
        };
        let policies = WasmPolicies::new(settings)?;
        let known = keeper.snapshot();
        policies.tidy(|digest| known.policies.contains_key(digest));
        let policies: Arc<dyn Policies> = Arc::new(policies);
        let baseline = baseline(&config);
        let rules = config.rules.clone();
        let middle =
            admission::start(keeper, Arc::clone(&policies), clock, rules, baseline, open_journal(&config))
                .context("cannot start the keeper")?;
        let facts = Arc::clone(&progress);
        let admin = admin.run(middle.door.clone(), Arc::new(move || facts.facts()))?;
        tracing::info!(
            token_file = %config.token_file.display(),
            "admin API: Swagger UI at {}/swagger-ui/", admin.url
        );
        let mut daemon = Self {
            config,
            options,
            middle,
            progress,
            admin,
            gpus: None,
            cluster: None,
            left,
            kubelet: None,
            labels: labels::Labelling::default(),
            configuration,
            tasks: JoinSet::new(),
        };
        daemon.tasks.spawn(progress::beat(Arc::clone(daemon.door().figures())));
        let keys = daemon.config.rules.trusted_keys.clone();
        let (door, progress) = (daemon.door().clone(), Arc::clone(&daemon.progress));
        if let Some(why) = policies::load(door.clone(), Arc::clone(&policies), keys.clone()).await? {
            let again = daemon.options.stack_again;
            daemon.tasks.spawn(policies::go_on_trying(door, policies, keys, progress, why, again));
        }
        daemon.resolve_file_stack()?;
        Ok(daemon)
    }

    /// The way to the kernel.
    #[must_use]
    pub fn door(&self) -> &Door {
        &self.middle.door
    }

    /// How far the start has come.
    #[must_use]
    pub fn progress(&self) -> &Arc<Progress> {
        &self.progress
    }

    /// Where the admin API listens.
    #[must_use]
    pub fn admin_address(&self) -> SocketAddr {
        self.admin.address
    }

    /// Finds the GPUs, activates the stack, adopts the allocations of running pods, registers. Logs what it waits for.
    ///
    /// # Errors
    /// If the stack of the configuration cannot be used, or a thread cannot be started.
    pub async fn bring_up(&mut self) -> anyhow::Result<()> {
        let found = tokio::time::timeout(GPUS_LATE, self.find_gpus()).await;
        if found.is_err() {
            // A node without GPUs is reported, too.
            self.start_cluster();
        }
        let (looker, inventory) = if let Ok(found) = found { found? } else { self.find_gpus().await? };
        self.progress.gpus_found(looker.gpus().describe(), &inventory);
        self.record_look(inventory).await?;
        self.gpus = Some(
            GpuWatch::start(&looker, self.door(), self.config.poll)
                .context("cannot start the GPU threads")?,
        );
        let settings = berth_kubelet::Settings {
            waits: self.options.waits.clone(),
            kubelet_dir: self.config.kubelet_dir.clone(),
            edits: self.config.edits.clone(),
            rounds: self.config.rounds.clone(),
        };
        let front = berth_kubelet::Front::new(settings, self.door().clone());
        // Adoption may wait for ever for a checkpoint that can be read.
        self.start_cluster();
        // Before the stack offers anything: the share numbers that pods hold keep their owner.
        self.adopt(&front).await;
        self.activate_file_stack().await?;
        if let Err(error) = self.door().reoffer().await {
            // The policy thread asks again by itself.
            tracing::warn!(
                "what the policies offered at the start could not be recorded, they are asked again: {error}"
            );
        }
        let running = front.start();
        self.progress.registering(running.registrations());
        self.kubelet = Some(running);
        self.start_labels();
        self.tasks.spawn(memory::keep_small());
        Ok(())
    }

    /// Runs once the GPUs were scanned, or after [`GPUS_LATE`]: a node that starts has not lost its GPUs.
    fn start_cluster(&mut self) {
        if self.cluster.is_none() {
            let (api_server, node) = (self.config.api_server.clone(), self.config.node_name.clone());
            let left = self.left.take().unwrap_or_else(|| self.door().snapshot());
            let mut settings = berth_cluster::Settings::new(api_server, node);
            settings.labels = self.labels.work(&self.config);
            settings.other_writer = self.labels.other_writer(&self.config);
            settings.followed = self.configuration.as_ref().map(configuration::Configuration::followed);
            self.tasks.spawn(transition_log::run(self.door().clone(), Arc::clone(&left)));
            let cluster = berth_cluster::start(settings, self.door().clone(), left);
            self.progress.cluster(cluster.link());
            self.cluster = Some(cluster);
        }
    }

    /// Sends the first inventory to the keeper. Waits for a disk that is slow while the node starts.
    async fn record_look(&self, inventory: Inventory) -> anyhow::Result<()> {
        let mut said = false;
        loop {
            let (door, inventory) = (self.door().clone(), inventory.clone());
            let looked = tokio::task::spawn_blocking(move || door.looked(inventory));
            match looked.await.context("taking in the GPUs")? {
                Ok(_) => return Ok(()),
                Err(error @ (AskError::Store(_) | AskError::Busy | AskError::Late(_))) => {
                    if !std::mem::replace(&mut said, true) {
                        let every = WAIT_AGAIN.as_secs();
                        tracing::error!("the GPUs cannot be recorded: {error}; trying again every {every} s");
                    }
                    tokio::time::sleep(WAIT_AGAIN).await;
                }
                Err(error) => return Err(error).context("the GPUs that were found could not be recorded"),
            }
        }
    }

    /// Scans the GPUs until that succeeds: some nodes load their drivers late.
    ///
    /// # Errors
    /// If GPUs cannot be read and the configuration has `failOnInitError`.
    async fn find_gpus(&self) -> anyhow::Result<(Looker, Inventory)> {
        let mut said = false;
        let processes = Arc::new(processes(&self.config));
        loop {
            let (source, in_hand) = (self.config.gpus.clone(), self.options.gpus.clone());
            let (processes, health_checks) = (Arc::clone(&processes), self.config.health_checks);
            let open = move || -> Result<(Looker, Inventory), GpusError> {
                let gpus = in_hand.map_or_else(|| open_gpus(source), Ok)?;
                let looker = Looker::new(gpus, processes).with_health_checks(health_checks);
                let inventory = looker.look()?;
                Ok((looker, inventory))
            };
            match tokio::task::spawn_blocking(open).await {
                Ok(Ok((looker, inventory))) => {
                    let count = inventory.parts.iter().filter(|p| p.parent.is_none()).count();
                    tracing::info!(backend = looker.gpus().describe(), gpus = count, "found GPUs");
                    return Ok((looker, inventory));
                }
                Ok(Err(error)) if self.config.fail_on_init_error => {
                    return Err(error).context("GPUs cannot be read, and failOnInitError is set");
                }
                Ok(Err(error)) => {
                    self.progress.gpus_wait(error.to_string());
                    if !std::mem::replace(&mut said, true) {
                        let every = WAIT_AGAIN.as_secs();
                        tracing::error!(
                            "no GPUs: {error}; trying again every {every} s (`berth node check` tells more)"
                        );
                    }
                }
                Err(error) => tracing::error!(%error, "looking for GPUs failed"),
            }
            tokio::time::sleep(WAIT_AGAIN).await;
        }
    }

    /// Finds the versions behind the names of the file's stack. A wrong stack stops the start, unless
    /// one that was activated through the API is in force: then it is only shown.
    fn resolve_file_stack(&self) -> anyhow::Result<()> {
        let snapshot = self.door().snapshot();
        match stack::resolve(&self.config, &snapshot)
            .and_then(|entries| stack::trusted(entries, &snapshot, &self.config.rules.trusted_keys))
        {
            Ok(entries) => self.progress.file_stack(FileStack { entries, trouble: None }),
            Err(trouble) if snapshot.stack.from_api => {
                tracing::error!("the stack of the configuration cannot be used: {trouble}");
                self.progress.file_stack(FileStack { entries: Vec::new(), trouble: Some(trouble) });
            }
            Err(trouble) => anyhow::bail!("the stack of the configuration cannot be used: {trouble}"),
        }
        Ok(())
    }

    /// The stack of the file is the start; one activated through the API wins until it is reset.
    async fn activate_file_stack(&self) -> anyhow::Result<()> {
        let snapshot = self.door().snapshot();
        let entries = self.progress.facts().file_stack.entries;
        if snapshot.stack.from_api {
            if snapshot.stack.entries != entries {
                tracing::warn!(
                    "stackShadowed: the stack activated through the API wins over the file's; \
                     `berth policy reset` goes back to the file's"
                );
            }
            return Ok(());
        }
        let mut said = false;
        while self.door().snapshot().stack.entries != entries {
            let stack = NewStack {
                from_api: false,
                by: "config".into(),
                why: String::new(),
                entries: entries.clone(),
            };
            match self.door().activate(stack, None).await {
                Ok(_) => break,
                // While a node starts it is busy and its disks are slow: a timeout does not mean that the stack is bad.
                Err(error) if error.is_passing() => {
                    if !std::mem::replace(&mut said, true) {
                        let every = WAIT_AGAIN.as_secs();
                        tracing::error!("{error}; trying again every {every} s");
                    }
                    tokio::time::sleep(WAIT_AGAIN).await;
                }
                Err(error) => return Err(error).context("the stack of the configuration cannot be used"),
            }
        }
        Ok(())
    }

    /// Streams end, sockets go, the API ends what it serves, the store is closed.
    pub async fn stop(self) {
        let Self { middle, options, admin, gpus, cluster, kubelet, mut tasks, .. } = self;
        let Middle { door, threads } = middle;
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
            let admin = tokio::task::spawn_blocking(move || admin.stop());
            let _ = tokio::join!(kubelet, admin);
        };
        // One deadline for all steps: by default a stop takes at most a second.
        let end = Instant::now() + options.stop_max;
        if tokio::time::timeout_at(end, fronts).await.is_err() {
            tracing::warn!("a front end did not stop in time");
        }
        drop(door);
        let join = tokio::task::spawn_blocking(move || threads.into_iter().for_each(|t| drop(t.join())));
        if tokio::time::timeout_at(end, join).await.is_err() {
            // Every Ok was durable when it was given, so nothing is lost.
            tracing::warn!("the keeper did not stop in time");
        }
    }
}

/// A journal that cannot be used is no reason to leave a node without GPUs.
fn open_journal(config: &Config) -> Option<Arc<dyn Journal>> {
    let limits = config.decisions?;
    match FileJournal::open(&config.state_dir.join("decisions"), limits) {
        Ok(journal) => Some(Arc::new(journal)),
        Err(error) => {
            let why = error.source.as_ref().map_or_else(String::new, |source| format!(": {source}"));
            tracing::error!("decisions are not put down: {error}{why}");
            None
        }
    }
}
