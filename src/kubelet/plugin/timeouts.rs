//! The timeouts of one resource's registration.

use std::time::Duration;

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
