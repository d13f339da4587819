//! The client of the API server: watches the pods of this node as a source of truth, evicts pods from GPUs that are
//! drained, and publishes the state of GPUs as events, node condition and node labels. All of it is optional: Allocate
//! works with the data of the kubelet alone.

mod claims;
mod client;
mod condition;
mod events;
mod evict;
mod fleet;
mod label_writer;
mod labels;
mod moves;
mod node_label;
pub mod node_labels;
mod pending_event;
mod pod;
mod pods;
mod quantity;
mod reviews;
mod settings;
mod slice_contents;
mod slice_order;
mod slices;
mod taint_rules;
#[cfg(test)]
mod test_node;

pub use berth_kube::{ApiServer, BACKOFF_MAX, RetryAfter, error_chain};
pub use claims::Claims;
pub use client::{ConnectError, NodeInfo, connect, node_info};
pub use evict::EvictionCheck;
pub use label_writer::{LabelChannels, LabelSettings};
pub use node_label::{LABEL_READ_MAX, node_label};
pub use pod::convert_pod;
pub use reviews::{ReviewError, Reviews, User};
pub use settings::{
    ApiServerStatus, DraTask, FleetState, FleetTask, NodeLabelState, NodeLabelTask, NodeStackState,
    OtherWriter, PolicyPulled, Settings, SlicesState, TaintRulesState, WatchedLabel,
};
pub use taint_rules::marks_of_rules;

use berth_core::KernelHandle;
use berth_core::transition_stream::Batches;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;

/// The running tasks of this crate. Dropping it aborts them; none needs an orderly end, since commands that the keeper
/// took are applied.
pub struct ClusterTasks {
    link: watch::Receiver<ApiServerStatus>,
    claims: Claims,
    /// Set once the tasks may connect.
    connect: watch::Sender<bool>,
    /// One task, or none without an API server.
    _tasks: JoinSet<()>,
}

impl ClusterTasks {
    /// The state of the connection to the API server.
    #[must_use]
    pub fn link(&self) -> watch::Receiver<ApiServerStatus> {
        self.link.clone()
    }

    /// What reads claims.
    #[must_use]
    pub fn claims(&self) -> Claims {
        self.claims.clone()
    }

    /// Allows the tasks to connect to the API server, if one is configured. The daemon calls this after the first scan,
    /// or after 30 s without one: before the first scan, the node condition would report every stored GPU as vanished.
    /// Until then the tasks only collect transitions.
    pub fn allow_connection(&self) {
        self.connect.send_replace(true);
    }
}

/// Starts the tasks and returns at once. The transitions of `batches` are published as events. No connection is made
/// before [`ClusterTasks::allow_connection`].
#[must_use]
pub fn start(settings: Settings, kernel: KernelHandle, mut batches: Batches) -> ClusterTasks {
    let (mut tasks, (connect, may_connect)) = (JoinSet::new(), watch::channel(false));
    if settings.connection.api_server == ApiServer::Off {
        let (link, claims) = (watch::channel(ApiServerStatus::Off).1, Claims::new(watch::channel(None).1));
        return ClusterTasks { link, claims, connect, _tasks: tasks };
    }
    let (client_sender, client) = watch::channel(None);
    let (link_sender, link) = watch::channel(ApiServerStatus::Connecting { last_error: None });
    tasks.spawn(async move {
        Box::pin(run(&settings, &kernel, &link_sender, &client_sender, &mut batches, may_connect)).await;
    });
    ClusterTasks { link, claims: Claims::new(client), connect, _tasks: tasks }
}

/// Connects, with retries, and then runs the tasks that need a client; never returns. Events are collected from the
/// start, before the connection exists.
async fn run(
    settings: &Settings,
    kernel: &KernelHandle,
    link: &watch::Sender<ApiServerStatus>,
    connected: &watch::Sender<Option<kube::Client>>,
    batches: &mut Batches,
    mut may_connect: watch::Receiver<bool>,
) {
    let (event_sender, mut events) = mpsc::channel(events::EVENTS_WAITING_MAX);
    let client_tasks = async {
        // An error means that the tasks are being aborted.
        let _ = may_connect.wait_for(|may_connect| *may_connect).await;
        let client = client::connect_with_retries(settings, link).await;
        connected.send_replace(Some(client.clone()));
        tokio::join!(
            pods::keep(settings, client.clone(), kernel, link),
            evict::keep(settings, client.clone(), kernel),
            events::publish(settings, client.clone(), &mut events),
            condition::keep(settings, client.clone(), kernel),
            async {
                if let Some(work) = &settings.labels {
                    labels::keep(settings, client.clone(), work).await;
                } else if let Some(other_writer) = &settings.other_writer {
                    labels::poll_other_writer(settings, client.clone(), other_writer).await;
                }
            },
            async {
                if let Some(task) = &settings.dra {
                    tokio::join!(
                        slices::keep(settings, client.clone(), kernel, task),
                        moves::keep(settings, client.clone(), kernel, task),
                        taint_rules::keep(settings, client.clone(), kernel, task),
                    );
                }
            },
            async {
                if let Some(task) = &settings.fleet {
                    fleet::keep(settings, client.clone(), kernel, task).await;
                }
            },
            async {
                if let Some(label) = &settings.watched_label {
                    node_label::follow(settings, client.clone(), label).await;
                }
            },
        );
    };
    // A bad stack is rolled back also while the API server cannot be reached.
    let node_stack = async {
        if let Some(task) = &settings.fleet {
            fleet::node_stack::keep(settings, connected.subscribe(), kernel, task).await;
        }
    };
    tokio::join!(events::collect(batches, event_sender), client_tasks, node_stack);
}
