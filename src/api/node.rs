//! The node, and whether its daemon lives and is ready.

use super::process::ProcessSight;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// The node and its daemon.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Node {
    /// The node's name.
    #[schema(example = "gpu-node-1")]
    pub name: String,
    /// The daemon's version.
    #[schema(example = "0.1.0")]
    pub version: String,
    /// Grows by one with each change of the ledger.
    #[schema(example = 42)]
    pub generation: u64,
    /// Whether `/readyz` says so.
    pub ready: bool,
    /// What readiness was held against.
    pub checks: Vec<Check>,
    /// Where GPUs come from.
    #[schema(example = "8 simulated H100")]
    pub gpu_source: String,
    /// Driver version, where there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = "580.65.06")]
    pub driver_version: Option<String>,
    /// CUDA version of the driver, where there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = "13.0")]
    pub cuda_version: Option<String>,
    /// Resources with their devices and their registration at the kubelet.
    pub resources: Vec<ResourceState>,
    /// What is wrong with the store, if anything; no grant is given then.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub store_trouble: Option<String>,
    /// The API server as a source of truth; left out where it is not used.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub api_server: Option<StepState>,
    /// Why no allocation ends at present, if so.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hold: Option<String>,
    /// How far the daemon can tell whose the processes on the GPUs are.
    pub processes: ProcessSight,
    /// Revision of the active stack.
    #[schema(example = 3)]
    pub stack_revision: u64,
    /// How many of each.
    pub counts: Counts,
}

/// How many there are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Counts {
    /// GPUs, vanished ones among them.
    #[schema(example = 8)]
    pub gpus: usize,
    /// GPUs that are healthy or degraded.
    #[schema(example = 8)]
    pub working_gpus: usize,
    /// GPUs that are cordoned.
    #[schema(example = 0)]
    pub cordoned_gpus: usize,
    /// Live allocations.
    #[schema(example = 5)]
    pub allocations: usize,
    /// Ended allocations that are kept.
    #[schema(example = 100)]
    pub ended_allocations: usize,
    /// Uses of GPUs that no allocation explains.
    #[schema(example = 0)]
    pub bypasses: usize,
    /// Pods whose spec lets them reach GPUs past every grant, whether or not they do; absent where no
    /// source shows pods.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = 0)]
    pub bypassing_pods: Option<usize>,
    /// Versions of policies.
    #[schema(example = 3)]
    pub policies: usize,
}

/// A resource at the kubelet.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct ResourceState {
    /// The resource.
    #[schema(example = "nvidia.com/gpu")]
    pub resource: String,
    /// Whether the kubelet knows it and watches its list.
    pub registration: StepState,
    /// Devices that the kubelet is shown.
    #[schema(example = 8)]
    pub devices: u32,
    /// Of these, held by an allocation.
    #[schema(example = 5)]
    pub held: u32,
    /// Of these, to be had now.
    #[schema(example = 3)]
    pub free: u32,
    /// Why its free devices are withdrawn, if a run of denials did that.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = "3 denials in a minute: withdrawn for 10 s")]
    pub breaker: Option<String>,
}

/// A step, and what it waits for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct StepState {
    /// Whether it is taken.
    pub done: bool,
    /// On what it waits, and what to do.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = "no kubelet.sock in /var/lib/kubelet/device-plugins")]
    pub waiting: Option<String>,
}

/// One thing that readiness is held against.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Check {
    /// `gpus`, `adoption`, `store`, `kubelet`, ...
    #[schema(example = "kubelet")]
    pub name: String,
    /// Whether it is well; false stands in the way of readiness, or of life.
    pub ok: bool,
    /// In words, where there is something to say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = "waiting: no kubelet.sock in /var/lib/kubelet/device-plugins")]
    pub detail: Option<String>,
}

/// The daemon lives.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Alive {
    /// Always true; a daemon that does not live does not answer, or answers 503.
    pub alive: bool,
    /// What life was held against: `keeper`, `policies`, `looks`, `streams`.
    pub checks: Vec<Check>,
}

/// The daemon is ready.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Ready {
    /// Always true; what is not ready is a problem with status 503.
    pub ready: bool,
    /// What readiness was held against.
    pub checks: Vec<Check>,
}
