//! The client of the API server: watches the pods of this node as a source of truth, evicts pods from GPUs that are
//! drained, and publishes the state of GPUs as events, node condition and node labels. All of it is optional: Allocate
//! works with the data of the kubelet alone. Changes of GPUs are also logged here, with or without an API server, since
//! log lines and events have the same texts.

mod bypass;
mod client;
mod condition;
mod events;
mod evict;
mod labels;
mod log;
mod node_label;
pub mod node_labels;
mod pod;
mod pod_watch;
mod pods;
mod policies;
mod reviews;
mod transitions;
mod wait;

pub use client::{ConnectError, connect, error_chain};
pub use labels::{NodeLabelState, NodeLabelTask, OtherWriter};
pub use node_label::{LABEL_READ_MAX, WatchedLabel, node_label};
pub use pod::convert_pod;
pub use reviews::{ReviewError, Reviews, User};
pub use wait::RetryAfter;

use berth_core::admission::Door;
use berth_kernel::ledger::Ledger;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;

/// How the API server is reached.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ApiServer {
    /// Not at all: the kubelet's own accounts are the only sources.
    Off,
    /// By the service account of our pod.
    InCluster,
    /// By a kubeconfig.
    Kubeconfig(PathBuf),
}

/// Settings of this crate.
#[derive(Clone, Debug)]
pub struct Settings {
    /// How the API server is reached.
    pub api_server: ApiServer,
    /// The name of this node's object.
    pub node: String,
    /// How long pod events are collected before they are sent to the keeper as one command. The event of a pod that may
    /// be the next to get an Allocate is not delayed; see [`berth_kernel::asking`].
    pub gather: Duration,
    /// `timeoutSeconds` of each watch, whole seconds.
    pub watch: Duration,
    /// Read timeout of a connection: how long it may deliver nothing before it counts as dead. The API server sends a
    /// bookmark on each watch every minute.
    pub silence: Duration,
    /// The longest wait after a watch that was open is lost.
    pub lost: Duration,
    /// How long after a drain begins the first pod of the GPU is evicted: by then the kubelet has received the list
    /// that shows its held devices Unhealthy.
    pub listed: Duration,
    /// The first wait after a failure; doubles up to [`BACKOFF_MAX`].
    pub again: Duration,
    /// Until when the API server asked its clients to wait (`Retry-After`).
    pub retry_after: RetryAfter,
    /// The labels to write to the node object, if any.
    pub labels: Option<NodeLabelTask>,
    /// Receives whether another writer labels the node object; `None`: not checked.
    pub other_writer: Option<watch::Sender<OtherWriter>>,
    /// The label of the node object to watch, if any.
    pub followed: Option<WatchedLabel>,
}

/// The longest wait before a failed request to the API server is sent again.
pub const BACKOFF_MAX: Duration = Duration::from_secs(30);

impl Settings {
    /// With the waits that the daemon uses.
    #[must_use]
    pub fn new(api_server: ApiServer, node: String) -> Self {
        // A tenth of a second: the hundred pod events of a deployment become a few commands to the keeper.
        Self {
            api_server,
            node,
            gather: Duration::from_millis(100),
            watch: wait::watch(wait::random()),
            // Two and a half bookmarks.
            silence: Duration::from_secs(150),
            // When an API server restarts, the connections of all nodes are lost at one moment.
            lost: Duration::from_secs(10),
            // A device list reaches the kubelet within milliseconds; a container takes longer to end.
            listed: Duration::from_millis(250),
            again: Duration::from_secs(1),
            retry_after: RetryAfter::default(),
            labels: None,
            other_writer: None,
            followed: None,
        }
    }
}

/// The state of the connection to the API server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ApiServerStatus {
    /// Not configured.
    Off,
    /// Not connected, or the watch of pods is interrupted.
    Connecting {
        /// The last error, if any, with what the operator has to do where retries alone do not help.
        last_error: Option<String>,
    },
    /// The pods of this node are watched.
    Watching,
}

/// The running tasks of this crate.
pub struct Running {
    link: watch::Receiver<ApiServerStatus>,
    tasks: Vec<JoinHandle<()>>,
}

impl Running {
    /// The state of the connection to the API server.
    #[must_use]
    pub fn link(&self) -> watch::Receiver<ApiServerStatus> {
        self.link.clone()
    }

    /// Aborts the tasks. None needs an orderly end: commands that the keeper took are applied.
    pub fn stop(self) {
        for task in self.tasks {
            task.abort();
        }
    }
}

/// Starts the tasks and returns at once. `before` is the ledger as the last process stored it: changes since then are
/// published as events, and logged even where no API server is configured.
#[must_use]
pub fn start(settings: Settings, door: Door, before: Arc<Ledger>) -> Running {
    let (log_door, stored) = (door.clone(), Arc::clone(&before));
    let log = tokio::spawn(async move { log::keep(&log_door, stored).await });
    if settings.api_server == ApiServer::Off {
        return Running { link: watch::channel(ApiServerStatus::Off).1, tasks: vec![log] };
    }
    let (link_sender, link) = watch::channel(ApiServerStatus::Connecting { last_error: None });
    let task = tokio::spawn(async move { Box::pin(run(&settings, &door, &link_sender, before)).await });
    Running { link, tasks: vec![log, task] }
}

/// Connects, with retries, and then runs the tasks that need a client; never returns. Events are collected from the
/// start, before the connection exists.
async fn run(settings: &Settings, door: &Door, link: &watch::Sender<ApiServerStatus>, before: Arc<Ledger>) {
    let (event_sender, mut events) = mpsc::channel(events::EVENTS_WAITING_MAX);
    let client_tasks = async {
        let client = client::connect_with_retries(settings, link).await;
        tokio::join!(
            pods::keep(settings, client.clone(), door, link),
            evict::keep(settings, client.clone(), door),
            events::publish(settings, client.clone(), &mut events),
            condition::keep(settings, client.clone(), door),
            async {
                if let Some(work) = &settings.labels {
                    labels::keep(settings, client.clone(), work).await;
                } else if let Some(other_writer) = &settings.other_writer {
                    labels::poll_other_writer(settings, client.clone(), other_writer).await;
                }
            },
            async {
                if let Some(label) = &settings.followed {
                    node_label::follow(settings, client.clone(), label).await;
                }
            },
        );
    };
    tokio::join!(events::collect(settings, door, before, event_sender), client_tasks);
}
