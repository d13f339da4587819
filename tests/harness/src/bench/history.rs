//! A store that remembers as many ended allocations as it may.

use anyhow::{Context as _, Result};
use berth_kernel::grants::allocation::{Allocation, Decision, End, EndReason, GrantOrigin, Holder, Limits};
use berth_kernel::grants::history::HISTORY_ALLOCATIONS_MAX;
use berth_kernel::ids::names::{AllocationId, DeviceId, PartId, Resource};
use berth_kernel::node::ports::Store as _;
use berth_kernel::node::record::{Meta, Record, Write};
use berth_store::SledStore;
use std::path::Path;

/// As many as the settings allow.
pub(crate) const RECORDS: usize = HISTORY_ALLOCATIONS_MAX;
/// Records of one append: well within its deadline.
const AT_ONCE: u64 = 250;

/// Puts them into the store in this folder, which is made if it is not there.
pub(crate) fn fill(folder: &Path) -> Result<()> {
    let mut store = SledStore::open(folder)?;
    let held = store.load()?;
    let meta = held.iter().find_map(|r| if let Record::Meta(meta) = r { Some(*meta) } else { None });
    let meta = meta.context("a store without its counters")?;
    let numbers: Vec<u64> = (meta.next_number..).take(RECORDS).collect();
    for chunk in numbers.chunks(usize::try_from(AT_ONCE)?) {
        let next_number = chunk.last().map_or(meta.next_number, |n| n + 1);
        let mut writes = vec![Write::Put(Record::Meta(Meta { next_number, ..meta }))];
        for number in chunk {
            writes.push(Write::Put(Record::Allocation(ended(meta.store, *number)?)));
        }
        store.append(&writes)?;
    }
    Ok(())
}

/// About what a policy's grant of a share leaves behind; every pod is another.
pub(crate) fn ended(store: u32, number: u64) -> Result<Allocation> {
    let part = PartId::parse(&format!("GPU-8a56a4bc-e184-a047-2620-be19fdf913{:02}", number % 8))?;
    let share = u32::try_from(number / 8 % 10)?;
    let namespaces = ["machine-learning", "default", "research", "batch"];
    let namespace = namespaces[usize::try_from(number / 80)? % namespaces.len()];
    Ok(Allocation {
        id: AllocationId { store, number },
        resource: Resource::parse("nvidia.com/gpu.shared")?,
        devices: vec![DeviceId::share(&part, share)],
        granted_wall_ms: 1_770_000_000_000 + number,
        origin: GrantOrigin::DevicePlugin,
        holder: Holder {
            namespace: Some(namespace.into()),
            pod: Some(format!("trainer-7c9d8f6b5-{number:05}")),
            pod_uid: Some(format!("3f0c8f5e-7f5b-4a53-a0c8-4a34d{:07}", number % 10_000_000)),
            container: Some("main".into()),
        },
        overlapped: false,
        decision: Decision {
            by: vec!["mixed@0123456789ab".into()],
            reason: "the emptiest GPU".into(),
            environment: Vec::new(),
            limits: Limits { memory_mib: Some(8_155), compute_percent: Some(10) },
        },
        ended: Some(End { reason: EndReason::Released, wall_ms: 1_770_000_100_000 + number }),
    })
}
