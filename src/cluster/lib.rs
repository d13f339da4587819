//! The API server, where it can be reached: which pods this node has, as a source of truth; the way
//! to ask pods to leave; and where the node's GPUs are told of. All of it is optional: what the
//! kubelet knows is enough to serve it. The log is told of GPUs here too, whether or not there is an API
//! server, since what is told is the same.

mod bypass;
mod client;
mod condition;
mod events;
mod evict;
mod labels;
mod log;
mod news;
mod node_label;
pub mod node_labels;
mod pod;
mod pod_watch;
mod pods;
mod policies;
mod reviews;
mod wait;

pub use client::{ConnectError, connect, words};
pub use labels::{LabelWork, Labelled, OtherWriter};
pub use node_label::{FollowedLabel, LABEL_WAIT_MAX, node_label};
pub use pod::understand;
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

/// What this room needs to be told.
#[derive(Clone, Debug)]
pub struct Settings {
    /// How the API server is reached.
    pub api_server: ApiServer,
    /// The name of this node's object.
    pub node: String,
    /// How long news of pods are gathered before they are handed in. A pod that may ask next waits for
    /// nobody; see [`berth_kernel::asking`].
    pub gather: Duration,
    /// How long the API server is asked to keep a watch open, whole seconds.
    pub watch: Duration,
    /// The longest silence on a connection before it counts as dead. A watch is sent a bookmark each minute.
    pub silence: Duration,
    /// The longest wait after a watch that was open is lost.
    pub lost: Duration,
    /// How long a GPU's held devices were listed Unhealthy before the first of its pods is asked to
    /// leave.
    pub listed: Duration,
    /// The first wait after something failed; doubles up to [`AGAIN_MAX`].
    pub again: Duration,
    /// Until when the API server asked to be left alone.
    pub retry_after: RetryAfter,
    /// The labels of the node object, if it is to have any of ours.
    pub labels: Option<LabelWork>,
    /// Who is to know whether another writer labels the node object, if anybody.
    pub other_writer: Option<watch::Sender<OtherWriter>>,
    /// The label of the node object that is followed, if any.
    pub followed: Option<FollowedLabel>,
}

/// The longest wait before the API server is asked again.
pub const AGAIN_MAX: Duration = Duration::from_secs(30);

impl Settings {
    /// With the product's waits.
    #[must_use]
    pub fn new(api_server: ApiServer, node: String) -> Self {
        // A tenth of a second turns the hundred events of a deployment into a few turns of the keeper.
        Self {
            api_server,
            node,
            gather: Duration::from_millis(100),
            watch: wait::watch(wait::random()),
            // Two bookmarks may be late before a third one counts as lost.
            silence: Duration::from_secs(150),
            // As many connections as there are nodes are lost when an API server restarts.
            lost: Duration::from_secs(10),
            // A list reaches the kubelet within milliseconds; a container takes longer to end.
            listed: Duration::from_millis(250),
            again: Duration::from_secs(1),
            retry_after: RetryAfter::default(),
            labels: None,
            other_writer: None,
            followed: None,
        }
    }
}

/// How it stands with the API server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Link {
    /// Not configured.
    Off,
    /// On the way, and what stands in it, if something does; says what to do where an operator must.
    Connecting {
        /// What failed last.
        trouble: Option<String>,
    },
    /// The pods of this node are shown.
    Watching,
}

/// The running room.
pub struct Running {
    link: watch::Receiver<Link>,
    tasks: Vec<JoinHandle<()>>,
}

impl Running {
    /// How it stands with the API server, as it changes.
    #[must_use]
    pub fn link(&self) -> watch::Receiver<Link> {
        self.link.clone()
    }

    /// Ends it. Nothing of it must be brought to an end: what it handed in is applied.
    pub fn stop(self) {
        for task in self.tasks {
            task.abort();
        }
    }
}

/// Starts it; waits for nothing. `before` is the ledger as the last process left it: what turned since
/// is told, in the log even where no API server is configured.
#[must_use]
pub fn start(settings: Settings, door: Door, before: Arc<Ledger>) -> Running {
    let (log_door, left) = (door.clone(), Arc::clone(&before));
    let log = tokio::spawn(async move { log::keep(&log_door, left).await });
    if settings.api_server == ApiServer::Off {
        return Running { link: watch::channel(Link::Off).1, tasks: vec![log] };
    }
    let (told, link) = watch::channel(Link::Connecting { trouble: None });
    let task = tokio::spawn(async move { Box::pin(run(&settings, &door, &told, before)).await });
    Running { link, tasks: vec![log, task] }
}

/// Connects, for ever, and works as long as a connection lasts.
async fn run(settings: &Settings, door: &Door, told: &watch::Sender<Link>, before: Arc<Ledger>) {
    let (tell, mut notices) = mpsc::channel(events::EVENTS_WAITING_MAX);
    let work = async {
        let client = client::connect_at_last(settings, told).await;
        tokio::join!(
            pods::keep(settings, client.clone(), door, told),
            evict::keep(settings, client.clone(), door),
            events::publish(settings, client.clone(), &mut notices),
            condition::keep(settings, client.clone(), door),
            async {
                if let Some(work) = &settings.labels {
                    labels::keep(settings, client.clone(), work).await;
                } else if let Some(told) = &settings.other_writer {
                    labels::look_for_another(settings, client.clone(), told).await;
                }
            },
            async {
                if let Some(label) = &settings.followed {
                    node_label::follow(settings, client.clone(), label).await;
                }
            },
        );
    };
    tokio::join!(events::collect(settings, door, before, tell), work);
}
