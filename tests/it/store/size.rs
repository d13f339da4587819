//! The store stays within a stated size, however many allocations are made, and no live allocation is pruned.

use crate::support::gpus::{SHARED, part, resource};
use crate::support::kubelet_fakes::SkipClock;
use berth_core::keeper::Keeper;
use berth_kernel::grants::history::{
    HISTORY_ALLOCATIONS_MAX, HISTORY_BYTES_MAX, HistoryLimit, PRUNED_AT_ONCE,
};
use berth_kernel::hardware::gpu::Inventory;
use berth_kernel::ids::names::{AllocationId, DeviceId, PartId};
use berth_kernel::node::change::Change;
use berth_kernel::node::command::{Attempt, Command, StackAnswer};
use berth_kernel::node::ports::Store as _;
use berth_kernel::node::rules::Rules;
use berth_kernel::policy::hooks::{AdmitRequest, Terms};
use berth_kernel::sharing::offer::{Consumes, OfferLine, PartOffer};
use berth_store::SledStore;
use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

/// What docs/measurements.md and docs/store.md state for the largest history.
const STORE_BYTES_MAX: u64 = 64 * 1024 * 1024;
/// GPUs, each in so many shares.
const GPUS: u32 = 8;
const SHARES: u32 = 10;
/// Allocations that live all the time.
const LASTING: u32 = 16;
/// Grants and ends: the whole history twice over, and more.
const CYCLES: u32 = 24_000;
/// The same for large ones: some 3,300 are as many bytes as are kept.
const LARGE_CYCLES: u32 = 7_000;

fn gpu(n: u32) -> PartId {
    PartId::parse(&format!("GPU-8a56a4bc-e184-a047-2620-be19fdf913{n:02}")).unwrap()
}

fn share(n: u32) -> DeviceId {
    DeviceId::share(&gpu(n / SHARES % GPUS), n % SHARES)
}

struct KeeperNode {
    keeper: Keeper,
    folder: std::path::PathBuf,
}

impl KeeperNode {
    fn open(folder: &Path, kept: usize) -> Self {
        let rules = Rules {
            history: HistoryLimit { allocations: kept, ..HistoryLimit::default() },
            ..Rules::default()
        };
        let store = SledStore::open(folder).unwrap();
        let keeper = Keeper::open(Box::new(store), rules, Arc::new(SkipClock::default())).unwrap();
        let mut node = Self { keeper, folder: folder.to_owned() };
        node.turn(&Command::RecordScan(Inventory {
            parts: (0..GPUS).map(|n| part(n, gpu(n))).collect(),
            ..Inventory::default()
        }));
        node
    }

    fn turn(&mut self, command: &Command) -> Vec<Change> {
        self.keeper.turn(command).unwrap().entry.changes.clone()
    }

    fn offer(&mut self) {
        let consumes = Consumes::Slice { memory_mib: 8000, compute_percent: 10 };
        let line = OfferLine { resource: resource(SHARED), count: SHARES, consumes };
        let offers =
            (0..GPUS).map(|n| (PartOffer { part: gpu(n), lines: vec![line.clone()] }, "test".into()));
        self.turn(&Command::Offer(offers.collect()));
    }

    fn allocate(&mut self, device: DeviceId) -> AllocationId {
        self.allocate_with(device, "/var/cache/models")
    }

    fn allocate_with(&mut self, device: DeviceId, environment: &str) -> AllocationId {
        let terms = Terms {
            reason: "the emptiest GPU".into(),
            environment: vec![("MODEL_CACHE".into(), environment.into())],
            ..Terms::default()
        };
        let changes = self.turn(&Command::Allocate {
            request: AdmitRequest { resource: resource(SHARED), devices: vec![device], claim: None },
            answer: StackAnswer::Allow { by: vec!["mixed@0123456789ab".into()], terms },
            evaluated: None,
            attempt: Attempt::Last { asked_mono_ms: 0 },
        });
        changes.iter().find_map(|c| if let Change::Granted(a) = c { Some(a.id) } else { None }).unwrap()
    }

    fn live(&self) -> BTreeSet<AllocationId> {
        self.keeper.snapshot().live.keys().copied().collect()
    }

    fn kept(&self) -> usize {
        self.keeper.snapshot().ended.len()
    }
}

/// Bytes that the files below take.
fn size(path: &Path) -> u64 {
    let entries = std::fs::read_dir(path).unwrap().map(Result::unwrap);
    entries.map(|e| if e.path().is_dir() { size(&e.path()) } else { e.metadata().unwrap().len() }).sum()
}

/// In memory where there is such a folder: what is counted is bytes, and the disk's time is not.
fn folder() -> tempfile::TempDir {
    tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap()
}

#[test]
fn the_store_stays_within_its_stated_size_and_prunes_nothing_that_lives() {
    let folder = folder();
    let path = folder.path().join("store");
    let mut node = KeeperNode::open(&path, HISTORY_ALLOCATIONS_MAX);
    node.offer();
    let lasting: BTreeSet<_> = (0..LASTING).map(|n| node.allocate(share(n))).collect();
    let mut largest = 0;
    for n in 0..CYCLES {
        let id = node.allocate(share(LASTING + n % (GPUS * SHARES - LASTING)));
        node.turn(&Command::End { id, force: true });
        assert_eq!(node.kept(), (n as usize + 1).min(HISTORY_ALLOCATIONS_MAX));
        if n % 1000 == 0 {
            assert_eq!(node.live(), lasting);
            largest = largest.max(size(&node.folder));
        }
    }
    assert!(largest <= STORE_BYTES_MAX, "{largest} bytes");
    let newest: Vec<_> = node.keeper.snapshot().ended.iter().map(|past| past.allocation()).collect();
    drop(node);

    // What is on the disk is just that, and no number is given twice.
    let records = SledStore::open(&path).unwrap().load().unwrap().len();
    // Of each GPU its part and its health.
    let most = HISTORY_ALLOCATIONS_MAX + LASTING as usize + 2 * GPUS as usize + 2;
    assert!(records <= most, "{records} records");
    let mut node = KeeperNode::open(&path, HISTORY_ALLOCATIONS_MAX);
    assert_eq!(node.live(), lasting);
    assert!(node.keeper.snapshot().ended.iter().map(|past| past.allocation()).eq(newest));
    let next = node.allocate(share(LASTING));
    assert!(lasting.iter().all(|id| next > *id) && next.number == u64::from(LASTING + CYCLES));
    node.turn(&Command::End { id: next, force: true });
    drop(node);

    // A lower limit is reached in small steps.
    const FEW: usize = 64;
    let mut node = KeeperNode::open(&path, FEW);
    for step in 1.. {
        let before = node.kept();
        if before == FEW {
            assert!(step <= HISTORY_ALLOCATIONS_MAX / PRUNED_AT_ONCE + 2);
            break;
        }
        node.turn(&Command::Tick);
        assert_eq!(before - node.kept(), PRUNED_AT_ONCE.min(before - FEW));
    }
    assert_eq!(node.live(), lasting);
    drop(node);
    assert_eq!(KeeperNode::open(&path, FEW).live(), lasting);
    assert!(size(&path) <= STORE_BYTES_MAX);
}

/// A policy may add up to 16 KiB of environment to each grant: then bytes are what bounds it.
#[test]
fn a_history_of_large_records_is_bounded_in_bytes() {
    let folder = folder();
    let path = folder.path().join("store");
    let mut node = KeeperNode::open(&path, HISTORY_ALLOCATIONS_MAX);
    node.offer();
    let lasting = node.allocate(share(0));
    let (mut largest, mut most) = (0, 0);
    for n in 0..LARGE_CYCLES {
        // From 1 to 9 KiB, so that one that ends makes room for several, or for none.
        let environment = "x".repeat(1024 * (1 + n as usize % 9));
        let id = node.allocate_with(share(1 + n % (GPUS * SHARES - 1)), &environment);
        node.turn(&Command::End { id, force: true });
        let ended = node.keeper.snapshot().ended.clone();
        assert!(ended.bytes() <= HISTORY_BYTES_MAX, "{} bytes", ended.bytes());
        most = most.max(ended.bytes());
        if n % 500 == 0 {
            largest = largest.max(size(&node.folder));
        }
    }
    assert!(most > HISTORY_BYTES_MAX / 10 * 9, "it was never full");
    assert!(largest <= STORE_BYTES_MAX, "{largest} bytes");
    assert_eq!(node.live(), BTreeSet::from([lasting]));
    drop(node);
    assert_eq!(KeeperNode::open(&path, HISTORY_ALLOCATIONS_MAX).live(), BTreeSet::from([lasting]));
}
