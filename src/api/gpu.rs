//! GPUs, their parts and devices.

use super::drain::Drain;
use super::values::values;
use berth_kernel::{gpu as kernel, health, offer};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use utoipa::ToSchema;

/// The GPUs of the node.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct GpuList {
    /// In the order of their index.
    pub items: Vec<GpuSummary>,
}

/// A GPU at a glance.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct GpuSummary {
    /// Its UUID.
    #[schema(example = "GPU-8a56a4bc-e184-a047-2620-be19fdf913d5")]
    pub uuid: String,
    /// NVML's index.
    #[schema(example = 0)]
    pub index: u32,
    /// Product name.
    #[schema(example = "NVIDIA H100 80GB HBM3")]
    pub model: String,
    /// Memory in MiB.
    #[schema(example = 81559)]
    #[serde(rename = "memoryMiB")]
    pub memory_mib: u64,
    /// Memory in use in MiB, where it could be read.
    #[serde(rename = "memoryUsedMiB", default, skip_serializing_if = "Option::is_none")]
    #[schema(example = 1024)]
    pub memory_used_mib: Option<u64>,
    /// Processes on it, where they could be seen; daemons that the configuration ignores left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = 1)]
    pub processes: Option<u32>,
    /// Of them, those that no allocation explains.
    #[schema(example = 0)]
    pub bypasses: u32,
    /// Whether the last look showed it.
    pub present: bool,
    /// How it fares.
    pub health: Health,
    /// Whether an operator lets it be granted.
    pub drain: Drain,
    /// What of it is advertised and held, by resource.
    pub resources: Vec<ResourceUse>,
}

/// A GPU with all that is known of it.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Gpu {
    /// At a glance.
    #[serde(flatten)]
    pub summary: GpuSummary,
    /// `nvidia`.
    #[schema(example = "nvidia")]
    pub vendor: String,
    /// N of `/dev/nvidiaN`, where known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = 0)]
    pub minor: Option<u32>,
    /// PCI bus id.
    #[schema(example = "00000000:65:00.0")]
    pub pci_bus: String,
    /// NUMA node, where the node says.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = 0)]
    pub numa_node: Option<u32>,
    /// In MIG mode its instances are granted, not the GPU itself.
    pub mig_enabled: bool,
    /// Further facts.
    #[schema(example = json!({"compute.capability": "9.0"}))]
    pub attributes: BTreeMap<String, String>,
    /// What devices are made of: the whole GPU, and its MIG instances.
    pub parts: Vec<Part>,
    /// How near the other GPUs sit.
    pub links: Vec<Link>,
}

/// A GPU's health.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Health {
    /// The state.
    pub state: HealthState,
    /// Why; absent where there is nothing to say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = "XID 79: GPU has fallen off the bus")]
    pub reason: Option<String>,
    /// Since when.
    #[schema(format = DateTime, example = "2026-02-03T04:05:06.000Z")]
    pub since: String,
    /// Whether it heals by itself after a quiet time; else an operator must act.
    pub heals: bool,
    /// What it was before, oldest first; the newest sixteen.
    pub history: Vec<HealthTurn>,
}

values! {
    /// Whether a GPU works.
    HealthState from health::HealthState {
        /// It works.
        Healthy = "healthy",
        /// It has a fault, and is still granted.
        Degraded = "degraded",
        /// Nothing new is granted on it.
        Unhealthy = "unhealthy",
        /// It is not there any more.
        Vanished = "vanished",
    }
}

/// A state that a GPU was in.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct HealthTurn {
    /// The state.
    pub state: HealthState,
    /// Why; absent where there was nothing to say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = "marked healthy by admin")]
    pub reason: Option<String>,
    /// Since when.
    #[schema(format = DateTime, example = "2026-02-03T04:05:06.000Z")]
    pub since: String,
}

/// Devices of one resource.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct ResourceUse {
    /// The resource.
    #[schema(example = "nvidia.com/gpu.shared")]
    pub resource: String,
    /// Devices that the kubelet is shown.
    #[schema(example = 4)]
    pub devices: u32,
    /// Of these, held by an allocation.
    #[schema(example = 1)]
    pub held: u32,
    /// Of these, to be had now.
    #[schema(example = 3)]
    pub free: u32,
}

/// What devices are made of.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Part {
    /// Its UUID.
    #[schema(example = "GPU-8a56a4bc-e184-a047-2620-be19fdf913d5")]
    pub uuid: String,
    /// Set for a MIG instance.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mig: Option<Mig>,
    /// Memory in MiB.
    #[schema(example = 81559)]
    #[serde(rename = "memoryMiB")]
    pub memory_mib: u64,
    /// Memory in use in MiB, where it could be read.
    #[serde(rename = "memoryUsedMiB", default, skip_serializing_if = "Option::is_none")]
    #[schema(example = 1024)]
    pub memory_used_mib: Option<u64>,
    /// Processes on it, where they could be seen.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = 1)]
    pub processes: Option<u32>,
    /// Whether the last look showed it.
    pub present: bool,
    /// Who made its offer: a policy, or `baseline`; absent before the first.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = "timeslice@0123456789ab")]
    pub offered_by: Option<String>,
    /// What it is offered as.
    pub offer: Vec<OfferLine>,
    /// Its devices, those on their way out among them.
    pub devices: Vec<Device>,
}

/// What makes a MIG instance.
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
    /// How many devices.
    #[schema(example = 4)]
    pub count: u32,
    /// What each takes of the part.
    pub consumes: Consumes,
}

/// What one device takes of its part while it is held.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Consumes {
    /// Everything.
    pub whole: bool,
    /// MiB of memory; 0 sets nothing aside.
    #[schema(example = 20389)]
    #[serde(rename = "memoryMiB")]
    pub memory_mib: u64,
    /// Percent of compute; 0 sets nothing aside.
    #[schema(example = 25)]
    pub compute_percent: u32,
}

/// What the kubelet counts.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Device {
    /// Its id at the kubelet.
    #[schema(example = "GPU-8a56a4bc-e184-a047-2620-be19fdf913d5::0")]
    pub id: String,
    /// Its resource.
    #[schema(example = "nvidia.com/gpu.shared")]
    pub resource: String,
    /// Where it stands.
    pub state: DeviceState,
    /// How the kubelet's list shows it.
    pub healthy: bool,
    /// What it takes of the part.
    pub consumes: Consumes,
    /// Live allocations that name it, oldest first. More than one only until a round has shown
    /// which of them lives.
    #[schema(example = json!(["5eed0001-17"]))]
    pub allocations: Vec<String>,
}

values! {
    /// Where a device stands.
    DeviceState {
        /// To be had.
        Free = "free",
        /// A live allocation names it.
        Held = "held",
        /// Offered, but not to be had now: its GPU is cordoned or unhealthy, or what is held on it
        /// leaves no room.
        Withdrawn = "withdrawn",
        /// No longer offered and not held: it leaves the list soon.
        Leaving = "leaving",
    }
}

/// How near another GPU sits.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Link {
    /// The other GPU.
    #[schema(example = "GPU-1e2f3a4b-0000-0000-0000-000000000001")]
    pub gpu: String,
    /// The way over PCIe.
    pub path: LinkPath,
    /// Active NVLinks between the two.
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
