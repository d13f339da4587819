use super::inbox::{Inboxes, Request, run};
use super::*;
use berth_kernel::hardware::gpu::{Inventory, Part};
use berth_kernel::ids::names::{DeviceId, GpuId, Resource};
use berth_kernel::ids::time::Now;
use berth_kernel::node::command::{Attempt, StackAnswer};
use berth_kernel::node::record::{Record, RecordKey, Write};
use berth_kernel::policy::hooks::{AdmitRequest, Terms};
use berth_kernel::sharing::offer::{Consumes, OfferLine, PartOffer};
use crossbeam_channel::{Receiver, Sender, bounded};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tracing::Span;

/// A clock that the test advances.
#[derive(Default)]
struct ManualClock(AtomicU64);

impl Clock for ManualClock {
    fn now(&self) -> Now {
        let ms = self.0.load(Ordering::Relaxed);
        Now { wall_ms: ms, mono_ms: ms }
    }
}

/// A store in memory with injected faults.
#[derive(Clone, Default)]
struct TestDisk {
    records: Arc<Mutex<BTreeMap<RecordKey, Record>>>,
    fault: Arc<Mutex<Option<DiskFault>>>,
}

#[derive(Clone, Copy, PartialEq)]
enum DiskFault {
    /// Nothing can be written or read.
    Gone,
    /// Writes return an error after they have taken effect.
    AfterWrite,
}

impl TestDisk {
    fn set_fault(&self, fault: Option<DiskFault>) {
        *self.fault.lock() = fault;
    }
}

impl Store for TestDisk {
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

    fn path(&self) -> String {
        "/disk".into()
    }
}

fn gpu(i: u32) -> GpuId {
    GpuId::parse(&format!("GPU-{i}")).unwrap()
}

fn resource() -> Resource {
    Resource::parse("nvidia.com/gpu").unwrap()
}

fn gpus(count: u32) -> Inventory {
    let part = |i| Part::whole_gpu(gpu(i), i);
    Inventory { parts: (0..count).map(part).collect(), ..Inventory::default() }
}

/// A keeper with two whole GPUs on offer, its store and its clock.
fn keeper() -> (Keeper, TestDisk, Arc<ManualClock>) {
    let (disk, clock) = (TestDisk::default(), Arc::new(ManualClock::default()));
    let store = Box::new(disk.clone());
    let mut keeper = Keeper::open(store, Rules::default(), clock.clone()).unwrap();
    keeper.turn(&Command::RecordScan(gpus(2))).unwrap();
    let line = OfferLine { resource: resource(), count: 1, consumes: Consumes::Whole };
    let offer = |i| (PartOffer { part: gpu(i).as_part().clone(), lines: vec![line.clone()] }, "test".into());
    keeper.turn(&Command::Offer((0..2).map(offer).collect())).unwrap();
    (keeper, disk, clock)
}

fn allocate(i: u32) -> Command {
    Command::Allocate {
        request: AdmitRequest {
            resource: resource(),
            devices: vec![DeviceId::whole(gpu(i).as_part())],
            claim: None,
        },
        answer: StackAnswer::Allow { by: vec!["test".into()], terms: Terms::default() },
        evaluated: None,
        attempt: Attempt::Last { asked_mono_ms: 0 },
    }
}

#[test]
fn an_allocate_whose_caller_stopped_waiting_is_not_granted() {
    let (keeper, _disk, _clock) = keeper();
    let mut snapshots = keeper.publisher.subscribe();
    let (kubelet, requests) = bounded(4);
    let (_other, other_requests) = bounded(4);
    let (nudge, _nudged) = bounded(1);
    let inboxes = Inboxes { kubelet: requests, other: other_requests, nudge };
    let (reply, abandoned) = tokio::sync::oneshot::channel();
    kubelet.send(Request { command: allocate(0), reply, span: Span::none() }).unwrap();
    drop(abandoned);
    let (reply, mut answer) = tokio::sync::oneshot::channel();
    kubelet.send(Request { command: allocate(1), reply, span: Span::none() }).unwrap();
    drop(kubelet);
    run(keeper, &inboxes);
    answer.try_recv().unwrap().unwrap();
    let live: Vec<_> = snapshots.borrow_and_update().live.values().map(|a| a.devices.clone()).collect();
    assert_eq!(live, [[DeviceId::whole(gpu(1).as_part())]]);
}

#[test]
fn a_failed_gpu_is_published_although_the_disk_is_gone() {
    let (mut keeper, disk, clock) = keeper();
    disk.set_fault(Some(DiskFault::Gone));
    assert!(matches!(keeper.turn(&allocate(0)), Err(CommandError::Store(_))));
    clock.0.fetch_add(10_000, Ordering::Relaxed);
    // One GPU vanished. That cannot be recorded, but it is published.
    let _ = keeper.turn(&Command::RecordScan(gpus(1)));
    let snapshot = keeper.snapshot();
    assert!(!snapshot.is_usable(snapshot.part(gpu(1).as_part()).unwrap()));
    assert!(snapshot.is_usable(snapshot.part(gpu(0).as_part()).unwrap()));
    assert!(snapshot.live.is_empty());
    // Granting works again once the disk does.
    disk.set_fault(None);
    clock.0.fetch_add(10_000, Ordering::Relaxed);
    keeper.turn(&allocate(0)).unwrap();
    let snapshot = keeper.snapshot();
    assert!(
        !snapshot.is_usable(snapshot.part(gpu(1).as_part()).unwrap()),
        "the vanished GPU stays withdrawn"
    );
}

#[test]
fn a_grant_whose_append_failed_after_the_write_has_no_holder() {
    let (mut keeper, disk, clock) = keeper();
    disk.set_fault(Some(DiskFault::AfterWrite));
    assert!(matches!(keeper.turn(&allocate(0)), Err(CommandError::Store(_))));
    disk.set_fault(None);
    clock.0.fetch_add(10_000, Ordering::Relaxed);
    keeper.turn(&Command::Tick).unwrap();
    let snapshot = keeper.snapshot();
    assert_eq!(snapshot.live.len(), 1);
    assert!(snapshot.live.values().all(|a| a.holder.is_unknown()));
}

#[test]
fn gpu_health_survives_a_restart_and_a_failed_write_is_repeated() {
    let (mut keeper, disk, clock) = keeper();
    let failing = || {
        let errors = [(gpu(1), "fell off the bus".into())].into();
        Command::RecordScan(Inventory { scan_errors: errors, ..gpus(2) })
    };
    let health_after_restart = || {
        let keeper = Keeper::open(Box::new(disk.clone()), Rules::default(), clock.clone()).unwrap();
        let health = &keeper.snapshot().gpus[&gpu(1)].health;
        (health.state.as_str(), health.reason.clone(), health.history.len())
    };
    disk.set_fault(Some(DiskFault::Gone));
    let _ = keeper.turn(&failing());
    disk.set_fault(None);
    assert_eq!(health_after_restart().0, "healthy", "nothing could be written");
    clock.0.fetch_add(10_000, Ordering::Relaxed);
    keeper.turn(&Command::Tick).unwrap();
    assert_eq!(health_after_restart(), ("unhealthy", "fell off the bus".into(), 1));
    // A lasting failure is written once, and so is the recovery.
    let before = disk.records.lock().clone();
    keeper.turn(&failing()).unwrap();
    assert_eq!(*disk.records.lock(), before);
    clock.0.fetch_add(400_000, Ordering::Relaxed);
    keeper.turn(&Command::RecordScan(gpus(2))).unwrap();
    assert_eq!(health_after_restart(), ("healthy", String::new(), 2));
}

/// A store whose appends wait until the test opens the gate by dropping its other end.
struct Gated {
    disk: TestDisk,
    gate: Receiver<()>,
}

impl Store for Gated {
    fn load(&mut self) -> Result<Vec<Record>, StoreError> {
        self.disk.load()
    }

    fn append(&mut self, writes: &[Write]) -> Result<(), StoreError> {
        let _ = self.gate.recv();
        self.disk.append(writes)
    }

    fn path(&self) -> String {
        self.disk.path()
    }
}

/// A running keeper whose first append hangs until the sender is dropped.
fn hanging_keeper() -> (Running, Arc<ManualClock>, Sender<()>) {
    let (mut keeper, disk, clock) = keeper();
    let (open, gate) = bounded(0);
    let store = Box::new(Gated { disk, gate });
    keeper.disk = Arc::new(Disk::new(store, Duration::from_millis(30)));
    let (nudge, _nudged) = bounded(1);
    (spawn(keeper, nudge).unwrap(), clock, open)
}

fn assert_slow(result: CommandResult) {
    let Err(CommandError::Store(error)) = result else { panic!("{result:?}") };
    assert!(error.contains("did not answer within 30 ms"), "{error}");
}

#[test]
fn another_keeper_takes_over_while_an_append_hangs() {
    let (Running { handle, thread }, clock, open) = hanging_keeper();
    assert_slow(handle.execute(allocate(0)));
    assert!(handle.store_trouble().is_some());
    assert_slow(handle.execute(allocate(0)));
    // One GPU vanished, which is published all the same.
    let _ = handle.execute(Command::RecordScan(gpus(1)));
    let snapshot = handle.snapshot();
    assert!(!snapshot.is_usable(snapshot.part(gpu(1).as_part()).unwrap()));
    assert!(snapshot.live.is_empty());
    drop(open);
    // On a busy machine each further call may be late as well, so commands are repeated.
    let since = Instant::now();
    let await_reopening = || {
        assert!(since.elapsed() < Duration::from_secs(300), "{:?}", handle.store_trouble());
        clock.0.fetch_add(REOPEN_MS, Ordering::Relaxed);
    };
    // The append that was late has taken effect, and no pod uses the allocation.
    while handle.snapshot().live.is_empty() || handle.store_trouble().is_some() {
        await_reopening();
        let _ = handle.execute(Command::Tick);
    }
    assert!(handle.snapshot().live.values().all(|a| a.holder.is_unknown()));
    while let Err(error) = handle.execute(allocate(0)) {
        assert!(matches!(error, CommandError::Store(_)), "{error}");
        await_reopening();
    }
    assert!(handle.snapshot().live.len() >= 2);
    drop(handle);
    thread.join().unwrap();
}

#[test]
fn the_keeper_ends_while_an_append_hangs() {
    let (Running { handle, thread }, _clock, open) = hanging_keeper();
    assert_slow(handle.execute(allocate(0)));
    drop(handle);
    thread.join().unwrap();
    drop(open);
}

#[test]
fn senders_learn_that_the_keeper_has_panicked() {
    struct Panics;
    impl Store for Panics {
        fn load(&mut self) -> Result<Vec<Record>, StoreError> {
            Ok(Vec::new())
        }
        fn append(&mut self, _: &[Write]) -> Result<(), StoreError> {
            panic!("a defect");
        }
        fn path(&self) -> String {
            "/disk".into()
        }
    }
    let (mut keeper, _disk, _clock) = keeper();
    keeper.disk = Arc::new(Disk::new(Box::new(Panics), DISK_WAIT));
    let (nudge, _nudged) = bounded(1);
    let Running { handle, thread } = spawn(keeper, nudge).unwrap();
    let stopping = |result| matches!(result, Err(CommandError::Stopping));
    assert!(stopping(handle.execute(allocate(0))));
    thread.join().unwrap();
    assert!(stopping(handle.execute(allocate(0))));
}
