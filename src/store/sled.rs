//! [`Store`] on sled 0.34, which only this file and [`super::handle`] use.
//!
//! What sled does not guarantee, and the measure against it:
//! - `flush()` is `sync_file_range`: after it, neither the drive's cache nor the length of a grown file
//!   is durable. So each append ends with `fdatasync` on the log, through a separate descriptor.
//! - Opening repairs a store, which may truncate it. So a copy is opened first and read completely ([`Folder::copy`],
//!   [`Contents`]). If both have the same check record, they have the same contents. The store itself is then opened
//!   but not read: sled keeps in memory what it has read, and exceeds its cache limit (it evicts by 256 shards and on
//!   every 64th access). If the files are unchanged since a clean stop, no acknowledged append can be missing, and the
//!   store itself is read, if its log has one segment in use; if it is damaged, its files are put back as they were
//!   ([`Folder::or_restore`]).
//! - While sled opens its log, it overwrites segments without pages with zeros, and may then be unable to read the log
//!   without a snapshot. So the snapshot of the copy is made durable before the store itself is opened
//!   ([`Folder::keep_snapshot`]).
//! - Opening fills the newest segment with zeros after the data that was read, and writes a snapshot. The log has room
//!   for the zeros ([`Folder::ensure_room`]), and that snapshot is in memory ([`Folder::links`]). sled may shorten its
//!   log while it opens it and then needs room again: if there is none, the daemon starts with the records of the copy.
//! - After an I/O error sled fails every call until it is opened again, and it may panic. So an append to a full disk
//!   is refused before sled writes; any error of sled closes it, under `catch_unwind`, and [`Store::load`] opens it
//!   again.
//! - If a write fails in one of sled's threads, `flush()` may block forever: `exit_reservation` records
//!   the error but does not wake the waiters. Another `flush()` finds the error and wakes them, so
//!   [`Store::waker`] calls it.
//! - sled writes a page of more than a quarter segment to a file that it never syncs. So segments are
//!   larger than sled's default ([`super::handle`]).
//!
//! Undetected: a whole folder, including the counter, that is restored to an older state; and see
//! [`super::counter`].

use super::check::{CHECK_KEY, Contents};
use super::codec::{self, Changes};
use super::counter::Counter;
use super::errors::ErrorFactory;
use super::folder::{Folder, is_in_place};
use super::handle::{Handle, initialize, open_counter, open_sled, read_check, read_complete, read_contents};
use berth_kernel::node::ports::{Store, StoreError, Waker};
use berth_kernel::node::record::{Record, Write};
use berth_kernel::node::steps::{Step, pass};
use crossbeam_channel::RecvTimeoutError;
use parking_lot::Mutex;
use std::fs::File;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// Interval at which an upgrade's append is woken: sled may wait for a write that failed, see [`ActiveAppend::wake`].
const UPGRADE_WAKE_INTERVAL: Duration = Duration::from_secs(5);
/// Largest size of the records of a store that is opened only once after a clean stop. sled keeps in memory what it has
/// read, so that a larger store is opened again without a read. About twice the size of the default history.
const OPENED_ONCE_BYTES_MAX: usize = 1024 * 1024;
/// Records in one append of an upgrade or an import: at 16 KiB each 1 MiB, half a segment of the log.
pub(super) const RECORDS_PER_APPEND: usize = 64;

/// A store in a folder.
#[derive(Debug)]
pub struct SledStore {
    // Dropped before the folder, which holds the lock.
    open: Option<OpenStore>,
    active_append: ActiveAppend,
    /// The records of a store that was read and is not open, since the disk is full or an upgrade failed, until the
    /// first load: the daemon starts with them, and its first append fails, as after any failed append, until a further
    /// load has opened the store.
    not_open: Option<Vec<Record>>,
    /// Why the store could not be opened for lack of room.
    full: Option<String>,
    folder: Folder,
}

/// The database of the append in progress, if there is one.
#[derive(Clone, Debug, Default)]
struct ActiveAppend(Arc<Mutex<Option<Handle>>>);

impl ActiveAppend {
    fn set(&self, db: Option<Handle>) {
        // Dropped outside the lock: the last handle writes.
        let old = std::mem::replace(&mut *self.0.lock(), db);
        drop(old);
    }

    /// Wakes an append that waits for a failed write. Uses a separate thread, since `flush()` blocks if the
    /// write has not failed.
    fn wake(&self) {
        let Some(db) = self.0.lock().as_ref().map(Handle::share) else {
            return;
        };
        let flush = move || drop(catch_unwind(AssertUnwindSafe(|| db.flush())));
        if let Err(error) = std::thread::Builder::new().name("store-waker".into()).spawn(flush) {
            tracing::warn!(%error, "cannot start a thread to wake the store");
        }
    }
}

/// An open and verified database.
#[derive(Debug)]
struct OpenStore {
    db: Handle,
    log: File,
    counter: Counter,
    contents: Contents,
    /// The records as of opening, until the first load or append.
    records: Option<Vec<Record>>,
}

impl SledStore {
    /// Opens the store in this folder, or creates one that only its owner can read if none was ever
    /// created here. A new store gets a random id ([`berth_kernel::node::record::Meta::store`]).
    ///
    /// # Errors
    /// If another process has it open, one was created here and is missing, a later release wrote it, it
    /// is damaged (its files are then unchanged), or an I/O error occurs.
    pub fn open(path: &Path) -> Result<Self, StoreError> {
        let folder = Folder::lock(path)?;
        if folder.has_store()? {
            if let Err(error) = folder.write_marker() {
                // The store opens even on a full disk; the next start tries again.
                tracing::warn!(
                    "{error}; if the store is lost before the next start, that start creates an empty one without an error"
                );
            }
        } else {
            folder.check_never_created()?;
            folder.create(|data| initialize(data, &folder.errors))?;
        }
        if !folder.wait_released()? {
            // Not another berth process: that one would hold `lock`.
            return Err(folder.errors.locked());
        }
        let (open, not_open, full) = match OpenStore::open_checked(&folder) {
            Ok(open) => (Some(open), None, None),
            Err(NotOpened { error: StoreError::Full { what, .. }, records: Some(records) }) => {
                tracing::error!(
                    error = what,
                    "the store was read, and nothing can be recorded until the disk has room"
                );
                (None, Some(records), Some(what))
            }
            Err(NotOpened { error, .. }) => return Err(error),
        };
        let mut store = Self { open, active_append: ActiveAppend::default(), not_open, full, folder };
        store.upgrade();
        Ok(store)
    }

    /// Writes a store of an older format in the current one. A store with records of both formats can be read as
    /// well, so that a failure, such as a full disk, only postpones the rest to the next start.
    fn upgrade(&mut self) {
        if !self.open.as_ref().is_some_and(|open| open.contents.is_outdated()) {
            return;
        }
        let Ok(records) = self.load() else { return };
        // Nothing else wakes these appends: the deadlines of the daemon's appends begin once the store is open.
        let (running, ended) = crossbeam_channel::bounded::<()>(0);
        let active_append = self.active_append.clone();
        let wake = move || {
            while ended.recv_timeout(UPGRADE_WAKE_INTERVAL) == Err(RecvTimeoutError::Timeout) {
                active_append.wake();
            }
        };
        if let Err(error) = std::thread::Builder::new().name("store-upgrade".into()).spawn(wake) {
            tracing::warn!(%error, "cannot start a thread that watches over the store's upgrade");
        }
        let mut chunks = records.chunks(RECORDS_PER_APPEND);
        let upgraded = chunks
            .try_for_each(|chunk| self.append(&chunk.iter().cloned().map(Write::Put).collect::<Vec<_>>()));
        drop(running);
        match upgraded {
            Ok(()) => tracing::info!(
                format = codec::FORMAT,
                "the store was upgraded to the format of this release; an earlier release refuses to open it"
            ),
            Err(error) => {
                tracing::warn!(%error, "cannot upgrade the store to the format of this release; the next start tries again");
                self.not_open = Some(records);
            }
        }
    }

    /// Creates an empty store in this folder, even if an earlier one is missing. Returns false and changes
    /// nothing if a store exists.
    ///
    /// # Errors
    /// If another process has locked the folder, or on an I/O error.
    pub fn init(path: &Path) -> Result<bool, StoreError> {
        create_if_missing(path, |folder| folder.create(|data| initialize(data, &folder.errors)))
    }

    /// Moves the closed store of the folder `from`, on the same file system, to this folder. Returns false
    /// and changes nothing if a store exists.
    ///
    /// # Errors
    /// As [`SledStore::init`].
    pub fn install(path: &Path, from: &Path) -> Result<bool, StoreError> {
        let from = Folder::lock(from)?;
        create_if_missing(path, |folder| folder.install(&from.data()))
    }

    /// The number of appends to the store in this folder, and all its records. Reads a copy and does not
    /// change the store.
    ///
    /// # Errors
    /// As [`SledStore::open`].
    pub fn read(path: &Path) -> Result<(u64, Vec<Record>), StoreError> {
        let folder = Folder::lock(path)?;
        folder.check_files()?;
        let (_, count) = open_counter(&folder)?;
        // The log must exist, or sled would create one.
        folder.open_log()?;
        let copy = folder.copy()?;
        let (contents, records) =
            read_complete(&open_sled(copy.path(), &folder.errors)?, count, &folder.errors)?;
        Ok((contents.check().writes, records))
    }

    fn errors(&self) -> &ErrorFactory {
        &self.folder.errors
    }

    fn reopen(&self) -> Result<OpenStore, StoreError> {
        if !self.folder.has_store()? {
            // Not replaced by a new store: the ledger would lose the pods' allocations.
            return Err(self.errors().failed(
                "its files were removed while the daemon was using them: put them back, or stop berth and restore an \
                 export (`berth state import FILE`)",
            ));
        }
        if !self.folder.wait_released()? {
            return Err(self.errors().failed("an earlier write is still in progress"));
        }
        // Without room the next append would fail as well.
        self.folder.ensure_room(&self.folder.open_log()?)?;
        self.folder.drop_cached_log()?;
        OpenStore::open_checked(&self.folder).map_err(|not_opened| not_opened.error)
    }
}

fn create_if_missing(
    path: &Path,
    create: impl FnOnce(&Folder) -> Result<(), StoreError>,
) -> Result<bool, StoreError> {
    let folder = Folder::lock(path)?;
    let is_missing = !folder.has_store()?;
    if is_missing {
        create(&folder)?;
    }
    Ok(is_missing)
}

impl Store for SledStore {
    fn load(&mut self) -> Result<Vec<Record>, StoreError> {
        if let Some(records) = self.not_open.take() {
            return Ok(records);
        }
        let mut open = match self.open.take() {
            Some(open) => open,
            None => self.reopen()?,
        };
        self.full = None;
        // An append that was refused for lack of room is not accepted before there is some.
        if let Err(error) = self.folder.ensure_room(&open.log)
            && open.records.is_none()
        {
            self.open = Some(open);
            return Err(error);
        }
        // An error drops `open`, which closes the store.
        if let Some(records) = open.records.take() {
            self.open = Some(open);
            return Ok(records);
        }
        let (contents, records) = read_contents(&open.db, self.errors())?;
        if contents.check() != open.contents.check() {
            return Err(self.errors().damaged("it does not hold what was last written"));
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
            let not_opened = self.full.clone().map(|what| StoreError::Full { path: self.path(), what });
            return Err(not_opened.unwrap_or_else(|| self.errors().not_reloaded()));
        };
        if let Err(full) = self.folder.ensure_room(&open.log) {
            // Nothing was written, and sled can go on.
            open.records = None;
            self.open = Some(open);
            return Err(full);
        }
        self.active_append.set(Some(open.db.share()));
        let appended = open.append(&changes, &self.folder);
        self.active_append.set(None);
        // An error drops `open`, which closes the store.
        appended?;
        self.open = Some(open);
        Ok(())
    }

    fn waker(&self) -> Option<Waker> {
        let active_append = self.active_append.clone();
        Some(Box::new(move || active_append.wake()))
    }

    fn path(&self) -> String {
        self.folder.path.display().to_string()
    }

    fn bytes(&self) -> Option<u64> {
        self.folder.bytes().ok()
    }
}

/// Why a store is not open, and what was read of it.
struct NotOpened {
    error: StoreError,
    records: Option<Vec<Record>>,
}

impl From<StoreError> for NotOpened {
    fn from(error: StoreError) -> Self {
        Self { error, records: None }
    }
}

impl OpenStore {
    /// Opens the store after a complete read of its copy, or of the store itself after a clean stop.
    fn open_checked(folder: &Folder) -> Result<Self, NotOpened> {
        let errors = &folder.errors;
        folder.check_files()?;
        let log = folder.open_log()?;
        let (counter, count) = open_counter(folder)?;
        // What was reserved in the log before suffices to open it, even if there is no further room now.
        let _ = folder.ensure_room(&log);
        let read = |data: &Path| {
            let db = open_sled(data, errors)?;
            read_complete(&db, count, errors).map(|(contents, records)| (db, contents, records))
        };
        let needs_snapshot = folder.segments_in_use(&log)? > 1;
        let original = if needs_snapshot { None } else { folder.files_of_clean_stop(&counter, count) };
        let opened_once = match &original {
            Some(files) => match folder.or_restore(files, || read(folder.links()?.path())) {
                Ok(opened) => Some(opened),
                // A full disk does not prevent the read of a copy.
                Err(StoreError::Full { .. }) => None,
                Err(error) => return Err(error.into()),
            },
            None => None,
        };
        let original = original.filter(|_| opened_once.is_some());
        let (db, contents, records) = match opened_once {
            // sled keeps in memory what it has read.
            Some((db, contents, records)) => {
                let is_small = contents.bytes_read() <= OPENED_ONCE_BYTES_MAX;
                (is_small.then_some(db), contents, records)
            }
            None => {
                let copy = folder.copy()?;
                let (_, contents, records) = read(copy.path())?;
                if needs_snapshot && let Err(error) = folder.keep_snapshot(copy.path(), &log) {
                    return Err(NotOpened { error, records: Some(records) });
                }
                (None, contents, records)
            }
        };
        pass(Step::StoreChecked);
        let open_again = || {
            if original.is_some() && !folder.wait_released()? {
                return Err(errors.locked());
            }
            let db = open_sled(folder.links()?.path(), errors)?;
            // Equal bytes give equal contents, unless the disk returns other bytes on the second read.
            if read_check(&db, errors)? != contents.check() {
                return Err(errors.damaged("its contents differ from those that were checked"));
            }
            Ok(db)
        };
        let opened = match (db, &original) {
            (Some(db), _) => Ok(db),
            (None, Some(original)) => folder.or_restore(original, open_again),
            (None, None) => open_again(),
        };
        let mut open = match opened {
            Ok(db) => Self { db, log, counter, contents, records: None },
            Err(error) => return Err(NotOpened { error, records: Some(records) }),
        };
        pass(Step::StoreOpened);
        if original.is_none()
            && let Err(error) = open.sync_opened()
        {
            return Err(NotOpened { error: errors.io("opening it", &error), records: Some(records) });
        }
        // sled may have shortened its log. Without room the first append fails, with the cause.
        let _ = folder.ensure_room(&open.log);
        open.records = Some(records);
        Ok(open)
    }

    /// Makes durable what may not be, unless the files are those of a clean stop, which synced them; sled itself syncs
    /// what it writes to its log when it opens it.
    fn sync_opened(&self) -> std::io::Result<()> {
        self.log.sync_data()?;
        self.counter.set(self.contents.check().writes)?;
        self.counter.sync()
    }

    /// Whether the paths still name the open files.
    fn is_in_place(&self, folder: &Folder) -> std::io::Result<bool> {
        Ok(is_in_place(&self.log, &folder.log())? && self.counter.is_in_place(&folder.counter())?)
    }

    fn append(&mut self, changes: &Changes, folder: &Folder) -> Result<(), StoreError> {
        let errors = &folder.errors;
        self.records = None;
        let pending = self.contents.prepare(changes);
        let mut batch = ::sled::Batch::default();
        for (key, value) in changes {
            match value {
                Some(value) => batch.insert(key.as_slice(), value.as_slice()),
                None => batch.remove(key.as_slice()),
            }
        }
        batch.insert(CHECK_KEY, pending.check.value());
        let db = &self.db;
        errors.writing(|| {
            db.apply_batch(batch)?;
            pass(Step::StoreTaken);
            db.flush()
        })?;
        pass(Step::StoreFlushed);
        // The counter is last: it must never be ahead of what is durable.
        let synced = self
            .log
            .sync_data()
            .inspect(|()| pass(Step::StoreSynced))
            .and_then(|()| self.counter.set(pending.check.writes))
            .inspect(|()| pass(Step::StoreCounted))
            .and_then(|()| self.is_in_place(folder));
        match synced {
            Ok(true) => {
                self.contents.commit(pending);
                Ok(())
            }
            Ok(false) => Err(errors.failed("its files were moved away while it was in use")),
            Err(e) => Err(errors.io("appending", &e)),
        }
    }
}

impl SledStore {
    /// Closes the store and records the digest of its files, so that the next start can skip the check of a copy. Best
    /// effort. The files may be damaged, and are not read here: the next start does that, and puts them back if sled
    /// repairs them ([`Folder::or_restore`]).
    fn close(&mut self) -> Result<(), Box<dyn std::error::Error>> {
        // A store that failed may be incomplete.
        let Some(open) = self.open.take() else { return Ok(()) };
        let count = open.contents.check().writes;
        if !open.is_in_place(&self.folder)? || self.folder.segments_in_use(&open.log)? > 1 {
            return Ok(());
        }
        drop(open);
        if !self.folder.wait_released()? {
            return Ok(());
        }
        let (counter, stored_count) = Counter::open(&self.folder.counter())?;
        if stored_count == count
            && let Some(digest) = self.folder.digest(count)?
        {
            counter.set_clean_stop_digest(&digest)?;
        }
        Ok(())
    }
}

impl Drop for SledStore {
    fn drop(&mut self) {
        if let Err(error) = self.close() {
            tracing::debug!(%error, "cannot record a clean stop: the next start checks a copy of the store");
        }
    }
}

impl Drop for OpenStore {
    fn drop(&mut self) {
        // Best effort: a counter may be behind.
        let _ = self.counter.sync();
    }
}
