//! Writes labels to the node object by server-side apply: the API server records which labels are ours, removes those
//! that an apply no longer has, and refuses to overwrite those of another field manager.

use super::settings::{NodeLabelState, NodeLabelTask, OtherWriter, Settings};
use crate::node_labels::{Labels, OTHER_WRITER};
use berth_kube::{Backoff, REFRESH_MEAN, RequestError, jittered, random, request};
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ManagedFieldsEntry;
use kube::api::{Patch, PatchParams};
use kube::{Api, Client};
use serde_json::json;
use std::collections::BTreeSet;
use tokio::sync::watch;
use tokio::time::{Instant, sleep};

/// The field manager of our labels.
const MANAGER: &str = "berth";

/// Keeps the labels up to date; never returns. The node object is checked for another writer and for changes of our
/// labels with each change of ours, and every quarter of an hour ([`REFRESH_MEAN`]).
pub(super) async fn keep(settings: &Settings, client: Client, work: &NodeLabelTask) {
    let nodes: Api<Node> = Api::all(client);
    let mut wanted = work.wanted.clone();
    let mut backoff = Backoff::new(settings.connection.retry_interval);
    loop {
        let known = wanted.wait_for(Option::is_some).await.ok().map(|labels| labels.clone());
        let Some(labels) = known.flatten() else { return std::future::pending().await };
        wanted.mark_unchanged();
        let next = match step(&nodes, &settings.node, &labels).await {
            Ok(state) => {
                set_state(work, state);
                backoff.reset();
                jittered(REFRESH_MEAN, random())
            }
            Err(RequestError { why, .. }) => {
                set_state(work, NodeLabelState::Not(why));
                settings.connection.retry_after.delay(backoff.next(random()), Instant::now())
            }
        };
        tokio::select! {
            changed = wanted.changed() => {
                if changed.is_err() {
                    return std::future::pending().await;
                }
                // A burst of changes is one patch.
                sleep(settings.batch_window).await;
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
        let node = request(nodes.get_metadata(&settings.node), "get nodes (ClusterRole berth)").await;
        let found = match node {
            Ok(node) => {
                logged = false;
                node.metadata.labels.unwrap_or_default().contains_key(OTHER_WRITER)
            }
            Err(RequestError { why, .. }) => {
                if !std::mem::replace(&mut logged, true) {
                    tracing::warn!(
                        why,
                        "cannot check whether another writer labels the node; the labels are written nevertheless"
                    );
                }
                // The result of the last check stays.
                *other_writer.borrow() == OtherWriter::Present
            }
        };
        other_writer.send_replace(if found { OtherWriter::Present } else { OtherWriter::Absent });
        sleep(jittered(REFRESH_MEAN, random())).await;
    }
}

/// Publishes the state, and logs it if it changed.
fn set_state(work: &NodeLabelTask, state: NodeLabelState) {
    work.state.send_if_modified(|current| {
        let changed = *current != state;
        if changed {
            match &state {
                NodeLabelState::Done => tracing::info!("the GPU labels were written to the node object"),
                NodeLabelState::Not(why) => tracing::warn!(why, "the node object is not labelled"),
            }
            *current = state;
        }
        changed
    });
}

/// Reads the node, and writes its labels if they differ. Returns their state.
async fn step(nodes: &Api<Node>, node: &str, wanted: &Labels) -> Result<NodeLabelState, RequestError> {
    let read = request(nodes.get_metadata(node), "get nodes (ClusterRole berth)").await?;
    let labels = read.metadata.labels.unwrap_or_default();
    let ours = managed_labels(&read.metadata.managed_fields.unwrap_or_default());
    if labels.contains_key(OTHER_WRITER) {
        // Labels that only we own are removed; those that the other writer owns, too, stay.
        if !ours.is_empty() {
            apply(nodes, node, &Labels::new()).await?;
        }
        return Ok(NodeLabelState::Not(format!(
            "the node has the label {OTHER_WRITER} of NVIDIA's GPU feature discovery, which writes the same labels: \
             remove GPU feature discovery from the node, or set `labels.node: false`"
        )));
    }
    let up_to_date = wanted.iter().all(|(key, value)| labels.get(key) == Some(value))
        && ours.iter().all(|key| wanted.contains_key(key))
        && wanted.keys().all(|key| ours.contains(key));
    if up_to_date {
        return Ok(NodeLabelState::Done);
    }
    let mut wanted = wanted.clone();
    let mut left_out = Vec::new();
    // Each iteration removes a label, so the loop ends.
    while let Err(error) = apply(nodes, node, &wanted).await {
        let keys = labels_in_conflict(&error, &wanted);
        if keys.is_empty() {
            return Err(error);
        }
        wanted.retain(|key, _| !keys.contains(key));
        left_out.extend(keys);
    }
    if left_out.is_empty() {
        return Ok(NodeLabelState::Done);
    }
    Ok(NodeLabelState::Not(format!(
        "another field manager owns {} with another value (`kubectl get node -o yaml --show-managed-fields` shows \
         which); the other labels are set",
        left_out.join(", ")
    )))
}

/// The labels among those sent that another field manager owns, with other values, if the error is such a conflict.
fn labels_in_conflict(error: &RequestError, sent: &Labels) -> BTreeSet<String> {
    let conflict = error.status.iter().filter(|status| status.code == 409);
    let causes = conflict.filter_map(|status| status.details.as_ref()).flat_map(|details| &details.causes);
    let keys = causes.filter_map(|cause| cause.field.strip_prefix(".metadata.labels."));
    keys.filter(|key| sent.contains_key(*key)).map(str::to_owned).collect()
}

/// The labels that our field manager owns.
fn managed_labels(fields: &[ManagedFieldsEntry]) -> BTreeSet<String> {
    let applied = fields
        .iter()
        .filter(|entry| entry.manager.as_deref() == Some(MANAGER))
        .filter(|entry| entry.operation.as_deref() == Some("Apply"));
    let labels = applied
        .filter_map(|entry| entry.fields_v1.as_ref()?.0.pointer("/f:metadata/f:labels")?.as_object())
        .flat_map(|labels| labels.keys());
    labels.filter_map(|key| Some(key.strip_prefix("f:")?.to_owned())).collect()
}

async fn apply(nodes: &Api<Node>, node: &str, labels: &Labels) -> Result<(), RequestError> {
    let patch = json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": node, "labels": labels}});
    // Without force: labels of other field managers are not changed.
    let (params, patch) = (PatchParams::apply(MANAGER), Patch::Apply(&patch));
    request(nodes.patch_metadata(node, &params, &patch), "patch nodes (ClusterRole berth-label)")
        .await
        .map(drop)
}
