//! Writes labels to the node object by server-side apply: the API server records which labels are ours, removes those
//! that an apply no longer has, and refuses to overwrite those of another field manager.

use super::client::{ANSWER_MAX, error_chain};
use super::settings::{NodeLabelState, NodeLabelTask, OtherWriter, Settings};
use super::wait::{self, Backoff, REFRESH_MEAN, jittered};
use crate::node_labels::{Labels, OTHER_WRITER};
use k8s_openapi::api::core::v1::Node;
use kube::api::{Patch, PatchParams};
use kube::core::Status;
use kube::{Api, Client};
use serde_json::json;
use std::collections::BTreeSet;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout};

/// The field manager of our labels.
const MANAGER: &str = "berth";

/// Keeps the labels up to date; never returns. The node object is checked for another writer and for changes of our
/// labels with each change of ours, and every quarter of an hour ([`REFRESH_MEAN`]).
pub(super) async fn keep(settings: &Settings, client: Client, work: &NodeLabelTask) {
    let nodes: Api<Node> = Api::all(client);
    let mut wanted = work.wanted.clone();
    let mut backoff = Backoff::new(settings.again);
    loop {
        let known = wanted.wait_for(Option::is_some).await.ok().map(|labels| labels.clone());
        let Some(labels) = known.flatten() else { return std::future::pending().await };
        wanted.mark_unchanged();
        let next = match step(&nodes, &settings.node, &labels).await {
            Ok(left_out) => {
                set_state(work, state_after_write(&left_out));
                backoff.reset();
                jittered(REFRESH_MEAN, wait::random())
            }
            Err(Stop::OtherWriter) => {
                let why = format!(
                    "another writer's {OTHER_WRITER} is on the node: remove GPU feature discovery from it, or switch `labels.node` off"
                );
                set_state(work, NodeLabelState::Not(why));
                jittered(REFRESH_MEAN, wait::random())
            }
            Err(Stop::Failed(why)) => {
                set_state(work, NodeLabelState::Not(why));
                settings.retry_after.delay(backoff.next(wait::random()), Instant::now())
            }
        };
        tokio::select! {
            changed = wanted.changed() => {
                if changed.is_err() {
                    return std::future::pending().await;
                }
                // A burst of changes is one patch.
                sleep(settings.gather).await;
            }
            () = sleep(next) => {}
        }
    }
}

/// Checks every quarter of an hour ([`REFRESH_MEAN`]) whether another writer's label is on the node object; never
/// returns. Used where this daemon does not write its labels through the API server: another writer may do so.
pub(super) async fn poll_other_writer(
    settings: &Settings,
    client: Client,
    other_writer: &watch::Sender<OtherWriter>,
) {
    let nodes: Api<Node> = Api::all(client);
    let mut logged = false;
    loop {
        let node = answer(nodes.get_metadata(&settings.node), "get nodes (ClusterRole berth)").await;
        let found = match node {
            Ok(node) => {
                logged = false;
                node.metadata.labels.unwrap_or_default().contains_key(OTHER_WRITER)
            }
            Err(RequestError(why)) => {
                if !std::mem::replace(&mut logged, true) {
                    tracing::warn!(
                        why,
                        "cannot check whether another writer labels the node; the labels are written all the same"
                    );
                }
                // The result of the last check stays.
                *other_writer.borrow() == OtherWriter::Present
            }
        };
        other_writer.send_replace(if found { OtherWriter::Present } else { OtherWriter::Absent });
        sleep(jittered(REFRESH_MEAN, wait::random())).await;
    }
}

/// The state after a write that left out the labels of other field managers.
fn state_after_write(left_out: &[String]) -> NodeLabelState {
    if left_out.is_empty() {
        return NodeLabelState::Done;
    }
    NodeLabelState::Not(format!(
        "another field manager owns {} with another value (`kubectl get node -o yaml --show-managed-fields` shows \
         which); the other labels are set",
        left_out.join(", ")
    ))
}

/// Publishes the state, and logs it if it changed.
fn set_state(work: &NodeLabelTask, state: NodeLabelState) {
    work.state.send_if_modified(|current| {
        let changed = *current != state;
        if changed {
            match &state {
                NodeLabelState::Done => tracing::info!("the node object has the labels of its GPUs"),
                NodeLabelState::Not(why) => tracing::warn!(why, "the node object is not labelled"),
            }
            *current = state;
        }
        changed
    });
}

enum Stop {
    OtherWriter,
    Failed(String),
}

/// Why a request failed.
pub(super) struct RequestError(pub(super) String);

/// Why an apply failed.
enum ApplyError {
    /// Another field manager owns these labels, with other values.
    Conflict(Vec<String>),
    Other(RequestError),
}

/// Reads the node, and writes its labels if they differ. Returns the labels that were left out since another field
/// manager owns them.
async fn step(nodes: &Api<Node>, node: &str, wanted: &Labels) -> Result<Vec<String>, Stop> {
    let read = answer(nodes.get_metadata(node), "get nodes (ClusterRole berth)").await;
    let read = read.map_err(|RequestError(why)| Stop::Failed(why))?;
    let labels = read.metadata.labels.unwrap_or_default();
    let ours: Vec<String> = managed_labels(&read.metadata.managed_fields.unwrap_or_default());
    if labels.contains_key(OTHER_WRITER) {
        // Labels that only we own are removed; those that the other writer owns, too, stay.
        if !ours.is_empty() {
            apply(nodes, node, &Labels::new()).await.map_err(ApplyError::stop)?;
        }
        return Err(Stop::OtherWriter);
    }
    let up_to_date = wanted.iter().all(|(key, value)| labels.get(key) == Some(value))
        && ours.iter().all(|key| wanted.contains_key(key))
        && wanted.keys().all(|key| ours.contains(key));
    if up_to_date {
        return Ok(Vec::new());
    }
    let mut wanted = wanted.clone();
    let mut left_out = Vec::new();
    // Each iteration removes a label, so the loop ends.
    loop {
        match apply(nodes, node, &wanted).await {
            Ok(()) => return Ok(left_out),
            Err(ApplyError::Conflict(keys)) => {
                for key in &keys {
                    wanted.remove(key);
                }
                left_out.extend(keys);
            }
            Err(error) => return Err(error.stop()),
        }
    }
}

impl ApplyError {
    fn stop(self) -> Stop {
        match self {
            Self::Conflict(keys) => Stop::Failed(format!("another field manager owns {}", keys.join(", "))),
            Self::Other(RequestError(why)) => Stop::Failed(why),
        }
    }
}

/// The labels among those sent that another field manager owns, by the status of a conflict.
fn labels_in_conflict(status: &Status, sent: &Labels) -> Vec<String> {
    let causes = status.details.iter().flat_map(|details| &details.causes);
    let keys = causes.filter_map(|cause| cause.field.strip_prefix(".metadata.labels."));
    let known: BTreeSet<&str> = keys.filter(|key| sent.contains_key(*key)).collect();
    known.into_iter().map(str::to_owned).collect()
}

/// The labels that our field manager owns.
fn managed_labels(
    fields: &[k8s_openapi::apimachinery::pkg::apis::meta::v1::ManagedFieldsEntry],
) -> Vec<String> {
    let applied = fields
        .iter()
        .filter(|entry| entry.manager.as_deref() == Some(MANAGER))
        .filter(|entry| entry.operation.as_deref() == Some("Apply"));
    let labels = applied.filter_map(|entry| {
        Some(entry.fields_v1.as_ref()?.0.pointer("/f:metadata/f:labels")?.as_object()?.clone())
    });
    let keys = labels.flat_map(|labels| labels.into_iter().map(|(key, _)| key));
    keys.filter_map(|key| Some(key.strip_prefix("f:")?.to_owned())).collect()
}

async fn apply(nodes: &Api<Node>, node: &str, labels: &Labels) -> Result<(), ApplyError> {
    let patch = json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": node, "labels": labels}});
    // Without force: labels of other field managers are not changed.
    let params = PatchParams::apply(MANAGER);
    let patch = Patch::Apply(&patch);
    let request = nodes.patch_metadata(node, &params, &patch);
    let conflict = |error: &kube::Error| match error {
        kube::Error::Api(status) if status.code == 409 => labels_in_conflict(status, labels),
        _ => Vec::new(),
    };
    let mut keys = Vec::new();
    let request = async { request.await.inspect_err(|error| keys = conflict(error)) };
    match answer(request, "patch nodes (ClusterRole berth-label)").await {
        Ok(_) => Ok(()),
        Err(_) if !keys.is_empty() => Err(ApplyError::Conflict(keys)),
        Err(error) => Err(ApplyError::Other(error)),
    }
}

/// The answer to a request within its timeout. `right`: the right that the request needs, for the message of a 403.
pub(super) async fn answer<T>(
    request: impl Future<Output = kube::Result<T>>,
    right: &str,
) -> Result<T, RequestError> {
    match timeout(ANSWER_MAX, request).await {
        Ok(Ok(answer)) => Ok(answer),
        Ok(Err(kube::Error::Api(status))) if status.code == 403 => Err(RequestError(format!(
            "{} (the daemon needs: {right}; see deploy/cluster-role.yaml)",
            status.message
        ))),
        Ok(Err(error)) => Err(RequestError(error_chain(&error))),
        Err(_) => Err(RequestError(format!("no answer within {} s", ANSWER_MAX.as_secs()))),
    }
}
