//! The timeouts of this crate, in a section for each part of it.

use std::time::Duration;

/// Timeouts that are not configurable; tests change some.
#[derive(Clone, Debug, Default)]
pub struct Timeouts {
    /// From the first dial of kubelet.sock to the kubelet's stream.
    pub registration: RegistrationTimeouts,
    /// Until the kubelet's earlier connection has ended.
    pub disconnect: DisconnectTimeouts,
    /// After the loss of a stream.
    pub loss: LossTimeouts,
    /// Of the connections to a plugin's socket.
    pub connections: ConnectionTimeouts,
    /// Of the checks of the plugins' folder.
    pub folder: FolderTimeouts,
    /// Of the reconcile passes, besides [`crate::ReconcileTiming`].
    pub reconcile: ReconcileTimeouts,
    /// Of the watch of the Pods API.
    pub pods_api: PodsApiTimeouts,
}

/// The waits from the first dial of kubelet.sock to the kubelet's stream.
#[derive(Clone, Copy, Debug)]
pub struct RegistrationTimeouts {
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
}

impl Default for RegistrationTimeouts {
    fn default() -> Self {
        Self {
            connect_retry_max: Duration::from_millis(20),
            connect_fast_for: Duration::from_secs(10),
            connect_retry_later: Duration::from_millis(500),
            register_limit: Duration::from_secs(15),
            register_retry: Duration::from_millis(100),
            register_retry_max: Duration::from_secs(2),
            watch_within: Duration::from_secs(5),
        }
    }
}

/// The waits for the end of the kubelet's earlier connection.
#[derive(Clone, Copy, Debug)]
pub struct DisconnectTimeouts {
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
}

impl Default for DisconnectTimeouts {
    fn default() -> Self {
        Self {
            exit_seen_within: Duration::from_millis(100),
            close_within: Duration::from_secs(1),
            stop_within: Duration::from_millis(400),
            settle: Duration::from_millis(250),
            settle_after_process: Duration::from_millis(250),
        }
    }
}

/// The waits after the loss of a stream.
#[derive(Clone, Copy, Debug)]
pub struct LossTimeouts {
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
}

impl Default for LossTimeouts {
    fn default() -> Self {
        Self {
            quick_loss: Duration::from_secs(10),
            quick_losses_max: 3,
            contested_pause: Duration::from_secs(300),
            contested_check: Duration::from_secs(1),
            unexplained_pause: Duration::from_secs(10),
        }
    }
}

/// The waits of the connections to one plugin.
#[derive(Clone, Copy, Debug)]
pub struct ConnectionTimeouts {
    /// A connection is closed after this long without a running call. The kubelet makes its first call within
    /// milliseconds, and then keeps a stream open.
    pub idle_max: Duration,
    /// If all slots are in use, no connection younger than this is closed for another: on a busy node, a dial and its
    /// first call may take this long.
    pub min_age: Duration,
    /// How long a graceful stop waits for running calls.
    pub stop_limit: Duration,
}

impl Default for ConnectionTimeouts {
    fn default() -> Self {
        Self {
            idle_max: Duration::from_secs(5),
            min_age: Duration::from_millis(200),
            stop_limit: Duration::from_millis(200),
        }
    }
}

/// The intervals at which the folder is checked.
#[derive(Clone, Copy, Debug)]
pub struct FolderTimeouts {
    /// While events are unavailable.
    pub check_interval: Duration,
    /// While events are available, since some file systems lose events.
    pub recheck_interval: Duration,
}

impl Default for FolderTimeouts {
    fn default() -> Self {
        Self { check_interval: Duration::from_secs(1), recheck_interval: Duration::from_secs(10) }
    }
}

/// The timeouts of reconcile passes.
#[derive(Clone, Copy, Debug)]
pub struct ReconcileTimeouts {
    /// The timeout of one `List` call.
    pub list_limit: Duration,
    /// The timeout of a reconcile pass before a refusal. The kubelet holds no lock meanwhile, but the pod's admission
    /// waits.
    pub refusal_pass_limit: Duration,
    /// The delay before a changed checkpoint is read: a pod with several containers changes it several times.
    pub gather: Duration,
}

impl Default for ReconcileTimeouts {
    fn default() -> Self {
        Self {
            list_limit: Duration::from_secs(1),
            refusal_pass_limit: Duration::from_secs(1),
            gather: Duration::from_millis(50),
        }
    }
}

/// The timeouts of the watch.
#[derive(Clone, Copy, Debug)]
pub struct PodsApiTimeouts {
    /// The first wait after the API failed or was absent; doubles up to `retry_max`.
    pub retry: Duration,
    /// The longest wait before the API is tried again.
    pub retry_max: Duration,
    /// The timeout of the first list: a few hundred pods of some KiB each.
    pub first_list: Duration,
    /// The watch restarts at this interval, since events can be lost silently. A pod whose deletion was lost counts as
    /// running until then.
    pub resync: Duration,
    /// The delay before a changed view is sent: the containers of a pod change it one after another.
    pub gather: Duration,
}

impl Default for PodsApiTimeouts {
    fn default() -> Self {
        Self {
            retry: Duration::from_secs(1),
            retry_max: Duration::from_secs(30),
            first_list: Duration::from_secs(10),
            resync: Duration::from_secs(60),
            gather: Duration::from_millis(50),
        }
    }
}
