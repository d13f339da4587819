//! A ledger of a node for tests.

use berth_kernel::hardware::gpu::Part;
use berth_kernel::hardware::health::Health;
use berth_kernel::ids::names::GpuId;
use berth_kernel::ids::time::Now;
use berth_kernel::node::ledger::{GpuState, Ledger};
use berth_kernel::sharing::part_state::PartState;
use std::sync::Arc;

pub(crate) const NOW: Now = Now { wall_ms: 1_767_225_600_000, mono_ms: 1_000 };

/// `GPU-0` and so on.
pub(crate) fn gpu(index: u32) -> GpuId {
    GpuId::parse(&format!("GPU-{index}")).unwrap()
}

/// A node with this number of healthy GPUs, of which none is offered.
pub(crate) fn node(gpus: u32) -> Ledger {
    let mut ledger = Ledger::default();
    for index in 0..gpus {
        let part = Part::whole_gpu(gpu(index), index);
        ledger.parts.insert(gpu(index).as_part().clone(), Arc::new(PartState::new(part, 0)));
        ledger.gpus.insert(gpu(index), Arc::new(GpuState::new(Health::healthy(NOW), NOW)));
    }
    ledger
}
