//! One label of the node object: read before the daemon starts, followed while it runs.

use super::Settings;
use super::client::{ConnectError, connected};
use super::labels::{Unanswered, answered};
use super::wait::{Backoff, REFRESH_MEAN, after_loss, jittered, random};
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
/// The mean wait once watches have failed more than [`QUICK_MAX`] times in a row for another reason than a missing
/// right. The label is read before each of them.
const READ_AGAIN: Duration = Duration::from_secs(60);
/// So many failures are waited for shortly.
const QUICK_MAX: u32 = 5;
/// What a watch of the node needs, for the message of an answer 403.
const WATCH_RIGHT: &str = "watch nodes (ClusterRole berth)";

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
            Err(error) if error.is_transient() && Instant::now() < end => {
                if let Some(waits) = waits.take() {
                    waits(&error);
                }
            }
            Err(error) => return Err(error),
        }
        let wait = settings.retry_after.delay(backoff.next(random()), Instant::now());
        sleep_until(end.min(Instant::now() + wait)).await;
    }
}

fn value(node: &PartialObjectMeta<Node>, key: &str) -> Option<String> {
    node.metadata.labels.as_ref()?.get(key).cloned()
}

/// Follows a label for ever. The label is read once; each watch then begins at the version that the one before it
/// reached, so nothing is missed between them.
pub(super) async fn follow(settings: &Settings, client: Client, label: &FollowedLabel) {
    let nodes: Api<Node> = Api::all(client);
    let (mut version, mut failures) = (None, Failures::new(settings.again));
    loop {
        let wait = match read_and_watch(settings, &nodes, label, &mut version, &mut failures).await {
            Ok(()) => {
                failures.reset();
                after_loss(settings.lost, random())
            }
            Err(Lost { why: Unanswered(why), resumes, refused }) => {
                let next = failures.next(refused, random());
                if next.is_news {
                    let (key, every) = (&label.key, if refused { "12 to 18 minutes" } else { "minute" });
                    tracing::warn!(
                        why,
                        "cannot watch the node label {key}; reading it every {every} instead"
                    );
                }
                // Without a watch for so long, the label is to be read.
                if !resumes || next.is_long {
                    version = None;
                }
                next.wait
            }
        };
        sleep(settings.retry_after.delay(wait, Instant::now())).await;
    }
}

/// Failures in a row, and the last warning about them.
struct Failures {
    backoff: Backoff,
    count: u32,
    /// Whether the watch was refused when a warning was logged last.
    said: Option<bool>,
}

/// What follows a failure.
struct Next {
    wait: Duration,
    /// Whether the short waits are used up.
    is_long: bool,
    /// Whether to log a warning.
    is_news: bool,
}

impl Failures {
    fn new(first: Duration) -> Self {
        Self { backoff: Backoff::new(first), count: 0, said: None }
    }

    fn reset(&mut self) {
        self.backoff.reset();
        (self.count, self.said) = (0, None);
    }

    /// `refused`: for want of the right, which comes seldom while the daemon runs, and soon where it was given with the
    /// daemon.
    fn next(&mut self, refused: bool, random: u32) -> Next {
        self.count = self.count.saturating_add(1);
        if self.count <= QUICK_MAX {
            return Next { wait: self.backoff.next(random), is_long: false, is_news: false };
        }
        let wait = jittered(if refused { REFRESH_MEAN } else { READ_AGAIN }, random);
        let is_news = self.said.replace(refused) != Some(refused);
        Next { wait, is_long: true, is_news }
    }
}

/// Why there is no watch any more.
struct Lost {
    why: Unanswered,
    /// Whether the next watch can begin at the version that is known.
    resumes: bool,
    /// Whether the right to watch is missing.
    refused: bool,
}

impl Lost {
    /// `code`: that of the answer or of the event, 0 without one.
    fn new(why: Unanswered, code: u16) -> Self {
        // 400: the version is of another cluster behind the same address. 403: the label is to be read meanwhile.
        Self { why, resumes: !matches!(code, 400 | 403 | 410), refused: code == 403 }
    }
}

/// Until the API server ends the watch. Reads the label first where no `version` is known.
async fn read_and_watch(
    settings: &Settings,
    nodes: &Api<Node>,
    label: &FollowedLabel,
    version: &mut Option<String>,
    failures: &mut Failures,
) -> Result<(), Lost> {
    let publish = |node: &PartialObjectMeta<Node>| {
        let now = value(node, &label.key);
        label.value.send_if_modified(|before| {
            let changed = *before != now;
            *before = now;
            changed
        });
    };
    if version.is_none() {
        let node = answered(nodes.get_metadata(&settings.node), "get nodes (ClusterRole berth)").await;
        let node = node.map_err(|why| Lost::new(why, 0))?;
        publish(&node);
        *version = node.metadata.resource_version;
    }
    let from = version.clone().unwrap_or_default();
    // Twice as long as a watch of pods: it need not come to another API server as soon, and each costs a request.
    let seconds = u32::try_from(2 * settings.watch.as_secs()).unwrap_or(u32::MAX);
    let only = WatchParams::default().fields(&format!("metadata.name={}", settings.node)).timeout(seconds);
    let mut code = 0;
    let asked = async {
        nodes.watch_metadata(&only, &from).await.inspect_err(|error| {
            if let kube::Error::Api(status) = error {
                code = status.code;
            }
        })
    };
    let asked = answered(asked, WATCH_RIGHT).await;
    let mut events = pin!(asked.map_err(|why| Lost::new(why, code))?);
    while let Some(event) = events.next().await {
        let event = answered(async { event }, WATCH_RIGHT).await.map_err(|why| Lost::new(why, 0))?;
        let newer = match event {
            WatchEvent::Added(node) | WatchEvent::Modified(node) => {
                publish(&node);
                node.metadata.resource_version
            }
            // A node that is deleted is on its way out, or is made again soon: its configuration stays.
            WatchEvent::Deleted(node) => node.metadata.resource_version,
            WatchEvent::Bookmark(bookmark) => Some(bookmark.metadata.resource_version),
            WatchEvent::Error(status) => {
                return Err(Lost::new(Unanswered(status.message.clone()), status.code));
            }
        };
        // It works: what failed before it is over.
        failures.reset();
        if newer.as_ref().is_some_and(|newer| !newer.is_empty()) {
            *version = newer;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seconds(next: &Next) -> u64 {
        next.wait.as_secs()
    }

    #[test]
    fn failures_are_waited_for_shortly_before_a_warning_and_a_missing_right_is_retried_seldom() {
        for (refused, least, most) in [(true, 720, 1080), (false, 48, 72)] {
            let mut failures = Failures::new(Duration::from_secs(1));
            for longest in [1, 2, 4, 8, 16] {
                let next = failures.next(refused, u32::MAX);
                assert_eq!((seconds(&next), next.is_long, next.is_news), (longest, false, false));
            }
            let next = failures.next(refused, 0);
            assert_eq!((seconds(&next), next.is_long, next.is_news), (least, true, true));
            let next = failures.next(refused, u32::MAX);
            assert_eq!((seconds(&next), next.is_long, next.is_news), (most, true, false), "said once");
            assert!(failures.next(!refused, 0).is_news, "it is read at another pace");
            failures.reset();
            assert_eq!(seconds(&failures.next(refused, u32::MAX)), 1);
        }
    }

    #[test]
    fn a_watch_goes_on_where_it_was_unless_the_version_is_of_no_use() {
        let lost = |code| Lost::new(Unanswered(String::new()), code);
        assert_eq!(
            [0, 400, 403, 410, 429, 500].map(|code| lost(code).resumes),
            [true, false, false, false, true, true]
        );
        assert!(lost(403).refused && !lost(401).refused);
    }
}
