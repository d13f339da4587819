//! The contract of `Store`: one set of checks, run on the store on disk and on the one in memory.

use crate::support::gpus::part;
use berth_kernel::drain::marks::{Mark, Marks};
use berth_kernel::grants::allocation::{Allocation, Decision, EndReason, GrantOrigin, Holder, Limits};
use berth_kernel::hardware::gpu::Part;
use berth_kernel::ids::names::{AllocationId, DeviceId, Digest, GpuId, PartId, Resource};
use berth_kernel::ids::time::Now;
use berth_kernel::node::change::{Change, Entry};
use berth_kernel::node::ledger::Ledger;
use berth_kernel::node::ports::{Store, StoreError};
use berth_kernel::node::record::{
    Meta, Record, RecordKey, Write, health_records, health_writes, records, writes,
};
use berth_kernel::node::restore::restore;
use berth_kernel::policy::hooks::Hook;
use berth_kernel::policy::stack::{OnFault, Permissions, Stack, StackEntry};
use berth_kernel::policy::version::PolicyVersion;
use berth_kernel::sharing::offer::{Consumes, OfferLine, ShareRange};
use berth_kernel::sharing::part_state::{Device, DeviceState};
use berth_store::{MemoryDisk, MemoryFault, RECORD_BYTES_MAX, SledStore};
use std::path::PathBuf;

/// A disk that stores are opened on.
pub(crate) trait Disk {
    /// Opens the store. Dropping it is the restart.
    fn open(&self) -> Result<Box<dyn Store>, StoreError>;
    /// From now on appends fail.
    fn spoil(&self);
    /// They no longer do.
    fn mend(&self);
}

impl Disk for MemoryDisk {
    fn open(&self) -> Result<Box<dyn Store>, StoreError> {
        Ok(Box::new(MemoryDisk::open(self)?))
    }

    fn spoil(&self) {
        self.set_fault(Some(MemoryFault::BeforeWrite));
    }

    fn mend(&self) {
        self.set_fault(None);
    }
}

/// A folder. Spoilt, its disk is full in the middle of the next append; that needs a process of its own.
pub(crate) struct Folder(pub(crate) PathBuf);

impl Disk for Folder {
    fn open(&self) -> Result<Box<dyn Store>, StoreError> {
        Ok(Box::new(SledStore::open(&self.0)?))
    }

    fn spoil(&self) {
        let log = std::fs::read(self.0.join("data/db")).unwrap();
        limit_files(Some(written(&log) as u64 + 3_000));
    }

    fn mend(&self) {
        limit_files(None);
    }
}

/// How far a log of sled's is written; from there on it repeats one byte.
pub(crate) fn written(log: &[u8]) -> usize {
    let filler = log.last().copied();
    log.iter().rposition(|byte| Some(*byte) != filler).map_or(0, |at| at + 1)
}

fn limit_files(bytes: Option<u64>) {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let maximum = getrlimit(Resource::Fsize).maximum;
    let current = bytes.or(maximum);
    setrlimit(Resource::Fsize, Rlimit { current, maximum }).unwrap();
}

pub(crate) fn allocation(number: u64, reason: &str) -> Record {
    let resource = Resource::parse("nvidia.com/gpu.shared").unwrap();
    let part = PartId::parse("GPU-1").unwrap();
    let share = u32::try_from(number % 1000).unwrap();
    Record::Allocation(granted(1, number, &resource, vec![DeviceId::share(&part, share)], reason))
}

pub(crate) fn meta(store: u32, next_number: u64) -> Record {
    Record::Meta(Meta { store, next_number, kubelet_seen_wall_ms: None })
}

/// The store's identity.
pub(crate) fn identity(loaded: &[Record]) -> u32 {
    match loaded.first() {
        Some(Record::Meta(meta)) => meta.store,
        other => panic!("the first record is {other:?}"),
    }
}

fn granted(store: u32, number: u64, resource: &Resource, devices: Vec<DeviceId>, reason: &str) -> Allocation {
    Allocation {
        id: AllocationId { store, number },
        resource: resource.clone(),
        devices,
        granted_wall_ms: 1_000 + number,
        origin: GrantOrigin::DevicePlugin,
        holder: Holder::default(),
        overlapped: false,
        decision: Decision {
            by: vec!["baseline".into()],
            reason: reason.into(),
            environment: Vec::new(),
            limits: Limits::default(),
        },
        ended: None,
    }
}

/// All checks but the one that spoils the disk.
fn contract(fresh: &dyn Fn() -> Box<dyn Disk>) {
    a_fresh_store_holds_its_identity_alone(&*fresh());
    records_come_back_in_the_order_of_their_keys(&*fresh());
    an_append_is_taken_whole_or_not_at_all(&*fresh());
    large_records_side_by_side(&*fresh());
    a_restart_gives_the_ledger(&*fresh());
    a_store_is_open_once(&*fresh());
}

fn a_fresh_store_holds_its_identity_alone(disk: &dyn Disk) {
    let mut store = disk.open().unwrap();
    let loaded = store.load().unwrap();
    let id = identity(&loaded);
    assert_eq!(loaded, [meta(id, 0)]);
    drop(store);
    assert_eq!(disk.open().unwrap().load().unwrap(), [meta(id, 0)]);
}

fn records_come_back_in_the_order_of_their_keys(disk: &dyn Disk) {
    let mut store = disk.open().unwrap();
    let id = identity(&store.load().unwrap());
    let drain = |gpu: &str, why: &str| {
        Record::Marks(GpuId::parse(gpu).unwrap(), Mark::cordon("admin", why, 3).into())
    };
    store.append(&[]).unwrap();
    store
        .append(&[
            Write::Put(allocation(256, "a")),
            Write::Put(allocation(2, "b")),
            Write::Put(drain("GPU-b", "x")),
            Write::Put(drain("GPU-B", "y")),
        ])
        .unwrap();
    store
        .append(&[
            Write::Delete(allocation(2, "").key()),
            Write::Delete(allocation(999, "").key()),
            Write::Put(allocation(1, "c")),
            Write::Put(allocation(256, "first")),
            // The last write counts.
            Write::Put(allocation(256, "d \u{0}\u{1F980}\"\\\n")),
            Write::Put(drain("GPU-c", "z")),
            Write::Delete(drain("GPU-c", "").key()),
            Write::Put(meta(id, 300)),
        ])
        .unwrap();
    let expected = [
        meta(id, 300),
        drain("GPU-B", "y"),
        drain("GPU-b", "x"),
        allocation(1, "c"),
        allocation(256, "d \u{0}\u{1F980}\"\\\n"),
    ];
    assert_eq!(store.load().unwrap(), expected);
    drop(store);
    assert_eq!(disk.open().unwrap().load().unwrap(), expected);
}

fn an_append_is_taken_whole_or_not_at_all(disk: &dyn Disk) {
    let mut store = disk.open().unwrap();
    let before = store.load().unwrap();
    let error = store
        .append(&[
            Write::Put(allocation(1, "small")),
            Write::Put(allocation(2, &"x".repeat(RECORD_BYTES_MAX))),
        ])
        .unwrap_err();
    assert!(matches!(error, StoreError::TooLarge { .. }), "{error}");
    assert_eq!(store.load().unwrap(), before);
    // Detected before anything was written, so the store still works.
    store.append(&[Write::Put(allocation(1, "small"))]).unwrap();
    assert_eq!(store.load().unwrap().len(), before.len() + 1);
}

fn large_records_side_by_side(disk: &dyn Disk) {
    let mut store = disk.open().unwrap();
    let mut expected = store.load().unwrap();
    let text = |n: u64| format!("{n}").repeat(RECORD_BYTES_MAX / 3 - 100);
    for n in 100..160 {
        store.append(&[Write::Put(allocation(n, &text(n)))]).unwrap();
    }
    let many: Vec<Write> = (160..220).map(|n| Write::Put(allocation(n, &text(n)))).collect();
    store.append(&many).unwrap();
    let odd = (100..220).filter(|n| n % 7 == 0);
    let deleted: Vec<Write> = odd.map(|n| Write::Delete(allocation(n, "").key())).collect();
    store.append(&deleted).unwrap();
    expected.extend((100..220).filter(|n| n % 7 != 0).map(|n| allocation(n, &text(n))));
    assert!(store.load().unwrap() == expected);
    drop(store);
    assert!(disk.open().unwrap().load().unwrap() == expected);
}

fn a_restart_gives_the_ledger(disk: &dyn Disk) {
    let now = Now { wall_ms: 77, mono_ms: 5 };
    let mut store = disk.open().unwrap();
    let mut ledger = restore(store.load().unwrap(), now);
    for entry in history(ledger.store) {
        let mut next = ledger.clone();
        next.apply(&entry);
        store.append(&writes(&ledger, &entry, &next)).unwrap();
        store.append(&health_writes(&health_records(&ledger), &health_records(&next))).unwrap();
        ledger = next;
        assert_same(&restore(store.load().unwrap(), now), &ledger, now);
    }
    assert_eq!((ledger.live.len(), ledger.ended.len()), (2, 1));
    drop(store);
    let again = disk.open().unwrap().load().unwrap();
    assert_same(&restore(again, now), &ledger, now);
}

fn assert_same(read: &Ledger, ledger: &Ledger, now: Now) {
    assert_eq!(*read, restore(records(ledger), now));
    assert_eq!(read.live, ledger.live);
    assert_eq!(read.ended, ledger.ended);
    assert_eq!(read.policies, ledger.policies);
    assert_eq!(read.stack, ledger.stack);
    assert_eq!(read.next_number, ledger.next_number);
    assert_eq!(read.kubelet_seen_wall_ms, ledger.kubelet_seen_wall_ms);
    for (id, part) in &ledger.parts {
        let back = &read.parts[id];
        let plain = |part: &berth_kernel::sharing::part_state::PartState| {
            let devices = part.devices.iter();
            let devices = devices.map(|(k, d)| (k.clone(), d.consumes, d.holders.clone()));
            (part.part.clone(), part.lines.clone(), devices.collect::<Vec<_>>())
        };
        assert_eq!(plain(back), plain(part));
        let gpu = &part.part.gpu;
        assert_eq!(read.gpus[gpu].marks, ledger.gpus[gpu].marks);
    }
}

fn a_store_is_open_once(disk: &dyn Disk) {
    let mut store = disk.open().unwrap();
    let second = disk.open().err();
    assert!(matches!(second, Some(StoreError::Locked { .. })), "{second:?}");
    store.append(&[Write::Put(allocation(1, "mine"))]).unwrap();
    drop(store);
    assert_eq!(disk.open().unwrap().load().unwrap().len(), 2);
}

/// Spoils the disk, so it may need a process of its own.
pub(crate) fn an_append_that_failed_is_settled_by_load(disk: &dyn Disk) {
    let mut store = disk.open().unwrap();
    let id = identity(&store.load().unwrap());
    let mut next = 0;
    for round in 0..3 {
        // What is acknowledged now must be there whatever comes.
        for _ in 0..20 {
            let writes = [Write::Put(meta(id, next + 1)), Write::Put(allocation(next, "x"))];
            store.append(&writes).unwrap();
            next += 1;
        }
        disk.spoil();
        let writes = [Write::Put(meta(id, next + 1)), Write::Put(allocation(next, &"y".repeat(9_000)))];
        let error = store.append(&writes).unwrap_err();
        assert!(matches!(error, StoreError::Io { .. }), "{error}");
        let error = store.append(&writes).unwrap_err();
        assert!(error.to_string().contains("read back"), "{error}");
        // Reading may fail as well, as long as it is full.
        let _ = store.load();
        disk.mend();
        let loaded = store.load().unwrap();
        let expected = |next: u64| -> Vec<Record> {
            let all = (0..next).map(|n| match (n + 1) % 21 {
                0 => allocation(n, &"y".repeat(9_000)),
                _ => allocation(n, "x"),
            });
            [meta(id, next)].into_iter().chain(all).collect()
        };
        if loaded == expected(next + 1) {
            next += 1;
        } else {
            assert!(loaded == expected(next), "round {round}");
            store.append(&writes).unwrap();
            next += 1;
        }
        assert!(store.load().unwrap() == expected(next), "round {round}");
    }
    drop(store);
    assert_eq!(disk.open().unwrap().load().unwrap().len() as u64, next + 1);
}

/// A node's life: found, offered, granted twice over, cordoned, shrunk, ended, with a stack.
fn history(store: u32) -> Vec<Entry> {
    let gpu = PartId::parse("GPU-1").unwrap();
    let (whole, shared) =
        (Resource::parse("nvidia.com/gpu").unwrap(), Resource::parse("nvidia.com/gpu.shared").unwrap());
    let slice = Consumes::Slice { memory_mib: 100, compute_percent: 5 };
    let device = |standing| Device {
        consumes: slice,
        state: standing,
        holders: Vec::new(),
        last_allocate_mono_ms: None,
    };
    let offer = |count: u32, retiring: u32| Change::Offered {
        part: gpu.clone(),
        by: Some("timeslice@0".into()),
        lines: vec![OfferLine { resource: shared.clone(), count, consumes: slice }],
        ranges: vec![ShareRange { resource: shared.clone(), first: 0, len: count + retiring }],
        devices: (0..count + retiring)
            .map(|n| {
                let retired = DeviceState::Retiring { since_mono_ms: 5 };
                let standing = if n < count { DeviceState::Offered } else { retired };
                ((shared.clone(), Some(n)), device(standing))
            })
            .collect(),
    };
    let grant = |number, shares: &[u32]| {
        let devices = shares.iter().map(|n| DeviceId::share(&gpu, *n)).collect();
        Change::Granted(granted(store, number, &shared, devices, "fits"))
    };
    let id = |number| AllocationId { store, number };
    let learned = Holder { namespace: Some("ml".into()), pod: Some("train".into()), ..Holder::default() };
    let mark = Mark::cordon("admin", "fan", 9);
    let steps = vec![
        vec![Change::PartFound(part(0, gpu.clone())), offer(4, 0)],
        vec![grant(0, &[0, 1])],
        vec![grant(1, &[2])],
        vec![Change::HolderLearned { id: id(0), holder: learned }, Change::KubeletSeen(123)],
        vec![Change::MarksChanged { gpu: GpuId::of_whole(&gpu), marks: mark.into() }],
        // The same devices again: the older one becomes overlapped.
        vec![grant(2, &[0, 1])],
        vec![Change::Ended { id: id(1), reason: EndReason::Released }],
        vec![Change::PolicyAdded(policy()), Change::StackActivated(stack(1, 3))],
        vec![Change::StackActivated(stack(2, 1))],
        vec![grant(3, &[3])],
        vec![Change::Ended { id: id(3), reason: EndReason::NeverStarted }, Change::Pruned(id(1))],
        vec![Change::MarksChanged { gpu: GpuId::of_whole(&gpu), marks: Marks::default() }],
        vec![Change::PartFound(Part { model: whole.to_string(), ..part(0, gpu.clone()) })],
    ];
    let at = Now { wall_ms: 50, mono_ms: 5 };
    steps.into_iter().map(|changes| Entry { at, changes }).collect()
}

fn digest() -> Digest {
    Digest::parse(&"ab".repeat(32)).unwrap()
}

fn policy() -> PolicyVersion {
    PolicyVersion {
        name: "timeslice".into(),
        version: "1.0.0".into(),
        summary: "Cuts.".into(),
        hooks: vec![Hook::Offer],
        parameters_schema: "{}".into(),
        digest: digest(),
        artifact: digest(),
        bytes: 3,
        shipped: true,
        since_wall_ms: 4,
        origin: berth_kernel::policy::version::Origin::default(),
    }
}

fn stack(revision: u64, entries: usize) -> Stack {
    let entry = |i: usize| StackEntry {
        name: format!("timeslice-{i}"),
        digest: digest(),
        parameters: "{}".into(),
        permissions: Permissions::default(),
        on_fault: OnFault::Skip,
    };
    Stack {
        revision,
        origin: berth_kernel::policy::stack::StackOrigin::Api,
        failed: None,
        by: "admin".into(),
        why: "a try".into(),
        since_wall_ms: 8,
        entries: (0..entries).map(entry).collect(),
    }
}

#[test]
fn the_store_in_memory_keeps_the_contract() {
    contract(&|| Box::new(MemoryDisk::new(7)));
    an_append_that_failed_is_settled_by_load(&MemoryDisk::new(7));
}

/// The failed append is in `store_sled`, in a process of its own.
#[test]
fn the_store_on_disk_keeps_the_contract() {
    let temporary = tempfile::tempdir().unwrap();
    let fresh = || Folder(tempfile::tempdir_in(temporary.path()).unwrap().keep().join("store"));
    contract(&|| Box::new(fresh()));
}

#[test]
fn a_failed_write_in_memory_may_be_there_after_all() {
    let disk = MemoryDisk::new(7);
    let mut store = disk.open().unwrap();
    disk.set_fault(Some(MemoryFault::AfterWrite));
    let write = [Write::Put(allocation(1, "x"))];
    assert!(matches!(store.append(&write), Err(StoreError::Io { .. })));
    disk.set_fault(Some(MemoryFault::Gone));
    assert!(store.append(&write).is_err() && store.load().is_err());
    disk.set_fault(None);
    assert_eq!(store.load().unwrap(), [meta(7, 0), allocation(1, "x")]);
    store.append(&[Write::Delete(RecordKey::Meta)]).unwrap();
}
