//! Settings of this crate. The crate `berth-config` reads those that the configuration file has.

use crate::edits::Edits;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;

/// The edits that a grant makes to its container. They follow the abilities of the node's container runtime.
pub type CurrentEdits = watch::Receiver<Arc<Edits>>;

/// Edits that never change.
#[must_use]
pub fn fixed_edits(edits: Edits) -> CurrentEdits {
    watch::Sender::new(Arc::new(edits)).subscribe()
}

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

/// Timeouts that are not configurable; tests shorten some.
#[derive(Clone, Debug)]
pub struct Timeouts {
    /// The longest wait after a refused dial of kubelet.sock. The first wait is a 32nd of it, since the
    /// kubelet listens microseconds after its bind; it doubles each time.
    pub connect_retry_max: Duration,
    /// How long after a change of the folder `connect_retry_max` applies; afterwards `connect_retry_later` applies. If
    /// a kubelet was down for hours, its new socket shows that it is back, so frequent dials are not needed.
    pub connect_fast_for: Duration,
    /// See `connect_fast_for`.
    pub connect_retry_later: Duration,
    /// The timeout of Register. The kubelet itself spends up to 10 s on dialling back.
    pub register_limit: Duration,
    /// The first wait after a refused Register; doubles up to `register_retry_max`.
    pub register_retry: Duration,
    /// The longest wait after refused Registers. Far below the 30 s of other plugins, since the node
    /// has no GPUs meanwhile.
    pub register_retry_max: Duration,
    /// If the kubelet does not call ListAndWatch within this time after Register, the plugin registers again.
    pub watch_within: Duration,
    /// After a replacement of kubelet.sock, the end of the old kubelet's connection is noticed within this
    /// time. The system closes a process's connections before its successor can start, so this
    /// only covers the delay of Berth's runtime.
    pub exit_seen_within: Duration,
    /// How long the kubelet may take to close its connection after the stream's end.
    pub close_within: Duration,
    /// `close_within` when the daemon stops, which has one second in total.
    pub stop_within: Duration,
    /// The wait between the connection's end and the next Register: the kubelet closes the
    /// connection before it notifies its device manager, and a Register in between gets a dead endpoint.
    pub settle: Duration,
    /// The same wait after an earlier process of the daemon that stopped in order. It begins at the last change of the
    /// plugins' folder.
    pub settle_after_process: Duration,
    /// The loss of a stream sooner than this after Register is a quick loss.
    pub quick_loss: Duration,
    /// After this many consecutive quick losses on one kubelet the plugin waits, and looks for their cause.
    pub quick_losses_max: u32,
    /// How long a plugin that another one contests waits before it registers again, unless the other one ends or the
    /// kubelet restarts.
    pub contested_pause: Duration,
    /// The interval at which a contested plugin checks whether the other one still serves.
    pub contested_check: Duration,
    /// The wait after repeated quick losses whose cause is unknown.
    pub unexplained_pause: Duration,
    /// A connection to a plugin is closed after this long without a running call. The kubelet makes its
    /// first call within milliseconds, and then keeps a stream open.
    pub idle_max: Duration,
    /// If all connection slots of a plugin are in use, no connection younger than this is closed for
    /// another: on a busy node, a dial and its first call may take this long.
    pub min_age: Duration,
    /// The timeout of one `List` call.
    pub list_limit: Duration,
    /// The timeout of a reconcile pass before a refusal. The kubelet holds no lock meanwhile, but the
    /// pod's admission waits.
    pub refusal_pass_limit: Duration,
    /// The delay before a changed checkpoint is read: a pod with several containers changes it several
    /// times.
    pub gather: Duration,
    /// The folder is checked at this interval while events are unavailable.
    pub folder_check_interval: Duration,
    /// While events are available, the folder is still checked at this interval, since some file systems lose events.
    pub folder_recheck_interval: Duration,
    /// The first wait after the Pods API failed or was absent; doubles up to `pods_retry_max`.
    pub pods_retry: Duration,
    /// The longest wait before the Pods API is tried again.
    pub pods_retry_max: Duration,
    /// The timeout of its first list: a few hundred pods of some KiB each.
    pub pods_first_list: Duration,
    /// Its watch restarts at this interval, since events can be lost silently. A pod whose deletion was
    /// lost counts as running until then.
    pub pods_resync: Duration,
    /// How long a graceful stop waits for running calls.
    pub stop_limit: Duration,
}

impl Default for Timeouts {
    fn default() -> Self {
        Self {
            connect_retry_max: Duration::from_millis(20),
            connect_fast_for: Duration::from_secs(10),
            connect_retry_later: Duration::from_millis(500),
            register_limit: Duration::from_secs(15),
            register_retry: Duration::from_millis(100),
            register_retry_max: Duration::from_secs(2),
            watch_within: Duration::from_secs(5),
            exit_seen_within: Duration::from_millis(100),
            close_within: Duration::from_secs(1),
            stop_within: Duration::from_millis(400),
            settle: Duration::from_millis(250),
            settle_after_process: Duration::from_millis(250),
            quick_loss: Duration::from_secs(10),
            quick_losses_max: 3,
            contested_pause: Duration::from_secs(300),
            contested_check: Duration::from_secs(1),
            unexplained_pause: Duration::from_secs(10),
            idle_max: Duration::from_secs(5),
            min_age: Duration::from_millis(200),
            list_limit: Duration::from_secs(1),
            refusal_pass_limit: Duration::from_secs(1),
            gather: Duration::from_millis(50),
            folder_check_interval: Duration::from_secs(1),
            folder_recheck_interval: Duration::from_secs(10),
            pods_retry: Duration::from_secs(1),
            pods_retry_max: Duration::from_secs(30),
            pods_first_list: Duration::from_secs(10),
            pods_resync: Duration::from_secs(60),
            stop_limit: Duration::from_millis(200),
        }
    }
}
