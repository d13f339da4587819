//! Nodes and stack entries for calls of policies.

use super::bytes::Bytes;
use berth_core::stack::Baseline;
use berth_kernel::hardware::gpu::{Mig, Part};
use berth_kernel::hardware::mig::MigStrategy;
use berth_kernel::hardware::triage::XidRules;
use berth_kernel::ids::names::{Digest, GpuId, PartId, Resource};
use berth_kernel::ids::pci::PciBusId;
use berth_kernel::ids::time::Now;
use berth_kernel::node::change::{Change, Entry};
use berth_kernel::node::ledger::Ledger;
use berth_kernel::policy::stack::{OnFault, Permissions, StackEntry};
use std::collections::BTreeMap;

/// Names that are offered and requested; the last is another vendor's.
const RESOURCES: [&str; 5] = [
    "nvidia.com/gpu",
    "nvidia.com/gpu.shared",
    "nvidia.com/mig-1g.10gb",
    "nvidia.com/gpu.large",
    "amd.com/gpu",
];

pub(super) fn resources() -> Vec<Resource> {
    RESOURCES.iter().map(|name| Resource::parse(name).unwrap()).collect()
}

pub(super) fn part(name: &str) -> PartId {
    PartId::parse(name).unwrap()
}

/// Up to four GPUs of 80 GiB, the last of them perhaps in MIG mode with an instance.
pub(super) fn node(bytes: &mut Bytes<'_>) -> Ledger {
    let count = 1 + bytes.below(4);
    let mut ledger = Ledger::default();
    let mut changes: Vec<Change> = (0..count).map(|index| Change::PartFound(gpu(index))).collect();
    if bytes.flag() {
        let whole = gpu(count - 1);
        let instance = Part {
            id: part("MIG-0"),
            gpu: whole.gpu.clone(),
            memory_mib: 9_728,
            mig: Some(Mig { profile: "1g.10gb".into(), gpu_instance: 7, compute_instance: 0 }),
            ..whole.clone()
        };
        changes.push(Change::PartFound(Part { mig_enabled: true, ..whole }));
        changes.push(Change::PartFound(instance));
    }
    ledger.apply(&Entry { at: Now::default(), changes });
    ledger
}

fn gpu(index: usize) -> Part {
    Part {
        model: "H100".into(),
        memory_mib: 81_920,
        pci_bus: PciBusId::parse(&format!("00000000:0{index}:00.0")).ok(),
        ..Part::whole_gpu(GpuId::of_whole(&part(&format!("GPU-{index}"))), u32::try_from(index).unwrap())
    }
}

/// An entry with permissions of the input's choice.
pub(super) fn entry(bytes: &mut Bytes<'_>, letter: char) -> StackEntry {
    let mut permissions = Permissions { deny: bytes.flag(), ..Permissions::default() };
    if bytes.flag() {
        permissions.share_max = u32::from(bytes.byte());
    }
    if bytes.flag() {
        permissions.resources.push("nvidia.com/gpu.*".into());
    }
    if bytes.flag() {
        permissions.environment = vec!["MY_*".into(), "LD_*".into(), "A".into()];
    }
    StackEntry {
        name: letter.to_string(),
        digest: Digest::parse(&letter.to_string().repeat(64)).unwrap(),
        parameters: "{}".into(),
        permissions,
        on_fault: if bytes.flag() { OnFault::Deny } else { OnFault::Skip },
    }
}

pub(super) fn baseline() -> Baseline {
    Baseline {
        resource: Resource::parse(RESOURCES[0]).unwrap(),
        mig: MigStrategy::Mixed,
        mps_sockets: BTreeMap::new(),
        xids: XidRules { ignored: vec![13], counted: Vec::new() },
        quiet_ms: 60_000,
    }
}
