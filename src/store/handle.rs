//! An open sled, and what is read from it and first put into it.

use super::check::{CHECK_KEY, Check, Contents};
use super::codec;
use super::counter::Counter;
use super::folder::Folder;
use super::trouble::{Trouble, panicked};
use berth_kernel::ports::StoreError;
use berth_kernel::record::{Meta, Record, Write};
use std::fs::File;
use std::io::{ErrorKind, Read};
use std::ops::Deref;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

/// A log segment, bytes. A page holds up to 17 records before it splits and 3 more where it takes
/// in a neighbour: 20 x (16 KiB + 65 of key and some) = 330 KiB, under a quarter of this.
const SEGMENT_BYTES: usize = 2 * 1024 * 1024;
/// sled's page cache, bytes: the pages that grants and ends touch, those of the oldest history among them.
const CACHE_BYTES: u64 = 8 * 1024 * 1024;

/// An open sled. Its `Drop` writes, and unwraps what comes of it: the panic ends here.
pub(super) struct Handle(Option<::sled::Db>);

impl Handle {
    /// The same sled; it closes with the last of its handles.
    pub(super) fn share(&self) -> Self {
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
        // Taken in `drop` alone, after which no caller is left.
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

pub(super) fn open_sled(data: &Path, trouble: &Trouble) -> Result<Handle, StoreError> {
    if SystemTime::now() < UNIX_EPOCH {
        // sled draws the name of a temporary folder from the clock, and panics.
        return Err(trouble.failed("the system's clock shows a time before 1970: set it"));
    }
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
pub(super) fn contents(db: &Handle, trouble: &Trouble) -> Result<(Contents, Vec<Record>), StoreError> {
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
pub(super) fn check(db: &Handle, trouble: &Trouble) -> Result<Check, StoreError> {
    match catch_unwind(AssertUnwindSafe(|| db.get(CHECK_KEY))) {
        Ok(Ok(value)) => Check::read(&value.unwrap_or_default()).map_err(|e| trouble.decoding(e)),
        Ok(Err(e)) => Err(trouble.reading(e)),
        Err(panic) => Err(trouble.damaged(panicked(&*panic))),
    }
}

/// The contents, found to reach as far as the counter.
pub(super) fn whole(
    db: &Handle,
    count: u64,
    trouble: &Trouble,
) -> Result<(Contents, Vec<Record>), StoreError> {
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
pub(super) fn open_counter(folder: &Folder) -> Result<(Counter, u64), StoreError> {
    let trouble = &folder.trouble;
    Counter::open(&folder.counter()).map_err(|e| match e.kind() {
        ErrorKind::NotFound => trouble.damaged("its file data/counter is missing"),
        ErrorKind::InvalidData => trouble.damaged("its file data/counter is no counter"),
        _ => trouble.io("opening its file data/counter", &e),
    })
}

/// A fresh store in an empty folder.
pub(super) fn fill(data: &Path, trouble: &Trouble) -> Result<(), StoreError> {
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
