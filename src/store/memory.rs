//! A store in memory, for simulations and tests, with the same encoded records as the one on disk and
//! with simulated faults.

use super::codec;
use super::errors::ErrorFactory;
use berth_kernel::node::ports::{Store, StoreError};
use berth_kernel::node::record::{Meta, Record, Write};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// Stands for the folder in errors.
const PATH: &str = "memory";

/// A simulated fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemoryFault {
    /// Appends fail and nothing is written.
    BeforeWrite,
    /// Appends fail after their writes are stored.
    AfterWrite,
    /// Appends take this long.
    Slow(Duration),
    /// Appends and reads fail.
    Gone,
}

/// The stored records, which survive a restart. Clones share them.
#[derive(Clone, Debug)]
pub struct MemoryDisk {
    shared: Arc<Mutex<Shared>>,
}

#[derive(Debug, Default)]
struct Shared {
    records: BTreeMap<Vec<u8>, Vec<u8>>,
    fault: Option<MemoryFault>,
    in_use: bool,
    appends: u64,
}

impl MemoryDisk {
    /// A disk with a new store of this id ([`Meta::store`]).
    ///
    /// # Panics
    /// Never: the record of counters is shorter than the limit.
    #[must_use]
    pub fn new(store: u32) -> Self {
        let meta = Record::Meta(Meta { store, ..Meta::default() });
        let value = codec::encode(&meta).expect("three numbers are within the limit");
        let records = BTreeMap::from([(codec::key_bytes(&meta.key()), value)]);
        Self { shared: Arc::new(Mutex::new(Shared { records, ..Shared::default() })) }
    }

    /// Opens its store.
    ///
    /// # Errors
    /// [`StoreError::Locked`] while another one is open.
    pub fn open(&self) -> Result<MemoryStore, StoreError> {
        let errors = ErrorFactory::new(Path::new(PATH));
        let mut shared = self.shared.lock();
        if shared.in_use {
            return Err(errors.locked());
        }
        shared.in_use = true;
        drop(shared);
        Ok(MemoryStore { disk: self.clone(), errors, failed: false })
    }

    /// Simulates this fault from now on; `None` ends it.
    pub fn set_fault(&self, fault: Option<MemoryFault>) {
        self.shared.lock().fault = fault;
    }

    /// The number of stored appends.
    #[must_use]
    pub fn appends(&self) -> u64 {
        self.shared.lock().appends
    }
}

/// An open store on a [`MemoryDisk`]. A test drops it and opens another to simulate a restart.
#[derive(Debug)]
pub struct MemoryStore {
    disk: MemoryDisk,
    errors: ErrorFactory,
    failed: bool,
}

impl Store for MemoryStore {
    fn load(&mut self) -> Result<Vec<Record>, StoreError> {
        let shared = self.disk.shared.lock();
        if shared.fault == Some(MemoryFault::Gone) {
            return Err(self.errors.failed("simulated fault"));
        }
        let records = shared.records.iter().map(|(key, value)| codec::decode(key, value));
        let records = records.collect::<Result<_, _>>().map_err(|e| self.errors.decode_error(e))?;
        self.failed = false;
        Ok(records)
    }

    fn append(&mut self, writes: &[Write]) -> Result<(), StoreError> {
        let changes = codec::changes(writes)?;
        if changes.is_empty() {
            return Ok(());
        }
        if self.failed {
            return Err(self.errors.not_reloaded());
        }
        let fault = self.disk.shared.lock().fault;
        if let Some(MemoryFault::Slow(wait)) = fault {
            // Without the lock, since tests read the disk meanwhile.
            std::thread::sleep(wait);
        }
        self.failed = fault.is_some_and(|f| !matches!(f, MemoryFault::Slow(_)));
        if !self.failed || fault == Some(MemoryFault::AfterWrite) {
            let mut shared = self.disk.shared.lock();
            for (key, value) in changes {
                match value {
                    Some(value) => shared.records.insert(key, value),
                    None => shared.records.remove(&key),
                };
            }
            shared.appends += 1;
        }
        if self.failed {
            return Err(self.errors.failed("simulated fault"));
        }
        Ok(())
    }

    fn path(&self) -> String {
        PATH.into()
    }
}

impl Drop for MemoryStore {
    fn drop(&mut self) {
        self.disk.shared.lock().in_use = false;
    }
}
