//! What the guard knows, and what of it the daemon is sent.

use crate::cgroup::ContainerCgroup;
use crate::containers::Containers;
use crate::link::Published;
use berth_proto::guard::{MemoryLimit, Status};
use parking_lot::Mutex;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};
use tokio::sync::{Notify, watch};

/// What the guard knows.
pub(crate) struct GuardState {
    pub(crate) containers: Mutex<Containers>,
    pub(crate) published: watch::Sender<Arc<Published>>,
    /// Wakes the sweep.
    pub(crate) left: Notify,
}

impl GuardState {
    pub(crate) fn new() -> Self {
        // Two guards of one node do not run at once, so the time of the start tells them apart.
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let status = Status {
            version: env!("CARGO_PKG_VERSION").into(),
            run: u64::try_from(since.as_nanos()).unwrap_or_default(),
            why: "the guard has just started".into(),
            ..Status::default()
        };
        let published = watch::Sender::new(Arc::new(Published { status, ..Published::default() }));
        Self { containers: Mutex::default(), published, left: Notify::new() }
    }

    /// Changes what is known of containers, and publishes it if `change` says that it did.
    pub(crate) fn update(&self, change: impl FnOnce(&mut Containers) -> bool) {
        let mut containers = self.containers.lock();
        if change(&mut containers) {
            self.publish(&containers, |_| {});
        }
    }

    pub(crate) fn set_status(&self, change: impl FnOnce(&mut Status)) {
        self.publish(&self.containers.lock(), change);
    }

    /// What is published of the guard itself.
    pub(crate) fn status(&self) -> Status {
        self.published.borrow().status.clone()
    }

    /// The containers that have memory limits and a known cgroup.
    pub(crate) fn limited(&self) -> Vec<(String, ContainerCgroup, Vec<MemoryLimit>)> {
        self.containers.lock().all_limited()
    }

    fn publish(&self, containers: &Containers, change: impl FnOnce(&mut Status)) {
        if containers.has_left() {
            self.left.notify_one();
        }
        let mut status = self.published.borrow().status.clone();
        change(&mut status);
        let now = Published {
            status,
            pods: containers.pods(),
            containers: containers.shown(),
            bypasses: containers.bypasses(),
        };
        self.published.send_if_modified(|published| {
            let is_new = **published != now;
            if is_new {
                *published = Arc::new(now);
            }
            is_new
        });
    }

    /// The guard is not connected; `why` is logged when it changes.
    pub(crate) fn set_unconnected(&self, why: String) {
        if self.published.borrow().status.why != why {
            tracing::warn!("the guard is not connected to the container runtime: {why}");
        }
        self.set_status(|status| (status.is_connected, status.why) = (false, why));
    }
}
