//! The disk itself: what one durable append costs without anybody's store.

use anyhow::{Context as _, Result, ensure};
use berth_kernel::node::ports::{Store, StoreError};
use berth_kernel::node::record::{Record, Write};
use berth_store::codec;
use fakes::program;
use std::fs::File;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// `f_type` of a file system in memory (linux/magic.h): there is no disk to measure on it.
const TMPFS_MAGIC: i64 = 0x0102_1994;
/// `f_type` of ramfs.
const RAMFS_MAGIC: i64 = 0x8584_58f6;

/// A new folder in `BERTH_BENCH_DIR`, or beside this program.
pub(crate) fn folder() -> Result<TempDir> {
    let base = std::env::var_os("BERTH_BENCH_DIR")
        .map_or_else(|| program::beside_this("tmp"), |folder| Ok(PathBuf::from(folder)))?;
    std::fs::create_dir_all(&base)?;
    TempDir::new_in(&base).with_context(|| format!("no folder in {}", base.display()))
}

/// Whether a folder lies in memory, where nothing is durable.
pub(crate) fn is_in_memory(folder: &Path) -> Result<bool> {
    let kind = rustix::fs::statfs(folder)?.f_type;
    Ok(kind == TMPFS_MAGIC || kind == RAMFS_MAGIC)
}

/// Says where a folder lies.
///
/// # Errors
/// If it lies in memory.
pub(crate) fn describe(folder: &Path) -> Result<String> {
    ensure!(
        !is_in_memory(folder)?,
        "{} lies in memory, where nothing is durable: set BERTH_BENCH_DIR to a folder on the disk to measure",
        folder.display()
    );
    let mounts = std::fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    let mount = mounts
        .lines()
        .filter_map(|line| {
            let mut words = line.split(' ').skip(1);
            Some((words.next()?, words.next()?))
        })
        .filter(|(at, _)| folder.starts_with(at))
        .max_by_key(|(at, _)| at.len());
    Ok(mount.map_or("unknown file system", |(_, kind)| kind).to_owned())
}

/// A file that grows by the same bytes again and again, each time down to the disk.
pub(crate) struct Bare {
    file: File,
    bytes: Vec<u8>,
}

impl Bare {
    pub(crate) fn new(folder: &Path, bytes: usize) -> Result<Self> {
        let file = File::options().append(true).create_new(true).open(folder.join("bare"))?;
        Ok(Self { file, bytes: vec![0x5a; bytes] })
    }

    /// One append and fdatasync.
    pub(crate) fn append(&mut self) -> Result<Duration> {
        let began = Instant::now();
        self.file.write_all(&self.bytes).and_then(|()| self.file.sync_data()).context("a bare append")?;
        Ok(began.elapsed())
    }
}

/// Weighs what a store is given.
pub(crate) struct Scales<S> {
    pub(crate) store: S,
    pub(crate) last: Arc<AtomicUsize>,
}

impl<S: Store> Store for Scales<S> {
    fn load(&mut self) -> Result<Vec<Record>, StoreError> {
        self.store.load()
    }

    fn append(&mut self, writes: &[Write]) -> Result<(), StoreError> {
        let weigh = |write: &Write| match write {
            Write::Put(record) => {
                codec::encode(record).map(|value| codec::key_bytes(&record.key()).len() + value.len())
            }
            Write::Delete(key) => Ok(codec::key_bytes(key).len()),
        };
        let bytes: usize = writes.iter().map(weigh).sum::<Result<_, _>>()?;
        self.last.store(bytes, Ordering::Relaxed);
        self.store.append(writes)
    }

    fn path(&self) -> String {
        self.store.path()
    }
}
