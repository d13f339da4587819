//! `Store` over sled 0.34, which only this file and [`super::handle`] name.
//!
//! What sled leaves open, and what is done about it:
//! - `flush()` is `sync_file_range`: neither the drive's cache nor a grown file's length is safe
//!   after it. So each append ends with `fdatasync` on the log, through a descriptor of our own.
//! - Opening repairs, which may mean cutting off. So a copy is opened first, and read whole
//!   ([`Folder::try_on_copy`], [`Contents`]), unless the files are those of a clean stop
//!   ([`Folder::is_as_closed`]). What it holds is what the store holds if their check
//!   records are the same; the store itself is opened once more and read no further, since sled keeps in memory what
//!   it has read, whatever its cache may hold (its bookkeeping is by 256 shards and for every 64th access).
//! - Opening writes, up to a segment of zeros and a snapshot, only behind what was read. Room for it is
//!   held for a full disk ([`Folder::release_reserve_if_full`]).
//! - After an I/O error it refuses everything until it is opened anew, and it may panic. So any
//!   error closes it, under `catch_unwind`, and [`Store::load`] opens it again.
//! - A write that fails in one of its own threads may leave `flush()` waiting for ever: there
//!   (`exit_reservation`) the error is noted and nobody is told. Another `flush()` sees the error and
//!   wakes all that wait, so that is what [`Store::waker`] does.
//! - A page of more than a quarter segment becomes a file that is never synced. So segments are
//!   larger than its default ([`super::handle`]).
//!
//! What stays undetected: a whole folder put back to an older state, the counter with it; and see
//! [`super::counter`].

use super::check::{CHECK_KEY, Changes, Contents};
use super::codec;
use super::counter::Counter;
use super::folder::{Folder, is_in_place};
use super::handle::{Handle, check, contents, fill, open_counter, open_sled, whole};
use super::trouble::{Trouble, panicked};
use berth_kernel::ports::{Store, StoreError, Waker};
use berth_kernel::record::{Record, Write};
use berth_kernel::steps::{Step, pass};
use parking_lot::Mutex;
use std::fs::File;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Arc;

/// A store in a folder.
#[derive(Debug)]
pub struct SledStore {
    // Before the folder, whose lock must go last.
    open: Option<Open>,
    flushing: Flushing,
    folder: Folder,
}

/// The sled of an append that is under way.
#[derive(Clone, Debug, Default)]
struct Flushing(Arc<Mutex<Option<Handle>>>);

impl Flushing {
    fn set(&self, db: Option<Handle>) {
        // Outside the lock: dropping the last handle writes.
        let old = std::mem::replace(&mut *self.0.lock(), db);
        drop(old);
    }

    /// Wakes whoever waits for a write that has failed already, in a thread of its own: if it has not
    /// failed, this waits as well.
    fn wake(&self) {
        let Some(db) = self.0.lock().as_ref().map(Handle::share) else {
            return;
        };
        let flush = move || drop(catch_unwind(AssertUnwindSafe(|| db.flush())));
        if let Err(error) = std::thread::Builder::new().name("store-waker".into()).spawn(flush) {
            tracing::warn!(%error, "no thread to wake the store with");
        }
    }
}

/// sled, opened and read.
#[derive(Debug)]
struct Open {
    db: Handle,
    log: File,
    counter: Counter,
    contents: Contents,
    /// What it held when it was opened, until somebody asks.
    records: Option<Vec<Record>>,
}

impl SledStore {
    /// Opens the store in this folder, which is made, readable to its owner alone, if there never was
    /// one. A fresh store gets a random identity ([`berth_kernel::record::Meta::store`]).
    ///
    /// # Errors
    /// If another process has it, one was made here and is gone, a later release wrote it, it is damaged
    /// in any way (and is then left byte for byte as it was), or the system does not let us.
    pub fn open(path: &Path) -> Result<Self, StoreError> {
        let folder = Folder::lock(path)?;
        if folder.is_made()? {
            if let Err(error) = folder.note_made() {
                // A full disk does not keep the store from being opened; the next start tries again.
                tracing::warn!(
                    "{error}; if the store is lost before the next start, that start creates an empty one without an error"
                );
            }
        } else {
            folder.check_never_made()?;
            folder.make(|data| fill(data, &folder.trouble))?;
        }
        if !folder.wait_released()? {
            // Not a daemon of ours: that one would hold `lock`.
            return Err(folder.trouble.locked());
        }
        Ok(Self { open: Some(Open::checked(&folder)?), flushing: Flushing::default(), folder })
    }

    /// Makes an empty store in this folder, also where one was made before and is gone.
    /// Answers whether it did; one that is there stays as it is.
    ///
    /// # Errors
    /// If another process has the folder, or the system does not let us.
    pub fn init(path: &Path) -> Result<bool, StoreError> {
        let folder = Folder::lock(path)?;
        let is_made = folder.is_made()?;
        if !is_made {
            folder.make(|data| fill(data, &folder.trouble))?;
        }
        Ok(!is_made)
    }

    /// Moves the store of the folder `from`, which nothing has open and is on the same disk, to this
    /// folder. Answers whether it did; one that is there stays as it is.
    ///
    /// # Errors
    /// As [`SledStore::init`].
    pub fn place(path: &Path, from: &Path) -> Result<bool, StoreError> {
        let from = Folder::lock(from)?;
        let folder = Folder::lock(path)?;
        let is_made = folder.is_made()?;
        if !is_made {
            folder.place(&from.data())?;
        }
        Ok(!is_made)
    }

    /// How many appends the store in this folder took, and every record in it, read from a copy: the
    /// store stays as it is.
    ///
    /// # Errors
    /// As [`SledStore::open`].
    pub fn read(path: &Path) -> Result<(u64, Vec<Record>), StoreError> {
        let folder = Folder::lock(path)?;
        folder.check_files()?;
        let (_, count) = open_counter(&folder)?;
        // It must be there, before sled makes one.
        folder.open_log()?;
        folder.try_on_copy(|copy| {
            let (contents, records) = whole(&open_sled(copy, &folder.trouble)?, count, &folder.trouble)?;
            Ok((contents.check().writes, records))
        })
    }

    fn trouble(&self) -> &Trouble {
        &self.folder.trouble
    }

    fn reopen(&self) -> Result<Open, StoreError> {
        if !self.folder.is_made()? {
            // Never a fresh one in its place: the ledger would forget what pods hold.
            return Err(self.trouble().failed(
                "its files were removed while the daemon was using them: put them back, or stop berth and restore an \
                 export (`berth state import FILE`)",
            ));
        }
        if !self.folder.wait_released()? {
            return Err(self.trouble().failed("an earlier write is not over yet"));
        }
        self.folder.forget_log()?;
        Open::checked(&self.folder)
    }
}

impl Store for SledStore {
    fn load(&mut self) -> Result<Vec<Record>, StoreError> {
        let mut open = match self.open.take() {
            Some(open) => open,
            None => self.reopen()?,
        };
        // An error drops `open`, and so closes it.
        if let Some(records) = open.records.take() {
            self.open = Some(open);
            return Ok(records);
        }
        let (contents, records) = contents(&open.db, self.trouble())?;
        if contents.check() != open.contents.check() {
            return Err(self.trouble().damaged("it does not hold what was written last"));
        }
        self.open = Some(open);
        Ok(records)
    }

    fn append(&mut self, writes: &[Write]) -> Result<(), StoreError> {
        let changes = codec::changes(writes)?;
        if changes.is_empty() {
            return Ok(());
        }
        let Some(mut open) = self.open.take() else {
            return Err(self.trouble().unread());
        };
        self.flushing.set(Some(open.db.share()));
        let appended = open.append(&changes, &self.folder);
        self.flushing.set(None);
        // An error drops `open`, and so closes it.
        appended?;
        self.open = Some(open);
        Ok(())
    }

    fn waker(&self) -> Option<Waker> {
        let flushing = self.flushing.clone();
        Some(Box::new(move || flushing.wake()))
    }

    fn bytes(&self) -> Option<u64> {
        self.folder.bytes().ok()
    }
}

impl Open {
    /// Opens the store after its copy was opened and found whole.
    fn checked(folder: &Folder) -> Result<Self, StoreError> {
        let trouble = &folder.trouble;
        folder.check_files()?;
        let log = folder.open_log()?;
        let (counter, count) = open_counter(folder)?;
        let read_whole = |data: &Path| whole(&open_sled(data, trouble)?, count, trouble);
        let (contents, records) = if folder.is_as_closed(&counter, count) {
            folder.sweep()?;
            folder.release_reserve_if_full();
            let read = read_whole(&folder.data())?;
            if !folder.wait_released()? {
                return Err(trouble.locked());
            }
            read
        } else {
            folder.try_on_copy(read_whole)?
        };
        pass(Step::StoreChecked);
        folder.sweep()?;
        folder.release_reserve_if_full();
        let db = open_sled(&folder.data(), trouble)?;
        // The same bytes give the same contents, unless the disk says otherwise the second time.
        if check(&db, trouble)? != contents.check() {
            return Err(trouble.damaged("it reads otherwise than its copy"));
        }
        let open = Self { db, log, counter, contents, records: Some(records) };
        pass(Step::StoreOpened);
        open.counter
            .set(open.contents.check().writes)
            .and_then(|()| open.counter.sync())
            .and_then(|()| open.log.sync_data())
            .map_err(|e| trouble.io("opening it", &e))?;
        folder.sync_names()?;
        folder.reserve();
        Ok(open)
    }

    /// Whether its files still have their names.
    fn is_in_place(&self, folder: &Folder) -> std::io::Result<bool> {
        Ok(is_in_place(&self.log, &folder.log())? && self.counter.is_in_place(&folder.counter())?)
    }

    fn append(&mut self, changes: &Changes, folder: &Folder) -> Result<(), StoreError> {
        let trouble = &folder.trouble;
        self.records = None;
        let next = self.contents.next(changes);
        let mut batch = ::sled::Batch::default();
        for (key, value) in changes {
            match value {
                Some(value) => batch.insert(key.as_slice(), value.as_slice()),
                None => batch.remove(key.as_slice()),
            }
        }
        batch.insert(CHECK_KEY, next.check.value());
        let db = &self.db;
        let written = catch_unwind(AssertUnwindSafe(|| {
            db.apply_batch(batch)?;
            pass(Step::StoreTaken);
            db.flush()
        }));
        match written {
            Ok(Ok(_)) => {}
            Ok(Err(e)) => return Err(trouble.writing(e)),
            Err(panic) => return Err(trouble.failed(panicked(&*panic))),
        }
        pass(Step::StoreFlushed);
        // The counter last: it must never be ahead of what is durable.
        let synced = self
            .log
            .sync_data()
            .inspect(|()| pass(Step::StoreSynced))
            .and_then(|()| self.counter.set(next.check.writes))
            .inspect(|()| pass(Step::StoreCounted))
            .and_then(|()| self.is_in_place(folder));
        match synced {
            Ok(true) => {
                self.contents.take(next);
                Ok(())
            }
            Ok(false) => Err(trouble.failed("its files were moved away while it was in use")),
            Err(e) => Err(trouble.io("appending", &e)),
        }
    }
}

impl SledStore {
    /// Closes it and leaves the digest of its files, by which the next start knows that nothing happened
    /// to them. Best effort: without the digest, the next start checks a copy.
    fn close(&mut self) -> std::io::Result<()> {
        // One that failed is not known to be whole.
        let Some(open) = self.open.take() else { return Ok(()) };
        let check = open.contents.check();
        let count = check.writes;
        if !open.is_in_place(&self.folder)? {
            return Ok(());
        }
        drop(open);
        let other = std::io::Error::other;
        if !self.folder.wait_released().map_err(other)? {
            return Ok(());
        }
        let (counter, noted) = Counter::open(&self.folder.counter())?;
        if noted != count {
            return Ok(());
        }
        // Taken first: what changes while the copy is read makes the next start check again.
        let digest = self.folder.digest(count)?;
        // What was written may have been damaged since, and nothing has read it: the next start would let sled
        // repair it in place, which cuts off what follows the damage.
        let trouble = &self.folder.trouble;
        let read = |data: &Path| whole(&open_sled(data, trouble)?, count, trouble);
        let (contents, _) = self.folder.try_on_copy(read).map_err(other)?;
        if contents.check() == check {
            counter.close(&digest)?;
        }
        Ok(())
    }
}

impl Drop for SledStore {
    fn drop(&mut self) {
        if let Err(error) = self.close() {
            tracing::debug!(%error, "the next start checks a copy of the store");
        }
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        // Best effort: a counter that is behind is still true.
        let _ = self.counter.sync();
    }
}
