//! The past of a GPU: its memory, utilisation, temperature and power, and its memory and utilisation by pod.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// The past of a GPU in equal steps, oldest first. A step without a reading is left out.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct GpuHistory {
    /// The length of a step, seconds. Each value is the average of the inventory scans in its step.
    #[schema(example = 15)]
    pub step_seconds: u64,
    /// The steps of the GPU.
    pub items: Vec<GpuSample>,
    /// The pods that had processes on the GPU, by namespace and name. Processes of unknown pods are left out.
    pub pods: Vec<PodHistory>,
}

/// Averages of one step of a GPU. A value that was never read in the step is absent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct GpuSample {
    /// The start of the step.
    #[schema(format = DateTime, example = "2026-02-03T04:05:00.000Z")]
    pub at: String,
    /// Memory in use, MiB.
    #[serde(rename = "memoryUsedMiB", default, skip_serializing_if = "Option::is_none")]
    #[schema(example = 1024)]
    pub memory_used_mib: Option<u64>,
    /// Memory that live allocations reserve, MiB.
    #[serde(rename = "memoryGrantedMiB", default, skip_serializing_if = "Option::is_none")]
    #[schema(example = 20389)]
    pub memory_granted_mib: Option<u64>,
    /// Percent of the time in which a kernel ran (NVML's `utilization.gpu`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = 87, maximum = 100)]
    pub utilization_percent: Option<u32>,
    /// Temperature, degrees Celsius.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = 56)]
    pub temperature_celsius: Option<u32>,
    /// Power, watts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = 412)]
    pub power_watts: Option<u32>,
}

/// The past of one pod on a GPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct PodHistory {
    /// The pod's namespace.
    #[schema(example = "default")]
    pub namespace: String,
    /// The pod's name.
    #[schema(example = "trainer-0")]
    pub pod: String,
    /// The steps of the pod, oldest first.
    pub items: Vec<PodSample>,
}

/// Averages of one step of a pod on a GPU. A value that was never read in the step is absent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct PodSample {
    /// The start of the step.
    #[schema(format = DateTime, example = "2026-02-03T04:05:00.000Z")]
    pub at: String,
    /// Memory of the pod's processes on the GPU, MiB.
    #[serde(rename = "memoryUsedMiB", default, skip_serializing_if = "Option::is_none")]
    #[schema(example = 512)]
    pub memory_used_mib: Option<u64>,
    /// Percent of the GPU's time that the pod's processes used; absent where NVML does not report it by process.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = 40, maximum = 100)]
    pub utilization_percent: Option<u32>,
}
