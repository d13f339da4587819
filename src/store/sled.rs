//! `Store` over sled 0.34: the only place that names it.
//!
//! What sled leaves open, and what is done about it:
//! - `flush()` is `sync_file_range`: neither the drive's cache nor a grown file's length is safe
//!   after it. So each append ends with `fdatasync` on the log, through a descriptor of our own.
//! - Opening repairs, which may mean cutting off. So a copy is opened first, and read whole
//!   ([`Folder::try_on_copy`], [`Contents`]). What it holds is what the store holds if their check
//!   records are the same; the store itself is read no further, since sled keeps in memory what it
//!   has read, whatever its cache may hold (its bookkeeping is by 256 shards and for every 64th access).
//! - After an I/O error it refuses everything until it is opened anew, and it may panic. So any
//!   error closes it, under `catch_unwind`, and [`Store::load`] opens it again.
//! - A write that fails in one of its own threads may leave `flush()` waiting for ever: there
//!   (`exit_reservation`) the error is noted and nobody is told. Another `flush()` sees the error and
//!   wakes all that wait, so that is what [`Store::waker`] does.
//! - A page of more than a quarter segment becomes a file that is never synced. So segments are
//!   larger than its default ([`SEGMENT_BYTES`]).
//!
//! What stays undetected: a whole folder put back to an older state, the counter with it; and see
//! [`super::counter`].

use super::check::{CHECK_KEY, Changes, Check, Contents};
use super::codec;
use super::counter::Counter;
use super::folder::Folder;
use super::trouble::{Trouble, panicked};
use crate::kernel::record::{Meta, Record, Write};
use crate::kill_points::{Point, pass};
use crate::ports::{Store, StoreError, Waker};
use std::fs::File;
use std::io::{ErrorKind, Read};
use std::ops::Deref;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

/// A log segment, bytes. A page holds up to 17 records before it splits and 3 more where it takes
/// in a neighbour: 20 x (16 KiB + 65 of key and some) = 330 KiB, under a quarter of this.
const SEGMENT_BYTES: usize = 2 * 1024 * 1024;
/// sled's page cache, bytes: the pages that grants and ends touch, those of the oldest history among them.
const CACHE_BYTES: u64 = 8 * 1024 * 1024;

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
        let old = std::mem::replace(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner), db);
        drop(old);
    }

    /// Wakes whoever waits for a write that has failed already, in a thread of its own: if it has not
    /// failed, this waits as well.
    fn wake(&self) {
        let Some(db) = self.0.lock().unwrap_or_else(PoisonError::into_inner).as_ref().map(Handle::another)
        else {
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
    /// Opens the store in this folder, which is made, readable to its owner alone, if it is not
    /// there. A fresh store gets a random identity ([`Meta::store`]).
    ///
    /// # Errors
    /// If another process has it, a later release wrote it, it is damaged in any way (and is then
    /// left byte for byte as it was), or the system does not let us.
    pub fn open(path: &Path) -> Result<Self, StoreError> {
        let folder = Folder::lock(path)?;
        if !folder.is_made()? {
            folder.make(|data| fill(data, &folder.trouble))?;
        }
        if !folder.wait_released()? {
            // Not a daemon of ours: that one would hold `lock`.
            return Err(folder.trouble.locked());
        }
        Ok(Self { open: Some(Open::checked(&folder)?), flushing: Flushing::default(), folder })
    }

    /// How many appends the store in this folder took, and every record in it, read from a copy: the
    /// store stays as it is.
    ///
    /// # Errors
    /// As [`SledStore::open`].
    pub fn read(path: &Path) -> Result<(u64, Vec<Record>), StoreError> {
        let folder = Folder::lock(path)?;
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
                "its files are gone while it was in use: put them back, or restart berth to start anew",
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
        self.flushing.set(Some(open.db.another()));
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
        let log = folder.open_log()?;
        let (counter, count) = open_counter(folder)?;
        let (contents, records) =
            folder.try_on_copy(|copy| whole(&open_sled(copy, trouble)?, count, trouble))?;
        pass(Point::StoreChecked);
        folder.sweep()?;
        let db = open_sled(&folder.data(), trouble)?;
        // The same bytes give the same contents, unless the disk says otherwise the second time.
        if check(&db, trouble)? != contents.check() {
            return Err(trouble.damaged("it reads otherwise than its copy"));
        }
        let open = Self { db, log, counter, contents, records: Some(records) };
        pass(Point::StoreOpened);
        open.counter
            .set(open.contents.check().writes)
            .and_then(|()| open.counter.sync())
            .and_then(|()| open.log.sync_data())
            .map_err(|e| trouble.io("opening it", &e))?;
        folder.sync_names()?;
        Ok(open)
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
            pass(Point::StoreTaken);
            db.flush()
        }));
        match written {
            Ok(Ok(_)) => {}
            Ok(Err(e)) => return Err(trouble.writing(e)),
            Err(panic) => return Err(trouble.failed(panicked(&*panic))),
        }
        pass(Point::StoreFlushed);
        // The counter last: it must never be ahead of what is durable.
        let synced = self
            .log
            .sync_data()
            .inspect(|()| pass(Point::StoreSynced))
            .and_then(|()| self.counter.set(next.check.writes))
            .inspect(|()| pass(Point::StoreCounted))
            .and_then(|()| folder.is_in_place(&self.log));
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

impl Drop for Open {
    fn drop(&mut self) {
        // Best effort: a counter that is behind is still true.
        let _ = self.counter.sync();
    }
}

/// An open sled. Its `Drop` writes, and unwraps what comes of it: the panic ends here.
struct Handle(Option<::sled::Db>);

impl Handle {
    /// The same sled; it closes with the last of its handles.
    fn another(&self) -> Self {
        Self(self.0.clone())
    }
}

impl std::fmt::Debug for Handle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // sled's own shows all that it holds.
        f.write_str("sled::Db")
    }
}

impl Deref for Handle {
    type Target = ::sled::Db;

    fn deref(&self) -> &Self::Target {
        // Taken in `drop` alone, after which nobody can ask.
        self.0.as_ref().expect("open until dropped")
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        let db = self.0.take();
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| drop(db))) {
            tracing::warn!(what = panicked(&*panic), "closing the store");
        }
    }
}

fn open_sled(data: &Path, trouble: &Trouble) -> Result<Handle, StoreError> {
    let config = ::sled::Config::new()
        .path(data)
        .segment_size(SEGMENT_BYTES)
        .cache_capacity(CACHE_BYTES)
        // Every append flushes; a thread that does so in between only wakes the processor.
        .flush_every_ms(None);
    match catch_unwind(AssertUnwindSafe(|| config.open())) {
        Ok(Ok(db)) => Ok(Handle(Some(db))),
        Ok(Err(e)) => Err(trouble.reading(e)),
        Err(panic) => Err(trouble.damaged(panicked(&*panic))),
    }
}

/// Everything in it, found to be what was written.
fn contents(db: &Handle, trouble: &Trouble) -> Result<(Contents, Vec<Record>), StoreError> {
    let read = catch_unwind(AssertUnwindSafe(|| {
        let mut failed = None;
        let pairs = db.iter().map_while(|pair| pair.map_err(|e| failed = Some(e)).ok());
        let contents = Contents::read(pairs);
        failed.map_or(Ok(contents), Err)
    }));
    match read {
        Ok(Ok(contents)) => contents.map_err(|e| trouble.decoding(e)),
        Ok(Err(e)) => Err(trouble.reading(e)),
        Err(panic) => Err(trouble.damaged(panicked(&*panic))),
    }
}

/// What its check record says.
fn check(db: &Handle, trouble: &Trouble) -> Result<Check, StoreError> {
    match catch_unwind(AssertUnwindSafe(|| db.get(CHECK_KEY))) {
        Ok(Ok(value)) => Check::read(&value.unwrap_or_default()).map_err(|e| trouble.decoding(e)),
        Ok(Err(e)) => Err(trouble.reading(e)),
        Err(panic) => Err(trouble.damaged(panicked(&*panic))),
    }
}

/// The contents, found to reach as far as the counter.
fn whole(db: &Handle, count: u64, trouble: &Trouble) -> Result<(Contents, Vec<Record>), StoreError> {
    let (contents, records) = contents(db, trouble)?;
    let writes = contents.check().writes;
    if writes < count {
        return Err(
            trouble.damaged(format!("its log ends after write {writes}, and {count} were acknowledged"))
        );
    }
    Ok((contents, records))
}

/// The counter and what it says.
fn open_counter(folder: &Folder) -> Result<(Counter, u64), StoreError> {
    let trouble = &folder.trouble;
    Counter::open(&folder.counter()).map_err(|e| match e.kind() {
        ErrorKind::NotFound => trouble.damaged("its file data/counter is missing"),
        ErrorKind::InvalidData => trouble.damaged("its file data/counter is no counter"),
        _ => trouble.io("opening its file data/counter", &e),
    })
}

/// A fresh store in an empty folder.
fn fill(data: &Path, trouble: &Trouble) -> Result<(), StoreError> {
    let io = |e: &std::io::Error| trouble.io("making it", e);
    let meta = Record::Meta(Meta { store: random().map_err(|e| io(&e))?, ..Meta::default() });
    let changes = codec::changes(&[Write::Put(meta)])?;
    let mut contents = Contents::default();
    contents.take(contents.next(&changes));
    let db = open_sled(data, trouble)?;
    let written = catch_unwind(AssertUnwindSafe(|| {
        for (key, value) in &changes {
            db.insert(key.as_slice(), value.as_deref().unwrap_or_default())?;
        }
        db.insert(CHECK_KEY, contents.check().value())?;
        db.flush()
    }));
    match written {
        Ok(Ok(_)) => {}
        Ok(Err(e)) => return Err(trouble.writing(e)),
        Err(panic) => return Err(trouble.failed(panicked(&*panic))),
    }
    Counter::create(&data.join("counter"), contents.check().writes).map_err(|e| io(&e))
}

fn random() -> std::io::Result<u32> {
    let mut bytes = [0; 4];
    File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(u32::from_ne_bytes(bytes))
}
