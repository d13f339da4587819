//! GPUNode: the GPUs of a node, as its daemon reports them.
// KubeSchema copies the structs into functions.
#![expect(unreachable_pub)]
// Each column has a name.
#![expect(clippy::duplicated_attributes)]

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Most GPUs in a status.
pub const GPUS_MAX: usize = 16;
/// Most models in a status.
pub const MODELS_MAX: usize = 16;
/// The longest JSON of [`GpuNodeStatus::gpus`], bytes.
pub const GPUS_BYTES_MAX: usize = 6 * 1024;

/// The GPUs of a node.
#[derive(CustomResource, KubeSchema, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[kube(
    group = "fleet.berth.dev",
    version = "v1alpha1",
    kind = "GPUNode",
    root = "GpuNode",
    plural = "gpunodes",
    singular = "gpunode",
    shortname = "gn",
    doc = "The GPUs of a node. The node's daemon creates it and reports in its status.",
    derive = "PartialEq",
    status = "GpuNodeStatus",
    printcolumn(name = "GPUS", type_ = "integer", json_path = ".status.summary.gpus"),
    printcolumn(name = "AVAILABLE", type_ = "integer", json_path = ".status.summary.available"),
    printcolumn(name = "OUT", type_ = "integer", json_path = ".status.summary.out"),
    printcolumn(name = "HELD", type_ = "integer", json_path = ".status.summary.held"),
    printcolumn(
        name = "WHY",
        type_ = "string",
        json_path = ".status.conditions[?(@.type==\"GPUsAvailable\")].reason"
    ),
    printcolumn(name = "SEEN", type_ = "date", json_path = ".status.heartbeatTime"),
    printcolumn(name = "AGE", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(rename_all = "camelCase")]
pub struct GpuNodeSpec {}

/// What the daemon reports.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct GpuNodeStatus {
    /// When the daemon wrote the status. The daemon writes it at least every 18 minutes, even if nothing has changed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "crate::time")]
    pub heartbeat_time: Option<Time>,
    /// Numbers over all GPUs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub summary: Option<Summary>,
    /// The models of the GPUs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 16))]
    pub models: Option<Vec<String>>,
    /// The GPUs, at most 16.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 16), extend("x-kubernetes-list-type" = "atomic"))]
    pub gpus: Option<Vec<GpuStatus>>,
    /// `GPUsAvailable`: False while a GPU is out of use, with the causes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "crate::conditions")]
    pub conditions: Option<Vec<Condition>>,
}

/// Numbers over all GPUs of a node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Summary {
    /// GPUs, without those that the configuration excludes.
    pub gpus: u32,
    /// Those that are granted.
    pub available: u32,
    /// Those that are not: cordoned, drained, unhealthy or gone.
    pub out: u32,
    /// Devices that the policies offer.
    pub offered: u32,
    /// Devices that are held.
    pub held: u32,
}

/// One GPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct GpuStatus {
    /// Its index on the node, as in `nvidia-smi`; absent for a GPU that is gone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub index: Option<u32>,
    /// Its UUID.
    pub uuid: String,
    /// The position of its model in `models`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model: Option<u32>,
    /// `healthy`, `degraded`, `unhealthy` or `vanished`.
    pub health: String,
    /// `active`, `cordoned`, `draining` or `drained`.
    pub drain: String,
    /// Who has cordoned or drained it. Long names are cut, and only those that fit are listed.
    pub marks: Vec<String>,
    /// Devices that the policies offer on it.
    pub offered: u32,
    /// Devices that are held on it.
    pub held: u32,
}
