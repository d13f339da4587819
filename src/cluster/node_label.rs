//! One label of the node object: read before the daemon starts, watched while it runs.

use super::client::{ConnectError, connect_and_get_node};
use super::settings::{Settings, WatchedLabel};
use berth_kube::{Backoff, REFRESH_MEAN, after_loss, jittered, random, request};
use futures_util::StreamExt;
use k8s_openapi::api::core::v1::Node;
use kube::api::WatchParams;
use kube::core::{PartialObjectMeta, WatchEvent};
use kube::{Api, Client};
use std::pin::pin;
use std::time::Duration;
use tokio::time::{Instant, sleep, sleep_until};

/// How long the start of the daemon retries reading the label. The start-up probe of deploy/ allows 60 s.
pub const LABEL_READ_MAX: Duration = Duration::from_secs(45);
/// The mean wait once watches have failed more than [`QUICK_RETRIES_MAX`] times in a row for another reason than a
/// missing right. The label is read before each of them.
const READ_INTERVAL_MEAN: Duration = Duration::from_secs(60);
/// After this number of failures in a row the waits are long.
const QUICK_RETRIES_MAX: u32 = 5;
/// The right that a watch of the node needs, for the message of a 403.
const WATCH_RIGHT: &str = "watch nodes (ClusterRole berth)";

/// Reads the value of a label of this node before the daemon starts. Transient errors are retried for
/// [`LABEL_READ_MAX`]; `waits` is called with the first of them.
///
/// # Errors
/// If the API server cannot be used, has no object of this node, or does not answer in that time.
pub async fn node_label(
    settings: &Settings,
    key: &str,
    waits: impl FnOnce(&ConnectError),
) -> Result<Option<String>, ConnectError> {
    let end = Instant::now() + LABEL_READ_MAX;
    let (mut backoff, mut waits) = (Backoff::new(settings.connection.retry_interval), Some(waits));
    loop {
        match connect_and_get_node(settings).await {
            Ok((_, node)) => return Ok(value(&node, key)),
            Err(error) if error.is_transient() && Instant::now() < end => {
                if let Some(waits) = waits.take() {
                    waits(&error);
                }
            }
            Err(error) => return Err(error),
        }
        let wait = settings.connection.retry_after.delay(backoff.next(random()), Instant::now());
        sleep_until(end.min(Instant::now() + wait)).await;
    }
}

fn value(node: &PartialObjectMeta<Node>, key: &str) -> Option<String> {
    node.metadata.labels.as_ref()?.get(key).cloned()
}

/// Watches a label; never returns. The label is read once; each watch then begins at the version that the one before it
/// reached, so nothing is missed between them.
pub(super) async fn follow(settings: &Settings, client: Client, label: &WatchedLabel) {
    let nodes: Api<Node> = Api::all(client);
    let (mut version, mut failures) = (None, Failures::new(settings.connection.retry_interval));
    loop {
        let wait = match read_and_watch(settings, &nodes, label, &mut version, &mut failures).await {
            Ok(()) => {
                failures.reset();
                after_loss(settings.reconnect_wait_max, random())
            }
            Err(lost) => {
                let next = failures.next(lost.is_forbidden(), random());
                if next.log {
                    let every = if lost.is_forbidden() { "12 to 18 minutes" } else { "minute" };
                    let (why, key) = (&lost.why, &label.key);
                    tracing::warn!(
                        why,
                        "cannot watch the node label {key}; reading it every {every} instead"
                    );
                }
                // After a long time without a watch the label is read again.
                if !lost.can_resume() || next.is_long {
                    version = None;
                }
                next.wait
            }
        };
        sleep(settings.connection.retry_after.delay(wait, Instant::now())).await;
    }
}

/// Failures in a row, and the last warning about them.
struct Failures {
    backoff: Backoff,
    count: u32,
    /// The value of `forbidden` in the last warning.
    logged: Option<bool>,
}

/// What to do after a failure.
struct Retry {
    wait: Duration,
    /// Whether the short waits are used up.
    is_long: bool,
    /// Whether to log a warning.
    log: bool,
}

impl Failures {
    fn new(first: Duration) -> Self {
        Self { backoff: Backoff::new(first), count: 0, logged: None }
    }

    fn reset(&mut self) {
        self.backoff.reset();
        (self.count, self.logged) = (0, None);
    }

    /// Counts a failure. `forbidden`: the right to watch is missing; it is seldom granted while the daemon runs, or
    /// soon, if it was created together with the daemon.
    fn next(&mut self, forbidden: bool, random: u32) -> Retry {
        self.count = self.count.saturating_add(1);
        if self.count <= QUICK_RETRIES_MAX {
            return Retry { wait: self.backoff.next(random), is_long: false, log: false };
        }
        let wait = jittered(if forbidden { REFRESH_MEAN } else { READ_INTERVAL_MEAN }, random);
        let log = self.logged.replace(forbidden) != Some(forbidden);
        Retry { wait, is_long: true, log }
    }
}

/// Why a watch failed or ended.
struct LostWatch {
    why: String,
    /// The status of the answer to the watch or of its error event, or 0.
    code: u16,
}

impl LostWatch {
    /// Whether the next watch can begin at the version that is known.
    fn can_resume(&self) -> bool {
        // 400: the version is from another cluster behind the same address. 403: the label is read instead.
        !matches!(self.code, 400 | 403 | 410)
    }

    /// Whether the right to watch is missing.
    fn is_forbidden(&self) -> bool {
        self.code == 403
    }
}

/// Watches the label until the API server ends the watch. Reads the label first where no `version` is known.
async fn read_and_watch(
    settings: &Settings,
    nodes: &Api<Node>,
    label: &WatchedLabel,
    version: &mut Option<String>,
    failures: &mut Failures,
) -> Result<(), LostWatch> {
    let publish = |node: &PartialObjectMeta<Node>| {
        let now = value(node, &label.key);
        label.value.send_if_modified(|before| {
            let changed = *before != now;
            *before = now;
            changed
        });
    };
    if version.is_none() {
        let node = request(nodes.get_metadata(&settings.node), "get nodes (ClusterRole berth)").await;
        let node = node.map_err(|error| LostWatch { why: error.why, code: 0 })?;
        publish(&node);
        *version = node.metadata.resource_version;
    }
    let from = version.clone().unwrap_or_default();
    // Twice as long as a watch of pods: it need not be rebalanced over the API servers as soon, and each costs a
    // request.
    let seconds = u32::try_from(2 * settings.connection.watch_timeout.as_secs()).unwrap_or(u32::MAX);
    let only = WatchParams::default().fields(&format!("metadata.name={}", settings.node)).timeout(seconds);
    let watch = request(nodes.watch_metadata(&only, &from), WATCH_RIGHT).await;
    let watch = watch.map_err(|error| LostWatch { code: error.code(), why: error.why })?;
    let mut events = pin!(watch);
    while let Some(event) = events.next().await {
        let event = request(async { event }, WATCH_RIGHT).await;
        let event = event.map_err(|error| LostWatch { why: error.why, code: 0 })?;
        let newer = match event {
            WatchEvent::Added(node) | WatchEvent::Modified(node) => {
                publish(&node);
                node.metadata.resource_version
            }
            // A node object that is deleted is removed with its node, or is created again soon: the configuration
            // stays.
            WatchEvent::Deleted(node) => node.metadata.resource_version,
            WatchEvent::Bookmark(bookmark) => Some(bookmark.metadata.resource_version),
            WatchEvent::Error(status) => {
                return Err(LostWatch { why: status.message.clone(), code: status.code });
            }
        };
        // The watch works: earlier failures no longer count.
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

    fn seconds(next: &Retry) -> u64 {
        next.wait.as_secs()
    }

    #[test]
    fn failures_are_retried_quickly_before_a_warning_and_a_missing_right_is_retried_seldom() {
        for (forbidden, least, most) in [(true, 720, 1080), (false, 48, 72)] {
            let mut failures = Failures::new(Duration::from_secs(1));
            for longest in [1, 2, 4, 8, 16] {
                let next = failures.next(forbidden, u32::MAX);
                assert_eq!((seconds(&next), next.is_long, next.log), (longest, false, false));
            }
            let next = failures.next(forbidden, 0);
            assert_eq!((seconds(&next), next.is_long, next.log), (least, true, true));
            let next = failures.next(forbidden, u32::MAX);
            assert_eq!((seconds(&next), next.is_long, next.log), (most, true, false), "logged once");
            assert!(failures.next(!forbidden, 0).log, "the reason is another");
            failures.reset();
            assert_eq!(seconds(&failures.next(forbidden, u32::MAX)), 1);
        }
    }

    #[test]
    fn a_watch_resumes_at_its_version_unless_that_is_unusable() {
        let lost = |code| LostWatch { why: String::new(), code };
        assert_eq!(
            [0, 400, 403, 410, 429, 500].map(|code| lost(code).can_resume()),
            [true, false, false, false, true, true]
        );
        assert!(lost(403).is_forbidden() && !lost(401).is_forbidden());
    }
}
