//! Counters and heartbeats of the daemon's parts, for `/metrics` and `/livez`.
//!
//! Counters are atomic numbers, or tables under locks that are held for one look-up, so counting never waits for long.
//! What is absent here: anything that the ledger holds, and any text from a pod or a user.

mod gpus;
mod heartbeat;
mod histogram;
mod http;
mod keeper;
mod kubelet;

pub use gpus::{DriverVersions, GpuCounters, XIDS_COUNTED_MAX};
pub use heartbeat::Heartbeat;
pub use histogram::{Histogram, HistogramSnapshot};
pub use http::{HttpCounters, MALFORMED, Method, ROUTES_COUNTED_MAX, Served};
pub use keeper::{KeeperCounters, RESOURCES_COUNTED_MAX};
pub use kubelet::{
    CODES, CountedCall, KubeletCounters, METHODS, PodListStatus, RegistrationOutcome, RegistrationState,
    RegistrationStatus, Rpc,
};

use parking_lot::Mutex;
use std::time::Duration;

/// All counters and heartbeats since the daemon started.
#[derive(Debug, Default)]
pub struct Counters {
    /// The keeper.
    pub keeper: KeeperCounters,
    /// Heartbeat of the policy thread.
    pub policies: Heartbeat,
    /// GPU scans and XIDs.
    pub gpus: GpuCounters,
    /// The kubelet front end.
    pub kubelet: KubeletCounters,
    /// Heartbeat of the async runtime that serves the kubelet.
    pub front: Heartbeat,
    /// The admin API.
    pub http: HttpCounters,
    limits: Mutex<LivenessLimits>,
}

impl Counters {
    /// The limits of liveness in force.
    #[must_use]
    pub fn limits(&self) -> LivenessLimits {
        *self.limits.lock()
    }

    /// Replaces the default limits; for tests, which do not wait for a minute.
    pub fn set_limits(&self, limits: LivenessLimits) {
        *self.limits.lock() = limits;
    }
}

/// Limits of `/livez`, and of one check of `/readyz`. Each is far above the longest operation that has its own
/// deadline, since a restart only helps where an operation never ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LivenessLimits {
    /// Longest time without a turn of the keeper, which ticks every ten seconds. Its longest turn is an append and a
    /// load of the store of 2 s each, after waiting for another such turn.
    pub keeper: Duration,
    /// Longest job of the policy thread: a stack evaluation has 1 s, an Allocate evaluates twice, and then waits for
    /// the keeper.
    pub policies: Duration,
    /// Longest scan of the GPUs, whose NVML calls run concurrently with deadlines of a few seconds per GPU; also the
    /// longest delay of the next scan after its interval.
    pub scan: Duration,
    /// Longest time without a heartbeat of the async runtime that serves the kubelet, which beats every ten seconds.
    pub front: Duration,
    /// Longest time that a resource may stay registered without a stream.
    pub stream: Duration,
    /// Longest time that the kubelet's `List` may fail before the daemon is not ready: far above a restart of the
    /// kubelet.
    pub pod_list: Duration,
}

impl Default for LivenessLimits {
    fn default() -> Self {
        Self {
            keeper: Duration::from_secs(30),
            policies: Duration::from_secs(30),
            scan: Duration::from_secs(120),
            front: Duration::from_secs(30),
            stream: Duration::from_secs(30),
            pod_list: Duration::from_secs(30),
        }
    }
}
