//! Keeps the way in which GPUs are passed to containers up to date: at the start, when the container runtime's
//! configuration, the CDI specifications, the driver's files or the GPUs change, and when Berth's own specification was
//! deleted.

use crate::{Access, NodeVersions, Strategy, StrategyFinder};
use berth_api::DeviceListStrategy;
use berth_cluster::ApiServer;
use berth_config::Config;
use berth_core::{KernelHandle, next_beat};
use berth_files::FolderEvents;
use berth_kernel::hardware::device_access::{DeviceAccess, NamedPart};
use berth_kernel::ids::names::PartId;
use berth_kernel::node::command::Command;
use berth_kernel::node::ledger::Ledger;
use berth_kubelet::{CurrentEdits, Edits, Resolution};
use parking_lot::Mutex;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until, timeout, timeout_at};

/// Interval of checks of the node while GPUs cannot be passed to containers, or changes of files are no events.
const CHECK_INTERVAL: Duration = Duration::from_secs(2);
/// Interval of checks otherwise. Each check reads some folders and small files, and not all of them are watched: the
/// driver has many files, and a mount is no event.
const CHECK_INTERVAL_WORKING: Duration = Duration::from_secs(10);
/// Changes of files within this time are handled together.
const FILE_EVENTS_DEBOUNCE: Duration = Duration::from_millis(100);
/// How long the start waits for the versions that the API server shows.
const VERSIONS_WAIT_MAX: Duration = Duration::from_secs(5);
/// Interval of reads of these versions, which change with an upgrade of the node; and after a failed read.
const VERSIONS_INTERVAL: Duration = Duration::from_secs(600);
const VERSIONS_RETRY: Duration = Duration::from_secs(60);
/// Longest wait until grants follow other settings: the task first ends its present check, which may wait for a disk.
const APPLIED_WAIT_MAX: Duration = Duration::from_secs(10);

/// Gives the task new settings and waits until grants follow them.
pub struct StrategySettings {
    newest: watch::Sender<NumberedConfig>,
    /// The number of the settings that grants follow.
    applied: watch::Receiver<u64>,
}

/// A configuration with its number, which grows by one with each configuration that is set.
#[derive(Clone)]
struct NumberedConfig {
    number: u64,
    config: Config,
}

impl StrategySettings {
    /// Returns once grants follow these settings, or after 10 s. In the second case, grants follow them once the task's
    /// present check has ended.
    pub async fn set(&self, config: &Config) {
        let number = self.newest.borrow().number + 1;
        self.newest.send_replace(NumberedConfig { number, config: config.clone() });
        let mut applied = self.applied.clone();
        if timeout(APPLIED_WAIT_MAX, applied.wait_for(|applied| *applied >= number)).await.is_err() {
            tracing::warn!(
                "the check of the node takes over 10 s: grants follow the new containerEdits once it has ended"
            );
        }
    }
}

/// The task, before it starts.
pub struct StrategyTask {
    newest: watch::Receiver<NumberedConfig>,
    applied: watch::Sender<u64>,
    is_simulated: bool,
    finder: Arc<Mutex<StrategyFinder>>,
    is_auto: bool,
    configured: Edits,
    current: watch::Sender<Arc<Edits>>,
    last: Option<(Strategy, DeviceAccess)>,
    /// Whether the next check is published even if it finds what the last one found, since the settings changed.
    must_publish: bool,
    versions: VersionReader,
    on_change: OnChange,
    kernel: KernelHandle,
}

/// Called with each new strategy, as the REST API shows it.
pub type OnChange = Box<dyn Fn(DeviceListStrategy) + Send + Sync>;

impl StrategyTask {
    /// A task with this configuration. `is_simulated`: the GPUs are not real, whatever the configuration says.
    #[must_use]
    pub fn new(
        config: Config,
        is_simulated: bool,
        on_change: OnChange,
        kernel: KernelHandle,
    ) -> (Self, StrategySettings) {
        let newest = watch::Sender::new(NumberedConfig { number: 0, config: config.clone() });
        let applied = watch::Sender::new(0);
        let settings = StrategySettings { newest, applied: applied.subscribe() };
        let finder = StrategyFinder::new(&config, Path::new("/"), is_simulated);
        let needs_versions = finder.needs_versions() && config.cluster.api_server != ApiServer::Off;
        let task = Self {
            newest: settings.newest.subscribe(),
            applied,
            is_simulated,
            finder: Arc::new(Mutex::new(finder)),
            is_auto: config.containers.auto_strategy,
            configured: config.containers.edits.clone(),
            current: watch::Sender::new(Arc::new(config.containers.edits.clone())),
            last: None,
            must_publish: false,
            versions: VersionReader {
                known: NodeVersions::default(),
                due: needs_versions.then(Instant::now),
                cluster: berth_cluster::Settings::new(config.cluster.api_server, config.node.name),
            },
            on_change,
            kernel,
        };
        (task, settings)
    }

    /// What a grant changes in its container, at present.
    #[must_use]
    pub fn edits(&self) -> CurrentEdits {
        self.current.subscribe()
    }

    /// Checks the node once, before the first list is sent.
    pub async fn check_first(&mut self) {
        if !self.versions.read_if_due().await {
            tracing::warn!(
                "the API server does not answer: the versions of the kubelet and of the container runtime are not known yet"
            );
        }
        self.check().await;
    }

    /// Runs until it is aborted.
    pub async fn run(mut self) {
        let mut snapshots = self.kernel.watch();
        let mut events = FolderEvents::new().inspect_err(log_no_events).ok();
        let mut next_file_check = Instant::now();
        loop {
            let before = Arc::clone(&snapshots.borrow_and_update());
            self.versions.read_if_due().await;
            let folders = self.finder.lock().folders();
            let watched = events.as_mut().map(|events| events.watch(folders.iter().map(PathBuf::as_path)));
            self.check().await;
            let is_watched = matches!(watched, Some(Ok(())));
            let may_wait = is_watched && self.works() && !self.finder.lock().is_settling();
            let interval = if may_wait { CHECK_INTERVAL_WORKING } else { CHECK_INTERVAL };
            let parts_changed = async {
                // Most changes of the ledger do not concern the parts.
                while snapshots.changed().await.is_ok() {
                    if have_parts_changed(&before, &snapshots.borrow_and_update()) {
                        return;
                    }
                }
                std::future::pending::<()>().await;
            };
            let not_before = next_file_check;
            let files_changed = async {
                match &mut events {
                    Some(events) => events.changed().await,
                    None => std::future::pending().await,
                }
                sleep_until(not_before.max(Instant::now() + FILE_EVENTS_DEBOUNCE)).await;
            };
            let mut newest = self.newest.clone();
            tokio::select! {
                _ = timeout_at(next_beat(interval), parts_changed) => {}
                // If the specification cannot be written, as on a full disk, the check itself changes the folder with
                // its draft. The pause keeps the check from starting itself again at once.
                () = files_changed => next_file_check = Instant::now() + CHECK_INTERVAL,
                Ok(()) = newest.changed() => self.reconfigure(),
            }
        }
    }

    /// Whether GPUs can be passed to containers, as of the last check.
    fn works(&self) -> bool {
        self.last.as_ref().is_some_and(|(last, _)| {
            matches!(last.resolution, Resolution::Works { .. }) && last.missing_nodes.is_none()
        })
    }

    /// Takes the settings of the newest configuration.
    fn reconfigure(&mut self) {
        let NumberedConfig { number, config } = self.newest.borrow_and_update().clone();
        *self.finder.lock() = StrategyFinder::new(&config, Path::new("/"), self.is_simulated);
        self.is_auto = config.containers.auto_strategy;
        self.configured = config.containers.edits;
        // The edits are published at once, with the last decision, since the check that follows may take a while.
        self.current.send_replace(match &self.last {
            Some((last, _)) => last.edits(&self.configured),
            None => Arc::new(self.configured.clone()),
        });
        self.must_publish = true;
        self.applied.send_replace(number);
    }

    /// Checks the node and publishes what changed.
    async fn check(&mut self) {
        let (finder, ledger, versions) =
            (Arc::clone(&self.finder), self.kernel.snapshot(), self.versions.known.clone());
        let check = move || {
            let found = finder.lock().find(&ledger, &versions, Access::Write);
            let device_access = device_access(&found, &ledger);
            (found, device_access)
        };
        let Ok((found, device_access)) = tokio::task::spawn_blocking(check).await else {
            tracing::error!("the check of the container runtime and its CDI specifications panicked");
            return;
        };
        let is_known =
            self.last.as_ref().is_some_and(|(last, reported)| (last, reported) == (&found, &device_access));
        if is_known && !self.must_publish {
            return;
        }
        self.log(&found);
        let edits = found.edits(&self.configured);
        (self.on_change)(found.shown(self.is_auto));
        // Without a strategy nothing will be granted; a grant that is under way keeps the former one.
        let has_strategy = matches!(found.resolution, Resolution::Works { .. });
        self.current.send_if_modified(|current| {
            let differs = has_strategy && *current != edits;
            if differs {
                *current = edits;
            }
            differs
        });
        match self.kernel.execute(Command::SetDeviceAccess(device_access.clone())).await {
            Ok(_) => (self.last, self.must_publish) = (Some((found, device_access)), false),
            // Tried again with the next check.
            Err(error) => {
                tracing::warn!(
                    "could not record whether containers can get devices; the next check tries again: {error}"
                );
            }
        }
    }

    /// Logs the decision and the warnings that changed. That no strategy works, and missing nodes, are logged as
    /// transitions.
    fn log(&self, found: &Strategy) {
        let last = self.last.as_ref().map(|(last, _)| last);
        if last.map(|last| &last.resolution) != Some(&found.resolution)
            && let Resolution::Works { why, warning, .. } = &found.resolution
        {
            let strategies = found.shown(self.is_auto).strategies.join(",");
            tracing::info!(strategies, "GPUs are passed to containers: {why}");
            if let Some(warning) = warning {
                tracing::warn!(strategies, "containers may get no GPU: {warning}");
            }
        }
        let is_new = |warning: &&String| last.is_none_or(|last| !last.warnings.contains(warning));
        for warning in found.warnings.iter().filter(is_new) {
            tracing::warn!("CDI specification: {warning}");
        }
    }
}

/// Reads the versions of the kubelet and of the container runtime, as the API server shows them.
struct VersionReader {
    /// Those of the last successful read.
    known: NodeVersions,
    /// When they are read next; `None` if they do not matter, or there is no API server.
    due: Option<Instant>,
    cluster: berth_cluster::Settings,
}

impl VersionReader {
    /// Reads the versions if they are due. Returns false if the API server did not answer in time; an error is an
    /// answer. The versions of the last successful read are used then.
    async fn read_if_due(&mut self) -> bool {
        if self.due.is_none_or(|due| Instant::now() < due) {
            return true;
        }
        self.due = Some(Instant::now() + VERSIONS_RETRY);
        let Ok(read) = timeout(VERSIONS_WAIT_MAX, berth_cluster::node_info(&self.cluster)).await else {
            return false;
        };
        match read {
            Ok(info) => {
                self.due = Some(Instant::now() + VERSIONS_INTERVAL);
                self.known = NodeVersions::of(&info);
            }
            // The connection's own task reports it.
            Err(error) => tracing::debug!("the versions of the node cannot be read: {error}"),
        }
        true
    }
}

fn log_no_events(error: &std::io::Error) {
    tracing::warn!(
        %error,
        "changes of CDI specifications are noticed by checks every 2 s only: raise fs.inotify.max_user_instances"
    );
}

/// What the ledger needs to know of this decision, which was made for its parts as they are in `ledger`.
fn device_access(found: &Strategy, ledger: &Ledger) -> DeviceAccess {
    let (no_strategy, by_cdi) = match &found.resolution {
        Resolution::NoStrategy(error) => (Some(error.to_string().into()), false),
        Resolution::Works { strategies, .. } => (None, strategies.iter().any(|strategy| strategy.is_cdi())),
    };
    let named = |id: &PartId| Some((id.clone(), NamedPart::of(ledger.part(id)?)));
    let named_parts =
        found.named_parts.as_ref().map(|parts| Arc::new(parts.iter().filter_map(named).collect()));
    let missing_nodes = found.missing_nodes.as_deref().map(Into::into);
    DeviceAccess { no_strategy, by_cdi, missing_nodes, named_parts }
}

/// Whether a part was added, removed or changed. A change of what containers hold is ignored unless a part left: the
/// specification keeps the name of a part that left as long as a container holds it.
fn have_parts_changed(before: &Ledger, now: &Ledger) -> bool {
    before.parts.len() != now.parts.len()
        || before.parts.iter().zip(&now.parts).any(|((_, old), (_, new))| {
            !Arc::ptr_eq(old, new) && (old.part != new.part || old.present != new.present)
        })
}
