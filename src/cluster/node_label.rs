//! One label of the node object: read before the daemon starts, followed while it runs.

use super::Settings;
use super::client::{ConnectError, connected};
use super::labels::{Unanswered, answered};
use super::wait::{Backoff, after_loss, around, random};
use futures_util::StreamExt;
use k8s_openapi::api::core::v1::Node;
use kube::api::WatchParams;
use kube::core::{PartialObjectMeta, WatchEvent};
use kube::{Api, Client};
use std::pin::pin;
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, sleep_until};

/// Longest that a start tries again to read the label. The start-up probe of deploy/ allows 60 s.
pub const LABEL_WAIT_MAX: Duration = Duration::from_secs(45);
/// The mean wait once watches have failed [`QUICK_MAX`] times in a row. Each attempt reads the label, so a daemon
/// without the right to watch sees a change after this long.
const READ_AGAIN: Duration = Duration::from_secs(60);
/// So many failures are waited for shortly.
const QUICK_MAX: u32 = 5;

/// A label that is followed.
#[derive(Clone, Debug)]
pub struct FollowedLabel {
    /// Its key.
    pub key: String,
    /// Its value on the node; `None` without the label.
    pub value: watch::Sender<Option<String>>,
}

/// The value of a label of this node, for a daemon that has yet to start. What passes is tried again for
/// [`LABEL_WAIT_MAX`]; `waits` gets the first such error.
///
/// # Errors
/// If the API server cannot be used, does not know the node, or does not answer in that time.
pub async fn node_label(
    settings: &Settings,
    key: &str,
    waits: impl FnOnce(&ConnectError),
) -> Result<Option<String>, ConnectError> {
    let end = Instant::now() + LABEL_WAIT_MAX;
    let (mut backoff, mut waits) = (Backoff::new(settings.again), Some(waits));
    loop {
        match connected(settings).await {
            Ok((_, node)) => return Ok(value(&node, key)),
            Err(error) if error.passes() && Instant::now() < end => {
                if let Some(waits) = waits.take() {
                    waits(&error);
                }
            }
            Err(error) => return Err(error),
        }
        let wait = settings.retry_after.and(backoff.next(random()), Instant::now());
        sleep_until(end.min(Instant::now() + wait)).await;
    }
}

fn value(node: &PartialObjectMeta<Node>, key: &str) -> Option<String> {
    node.metadata.labels.as_ref()?.get(key).cloned()
}

/// Follows a label for ever.
pub(super) async fn follow(settings: &Settings, client: Client, label: &FollowedLabel) {
    let nodes: Api<Node> = Api::all(client);
    let (mut backoff, mut failures) = (Backoff::new(settings.again), 0);
    loop {
        let wait = match read_and_watch(settings, &nodes, label).await {
            Ok(()) => {
                backoff.reset();
                failures = 0;
                after_loss(settings.lost, random())
            }
            Err(Unanswered(why)) => {
                failures += 1;
                if failures == 1 {
                    let (key, every) = (&label.key, READ_AGAIN.as_secs());
                    tracing::warn!(why, "the node's label {key} is not watched, and read every {every} s");
                }
                if failures > QUICK_MAX { around(READ_AGAIN, random()) } else { backoff.next(random()) }
            }
        };
        sleep(settings.retry_after.and(wait, Instant::now())).await;
    }
}

/// Until the API server ends the watch.
async fn read_and_watch(
    settings: &Settings,
    nodes: &Api<Node>,
    label: &FollowedLabel,
) -> Result<(), Unanswered> {
    let node = answered(nodes.get_metadata(&settings.node), "get nodes (ClusterRole berth)").await?;
    let publish = |node: &PartialObjectMeta<Node>| {
        let now = value(node, &label.key);
        label.value.send_if_modified(|before| {
            let changed = *before != now;
            *before = now;
            changed
        });
    };
    publish(&node);
    let seconds = u32::try_from(settings.watch.as_secs()).unwrap_or(u32::MAX);
    let only = WatchParams::default().fields(&format!("metadata.name={}", settings.node)).timeout(seconds);
    let version = node.metadata.resource_version.unwrap_or_default();
    let events = nodes.watch_metadata(&only, &version);
    let right = "watch nodes, see the ClusterRole berth";
    let mut events = pin!(answered(events, right).await?);
    while let Some(event) = events.next().await {
        match answered(async { event }, right).await? {
            WatchEvent::Added(node) | WatchEvent::Modified(node) => publish(&node),
            // A node that is deleted is on its way out, or is made again soon: its configuration stays.
            WatchEvent::Deleted(_) | WatchEvent::Bookmark(_) => {}
            WatchEvent::Error(status) => return Err(Unanswered(status.message.clone())),
        }
    }
    Ok(())
}
