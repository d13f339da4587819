//! The store's twin in memory, for simulations and tests. It keeps the same bytes as the one on
//! disk, and takes faults on demand.

use super::codec;
use super::trouble::Trouble;
use berth_kernel::ports::{Store, StoreError};
use berth_kernel::record::{Meta, Record, Write};
use parking_lot::{Mutex, MutexGuard};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// What goes wrong next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemoryFault {
    /// Appends fail and nothing is written.
    BeforeWrite,
    /// Appends fail, but what they wrote is there after all.
    AfterWrite,
    /// Appends take so long.
    Slow(Duration),
    /// Appends fail, and so does reading.
    Gone,
}

/// What outlives a restart. Clones are the same disk.
#[derive(Clone, Debug)]
pub struct MemoryDisk {
    shared: Arc<Mutex<Shared>>,
}

#[derive(Debug)]
struct Shared {
    records: BTreeMap<Vec<u8>, Vec<u8>>,
    fault: Option<MemoryFault>,
    in_use: bool,
    appends: u64,
}

impl MemoryDisk {
    /// An empty disk; `store` is the identity that its store will have ([`Meta::store`]).
    ///
    /// # Panics
    /// Never: a record of counters fits.
    #[must_use]
    pub fn new(store: u32) -> Self {
        let meta = Record::Meta(Meta { store, ..Meta::default() });
        let value = codec::encode(&meta).expect("three numbers are short");
        Self {
            shared: Arc::new(Mutex::new(Shared {
                records: BTreeMap::from([(codec::key_bytes(&meta.key()), value)]),
                fault: None,
                in_use: false,
                appends: 0,
            })),
        }
    }

    /// Opens the store on it.
    ///
    /// # Errors
    /// [`StoreError::Locked`] while another one is open.
    pub fn open(&self) -> Result<MemoryStore, StoreError> {
        let trouble = Trouble::new(Path::new("memory"));
        let mut shared = self.shared();
        if shared.in_use {
            return Err(trouble.locked());
        }
        shared.in_use = true;
        drop(shared);
        Ok(MemoryStore { disk: self.clone(), trouble, failed: false })
    }

    /// From now on, until told otherwise.
    pub fn set_fault(&self, fault: Option<MemoryFault>) {
        self.shared().fault = fault;
    }

    /// How many appends it took.
    #[must_use]
    pub fn appends(&self) -> u64 {
        self.shared().appends
    }

    fn shared(&self) -> MutexGuard<'_, Shared> {
        // Nothing in here can panic half-way.
        self.shared.lock()
    }
}

/// An open store on a [`MemoryDisk`]. Dropping it is the restart.
#[derive(Debug)]
pub struct MemoryStore {
    disk: MemoryDisk,
    trouble: Trouble,
    failed: bool,
}

impl Store for MemoryStore {
    fn load(&mut self) -> Result<Vec<Record>, StoreError> {
        let shared = self.disk.shared();
        if shared.fault == Some(MemoryFault::Gone) {
            return Err(self.trouble.failed("the test said so"));
        }
        let records = shared.records.iter();
        let records = records.map(|(key, value)| codec::decode(key, value));
        let records = records.collect::<Result<_, _>>();
        let records = records.map_err(|e| self.trouble.decoding(e))?;
        self.failed = false;
        Ok(records)
    }

    fn append(&mut self, writes: &[Write]) -> Result<(), StoreError> {
        let changes = codec::changes(writes)?;
        if changes.is_empty() {
            return Ok(());
        }
        if self.failed {
            return Err(self.trouble.unread());
        }
        let fault = self.disk.shared().fault;
        if let Some(MemoryFault::Slow(wait)) = fault {
            // Without the lock: tests look at the disk meanwhile.
            std::thread::sleep(wait);
        }
        self.failed = fault.is_some_and(|f| !matches!(f, MemoryFault::Slow(_)));
        if !self.failed || fault == Some(MemoryFault::AfterWrite) {
            let mut shared = self.disk.shared();
            for (key, value) in changes {
                match value {
                    Some(value) => shared.records.insert(key, value),
                    None => shared.records.remove(&key),
                };
            }
            shared.appends += 1;
        }
        if self.failed {
            return Err(self.trouble.failed("the test said so"));
        }
        Ok(())
    }
}

impl Drop for MemoryStore {
    fn drop(&mut self) {
        self.disk.shared().in_use = false;
    }
}
