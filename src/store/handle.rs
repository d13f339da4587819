//! Opens, reads and initializes a sled database.

use super::check::{CHECK_KEY, Check, Contents};
use super::codec;
use super::counter::Counter;
use super::errors::{ErrorFactory, panic_message};
use super::folder::{Folder, SEGMENT_BYTES};
use berth_kernel::node::ports::StoreError;
use berth_kernel::node::record::{Meta, Record, Write};
use std::fs::File;
use std::io::{ErrorKind, Read};
use std::ops::Deref;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

/// Bytes of sled's page cache: the pages that grants and ends touch, including those of the oldest history.
const CACHE_BYTES: u64 = 8 * 1024 * 1024;

/// An open sled database. Dropping it writes and panics on an error; this type catches the panic.
pub(super) struct Handle(Option<::sled::Db>);

impl Handle {
    /// Another handle to the same database, which closes with its last handle.
    pub(super) fn share(&self) -> Self {
        Self(self.0.clone())
    }
}

impl std::fmt::Debug for Handle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // `Debug` of sled prints all records.
        f.write_str("sled::Db")
    }
}

impl Deref for Handle {
    type Target = ::sled::Db;

    fn deref(&self) -> &Self::Target {
        // Only `drop` takes it.
        self.0.as_ref().expect("open until dropped")
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        let db = self.0.take();
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| drop(db))) {
            tracing::warn!(what = panic_message(&*panic), "sled panicked while the store was closed");
        }
    }
}

pub(super) fn open_sled(data: &Path, errors: &ErrorFactory) -> Result<Handle, StoreError> {
    if SystemTime::now() < UNIX_EPOCH {
        // sled derives the name of a temporary folder from the clock and panics.
        return Err(errors.failed("the system's clock shows a time before 1970: set it"));
    }
    let config = ::sled::Config::new()
        .path(data)
        .segment_size(SEGMENT_BYTES)
        .cache_capacity(CACHE_BYTES)
        // Every append flushes, so sled's flush thread would only wake the CPU.
        .flush_every_ms(None);
    errors.reading(|| config.open()).map(|db| Handle(Some(db)))
}

/// Reads and verifies all records.
pub(super) fn read_contents(
    db: &Handle,
    errors: &ErrorFactory,
) -> Result<(Contents, Vec<Record>), StoreError> {
    let contents = errors.reading(|| {
        let mut failed = None;
        let pairs = db.iter().map_while(|pair| pair.map_err(|e| failed = Some(e)).ok());
        let contents = Contents::read(pairs);
        failed.map_or(Ok(contents), Err)
    })?;
    contents.map_err(|e| errors.decode_error(e))
}

/// Reads the check record.
pub(super) fn read_check(db: &Handle, errors: &ErrorFactory) -> Result<Check, StoreError> {
    let value = errors.reading(|| db.get(CHECK_KEY))?;
    Check::read(&value.unwrap_or_default()).map_err(|e| errors.decode_error(e))
}

/// Reads and verifies all records, and that no acknowledged append is missing.
pub(super) fn read_complete(
    db: &Handle,
    count: u64,
    errors: &ErrorFactory,
) -> Result<(Contents, Vec<Record>), StoreError> {
    let (contents, records) = read_contents(db, errors)?;
    let writes = contents.check().writes;
    if writes < count {
        return Err(
            errors.damaged(format!("its log ends after write {writes}, and {count} were acknowledged"))
        );
    }
    Ok((contents, records))
}

/// Opens the counter and reads it.
pub(super) fn open_counter(folder: &Folder) -> Result<(Counter, u64), StoreError> {
    let errors = &folder.errors;
    Counter::open(&folder.counter()).map_err(|e| match e.kind() {
        ErrorKind::NotFound => errors.damaged("its file data/counter is missing"),
        ErrorKind::InvalidData => errors.damaged("its file data/counter is malformed"),
        _ => errors.io("opening its file data/counter", &e),
    })
}

/// Creates a new store in an empty folder.
pub(super) fn initialize(data: &Path, errors: &ErrorFactory) -> Result<(), StoreError> {
    let io = |e: &std::io::Error| errors.io("creating it", e);
    let meta = Record::Meta(Meta { store: random_id().map_err(|e| io(&e))?, ..Meta::default() });
    let changes = codec::changes(&[Write::Put(meta)])?;
    let mut contents = Contents::default();
    contents.commit(contents.prepare(&changes));
    let db = open_sled(data, errors)?;
    errors.writing(|| {
        for (key, value) in &changes {
            db.insert(key.as_slice(), value.as_deref().unwrap_or_default())?;
        }
        db.insert(CHECK_KEY, contents.check().value())?;
        db.flush()
    })?;
    Counter::create(&data.join("counter"), contents.check().writes).map_err(|e| io(&e))
}

fn random_id() -> std::io::Result<u32> {
    let mut bytes = [0; 4];
    File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(u32::from_ne_bytes(bytes))
}
