//! Waiting for something to become true, with a deadline and without guessing.

use crate::{kubelet::Kubelet, world::World};
use std::{sync::Arc, time::Duration};
use tokio::time::{Instant, timeout_at};

/// Some states change by time alone (the five minutes after a plugin left), so
/// a waiter also looks this often without being told of a change.
const LOOK_AGAIN: Duration = Duration::from_millis(20);

/// What was waited for did not come true in time.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("waited {waited:?} for {what}; anomalies so far: {anomalies}")]
pub struct TimedOut {
    /// What was waited for, in the caller's words.
    pub what: String,
    /// For how long.
    pub waited: Duration,
    /// What the plugin had done wrong by then.
    pub anomalies: String,
}

impl Kubelet {
    /// Waits until `holds` is true of this kubelet.
    pub async fn wait_for(
        &self,
        what: &str,
        limit: Duration,
        holds: impl Fn(&Self) -> bool,
    ) -> Result<(), TimedOut> {
        let deadline = Instant::now() + limit;
        let world: Arc<World> = Arc::clone(self.world());
        let mut changes = world.changed.subscribe();
        loop {
            // Marked seen before the look, so a change during the look wakes us.
            changes.borrow_and_update();
            if holds(self) {
                return Ok(());
            }
            if Instant::now() >= deadline {
                return Err(TimedOut {
                    what: what.to_owned(),
                    waited: limit,
                    anomalies: format!("{:?}", self.anomalies()),
                });
            }
            let next_look = deadline.min(Instant::now() + LOOK_AGAIN);
            // Either outcome means: look again.
            let _ = timeout_at(next_look, changes.changed()).await;
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
