//! Counts and signs of life that rooms leave behind them as they work, for `/metrics` and `/livez`.
//!
//! Atomic numbers, and tables under locks that are held for one look-up: who counts waits for nobody,
//! and who reads waits for nobody who works. What is absent here: anything that is in the ledger
//! anyway, and any text of a pod's or a user's.

mod beat;
mod gpus;
mod http;
mod keeper;
mod plugins;
mod times;

pub use beat::Beat;
pub use gpus::{GpuFigures, Versions, XIDS_COUNTED_MAX};
pub use http::{HttpFigures, MALFORMED, Method, ROUTES_COUNTED_MAX, Served};
pub use keeper::{KeeperFigures, RESOURCES_COUNTED_MAX};
pub use plugins::{At, CODES, Call, KubeletFigures, METHODS, Rpc, Standing};
pub use times::{Spread, Times};

use parking_lot::Mutex;
use std::time::Duration;

/// What a daemon has counted since it started.
#[derive(Debug, Default)]
pub struct Figures {
    /// The ledger's writer.
    pub keeper: KeeperFigures,
    /// The policy thread's signs of life.
    pub policies: Beat,
    /// Looks at the GPUs, and what they reported.
    pub gpus: GpuFigures,
    /// The kubelet front end.
    pub kubelet: KubeletFigures,
    /// The runtime on which the kubelet front end answers.
    pub front: Beat,
    /// The admin API.
    pub http: HttpFigures,
    limits: Mutex<Limits>,
}

impl Figures {
    /// How long silence may last.
    #[must_use]
    pub fn limits(&self) -> Limits {
        *self.limits.lock()
    }

    /// Sets that otherwise than by the product's: tests do not wait for a minute.
    pub fn set_limits(&self, limits: Limits) {
        *self.limits.lock() = limits;
    }
}

/// How long silence may last before the daemon does not live. Each is far above the longest work that
/// has an end of its own, since a restart helps only where there is none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// The ledger's writer takes a turn each second by itself. Its longest is an append and a reading of
    /// the store of 2 s each, and a waiting round of both.
    pub keeper: Duration,
    /// One job of the policy thread: a stack has 1 s, twice for an Allocate; then it waits for the
    /// ledger's writer.
    pub policies: Duration,
    /// One look at the GPUs: its calls of NVML have deadlines of a few seconds a GPU, all at once. So long,
    /// too, after its time, until the next one is begun.
    pub look: Duration,
    /// The runtime of the kubelet front end gives a sign of life each second.
    pub front: Duration,
    /// A resource that counts as registered without a stream: the loss of one is noticed at once.
    pub stream: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            keeper: Duration::from_secs(30),
            policies: Duration::from_secs(30),
            look: Duration::from_secs(120),
            front: Duration::from_secs(30),
            stream: Duration::from_secs(30),
        }
    }
}
