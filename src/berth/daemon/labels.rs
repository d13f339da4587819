//! Keeps the node's labels up to date: computes them from each snapshot, writes the file of node-feature-discovery, and
//! sends them to the task that patches the node object.

use super::{Daemon, Progress};
use crate::config::Config;
use berth_admin::Step;
use berth_cluster::ApiServer;
use berth_cluster::node_labels::{Facts, Labels, OTHER_WRITER, file, labels};
use berth_cluster::{NodeLabelState, NodeLabelTask, OtherWriter};
use berth_core::admission::Door;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;

/// Changes of the ledger are gathered this long: labels concern what comes and goes by the hour.
const GATHER: Duration = Duration::from_secs(1);
/// Interval of the checks whether the file is still there, and whether another writer came or went.
const LOOK_AGAIN: Duration = Duration::from_secs(60);
/// The file in which the machine reports its product name.
const MACHINE: &str = "/sys/class/dmi/id/product_name";

/// The channels to and from the task that patches the node object.
pub(super) struct Labelling {
    wanted: watch::Sender<Option<Labels>>,
    told: watch::Sender<NodeLabelState>,
    other: watch::Sender<OtherWriter>,
}

impl Default for Labelling {
    fn default() -> Self {
        let waiting = NodeLabelState::Not("the API server was not asked yet".into());
        Self {
            wanted: watch::Sender::new(None),
            told: watch::Sender::new(waiting),
            other: watch::Sender::new(OtherWriter::Unasked),
        }
    }
}

impl Labelling {
    /// For the task that patches the node object, if it is configured.
    pub(super) fn work(&self, config: &Config) -> Option<NodeLabelTask> {
        let work = || NodeLabelTask { wanted: self.wanted.subscribe(), state: self.told.clone() };
        config.labels.node.then(work)
    }

    /// For the task that reads the node object, if labels are written to a file.
    pub(super) fn other_writer(&self, config: &Config) -> Option<watch::Sender<OtherWriter>> {
        config.labels.nfd_file.is_some().then(|| self.other.clone())
    }
}

impl Daemon {
    /// Runs once the GPUs were scanned and offered: labels show how they are shared.
    pub(super) fn start_labels(&mut self) {
        let config = &self.config;
        if !config.labels.wanted() {
            return;
        }
        let facts = Facts {
            machine: fs::read_to_string(MACHINE).ok().map(|name| name.trim().to_owned()),
            mig: config.mig_strategy,
            mps: config.edits.mps_sockets().into_keys().collect(),
            ..Facts::default()
        };
        let no_server = config.api_server == ApiServer::Off;
        let node = config.labels.node.then(|| {
            if no_server {
                let why = "labels.node needs the API server, and none is configured (--kubeconfig, or a service account)";
                tracing::warn!("the node object is not labelled: {why}");
                self.labels.told.send_replace(NodeLabelState::Not(why.into()));
            }
            self.labels.told.subscribe()
        });
        let keeper = Keeper {
            door: self.door().clone(),
            facts,
            file: config.labels.nfd_file.clone(),
            // Without an API server the files of the folder are all that is seen of another writer.
            other: (config.labels.nfd_file.is_some() && !no_server).then(|| self.labels.other.subscribe()),
            node,
            wanted: self.labels.wanted.clone(),
            progress: Arc::clone(&self.progress),
            said: None,
        };
        self.tasks.spawn(keeper.keep());
    }
}

/// What the task works with.
struct Keeper {
    door: Door,
    facts: Facts,
    file: Option<PathBuf>,
    /// Whether another writer labels the node object, if that is checked.
    other: Option<watch::Receiver<OtherWriter>>,
    /// The state of the labels of the node object, if they are configured.
    node: Option<watch::Receiver<NodeLabelState>>,
    wanted: watch::Sender<Option<Labels>>,
    progress: Arc<Progress>,
    /// What was last logged about the file.
    said: Option<Step>,
}

impl Keeper {
    async fn keep(mut self) {
        let mut snapshots = self.door.watch();
        loop {
            let versions = self.door.figures().gpus.versions();
            self.facts.driver_version = versions.driver;
            self.facts.cuda_version = versions.cuda;
            let labels = labels(&snapshots.borrow_and_update(), &self.facts);
            let of_file = self.write(&labels).await;
            self.wanted.send_if_modified(|wanted| {
                let news = wanted.as_ref() != Some(&labels);
                *wanted = Some(labels);
                news
            });
            let of_node = self.node.as_ref().map(|told| match &*told.borrow() {
                NodeLabelState::Done => Step::Done,
                NodeLabelState::Not(why) => Step::Waiting(why.clone()),
            });
            let waiting = |step: &Option<Step>| match step {
                Some(Step::Waiting(why)) => Some(why.clone()),
                _ => None,
            };
            let why: Vec<String> = [&of_file, &of_node].into_iter().filter_map(waiting).collect();
            self.progress.labels(if why.is_empty() { Step::Done } else { Step::Waiting(why.join("; ")) });
            let told = async {
                match (&mut self.node, &mut self.other) {
                    (Some(told), _) => drop(told.changed().await),
                    (None, Some(other)) => drop(other.changed().await),
                    (None, None) => std::future::pending().await,
                }
            };
            tokio::select! {
                changed = snapshots.changed() => {
                    if changed.is_err() {
                        return;
                    }
                    tokio::time::sleep(GATHER).await;
                }
                () = told => {}
                () = tokio::time::sleep(LOOK_AGAIN) => {}
            }
        }
    }

    /// Brings the file up to date. Says in the log what is news.
    async fn write(&mut self, labels: &Labels) -> Option<Step> {
        let path = self.file.clone()?;
        let labels = labels.clone();
        let other =
            self.other.as_mut().map_or(OtherWriter::Absent, |other| other.borrow_and_update().clone());
        let shown = path.display().to_string();
        let work = move || brought_up_to_date(&path, &labels, &other);
        let step = tokio::task::spawn_blocking(work).await.ok()?;
        if self.said.as_ref() != Some(&step) {
            match &step {
                Step::Done => {
                    tracing::info!(file = shown, "the label file for node-feature-discovery was written");
                }
                Step::Waiting(why) => {
                    tracing::warn!(why, "the label file for node-feature-discovery is not written");
                }
            }
            self.said = Some(step.clone());
        }
        Some(step)
    }
}

fn brought_up_to_date(path: &Path, labels: &Labels, on_node: &OtherWriter) -> Step {
    let shown = path.display();
    let other = match (on_node, file::other_writer(path)) {
        (_, Some(other)) => Some(format!("in {}", other.display())),
        (OtherWriter::Present, None) => Some("on the node object".into()),
        (OtherWriter::Unasked, None) => {
            // The earlier content stays.
            return Step::Waiting(
                "the API server was not asked yet whether another writer labels the node".into(),
            );
        }
        (OtherWriter::Absent, None) => None,
    };
    if let Some(other) = other {
        let left = file::remove(path).err().map(|error| format!(" ({shown} cannot be removed: {error})"));
        return Step::Waiting(format!(
            "another writer's {OTHER_WRITER} is {other}: remove GPU feature discovery from the node, or take `labels.nfdFile` out{}",
            left.unwrap_or_default()
        ));
    }
    match file::write(path, labels) {
        Ok(_) => Step::Done,
        Err(error) => Step::Waiting(format!(
            "{shown} cannot be written: {error} (the folder must be there and, in a pod, be mounted)"
        )),
    }
}
