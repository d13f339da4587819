use super::*;
use crate::memory::{MemoryDisk, MemoryStore};
use berth_kernel::record::{Meta, RecordKey};
use std::time::Instant;

const SHORT: Duration = Duration::from_millis(30);
const LONG: Duration = Duration::from_secs(30);

/// A memory store whose appends block until the test opens the gate.
struct Gated {
    store: MemoryStore,
    gate: Receiver<()>,
    /// With this, the store has a waker, which opens the gate.
    waker: Option<Sender<()>>,
}

impl Store for Gated {
    fn load(&mut self) -> Result<Vec<Record>, StoreError> {
        self.store.load()
    }

    fn append(&mut self, writes: &[Write]) -> Result<(), StoreError> {
        self.gate.recv().expect("the test opens the gate");
        self.store.append(writes)
    }

    fn waker(&self) -> Option<Waker> {
        let open = self.waker.clone()?;
        Some(Box::new(move || {
            let _ = open.try_send(());
        }))
    }
}

fn gated(disk: &MemoryDisk, append_wait: Duration) -> (Deadline, Sender<()>) {
    let (open, gate) = bounded(8);
    let store = disk.open().unwrap();
    let path = Path::new("/disk");
    let deadline =
        Deadline::open_within(path, append_wait, LONG, move || Ok(Gated { store, gate, waker: None }))
            .unwrap();
    (deadline, open)
}

fn numbered(next_number: u64) -> Record {
    Record::Meta(Meta { store: 1, next_number, kubelet_seen_wall_ms: None })
}

/// Loads with a long deadline, and retries until a late call has ended.
fn load_patiently(store: &mut Deadline) -> Vec<Record> {
    let since = Instant::now();
    store.append_wait = LONG;
    loop {
        match store.load() {
            Ok(records) => return records,
            Err(StoreError::Slow { .. }) if since.elapsed() < LONG => std::thread::yield_now(),
            Err(e) => panic!("{e}"),
        }
    }
}

#[test]
fn calls_within_the_deadline_return_the_stores_results() {
    let disk = MemoryDisk::new(1);
    let (mut store, gate) = gated(&disk, LONG);
    gate.send(()).unwrap();
    store.append(&[Write::Put(numbered(2))]).unwrap();
    assert_eq!(store.load().unwrap(), [numbered(2)]);
}

#[test]
fn after_a_late_append_calls_fail_until_it_has_ended_and_the_store_is_loaded() {
    let disk = MemoryDisk::new(1);
    let (mut store, gate) = gated(&disk, SHORT);
    let error = store.append(&[Write::Put(numbered(2))]).unwrap_err();
    assert!(matches!(error, StoreError::Slow { ms: 30, .. }), "{error}");
    // Stuck: calls fail without waiting and do not reach the disk.
    for _ in 0..100 {
        let again = store.append(&[Write::Put(numbered(3))]).unwrap_err();
        assert!(matches!(again, StoreError::Slow { .. }), "{again}");
        assert!(matches!(store.load(), Err(StoreError::Slow { .. })));
    }
    gate.send(()).unwrap();
    // The late write is stored.
    assert_eq!(load_patiently(&mut store), [numbered(2)]);
    assert_eq!(disk.appends(), 1);
    gate.send(()).unwrap();
    store.append(&[Write::Put(numbered(4))]).unwrap();
    assert_eq!(store.load().unwrap(), [numbered(4)]);
}

#[test]
fn after_a_late_append_no_append_succeeds_before_a_load() {
    let disk = MemoryDisk::new(1);
    let (mut store, gate) = gated(&disk, SHORT);
    store.append(&[Write::Delete(RecordKey::Stack)]).unwrap_err();
    gate.send(()).unwrap();
    let since = Instant::now();
    while disk.appends() == 0 {
        assert!(since.elapsed() < LONG);
        std::thread::yield_now();
    }
    // The response arrives shortly after the write.
    let error = loop {
        match store.append(&[Write::Put(numbered(2))]).unwrap_err() {
            StoreError::Slow { .. } if since.elapsed() < LONG => std::thread::yield_now(),
            other => break other,
        }
    };
    assert!(error.to_string().contains("read back"), "{error}");
    load_patiently(&mut store);
    gate.send(()).unwrap();
    store.append(&[Write::Put(numbered(2))]).unwrap();
}

#[test]
fn dropping_a_stuck_store_does_not_block_and_dropping_an_idle_one_closes_it() {
    let disk = MemoryDisk::new(1);
    let (mut store, gate) = gated(&disk, SHORT);
    store.append(&[Write::Put(numbered(2))]).unwrap_err();
    drop(store);
    assert!(matches!(disk.open(), Err(StoreError::Locked { .. })));
    gate.send(()).unwrap();
    let since = Instant::now();
    while disk.open().is_err() {
        assert!(since.elapsed() < LONG);
        std::thread::yield_now();
    }
    drop(gated(&disk, LONG));
    assert!(disk.open().is_ok());
}

#[test]
fn errors_of_opening_are_returned_and_a_late_opening_is_slow() {
    let disk = MemoryDisk::new(1);
    let open = disk.open().unwrap();
    let second = disk.clone();
    let refused = Deadline::open(Path::new("/disk"), move || second.open());
    assert!(matches!(refused, Err(StoreError::Locked { .. })));
    drop(open);
    let (release, held) = bounded::<()>(1);
    let late = Deadline::open_within(Path::new("/disk"), SHORT, SHORT, move || {
        held.recv().expect("the test opens the gate");
        disk.open()
    });
    assert!(matches!(late, Err(StoreError::Slow { ms: 30, .. })));
    release.send(()).unwrap();
}

#[test]
fn a_store_that_panics_is_an_error() {
    struct Panics;
    impl Store for Panics {
        fn load(&mut self) -> Result<Vec<Record>, StoreError> {
            panic!("in load");
        }
        fn append(&mut self, _: &[Write]) -> Result<(), StoreError> {
            panic!("in append");
        }
    }
    let mut store = Deadline::open(Path::new("/disk"), || Ok(Panics)).unwrap();
    for _ in 0..2 {
        assert!(matches!(store.load(), Err(StoreError::Io { .. })));
        assert!(matches!(store.append(&[]), Err(StoreError::Io { .. })));
    }
}

#[test]
fn the_result_of_a_late_load_is_used_by_the_next_load() {
    /// Loads block until the test opens the gate.
    struct Slow(Receiver<()>, u64);
    impl Store for Slow {
        fn load(&mut self) -> Result<Vec<Record>, StoreError> {
            self.0.recv().expect("the test opens the gate");
            self.1 += 1;
            Ok(vec![numbered(self.1)])
        }
        fn append(&mut self, _: &[Write]) -> Result<(), StoreError> {
            Ok(())
        }
    }
    let (open, gate) = bounded(8);
    let path = Path::new("/disk");
    let mut store = Deadline::open_within(path, SHORT, LONG, move || Ok(Slow(gate, 0))).unwrap();
    open.send(()).unwrap();
    assert_eq!(store.load().unwrap(), [numbered(1)]);
    // Only the first load has the long deadline.
    assert!(matches!(store.load(), Err(StoreError::Slow { ms: 30, .. })));
    assert!(matches!(store.append(&[]), Err(StoreError::Slow { .. })));
    open.send(()).unwrap();
    assert_eq!(load_patiently(&mut store), [numbered(2)], "no third load");
    store.append(&[]).unwrap();
}

#[test]
fn a_late_append_is_woken_by_the_waker() {
    let disk = MemoryDisk::new(1);
    let (open, gate) = bounded(8);
    let store = disk.open().unwrap();
    let waker = Some(open);
    let gated = move || Ok(Gated { store, gate, waker });
    let mut store = Deadline::open_within(Path::new("/disk"), SHORT, LONG, gated).unwrap();
    let error = store.append(&[Write::Put(numbered(2))]).unwrap_err();
    assert!(matches!(error, StoreError::Slow { .. }), "{error}");
    assert_eq!(load_patiently(&mut store), [numbered(2)]);
}
