//! The disk: the store in memory with a point at which the process dies, and next to it what
//! the records on it are.

use super::event::{CrashAt, DiskFault};
use berth_kernel::node::ports::{Store, StoreError};
use berth_kernel::node::record::{Record, RecordKey, Write};
use berth_store::{MemoryDisk, MemoryFault, MemoryStore};
use std::collections::BTreeMap;
use std::panic::resume_unwind;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Thrown through the keeper where the process dies.
pub(crate) struct Died;

/// What outlives the process.
#[derive(Clone)]
pub(crate) struct Disk {
    memory: MemoryDisk,
    shared: Arc<Mutex<Shared>>,
}

#[derive(Default)]
struct Shared {
    /// The records as written: what reading the disk must give.
    records: BTreeMap<RecordKey, Record>,
    fault: Option<DiskFault>,
    crash: Option<CrashAt>,
    wrong: Option<String>,
}

impl Disk {
    pub(crate) fn new() -> Self {
        let memory = MemoryDisk::new(7);
        let records = memory.open().and_then(|mut store| store.load()).unwrap_or_default();
        let records = records.into_iter().map(|r| (r.key(), r)).collect();
        Self { memory, shared: Arc::new(Mutex::new(Shared { records, ..Shared::default() })) }
    }

    /// Opens the store on it.
    pub(crate) fn open(&self) -> Result<Box<dyn Store>, StoreError> {
        Ok(Box::new(Handle { store: self.memory.open()?, disk: self.clone() }))
    }

    pub(crate) fn set_fault(&self, fault: Option<DiskFault>) {
        self.shared().fault = fault;
        self.memory.set_fault(fault.map(|fault| match fault {
            DiskFault::BeforeWrite => MemoryFault::BeforeWrite,
            DiskFault::AfterWrite => MemoryFault::AfterWrite,
            DiskFault::Gone => MemoryFault::Gone,
        }));
    }

    /// The process dies at this moment; `None` forgets it.
    pub(crate) fn set_crash(&self, at: Option<CrashAt>) {
        self.shared().crash = at;
    }

    /// Whether writes go well at present.
    pub(crate) fn is_well(&self) -> bool {
        self.shared().fault.is_none()
    }

    /// Whether these records are on it, no more and no fewer. Answers the first that differs.
    /// `health` is left out where it may be behind.
    pub(crate) fn differs(&self, expected: &[Record], health: bool) -> Option<String> {
        let shared = self.shared();
        if let Some(wrong) = &shared.wrong {
            return Some(wrong.clone());
        }
        let counts = |record: &&Record| health || !matches!(record, Record::Health(_));
        let mut on_disk = shared.records.values().filter(counts);
        for record in expected.iter().filter(counts) {
            match on_disk.next() {
                Some(found) if found == record => {}
                found => return Some(format!("the disk has {found:?} where the ledger has {record:?}")),
            }
        }
        on_disk.next().map(|more| format!("the disk has {more:?} and the ledger nothing"))
    }

    fn shared(&self) -> MutexGuard<'_, Shared> {
        // The process dies while the lock is free.
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn die_at(&self, moment: CrashAt) {
        let mut shared = self.shared();
        if shared.crash == Some(moment) {
            shared.crash = None;
            drop(shared);
            // Not a panic: nothing is wrong, and nothing should be printed.
            resume_unwind(Box::new(Died));
        }
    }
}

struct Handle {
    store: MemoryStore,
    disk: Disk,
}

impl Store for Handle {
    fn load(&mut self) -> Result<Vec<Record>, StoreError> {
        self.disk.die_at(CrashAt::Load);
        let records = self.store.load()?;
        let mut shared = self.disk.shared();
        // Bytes and back: what the codec loses, the ledger would lose at the next start.
        if !records.iter().eq(shared.records.values()) {
            shared.wrong = Some("the codec does not give back what was written".into());
        }
        drop(shared);
        Ok(records)
    }

    fn append(&mut self, writes: &[Write]) -> Result<(), StoreError> {
        self.disk.die_at(CrashAt::BeforeAppend);
        let before = self.disk.memory.appends();
        let appended = self.store.append(writes);
        if self.disk.memory.appends() > before {
            let mut shared = self.disk.shared();
            for write in writes {
                match write {
                    Write::Put(record) => shared.records.insert(record.key(), record.clone()),
                    Write::Delete(key) => shared.records.remove(key),
                };
            }
        }
        self.disk.die_at(CrashAt::AfterAppend);
        appended
    }

    fn path(&self) -> String {
        self.store.path()
    }
}
