use super::inbox::{Ask, run};
use super::*;
use berth_kernel::command::{Attempt, StackAnswer};
use berth_kernel::gpu::{Inventory, Part};
use berth_kernel::names::{DeviceId, PartId, Resource};
use berth_kernel::offer::{Consumes, OfferLine, PartOffer};
use berth_kernel::policy::{AdmitRequest, Terms};
use berth_kernel::record::{Record, RecordKey, Write};
use berth_kernel::time::Now;
use crossbeam_channel::bounded;
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use tracing::Span;

/// A clock that goes on when it is told to.
#[derive(Default)]
struct Hands(AtomicU64);

impl Clock for Hands {
    fn now(&self) -> Now {
        let ms = self.0.load(Ordering::Relaxed);
        Now { wall_ms: ms, mono_ms: ms }
    }
}

/// A disk that does as it is told.
#[derive(Clone, Default)]
struct Disk {
    records: Arc<Mutex<BTreeMap<RecordKey, Record>>>,
    fault: Arc<Mutex<Option<DiskFault>>>,
}

#[derive(Clone, Copy, PartialEq)]
enum DiskFault {
    /// Nothing can be written or read.
    Gone,
    /// Writes fail, and are there all the same.
    AfterWrite,
}

impl Disk {
    fn set_fault(&self, fault: Option<DiskFault>) {
        *self.fault.lock() = fault;
    }
}

impl Store for Disk {
    fn load(&mut self) -> Result<Vec<Record>, StoreError> {
        match *self.fault.lock() {
            Some(DiskFault::Gone) => Err(StoreError::Io { path: "/disk".into(), what: "gone".into() }),
            _ => Ok(self.records.lock().values().cloned().collect()),
        }
    }

    fn append(&mut self, writes: &[Write]) -> Result<(), StoreError> {
        let fault = *self.fault.lock();
        let mut records = self.records.lock();
        for write in writes.iter().filter(|_| fault != Some(DiskFault::Gone)) {
            match write {
                Write::Put(record) => records.insert(record.key(), record.clone()),
                Write::Delete(key) => records.remove(key),
            };
        }
        match fault {
            Some(_) => Err(StoreError::Io { path: "/disk".into(), what: "full".into() }),
            None => Ok(()),
        }
    }
}

fn gpu(i: u32) -> PartId {
    PartId::parse(&format!("GPU-{i}")).unwrap()
}

fn resource() -> Resource {
    Resource::parse("nvidia.com/gpu").unwrap()
}

fn gpus(count: u32) -> Inventory {
    let part = |i| Part {
        id: gpu(i),
        parent: None,
        vendor: "nvidia".into(),
        model: String::new(),
        gpu_index: i,
        minor: None,
        memory_mib: 1,
        pci_bus: String::new(),
        numa_node: None,
        mig_enabled: false,
        mig: None,
        attributes: BTreeMap::new(),
    };
    Inventory { parts: (0..count).map(part).collect(), ..Inventory::default() }
}

/// A keeper with two whole GPUs on offer, its disk, and its clock.
fn keeper() -> (Keeper, Disk, Arc<Hands>) {
    let (disk, clock) = (Disk::default(), Arc::new(Hands::default()));
    let store = Box::new(disk.clone());
    let mut keeper = Keeper::open(store, Rules::default(), clock.clone()).unwrap();
    keeper.turn(&Command::Look(gpus(2))).unwrap();
    let line = OfferLine { resource: resource(), count: 1, consumes: Consumes::Whole };
    let offer = |i| (PartOffer { part: gpu(i), lines: vec![line.clone()] }, "test".into());
    keeper.turn(&Command::Offer((0..2).map(offer).collect())).unwrap();
    (keeper, disk, clock)
}

fn allocate(i: u32) -> Command {
    Command::Allocate {
        request: AdmitRequest { resource: resource(), devices: vec![DeviceId::whole(&gpu(i))] },
        answer: StackAnswer::Allow { by: vec!["test".into()], terms: Terms::default() },
        seen: 0,
        again: true,
        attempt: Attempt::Last,
    }
}

#[test]
fn an_allocate_that_nobody_waits_for_any_more_is_not_granted() {
    let (keeper, _disk, _clock) = keeper();
    let mut snapshots = keeper.publisher.subscribe();
    let (kubelet, asks) = bounded(4);
    let (_other, other_asks) = bounded(4);
    let (nudge, _nudged) = bounded(1);
    let (reply, given_up) = tokio::sync::oneshot::channel();
    kubelet.send(Ask { command: allocate(0), reply, span: Span::none() }).unwrap();
    drop(given_up);
    let (reply, mut answer) = tokio::sync::oneshot::channel();
    kubelet.send(Ask { command: allocate(1), reply, span: Span::none() }).unwrap();
    drop(kubelet);
    run(keeper, &asks, &other_asks, &nudge);
    answer.try_recv().unwrap().unwrap();
    let live: Vec<_> = snapshots.borrow_and_update().live.values().map(|a| a.devices.clone()).collect();
    assert_eq!(live, [[DeviceId::whole(&gpu(1))]]);
}

#[test]
fn a_gpu_that_died_is_shown_although_the_disk_is_gone() {
    let (mut keeper, disk, clock) = keeper();
    disk.set_fault(Some(DiskFault::Gone));
    assert!(matches!(keeper.turn(&allocate(0)), Err(AskError::Store(_))));
    clock.0.fetch_add(10_000, Ordering::Relaxed);
    // One GPU went. To record anything is impossible, to say it is not.
    let _ = keeper.turn(&Command::Look(gpus(1)));
    let snapshot = keeper.snapshot();
    assert!(!snapshot.works(snapshot.part(&gpu(1)).unwrap()));
    assert!(snapshot.works(snapshot.part(&gpu(0)).unwrap()));
    assert!(snapshot.live.is_empty());
    // The disk comes back, and so does granting.
    disk.set_fault(None);
    clock.0.fetch_add(10_000, Ordering::Relaxed);
    keeper.turn(&allocate(0)).unwrap();
    let snapshot = keeper.snapshot();
    assert!(!snapshot.works(snapshot.part(&gpu(1)).unwrap()), "what was seen is not forgotten");
}

#[test]
fn a_write_that_failed_and_is_there_after_all_is_a_grant_that_nobody_heard_of() {
    let (mut keeper, disk, clock) = keeper();
    disk.set_fault(Some(DiskFault::AfterWrite));
    assert!(matches!(keeper.turn(&allocate(0)), Err(AskError::Store(_))));
    disk.set_fault(None);
    clock.0.fetch_add(10_000, Ordering::Relaxed);
    keeper.turn(&Command::Tick).unwrap();
    let snapshot = keeper.snapshot();
    assert_eq!(snapshot.live.len(), 1);
    assert!(snapshot.live.values().all(|a| a.holder.is_unknown()));
}

#[test]
fn how_a_gpu_fares_outlives_a_restart_and_a_failed_write_is_made_good() {
    let (mut keeper, disk, clock) = keeper();
    let troubled = || {
        let trouble = [(gpu(1), "fell off the bus".to_owned())].into();
        Command::Look(Inventory { troubles: trouble, ..gpus(2) })
    };
    let restarted = || {
        let keeper = Keeper::open(Box::new(disk.clone()), Rules::default(), clock.clone()).unwrap();
        let health = &keeper.snapshot().gpus[&gpu(1)].health;
        (health.state.as_str(), health.reason.clone(), health.history.len())
    };
    disk.set_fault(Some(DiskFault::Gone));
    let _ = keeper.turn(&troubled());
    disk.set_fault(None);
    assert_eq!(restarted().0, "healthy", "nothing could be written");
    clock.0.fetch_add(10_000, Ordering::Relaxed);
    keeper.turn(&Command::Tick).unwrap();
    assert_eq!(restarted(), ("unhealthy", "fell off the bus".into(), 1));
    // Lasting trouble is not written again and again, and the recovery is.
    let before = disk.records.lock().clone();
    keeper.turn(&troubled()).unwrap();
    assert_eq!(*disk.records.lock(), before);
    clock.0.fetch_add(400_000, Ordering::Relaxed);
    keeper.turn(&Command::Look(gpus(2))).unwrap();
    assert_eq!(restarted(), ("healthy", String::new(), 2));
}
