//! Labels of the node object, by server-side apply: the API server keeps account of which labels are ours,
//! takes away those that we no longer name, and refuses to overwrite those of somebody else.

use super::Settings;
use super::client::{ANSWER_MAX, words};
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

/// Whose labels they are, in the API server's account.
const MANAGER: &str = "berth";

/// How it stands with the labels of the node object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Labelled {
    /// They stand.
    Done,
    /// They do not, and why.
    Not(String),
}

/// What the node is to be called, and how that stands.
#[derive(Clone, Debug)]
pub struct LabelWork {
    /// The labels that are wanted; `None` as long as nobody knows.
    pub wanted: watch::Receiver<Option<Labels>>,
    /// Told how it stands.
    pub told: watch::Sender<Labelled>,
}

/// Keeps the labels up to date for ever. Whether another writer came or went, and whether ours still stand, is checked
/// with each change of ours, and every quarter of an hour ([`REFRESH_MEAN`]).
pub(super) async fn keep(settings: &Settings, client: Client, work: &LabelWork) {
    let nodes: Api<Node> = Api::all(client);
    let mut wanted = work.wanted.clone();
    let mut backoff = Backoff::new(settings.again);
    loop {
        let known = wanted.wait_for(Option::is_some).await.ok().map(|labels| labels.clone());
        let Some(labels) = known.flatten() else { return std::future::pending().await };
        wanted.mark_unchanged();
        let next = match step(&nodes, &settings.node, &labels).await {
            Ok(left_out) => {
                tell(work, labelled(&left_out));
                backoff.reset();
                jittered(REFRESH_MEAN, wait::random())
            }
            Err(Stop::OtherWriter) => {
                let why = format!(
                    "another writer's {OTHER_WRITER} is on the node: remove GPU feature discovery from it, or switch `labels.node` off"
                );
                tell(work, Labelled::Not(why));
                jittered(REFRESH_MEAN, wait::random())
            }
            Err(Stop::Failed(why)) => {
                tell(work, Labelled::Not(why));
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

/// Whether another writer's label is on the node object, as far as it is known.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OtherWriter {
    /// The API server was not asked yet.
    Unasked,
    /// It is not there, or the API server did not say.
    Absent,
    /// It is there.
    Present,
}

/// Checks every quarter of an hour ([`REFRESH_MEAN`]) whether another writer's label is on the node object, for ever. Used
/// where the labels of this daemon do not go through the API server: those of the other writer may.
pub(super) async fn look_for_another(settings: &Settings, client: Client, told: &watch::Sender<OtherWriter>) {
    let nodes: Api<Node> = Api::all(client);
    let mut said = false;
    loop {
        let asked = answered(nodes.get_metadata(&settings.node), "get nodes (ClusterRole berth)").await;
        let found = match asked {
            Ok(node) => {
                said = false;
                node.metadata.labels.unwrap_or_default().contains_key(OTHER_WRITER)
            }
            Err(Unanswered(why)) => {
                if !std::mem::replace(&mut said, true) {
                    tracing::warn!(why, "whether another writer labels the node is not known; ours go on");
                }
                // What was seen last stands.
                *told.borrow() == OtherWriter::Present
            }
        };
        told.send_replace(if found { OtherWriter::Present } else { OtherWriter::Absent });
        sleep(jittered(REFRESH_MEAN, wait::random())).await;
    }
}

/// How it stands once they were written, without those that are somebody else's.
fn labelled(left_out: &[String]) -> Labelled {
    if left_out.is_empty() {
        return Labelled::Done;
    }
    Labelled::Not(format!(
        "somebody else set {} to another value, and keeps it (`kubectl get node -o yaml --show-managed-fields` shows \
         who); the other labels stand",
        left_out.join(", ")
    ))
}

/// Says it in the log whenever it is something else.
fn tell(work: &LabelWork, labelled: Labelled) {
    work.told.send_if_modified(|told| {
        let news = *told != labelled;
        if news {
            match &labelled {
                Labelled::Done => tracing::info!("the node object has the labels of its GPUs"),
                Labelled::Not(why) => tracing::warn!(why, "the node object is not labelled"),
            }
            *told = labelled;
        }
        news
    });
}

enum Stop {
    OtherWriter,
    Failed(String),
}

/// Why there is no answer, or none that helps.
pub(super) struct Unanswered(pub(super) String);

/// A patch that the API server does not take.
enum Refused {
    /// These labels are somebody else's, with other values.
    Conflict(Vec<String>),
    Other(Unanswered),
}

/// Looks at the node, and writes what differs. Answers which labels were left out, since they are somebody
/// else's.
async fn step(nodes: &Api<Node>, node: &str, wanted: &Labels) -> Result<Vec<String>, Stop> {
    let asked = answered(nodes.get_metadata(node), "get nodes (ClusterRole berth)").await;
    let now = asked.map_err(|Unanswered(why)| Stop::Failed(why))?;
    let labels = now.metadata.labels.unwrap_or_default();
    let ours: Vec<String> = ours(&now.metadata.managed_fields.unwrap_or_default());
    if labels.contains_key(OTHER_WRITER) {
        // What we wrote before it came goes; what it wrote as well stays, since it is its own, too.
        if !ours.is_empty() {
            apply(nodes, node, &Labels::new()).await.map_err(Refused::stop)?;
        }
        return Err(Stop::OtherWriter);
    }
    let stands = wanted.iter().all(|(key, value)| labels.get(key) == Some(value))
        && ours.iter().all(|key| wanted.contains_key(key))
        && wanted.keys().all(|key| ours.contains(key));
    if stands {
        return Ok(Vec::new());
    }
    let mut wanted = wanted.clone();
    let mut left_out = Vec::new();
    // Each turn takes a label out, so it ends.
    loop {
        match apply(nodes, node, &wanted).await {
            Ok(()) => return Ok(left_out),
            Err(Refused::Conflict(keys)) => {
                for key in &keys {
                    wanted.remove(key);
                }
                left_out.extend(keys);
            }
            Err(refused) => return Err(refused.stop()),
        }
    }
}

impl Refused {
    fn stop(self) -> Stop {
        match self {
            Self::Conflict(keys) => Stop::Failed(format!("somebody else keeps {}", keys.join(", "))),
            Self::Other(Unanswered(why)) => Stop::Failed(why),
        }
    }
}

/// The labels that the API server says are somebody else's, of those that were sent.
fn in_conflict(status: &Status, sent: &Labels) -> Vec<String> {
    let causes = status.details.iter().flat_map(|details| &details.causes);
    let keys = causes.filter_map(|cause| cause.field.strip_prefix(".metadata.labels."));
    let known: BTreeSet<&str> = keys.filter(|key| sent.contains_key(*key)).collect();
    known.into_iter().map(str::to_owned).collect()
}

/// The labels that the API server has down as ours.
fn ours(fields: &[k8s_openapi::apimachinery::pkg::apis::meta::v1::ManagedFieldsEntry]) -> Vec<String> {
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

async fn apply(nodes: &Api<Node>, node: &str, labels: &Labels) -> Result<(), Refused> {
    let patch = json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": node, "labels": labels}});
    // Not by force: a label of another owner is not ours to change.
    let how = PatchParams::apply(MANAGER);
    let patch = Patch::Apply(&patch);
    let sent = nodes.patch_metadata(node, &how, &patch);
    let conflict = |error: &kube::Error| match error {
        kube::Error::Api(status) if status.code == 409 => in_conflict(status, labels),
        _ => Vec::new(),
    };
    let mut keys = Vec::new();
    let sent = async { sent.await.inspect_err(|error| keys = conflict(error)) };
    match answered(sent, "patch nodes (ClusterRole berth-label)").await {
        Ok(_) => Ok(()),
        Err(_) if !keys.is_empty() => Err(Refused::Conflict(keys)),
        Err(why) => Err(Refused::Other(why)),
    }
}

/// An answer in time, or why there is none. `right`: what is needed for it.
pub(super) async fn answered<T>(
    sent: impl Future<Output = kube::Result<T>>,
    right: &str,
) -> Result<T, Unanswered> {
    match timeout(ANSWER_MAX, sent).await {
        Ok(Ok(answer)) => Ok(answer),
        Ok(Err(kube::Error::Api(status))) if status.code == 403 => Err(Unanswered(format!(
            "{} (the daemon needs: {right}; see deploy/cluster-role.yaml)",
            status.message
        ))),
        Ok(Err(error)) => Err(Unanswered(words(&error))),
        Err(_) => Err(Unanswered(format!("no answer within {} s", ANSWER_MAX.as_secs()))),
    }
}
