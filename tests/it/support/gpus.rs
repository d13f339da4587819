//! Simulated GPUs and the resources that they are offered as.

use berth_kernel::hardware::gpu::Part;
use berth_kernel::ids::names::{GpuId, PartId, Resource};
use berth_kernel::ids::pci::PciBusId;
use std::collections::BTreeMap;

/// The resource of whole GPUs.
pub(crate) const WHOLE: &str = "nvidia.com/gpu";
/// The resource of shares.
pub(crate) const SHARED: &str = "nvidia.com/gpu.shared";
/// Memory of every simulated GPU.
pub(crate) const MEMORY_MIB: u64 = 81_559;

pub(crate) fn resource(name: &str) -> Resource {
    Resource::parse(name).unwrap()
}

/// A whole GPU as a part: `GPU-0`, `GPU-1`, ...
pub(crate) fn gpu(index: u32) -> PartId {
    PartId::parse(&format!("GPU-{index}")).unwrap()
}

/// The same GPU as the owner of its parts.
pub(crate) fn gpu_id(index: u32) -> GpuId {
    GpuId::of_whole(&gpu(index))
}

/// A whole H100 with this name.
pub(crate) fn part(index: u32, id: PartId) -> Part {
    Part {
        gpu: GpuId::of_whole(&id),
        id,
        vendor: "nvidia".into(),
        model: "NVIDIA H100 80GB HBM3".into(),
        gpu_index: index,
        minor: Some(index),
        memory_mib: MEMORY_MIB,
        pci_bus: PciBusId::parse(&format!("00000000:{index:02x}:00.0")).ok(),
        numa_node: Some(0),
        mig_enabled: false,
        mig: None,
        attributes: BTreeMap::from([("compute.capability".into(), "9.0".into())]),
    }
}
