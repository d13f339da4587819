//! How large the store becomes under allocations that come and go for ever, and what an append costs.

use anyhow::Context;
use berth_kernel::grants::allocation::{Allocation, Decision, End, EndReason, GrantOrigin, Holder, Limits};
use berth_kernel::grants::history::HISTORY_ALLOCATIONS_MAX;
use berth_kernel::ids::names::{AllocationId, DeviceId, PartId, Resource};
use berth_kernel::node::ports::Store;
use berth_kernel::node::record::{Meta, Record, RecordKey, Write};
use berth_store::SledStore;
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

/// Allocations that live at a time: 16 GPUs in ten shares each.
const LIVE: u64 = 160;
/// Lines shown.
const SHOWN: u64 = 20;

/// Runs so many appends: each second one grants, the others end the oldest and prune.
pub(crate) fn run(appends: u64) -> anyhow::Result<()> {
    let folder = tempfile::Builder::new().prefix("berth-grow-").tempdir()?;
    let path = folder.path().join("store");
    let mut store = SledStore::open(&path)?;
    let kept = HISTORY_ALLOCATIONS_MAX as u64;
    let mut took = Vec::new();
    println!("{:>10} {:>9} {:>10} {:>10} {:>10}", "appends", "disk MiB", "p50 us", "p99 us", "open ms");
    for n in 0..appends {
        let number = n / 2;
        let writes = if n % 2 == 0 {
            let meta = Meta { store: 1, next_number: number + 1, kubelet_seen_wall_ms: None };
            vec![Write::Put(Record::Meta(meta)), Write::Put(allocation(number, false))]
        } else {
            let mut writes = Vec::new();
            if let Some(oldest) = number.checked_sub(LIVE) {
                writes.push(Write::Put(allocation(oldest, true)));
            }
            if let Some(pruned) = number.checked_sub(LIVE + kept) {
                writes.push(Write::Delete(RecordKey::Allocation(id(pruned))));
            }
            writes
        };
        let began = Instant::now();
        store.append(&writes).with_context(|| format!("append {n}"))?;
        took.push(began.elapsed());
        if (n + 1) % (appends / SHOWN).max(1) == 0 {
            took.sort_unstable();
            let (half, most) = (took[took.len() / 2], took[took.len() * 99 / 100]);
            drop(store);
            let began = Instant::now();
            store = SledStore::open(&path)?;
            let opened = began.elapsed();
            let size = size(&path)? as f64 / 1024.0 / 1024.0;
            println!(
                "{:>10} {size:>9.1} {:>10} {:>10} {:>10.1}",
                n + 1,
                half.as_micros(),
                most.as_micros(),
                ms(opened)
            );
            took.clear();
        }
    }
    println!("records={}", store.load()?.len());
    Ok(())
}

fn ms(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1000.0
}

/// Bytes that the files below take.
fn size(path: &Path) -> std::io::Result<u64> {
    let mut sum = 0;
    for entry in fs::read_dir(path)? {
        let entry = entry?;
        sum += if entry.file_type()?.is_dir() { size(&entry.path())? } else { entry.metadata()?.len() };
    }
    Ok(sum)
}

fn id(number: u64) -> AllocationId {
    AllocationId { store: 1, number }
}

/// About what a policy's grant of two shares takes.
fn allocation(number: u64, ended: bool) -> Record {
    let part =
        |i: u64| PartId::parse(&format!("GPU-8a56a4bc-e184-a047-2620-be19fdf913{i:02}")).expect("a UUID");
    let share = u32::try_from(number % 10).unwrap_or(0);
    Record::Allocation(Allocation {
        id: id(number),
        resource: Resource::parse("nvidia.com/gpu.shared").expect("a name"),
        devices: (0..2).map(|i| DeviceId { part: part((number + i) % 16), share: Some(share) }).collect(),
        granted_wall_ms: 1_770_000_000_000 + number,
        origin: GrantOrigin::DevicePlugin,
        holder: Holder {
            namespace: Some("machine-learning".into()),
            pod: Some(format!("trainer-{number}")),
            pod_uid: Some("3f0c8f5e-7f5b-4a53-a0c8-4a34d0f0b6a1".into()),
            container: Some("main".into()),
        },
        overlapped: false,
        decision: Decision {
            by: vec!["mixed@0123456789ab".into()],
            reason: "the emptiest GPU".into(),
            environment: vec![("MODEL_CACHE".into(), "/var/cache/models".into())],
            limits: Limits { memory_mib: Some(20_389), compute_percent: Some(25) },
        },
        ended: ended.then(|| End { reason: EndReason::Released, wall_ms: 1_770_000_100_000 + number }),
    })
}
