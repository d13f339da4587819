//! Waits for a condition, with a deadline.

use crate::{kubelet::Kubelet, node_state::NodeState};
use std::{sync::Arc, time::Duration};
use tokio::time::{Instant, timeout_at};

/// Some states change with time only (the five minutes after a disconnect), so a
/// condition is also checked at this interval without a notification.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// A condition was not met in time.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("waited {waited:?} for {what}; anomalies so far: {anomalies}")]
pub struct TimedOut {
    /// The caller's description of the condition.
    pub what: String,
    /// The time limit.
    pub waited: Duration,
    /// The plugin's anomalies by then.
    pub anomalies: String,
}

impl Kubelet {
    /// Waits until `condition` is true.
    pub async fn wait_for(
        &self,
        what: &str,
        limit: Duration,
        condition: impl Fn(&Self) -> bool,
    ) -> Result<(), TimedOut> {
        let deadline = Instant::now() + limit;
        let node: Arc<NodeState> = Arc::clone(self.node());
        let mut changes = node.changed.subscribe();
        loop {
            // Marked as seen before the check, so that a change during it ends the wait.
            changes.borrow_and_update();
            if condition(self) {
                return Ok(());
            }
            if Instant::now() >= deadline {
                return Err(TimedOut {
                    what: what.to_owned(),
                    waited: limit,
                    anomalies: format!("{:?}", self.anomalies()),
                });
            }
            let next_poll = deadline.min(Instant::now() + POLL_INTERVAL);
            // A change and the timeout both lead to the next check.
            let _ = timeout_at(next_poll, changes.changed()).await;
        }
    }

    /// Waits until `resource` has exactly `count` healthy devices.
    pub async fn wait_allocatable(
        &self,
        resource: &str,
        count: usize,
        limit: Duration,
    ) -> Result<(), TimedOut> {
        let what = format!("{count} allocatable {resource}");
        self.wait_for(&what, limit, |k| k.allocatable(resource) == Some(count)).await
    }

    /// Waits until `resource` has exactly `count` devices, healthy or not.
    pub async fn wait_capacity(&self, resource: &str, count: usize, limit: Duration) -> Result<(), TimedOut> {
        let what = format!("a capacity of {count} {resource}");
        self.wait_for(&what, limit, |k| k.capacity(resource) == Some(count)).await
    }
}
