//! What this room is told; the configuration file's part of it is read by `config`.

use crate::edits::Edits;
use std::path::PathBuf;
use std::time::Duration;

/// Settings of the kubelet front end.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The kubelet's folder, which holds `device-plugins/` and `pod-resources/`.
    pub kubelet_dir: PathBuf,
    /// What a grant does to its container.
    pub edits: Edits,
    /// When rounds are taken.
    pub rounds: RoundTiming,
    /// Every other wait of this room.
    pub waits: Waits,
}

impl Settings {
    /// Where plugins' sockets, the kubelet's registration socket and its checkpoint lie.
    #[must_use]
    pub fn device_plugins(&self) -> PathBuf {
        self.kubelet_dir.join("device-plugins")
    }

    /// Where plugins register.
    #[must_use]
    pub fn kubelet_socket(&self) -> PathBuf {
        self.device_plugins().join("kubelet.sock")
    }

    /// Where the Pods API is served, if it is.
    #[must_use]
    pub fn pods_api_socket(&self) -> PathBuf {
        self.kubelet_dir.join("pods-api").join("pods-api.sock")
    }

    /// Where the pod resources API is served.
    #[must_use]
    pub fn pod_resources_socket(&self) -> PathBuf {
        self.kubelet_dir.join("pod-resources").join("kubelet.sock")
    }
}

/// The waits of rounds (DESIGN section 5).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RoundTiming {
    /// How often `List` is asked.
    pub list_every: Duration,
    /// How often while a GPU is cordoned.
    pub list_every_cordoned: Duration,
    /// How often a round runs anyway.
    pub round_every: Duration,
    /// How long a round waits for a freshly written checkpoint.
    pub checkpoint_wait: Duration,
}

impl Default for RoundTiming {
    fn default() -> Self {
        Self {
            list_every: Duration::from_secs(2),
            list_every_cordoned: Duration::from_secs(1),
            round_every: Duration::from_secs(60),
            checkpoint_wait: Duration::from_secs(1),
        }
    }
}

/// The waits. The defaults are the product's, each with its reason; tests shorten some.
#[derive(Clone, Debug)]
pub struct Waits {
    /// A refused dial of kubelet.sock again after this long at most; the first ones come sooner,
    /// from a 32nd of it on, since between the kubelet's bind and its listen lie microseconds.
    pub dial_again: Duration,
    /// So eager for this long after a change, then only every `dial_again_later`: a kubelet that
    /// is down for hours is announced by its new socket, not by our dials.
    pub dial_eager: Duration,
    /// See `dial_eager`.
    pub dial_again_later: Duration,
    /// Register is given up after this long. The kubelet itself spends up to 10 s on dialling back.
    pub register_limit: Duration,
    /// The first wait after a refused Register; doubles up to `refused_again_max`.
    pub refused_again: Duration,
    /// The longest wait after refused Registers. Far below the 30 s that other plugins take: the
    /// node has no GPUs meanwhile.
    pub refused_again_max: Duration,
    /// ListAndWatch must come within this time of a Register, else register again.
    pub watch_within: Duration,
    /// Where kubelet.sock is another file, the end of the kubelet that registered us shows within
    /// this time. The system closes a process's connections before the next one can start, so this
    /// is for our own runtime to read of it.
    pub exit_seen_within: Duration,
    /// How long the kubelet gets to close its connection after we ended the stream.
    pub close_within: Duration,
    /// The same when the daemon ends: it has a second for everything.
    pub leave_within: Duration,
    /// How long after that before a Register: it closes the connection before it tells its own
    /// device manager, and a Register in between gets a dead endpoint.
    pub settle: Duration,
    /// A stream that lived shorter than this was lost quickly.
    pub quick_loss: Duration,
    /// So many quick losses in a row on one kubelet mean a second plugin for the same resource.
    pub quick_losses_max: u32,
    /// Then nothing is tried for this long, unless the kubelet restarts.
    pub foreign_pause: Duration,
    /// A connection to a plugin is closed after this long without a call under way. The kubelet's
    /// first call comes within milliseconds, and then it keeps a stream open.
    pub silent_max: Duration,
    /// Where all connections to a plugin are in use, none is closed for another before it is this
    /// old: so long a dial and its first call may take on a busy node.
    pub min_age: Duration,
    /// One call of `List`.
    pub list_limit: Duration,
    /// A round before a refusal may take this long in all. No kubelet lock is held meanwhile, but
    /// the pod's admission waits.
    pub cure_limit: Duration,
    /// Checkpoint changes are gathered this long before they are read: a pod with several
    /// containers changes it several times.
    pub gather: Duration,
    /// The folder is looked at this often even if no event came: events can be lost or
    /// unavailable.
    pub look_again: Duration,
    /// The first wait after the Pods API was lost or found missing; doubles up to `pods_again_max`.
    pub pods_again: Duration,
    /// The longest wait for it: one that is switched on, or comes back, is found within it.
    pub pods_again_max: Duration,
    /// Its first list must be whole within this time: a few hundred pods of some KiB.
    pub pods_first_list: Duration,
    /// Its watch begins anew after this long, since single events can be lost without a word, and a
    /// pod whose end was lost would be vouched for until then.
    pub pods_resync: Duration,
    /// A graceful stop waits this long for calls under way.
    pub stop_limit: Duration,
}

impl Default for Waits {
    fn default() -> Self {
        Self {
            dial_again: Duration::from_millis(20),
            dial_eager: Duration::from_secs(10),
            dial_again_later: Duration::from_millis(500),
            register_limit: Duration::from_secs(15),
            refused_again: Duration::from_millis(100),
            refused_again_max: Duration::from_secs(2),
            watch_within: Duration::from_secs(5),
            exit_seen_within: Duration::from_millis(100),
            close_within: Duration::from_secs(1),
            leave_within: Duration::from_millis(400),
            settle: Duration::from_millis(250),
            quick_loss: Duration::from_secs(10),
            quick_losses_max: 3,
            foreign_pause: Duration::from_secs(300),
            silent_max: Duration::from_secs(5),
            min_age: Duration::from_millis(200),
            list_limit: Duration::from_secs(1),
            cure_limit: Duration::from_secs(1),
            gather: Duration::from_millis(50),
            look_again: Duration::from_secs(1),
            pods_again: Duration::from_secs(1),
            pods_again_max: Duration::from_secs(30),
            pods_first_list: Duration::from_secs(10),
            pods_resync: Duration::from_secs(60),
            stop_limit: Duration::from_millis(200),
        }
    }
}
