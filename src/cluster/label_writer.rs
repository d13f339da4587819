//! Keeps the node's labels up to date: computes them from each snapshot, writes the file of node-feature-discovery, and
//! sends them to the task that patches the node object.

use super::node_labels::{Facts, Labels, OTHER_WRITER, file, labels};
use super::settings::{NodeLabelState, NodeLabelTask, OtherWriter};
use berth_core::{KernelHandle, next_beat};
use berth_kernel::hardware::mig::MigStrategy;
use berth_kernel::ids::names::Resource;
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tokio::sync::watch;

/// Changes of the ledger within this time are handled together, since labels change rarely.
const DEBOUNCE: Duration = Duration::from_secs(1);
/// Interval of checks whether the file still exists, and whether there is another writer.
const CHECK_INTERVAL: Duration = Duration::from_secs(60);
/// The file in which the machine reports its product name.
const PRODUCT_NAME_FILE: &str = "/sys/class/dmi/id/product_name";

/// How the node is labelled. Off by default.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LabelSettings {
    /// The file from which node-feature-discovery reads labels.
    pub nfd_file: Option<PathBuf>,
    /// Whether the node object is patched.
    pub node: bool,
}

impl LabelSettings {
    /// Whether the node is labelled.
    #[must_use]
    pub fn is_enabled(&self) -> bool {
        self.node || self.nfd_file.is_some()
    }
}

/// The channels to and from the task that patches the node object.
pub struct LabelChannels {
    settings: LabelSettings,
    labels: watch::Sender<Option<Labels>>,
    node_state: watch::Sender<NodeLabelState>,
    other_writer: watch::Sender<OtherWriter>,
    sharing: watch::Sender<Sharing>,
}

/// What labels show of the configuration.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Sharing {
    /// The strategy by which MIG instances are offered.
    mig: MigStrategy,
    /// Resources that containers share by MPS.
    mps: BTreeSet<Resource>,
}

impl LabelChannels {
    /// The channels for these settings.
    #[must_use]
    pub fn new(settings: LabelSettings) -> Self {
        let waiting = NodeLabelState::Not("not connected to the API server yet".into());
        Self {
            settings,
            labels: watch::Sender::new(None),
            node_state: watch::Sender::new(waiting),
            other_writer: watch::Sender::new(OtherWriter::Unknown),
            sharing: watch::Sender::default(),
        }
    }

    /// The channels for the task that patches the node object, if it is configured.
    #[must_use]
    pub fn node_task(&self) -> Option<NodeLabelTask> {
        let task = || NodeLabelTask { wanted: self.labels.subscribe(), state: self.node_state.clone() };
        self.settings.node.then(task)
    }

    /// The channel for the task that reads the node object, if labels are written to a file.
    #[must_use]
    pub fn other_writer(&self) -> Option<watch::Sender<OtherWriter>> {
        self.settings.nfd_file.is_some().then(|| self.other_writer.clone())
    }

    /// Sets what labels show of the configuration: the strategy by which MIG instances are offered, and the resources
    /// that containers share by MPS.
    pub fn set_sharing(&self, mig: MigStrategy, mps: BTreeSet<Resource>) {
        let sharing = Sharing { mig, mps };
        self.sharing.send_if_modified(|current| {
            let is_changed = *current != sharing;
            *current = sharing;
            is_changed
        });
    }

    /// The task that computes and writes labels, if they are configured. Run it after the GPUs are scanned and offered,
    /// since labels show how they are shared. `report` gets the reason why labels are not written, or `None`.
    pub fn task<R: Fn(Option<String>) + Send + 'static>(
        &self,
        has_api_server: bool,
        kernel: &KernelHandle,
        report: R,
    ) -> Option<impl Future<Output = ()> + Send + use<R>> {
        let settings = &self.settings;
        if !settings.is_enabled() {
            return None;
        }
        let facts = Facts {
            machine: fs::read_to_string(PRODUCT_NAME_FILE).ok().map(|name| name.trim().to_owned()),
            ..Facts::default()
        };
        if settings.node && !has_api_server {
            let reason = "labels.node needs the API server, and none is configured (--kubeconfig, or a service account)";
            tracing::warn!("the node object is not labelled: {reason}");
            self.node_state.send_replace(NodeLabelState::Not(reason.into()));
        }
        let writer = LabelWriter {
            kernel: kernel.clone(),
            facts,
            sharing: self.sharing.subscribe(),
            file: settings.nfd_file.clone(),
            // Without an API server another writer is detected only by its files in the folder.
            other_writer: (settings.nfd_file.is_some() && has_api_server)
                .then(|| self.other_writer.subscribe()),
            node_state: settings.node.then(|| self.node_state.subscribe()),
            labels: self.labels.clone(),
            report: Box::new(report),
            last_logged: None,
        };
        Some(writer.run())
    }
}

/// The task that computes and writes labels.
struct LabelWriter {
    kernel: KernelHandle,
    facts: Facts,
    sharing: watch::Receiver<Sharing>,
    file: Option<PathBuf>,
    /// Whether another writer labels the node object, if that is checked.
    other_writer: Option<watch::Receiver<OtherWriter>>,
    /// The state of the labels of the node object, if they are configured.
    node_state: Option<watch::Receiver<NodeLabelState>>,
    labels: watch::Sender<Option<Labels>>,
    report: Box<dyn Fn(Option<String>) + Send>,
    /// The result of writing the file that was last logged.
    last_logged: Option<Result<(), String>>,
}

impl LabelWriter {
    async fn run(mut self) {
        let mut snapshots = self.kernel.watch();
        loop {
            let versions = self.kernel.counters().gpus.versions();
            self.facts.driver_version = versions.driver;
            self.facts.cuda_version = versions.cuda;
            Sharing { mig: self.facts.mig, mps: self.facts.mps } = self.sharing.borrow_and_update().clone();
            let labels = labels(&snapshots.borrow_and_update(), &self.facts);
            let file_reason = self.write_file(&labels).await;
            self.labels.send_if_modified(|sent| {
                let is_changed = sent.as_ref() != Some(&labels);
                *sent = Some(labels);
                is_changed
            });
            let node_reason = self.node_state.as_ref().and_then(|state| match &*state.borrow() {
                NodeLabelState::Done => None,
                NodeLabelState::Not(reason) => Some(reason.clone()),
            });
            let reasons: Vec<String> = [file_reason, node_reason].into_iter().flatten().collect();
            (self.report)(Some(reasons.join("; ")).filter(|reasons| !reasons.is_empty()));
            let state_changed = async {
                match (&mut self.node_state, &mut self.other_writer) {
                    (Some(state), _) => drop(state.changed().await),
                    (None, Some(other)) => drop(other.changed().await),
                    (None, None) => std::future::pending().await,
                }
            };
            tokio::select! {
                changed = snapshots.changed() => {
                    if changed.is_err() {
                        return;
                    }
                    tokio::time::sleep(DEBOUNCE).await;
                }
                () = state_changed => {}
                _ = self.sharing.changed() => {}
                () = tokio::time::sleep_until(next_beat(CHECK_INTERVAL)) => {}
            }
        }
    }

    /// Updates the file and logs a change of the result. Returns why it is not written, if it is not.
    async fn write_file(&mut self, labels: &Labels) -> Option<String> {
        let path = self.file.clone()?;
        let labels = labels.clone();
        let other =
            self.other_writer.as_mut().map_or(OtherWriter::Absent, |other| other.borrow_and_update().clone());
        let shown = path.display().to_string();
        let update = move || update_file(&path, &labels, &other);
        let result = tokio::task::spawn_blocking(update).await.ok()?;
        if self.last_logged.as_ref() != Some(&result) {
            if let Err(why) = &result {
                tracing::warn!(why, "the label file for node-feature-discovery is not written");
            } else {
                tracing::info!(file = shown, "the label file for node-feature-discovery was written");
            }
            self.last_logged = Some(result.clone());
        }
        result.err()
    }
}

/// Writes the file, or removes it if there is another writer.
fn update_file(path: &Path, labels: &Labels, on_node: &OtherWriter) -> Result<(), String> {
    let shown = path.display();
    let other = match (on_node, file::other_writer(path)) {
        (_, Some(other)) => format!("in {}", other.display()),
        (OtherWriter::Present, None) => "on the node object".into(),
        // The existing content stays.
        (OtherWriter::Unknown, None) => {
            return Err(
                "it is not known yet whether another writer labels the node: not connected to the API server"
                    .into(),
            );
        }
        (OtherWriter::Absent, None) => {
            return file::write(path, labels).map(drop).map_err(|error| {
                format!(
                    "{shown} cannot be written: {error} (the folder must exist and, in a pod, be mounted)"
                )
            });
        }
    };
    let not_removed = file::remove(path).err().map(|error| format!(" ({shown} cannot be removed: {error})"));
    Err(format!(
        "another program labels the node: its label {OTHER_WRITER} is {other}; remove GPU feature discovery from the node, \
         or remove `labels.nfdFile`{}",
        not_removed.unwrap_or_default()
    ))
}
