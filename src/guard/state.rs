//! What the guard knows, and what of it the daemon is sent.

use crate::cgroup::ContainerCgroup;
use crate::containers::Containers;
use crate::published::Published;
use berth_proto::guard::{MemoryLimit, Status};
use parking_lot::Mutex;
use std::path::PathBuf;
use std::time::{SystemTime, UNIX_EPOCH};
use tokio::sync::{Notify, watch};

/// What the guard knows.
pub(crate) struct GuardState {
    pub(crate) containers: Mutex<Containers>,
    status: Mutex<Status>,
    /// Wakes the connections to daemons, which send what has changed. The container runtime does not wait for that.
    changes: watch::Sender<()>,
    /// Wakes the sweep.
    pub(crate) left: Notify,
}

impl GuardState {
    pub(crate) fn new(claim_grants: PathBuf) -> Self {
        // Two guards of one node do not run at once, so the time of the start tells them apart.
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let status = Status {
            version: env!("CARGO_PKG_VERSION").into(),
            run: u64::try_from(since.as_nanos()).unwrap_or_default(),
            why: "the guard has just started".into(),
            claim_grants: claim_grants.display().to_string(),
            ..Status::default()
        };
        Self {
            containers: Mutex::new(Containers::new(claim_grants)),
            status: Mutex::new(status),
            changes: watch::Sender::default(),
            left: Notify::new(),
        }
    }

    /// Changes what is known of containers; `change` returns whether it did.
    pub(crate) fn update(&self, change: impl FnOnce(&mut Containers) -> bool) {
        let mut containers = self.containers.lock();
        if change(&mut containers) {
            if containers.has_left() {
                self.left.notify_one();
            }
            self.changes.send_replace(());
        }
    }

    pub(crate) fn set_status(&self, change: impl FnOnce(&mut Status)) {
        change(&mut self.status.lock());
        self.changes.send_replace(());
    }

    /// What is known of the guard itself.
    pub(crate) fn status(&self) -> Status {
        self.status.lock().clone()
    }

    /// The containers that have memory limits and a known cgroup.
    pub(crate) fn limited(&self) -> Vec<(String, ContainerCgroup, Vec<MemoryLimit>)> {
        self.containers.lock().all_limited()
    }

    /// Returns a receiver that is notified of later changes; several changes can be one notification.
    pub(crate) fn changes(&self) -> watch::Receiver<()> {
        self.changes.subscribe()
    }

    /// What daemons are sent.
    pub(crate) fn published(&self) -> Published {
        let containers = self.containers.lock();
        Published {
            status: self.status(),
            pods: containers.pods(),
            containers: containers.shown(),
            bypasses: containers.bypasses(),
        }
    }

    /// The guard is not connected; `why` is logged when it changes.
    pub(crate) fn set_unconnected(&self, why: String) {
        if self.status.lock().why != why {
            tracing::warn!("the guard is not connected to the container runtime: {why}");
        }
        self.set_status(|status| (status.is_connected, status.why) = (false, why));
    }
}
