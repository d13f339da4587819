//! GPUs, their parts and devices.

use super::drain::Drain;
use super::health::HealthState;
use super::values::values;
use super::via::Via;
use berth_kernel::hardware::gpu as kernel;
use berth_kernel::sharing::offer;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use utoipa::ToSchema;

/// The GPUs of the node.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct GpuList {
    /// The GPUs, by index.
    pub items: Vec<GpuSummary>,
    /// GPUs that the driver has and whose UUID is not known, so that they are counted but cannot be offered.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub unidentified: Vec<UnidentifiedGpu>,
}

/// A GPU that the driver has and whose UUID is not known.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct UnidentifiedGpu {
    /// The GPU's NVML index; absent if NVML does not list the GPU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = 7)]
    pub index: Option<u32>,
    /// PCI bus id; absent if unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = "00000000:DB:00.0")]
    pub pci_bus: Option<String>,
    /// Why it is not identified.
    #[schema(
        example = "nvmlDeviceGetHandleByIndex_v2: the GPU fell off the bus; reset it or reboot the node"
    )]
    pub reason: String,
}

impl From<&kernel::UnidentifiedGpu> for UnidentifiedGpu {
    fn from(gpu: &kernel::UnidentifiedGpu) -> Self {
        let pci_bus = gpu.pci_bus.map(|bus| bus.to_string());
        Self { index: gpu.index, pci_bus, reason: gpu.reason.clone() }
    }
}

/// The main properties of a GPU.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct GpuSummary {
    /// The GPU's UUID.
    #[schema(example = "GPU-8a56a4bc-e184-a047-2620-be19fdf913d5")]
    pub uuid: String,
    /// The GPU's NVML index.
    #[schema(example = 0)]
    pub index: u32,
    /// Product name; empty if it could not be read.
    #[schema(example = "NVIDIA H100 80GB HBM3")]
    pub model: String,
    /// Memory in MiB; absent if the driver does not report it.
    #[schema(example = 81559)]
    #[serde(rename = "memoryMiB", default, skip_serializing_if = "Option::is_none")]
    pub memory_mib: Option<u64>,
    /// Memory in use in MiB; absent if it could not be read.
    #[serde(rename = "memoryUsedMiB", default, skip_serializing_if = "Option::is_none")]
    #[schema(example = 1024)]
    pub memory_used_mib: Option<u64>,
    /// The number of processes on the GPU, without those that the configuration ignores; absent if processes are not
    /// visible.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = 1)]
    pub processes: Option<u32>,
    /// The number of these processes that have no allocation.
    #[schema(example = 0)]
    pub bypasses: u32,
    /// Whether the last inventory scan found the GPU.
    pub present: bool,
    /// Whether the configuration excludes the GPU (`gpus.exclude`): it is not offered under any stack.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub excluded: bool,
    /// The GPU's health.
    pub health: Health,
    /// The GPU's drain state.
    pub drain: Drain,
    /// The API of the kubelet through which the GPU is granted; absent from releases with one API.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub via: Option<Via>,
    /// The advertised, held and free devices of each resource.
    pub resources: Vec<ResourceUse>,
    /// How busy the GPU is, percent of the time in which a kernel ran (NVML's `utilization.gpu`); absent if the last
    /// inventory scan could not read it, as while the GPU is in MIG mode.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = 87, maximum = 100)]
    pub utilization_percent: Option<u32>,
    /// Temperature of the GPU's die, degrees Celsius; absent if the last inventory scan could not read it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = 56)]
    pub temperature_celsius: Option<u32>,
    /// Power that the GPU draws, watts; absent if the last inventory scan could not read it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = 412)]
    pub power_watts: Option<u32>,
    /// Memory that live allocations reserve, MiB; all of it while the whole GPU is held. Absent if the driver does not
    /// report the GPU's memory. Shares that reserve no memory count as 0.
    #[serde(rename = "memoryGrantedMiB", default, skip_serializing_if = "Option::is_none")]
    #[schema(example = 20389)]
    pub memory_granted_mib: Option<u64>,
    /// The pod with the most devices of this GPU, and of pods with as many, the one with the most memory reserved; absent
    /// if no known pod has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub top_holder: Option<TopHolder>,
    /// The number of known pods with a device of this GPU. The pod of an allocation is known seconds after the grant.
    #[serde(default)]
    #[schema(example = 3)]
    pub pod_count: u32,
}

/// A pod with devices of a GPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct TopHolder {
    /// The pod's namespace.
    #[schema(example = "default")]
    pub namespace: String,
    /// The pod's name.
    #[schema(example = "trainer-0")]
    pub pod: String,
    /// The number of devices of the GPU that it holds.
    #[schema(example = 2)]
    pub devices: u32,
}

/// All properties of a GPU.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Gpu {
    /// The main properties.
    #[serde(flatten)]
    pub summary: GpuSummary,
    /// `nvidia`.
    #[schema(example = "nvidia")]
    pub vendor: String,
    /// N of `/dev/nvidiaN`; absent if unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = 0)]
    pub minor: Option<u32>,
    /// PCI bus id; empty if it could not be read.
    #[schema(example = "00000000:65:00.0")]
    pub pci_bus: String,
    /// NUMA node; absent if unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = 0)]
    pub numa_node: Option<u32>,
    /// Whether the GPU is in MIG mode. Its instances are then granted instead of the GPU.
    pub mig_enabled: bool,
    /// Further attributes.
    #[schema(example = json!({"compute.capability": "9.0"}))]
    pub attributes: BTreeMap<String, String>,
    /// The parts that devices consist of: the whole GPU, and its MIG instances.
    pub parts: Vec<Part>,
    /// The connections to the other GPUs.
    pub links: Vec<Link>,
}

/// A GPU's health.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Health {
    /// The state.
    pub state: HealthState,
    /// The reason of the state.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = "XID 79: GPU has fallen off the bus")]
    pub reason: Option<String>,
    /// The start of the state.
    #[schema(format = DateTime, example = "2026-02-03T04:05:06.000Z")]
    pub since: String,
    /// Whether the GPU becomes healthy automatically after a time without errors; otherwise an operator must mark it
    /// healthy.
    pub heals: bool,
    /// The time at which the GPU becomes healthy if no error comes until then, in whole seconds. Absent if it is not known: the
    /// GPU is healthy, it is not found or does not answer at present, or an operator must mark it healthy.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(format = DateTime, example = "2026-02-03T04:10:06.000Z")]
    pub heals_at: Option<String>,
    /// The previous states, at most 16, oldest first.
    pub history: Vec<HealthTurn>,
}

/// A previous health state of a GPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct HealthTurn {
    /// The state.
    pub state: HealthState,
    /// The reason of the state.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = "marked healthy by admin")]
    pub reason: Option<String>,
    /// The start of the state.
    #[schema(format = DateTime, example = "2026-02-03T04:05:06.000Z")]
    pub since: String,
}

/// The number of devices of one resource.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct ResourceUse {
    /// The resource.
    #[schema(example = "nvidia.com/gpu.shared")]
    pub resource: String,
    /// The number of devices that the kubelet is shown.
    #[schema(example = 4)]
    pub devices: u32,
    /// The number of these that an allocation holds.
    #[schema(example = 1)]
    pub held: u32,
    /// The number of these that can be granted now.
    #[schema(example = 3)]
    pub free: u32,
}

/// A part of a GPU that devices consist of: the whole GPU, or a MIG instance.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Part {
    /// The part's UUID.
    #[schema(example = "GPU-8a56a4bc-e184-a047-2620-be19fdf913d5")]
    pub uuid: String,
    /// The MIG instance; absent for a whole GPU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mig: Option<Mig>,
    /// Memory in MiB; absent if the driver does not report it.
    #[schema(example = 81559)]
    #[serde(rename = "memoryMiB", default, skip_serializing_if = "Option::is_none")]
    pub memory_mib: Option<u64>,
    /// Memory in use in MiB; absent if it could not be read.
    #[serde(rename = "memoryUsedMiB", default, skip_serializing_if = "Option::is_none")]
    #[schema(example = 1024)]
    pub memory_used_mib: Option<u64>,
    /// The number of processes on the part; absent if processes are not visible.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = 1)]
    pub processes: Option<u32>,
    /// Whether the last inventory scan found the part.
    pub present: bool,
    /// The policy that made the part's offer, or `baseline`; absent before the first offer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = "timeslice@0123456789ab")]
    pub offered_by: Option<String>,
    /// The offered resources.
    pub offer: Vec<OfferLine>,
    /// The part's devices, including those that are no longer offered but still held.
    pub devices: Vec<Device>,
}

/// A MIG instance.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Mig {
    /// Profile.
    #[schema(example = "1g.10gb")]
    pub profile: String,
    /// GPU instance id.
    #[schema(example = 7)]
    pub gpu_instance: u32,
    /// Compute instance id.
    #[schema(example = 0)]
    pub compute_instance: u32,
}

/// Devices of one resource that a part is offered as.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct OfferLine {
    /// The resource.
    #[schema(example = "nvidia.com/gpu.shared")]
    pub resource: String,
    /// The number of devices.
    #[schema(example = 4)]
    pub count: u32,
    /// The amount of the part that each device consumes.
    pub consumes: Consumes,
}

/// The amount of its part that a held device consumes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Consumes {
    /// Whether it consumes the whole part.
    pub whole: bool,
    /// MiB of memory; 0 reserves none.
    #[schema(example = 20389)]
    #[serde(rename = "memoryMiB")]
    pub memory_mib: u64,
    /// Percent of compute; 0 reserves none.
    #[schema(example = 25)]
    pub compute_percent: u32,
}

/// A device, as the kubelet counts them.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Device {
    /// The device's id in the kubelet's list.
    #[schema(example = "GPU-8a56a4bc-e184-a047-2620-be19fdf913d5::0")]
    pub id: String,
    /// The device's resource.
    #[schema(example = "nvidia.com/gpu.shared")]
    pub resource: String,
    /// The device's state.
    pub state: DeviceState,
    /// The device's health in the kubelet's list.
    pub healthy: bool,
    /// The amount of the part that the device consumes.
    pub consumes: Consumes,
    /// Live allocations of the device, oldest first. More than one only until a reconcile pass has shown which of
    /// them is live.
    #[schema(example = json!(["5eed0001-17"]))]
    pub allocations: Vec<String>,
}

values! {
    /// The state of a device.
    DeviceState {
        /// The device can be granted.
        Free = "free",
        /// A live allocation holds the device.
        Held = "held",
        /// The device is offered but cannot be granted now: its GPU is cordoned or unhealthy, or the held devices
        /// leave too little of it.
        Withdrawn = "withdrawn",
        /// The device is no longer offered and not held; it is removed from the list soon.
        Leaving = "leaving",
    }
}

/// The connection to another GPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Link {
    /// The other GPU's UUID.
    #[schema(example = "GPU-1e2f3a4b-0000-0000-0000-000000000001")]
    pub gpu: String,
    /// The way over PCIe.
    pub path: LinkPath,
    /// The number of active NVLinks between the two GPUs.
    #[schema(example = 18)]
    pub nvlinks: u32,
}

values! {
    /// The way between two GPUs over PCIe, nearest first.
    LinkPath from kernel::Path {
        /// On one board.
        SameBoard = "sameBoard",
        /// Over one PCIe switch.
        SingleSwitch = "singleSwitch",
        /// Over several PCIe switches.
        MultiSwitch = "multiSwitch",
        /// Over a PCIe host bridge.
        HostBridge = "hostBridge",
        /// Over host bridges of one NUMA node.
        SameNuma = "sameNuma",
        /// Between NUMA nodes.
        CrossNuma = "crossNuma",
    }
}

impl From<&offer::OfferLine> for OfferLine {
    fn from(line: &offer::OfferLine) -> Self {
        Self { resource: line.resource.to_string(), count: line.count, consumes: line.consumes.into() }
    }
}

impl From<offer::Consumes> for Consumes {
    fn from(consumes: offer::Consumes) -> Self {
        match consumes {
            offer::Consumes::Whole => Self { whole: true, memory_mib: 0, compute_percent: 0 },
            offer::Consumes::Slice { memory_mib, compute_percent } => {
                Self { whole: false, memory_mib, compute_percent }
            }
        }
    }
}
