//! Settings of this crate. The crate `berth-config` reads those that the configuration file has.

use crate::edits::Edits;
use crate::timeouts::Timeouts;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;

/// The edits that a grant makes to its container. They follow the abilities of the node's container runtime.
pub type CurrentEdits = watch::Receiver<Arc<Edits>>;

/// Settings of the kubelet front end.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The folder of the plugins' sockets, the kubelet's registration socket and its checkpoint. Every kubelet has it
    /// at `/var/lib/kubelet/device-plugins`, whatever its `--root-dir`.
    pub device_plugins: PathBuf,
    /// The kubelet's `--root-dir`, which holds `pod-resources/` and `pods-api/`.
    pub root_dir: PathBuf,
    /// What a grant changes in its container, at present.
    pub edits: CurrentEdits,
    /// When reconcile passes run.
    pub reconcile: ReconcileTiming,
    /// All other timeouts and intervals.
    pub timeouts: Timeouts,
}

impl Settings {
    /// The socket where plugins register.
    #[must_use]
    pub fn kubelet_socket(&self) -> PathBuf {
        self.device_plugins.join("kubelet.sock")
    }

    /// The socket of the Pods API, if the kubelet serves it.
    #[must_use]
    pub fn pods_api_socket(&self) -> PathBuf {
        self.root_dir.join("pods-api").join("pods-api.sock")
    }

    /// The socket of the pod resources API.
    #[must_use]
    pub fn pod_resources_socket(&self) -> PathBuf {
        self.root_dir.join("pod-resources").join("kubelet.sock")
    }
}

/// The waits of reconcile passes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReconcileTiming {
    /// The interval of `List` calls.
    pub list_interval: Duration,
    /// The interval while a GPU is cordoned.
    pub list_interval_cordoned: Duration,
    /// The longest time between two full passes.
    pub full_pass_interval: Duration,
    /// How long a pass waits for a newly written checkpoint.
    pub checkpoint_wait: Duration,
}

impl Default for ReconcileTiming {
    fn default() -> Self {
        Self {
            list_interval: Duration::from_secs(2),
            list_interval_cordoned: Duration::from_secs(1),
            full_pass_interval: Duration::from_secs(60),
            checkpoint_wait: Duration::from_secs(1),
        }
    }
}
