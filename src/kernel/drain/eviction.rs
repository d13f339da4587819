//! Evictions of pods: how one is requested, its outcome, and what is known of it.

use crate::evidence::pods::Pod;
use crate::ids::names::GpuId;
use std::sync::Arc;

/// How a pod is removed, the gentler method first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum EvictionMethod {
    /// Eviction API: disruption budgets are respected.
    Evict,
    /// Deletion with the pod's own grace period: disruption budgets are ignored.
    Delete,
}

/// One request to the API server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EvictionRequest {
    /// The pod; its UID is the request's precondition.
    pub pod: Arc<Pod>,
    /// The method.
    pub method: EvictionMethod,
    /// The GPU that is drained; the first if there are several.
    pub gpu: GpuId,
}

/// The outcome of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EvictionOutcome {
    /// The API server accepted the request.
    Accepted,
    /// The API server has no pod with this UID.
    Gone,
    /// A disruption budget forbids it at present; the API server's message.
    Budget(String),
    /// The request failed, or the API server refused it for another reason.
    Failed(String),
}

/// The newest request for one pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EvictionRecord {
    /// The request.
    pub request: EvictionRequest,
    /// Its outcome.
    pub outcome: EvictionOutcome,
    /// When the first request for the pod was sent, milliseconds since 1970.
    pub since_wall_ms: u64,
    /// When the next request may be sent, monotonic milliseconds.
    pub quiet_until_mono_ms: u64,
}
