//! The store's folder: its lock, its creation and checks of its files.
//!
//! ```text
//! <path>.made        marks that a store was created; if it is missing, the daemon does not start
//! <path>/            0700
//!   lock             locked while the store is open
//!   data/            sled's log, configuration and snapshot, next-snapshot, and the counter; created by one rename
//!   data.new/        an unfinished store; removed at the next start
//!   data.check/      a scratch folder, if memory has no room for one
//! ```
//!
//! The copy: sled repairs a store when it opens it, by truncating what it cannot read; a store that it cannot read
//! completely must stay unchanged, so that other tools can recover it. The copy is in memory, since a full disk has no
//! room for it, or next to the store if memory does not suffice. A store that is unchanged since a clean stop needs no
//! copy if its log has one segment in use ([`super::counter`], [`snapshot`]).
//!
//! The room: a full disk must not prevent a start. When sled opens a store it fills the newest segment of its log with
//! zeros and writes a snapshot of its page table. The log always has the blocks of its newest segment and of
//! [`ROOM_BYTES`] after it ([`Folder::ensure_room`]), which no other program can take. sled gets a scratch folder in
//! memory with links to the store's files, and writes its snapshot there. If the store needs a snapshot, the one of the
//! copy is kept, in blocks that were allocated before ([`snapshot`]).

mod snapshot;

use super::errors::{ErrorFactory, is_full};
use berth_files::{self, Links};
use berth_kernel::node::ports::StoreError;
use rustix::fs::FallocateFlags;
use snapshot::{NEXT, is_snapshot, newest_snapshot};
use std::ffi::OsStr;
use std::fs::{self, DirBuilder, File, OpenOptions, TryLockError};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, symlink};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// How long a lock may outlive its holder: sled's threads finish their work, a stopped daemon shuts
/// down, and a child process has a copy of the descriptor until it executes its program.
const RELEASE_WAIT: Duration = Duration::from_secs(1);
/// Interval of attempts to lock.
const RELEASE_POLL_INTERVAL: Duration = Duration::from_millis(2);
/// sled's files in `data/`; `blobs` is a folder, and empty.
const SLED_FILES: [&str; 3] = ["db", "conf", "blobs"];
/// Most bytes of a store's files: about ten times those of the longest history.
const FILES_BYTES_MAX: u64 = 1 << 30;
/// The text of the marker file next to the folder.
const MARKER_TEXT: &[u8] =
    b"berth created a store here. If it is missing, berth does not start: put it back, or run\n\
`berth state import FILE`; `berth state init` creates an empty one. Give both the folder of this file as --state-dir.\n";

/// The scratch folder next to the store.
const ON_DISK: &str = "data.check";
/// A file system in memory that every container and node has.
const MEMORY_FOLDER: &str = "/dev/shm";
/// Bytes that sled writes to a scratch folder: a segment of a copied log, and a snapshot.
const OPENING_BYTES: u64 = 4 * 1024 * 1024;
/// Bytes of a log segment. A page has up to 17 records before it splits, and 3 more after it merges with
/// a neighbour: 20 x (16 KiB + 65 of the key + overhead) = 330 KiB, under a quarter of a segment.
pub(super) const SEGMENT_BYTES: usize = 2 * 1024 * 1024;
/// Bytes that the log has beyond its newest segment: what one append writes, of at most 1 MiB of records and the pages
/// that they are on, and a further segment that it may begin.
const ROOM_BYTES: u64 = 2 * SEGMENT_BYTES as u64;
/// The unit of `st_blocks`.
pub(super) const BLOCK_BYTES: u64 = 512;

/// A temporary folder that sled opens, removed when dropped.
#[derive(Debug)]
pub(super) struct Scratch(PathBuf);

impl Scratch {
    pub(super) fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // If this fails, it is removed before the next one is made.
        let _ = remove(&self.0);
    }
}

/// A locked folder.
#[derive(Debug)]
pub(super) struct Folder {
    pub(super) path: PathBuf,
    pub(super) errors: ErrorFactory,
    /// The last field: closing it releases the lock.
    pub(super) lock: File,
}

impl Folder {
    /// Creates the folder if it does not exist, and locks it.
    pub(super) fn lock(path: &Path) -> Result<Self, StoreError> {
        let errors = ErrorFactory::new(path);
        if !path.is_dir() {
            create_folder(path).map_err(|e| errors.io("creating its folder", &e))?;
            // The entry of a new folder is in its parent.
            sync_folder(parent(path)).map_err(|e| errors.io("creating its folder", &e))?;
        }
        let mut options = OpenOptions::new();
        options.write(true).create(true).truncate(false).mode(0o600);
        let lock = berth_files::open_with(&mut options, &path.join("lock"), Links::Refuse)
            .map_err(|e| errors.io("opening its file lock", &e))?;
        if !lock_within(&lock, RELEASE_WAIT).map_err(|e| errors.io("locking it", &e))? {
            return Err(errors.locked());
        }
        Ok(Self { path: path.to_owned(), errors, lock })
    }

    /// The folder of sled's files.
    pub(super) fn data(&self) -> PathBuf {
        self.path.join("data")
    }

    /// sled's log.
    pub(super) fn log(&self) -> PathBuf {
        self.data().join("db")
    }

    /// The path of the counter.
    pub(super) fn counter(&self) -> PathBuf {
        self.data().join("counter")
    }

    /// Bytes of its files: sled's log, a snapshot of it, and values too large for the log.
    pub(super) fn bytes(&self) -> io::Result<u64> {
        let mut sum = 0;
        for folder in [self.data(), self.data().join("blobs")] {
            let entries = match fs::read_dir(folder) {
                Ok(entries) => entries,
                Err(e) if e.kind() == io::ErrorKind::NotFound => continue,
                Err(e) => return Err(e),
            };
            for entry in entries {
                // A file may be deleted during the count.
                let file = entry?.metadata().ok().filter(fs::Metadata::is_file);
                sum += file.map_or(0, |file| file.len());
            }
        }
        Ok(sum)
    }

    /// Whether the store exists.
    pub(super) fn has_store(&self) -> Result<bool, StoreError> {
        fs::exists(self.data()).map_err(|e| self.errors.io("checking whether it exists", &e))
    }

    /// Fails if a store was created here and is missing: an empty one in its place would lose all cordons,
    /// the stack and all allocations.
    pub(super) fn check_never_created(&self) -> Result<(), StoreError> {
        match find_creation_evidence(&self.path) {
            Ok(Some(evidence)) => Err(StoreError::Gone {
                path: self.path.display().to_string(),
                made: evidence.display().to_string(),
            }),
            Ok(None) => Ok(()),
            Err(e) => Err(self.errors.io("checking whether it existed", &e)),
        }
    }

    /// Creates the marker file next to the folder if it does not exist.
    pub(super) fn write_marker(&self) -> Result<(), StoreError> {
        let marker = marker_path(&self.path);
        let written = match OpenOptions::new().write(true).create_new(true).mode(0o600).open(marker) {
            Ok(mut file) => file
                .write_all(MARKER_TEXT)
                .and_then(|()| file.sync_all())
                .and_then(|()| sync_folder(parent(&self.path))),
            Err(e) if e.kind() == ErrorKind::AlreadyExists => Ok(()),
            Err(e) => Err(e),
        };
        written.map_err(|e| self.errors.io("writing its marker file (.made)", &e))
    }

    /// Creates the store: `initialize` writes its files to an empty folder, which is synced and renamed
    /// to `data/`, so that an unfinished store is never opened.
    pub(super) fn create(
        &self,
        initialize: impl FnOnce(&Path) -> Result<(), StoreError>,
    ) -> Result<(), StoreError> {
        let new = self.path.join("data.new");
        let io = |e: &io::Error| self.errors.io("creating it", e);
        remove(&new).map_err(|e| io(&e))?;
        create_folder(&new).map_err(|e| io(&e))?;
        initialize(&new)?;
        self.install(&new)
    }

    /// Renames a folder of the same file system to `data/`.
    pub(super) fn install(&self, new: &Path) -> Result<(), StoreError> {
        sync_all(new)
            .and_then(|()| fs::rename(new, self.data()))
            .and_then(|()| sync_folder(&self.path))
            .map_err(|e| self.errors.io("creating it", &e))?;
        self.write_marker()
    }

    /// Checks the type and the size of the files that sled and this module open: sled would block on a
    /// FIFO and read a device without end.
    pub(super) fn check_files(&self) -> Result<(), StoreError> {
        let io = |e: &io::Error| self.errors.io("opening it", e);
        let mut bytes = 0;
        for entry in fs::read_dir(self.data()).map_err(|e| io(&e))? {
            let entry = entry.map_err(|e| io(&e))?;
            let name = entry.file_name().to_string_lossy().into_owned();
            if !matches!(&*name, "db" | "conf" | "counter" | NEXT) && !is_snapshot(&entry.file_name()) {
                continue;
            }
            let metadata = entry.metadata().map_err(|e| io(&e))?;
            berth_files::ensure_regular(metadata.file_type())
                .map_err(|e| self.errors.io(&format!("opening its file data/{name}"), &e))?;
            bytes += metadata.len();
        }
        if bytes > FILES_BYTES_MAX {
            let limit = FILES_BYTES_MAX >> 20;
            return Err(self
                .errors
                .damaged(format!("its files have {bytes} bytes, more than the limit of {limit} MiB")));
        }
        Ok(())
    }

    /// Opens sled's log for syncing. It must exist and be writable.
    pub(super) fn open_log(&self) -> Result<File, StoreError> {
        let opened =
            berth_files::open_with(OpenOptions::new().read(true).write(true), &self.log(), Links::Refuse);
        opened.map_err(|e| match e.kind() {
            ErrorKind::NotFound => self.errors.damaged("its file data/db is missing"),
            _ => self.errors.io("opening its file data/db", &e),
        })
    }

    /// Waits until sled has closed the log. Returns false after [`RELEASE_WAIT`].
    pub(super) fn wait_released(&self) -> Result<bool, StoreError> {
        let log = self.open_log()?;
        lock_within(&log, RELEASE_WAIT).map_err(|e| self.errors.io("locking it", &e))
    }

    /// A copy of sled's files.
    pub(super) fn copy(&self) -> Result<Scratch, StoreError> {
        remove(&self.path.join(ON_DISK)).map_err(|e| self.errors.io("copying it to check it", &e))?;
        let needed = self.bytes().unwrap_or(u64::MAX).saturating_add(OPENING_BYTES);
        self.scratch(needed, |to| copy_files(&self.data(), to))
    }

    /// Links to sled's files: sled changes these files, and writes its snapshot in memory.
    pub(super) fn links(&self) -> Result<Scratch, StoreError> {
        self.scratch(OPENING_BYTES, |to| {
            let data = fs::canonicalize(self.data())?;
            // A copy may lack empty folders, and sled does not create a folder behind a symbolic link.
            DirBuilder::new().recursive(true).create(data.join("blobs"))?;
            let link = |path: &Path| symlink(path, to.join(path.file_name().unwrap_or_default()));
            SLED_FILES.iter().try_for_each(|name| link(&data.join(name)))?;
            newest_snapshot(&data)?.map_or(Ok(()), |snapshot| link(&snapshot))
        })
    }

    /// A folder in memory if this many bytes are free there, else one next to the store, which `fill` fills.
    fn scratch(&self, needed: u64, fill: impl Fn(&Path) -> io::Result<()>) -> Result<Scratch, StoreError> {
        let make = |path: PathBuf| {
            remove(&path)?;
            // Fails if the folder exists: other users can create folders in memory, too.
            DirBuilder::new().mode(0o700).create(&path)?;
            let scratch = Scratch(path);
            fill(&scratch.0).map(|()| scratch)
        };
        let has_room = free_bytes(Path::new(MEMORY_FOLDER)).is_ok_and(|free| free >= needed);
        let in_memory = self.path_in_memory().filter(|_| has_room).and_then(|path| make(path).ok());
        match in_memory {
            Some(scratch) => Ok(scratch),
            None => {
                make(self.path.join(ON_DISK)).map_err(|e| self.errors.io("making a folder to open it in", &e))
            }
        }
    }

    /// The path of a scratch folder in memory. Named after the lock file's inode, so that the next process on the same
    /// store removes the folder of a killed one.
    fn path_in_memory(&self) -> Option<PathBuf> {
        let lock = self.lock.metadata().ok()?;
        Some(Path::new(MEMORY_FOLDER).join(format!("berth-check-{:x}-{:x}", lock.dev(), lock.ino())))
    }

    /// Makes sure that the log has blocks for what sled writes next: its newest segment, which an opening fills, and
    /// [`ROOM_BYTES`]. Whenever it allocates blocks for the log, it also allocates those of the next snapshot. All are
    /// inside the store's own files, so that no other program can take them. File systems without such a call are left
    /// to fail in the write itself.
    ///
    /// # Errors
    /// If the disk is full: nothing was written.
    pub(super) fn ensure_room(&self, log: &File) -> Result<(), StoreError> {
        let ensured = (|| {
            let file = log.metadata()?;
            let wanted = file.len().next_multiple_of(SEGMENT_BYTES as u64) + ROOM_BYTES;
            // sled gives blocks back when it shortens its log, which takes those after its end with it.
            if file.blocks() * BLOCK_BYTES >= wanted {
                return Ok(());
            }
            // The snapshot gets its blocks first: once the log has its own, this function returns before this line.
            self.ensure_room_of_snapshot()?;
            Ok(rustix::fs::fallocate(log, FallocateFlags::KEEP_SIZE, 0, wanted)?)
        })();
        match ensured {
            Err(error) if is_full(&error) => Err(self.errors.io("making room for its log", &error)),
            Err(error) => {
                tracing::debug!(%error, "cannot make room for the store's log");
                Ok(())
            }
            Ok(()) => Ok(()),
        }
    }

    /// Drops the log from the page cache, so that the next read is from the drive. After a failed sync
    /// the system marks unwritten pages as clean, and a later sync succeeds without writing them.
    pub(super) fn drop_cached_log(&self) -> Result<(), StoreError> {
        let log = self.open_log()?;
        rustix::fs::fadvise(&log, 0, None, rustix::fs::Advice::DontNeed)
            .map_err(|e| self.errors.io("reading it back", &e.into()))
    }
}

/// The file that shows that a store was created at `path`: the marker, or a decision file, which a daemon
/// writes only after it opened its store. Stores of earlier versions have no marker.
pub(super) fn find_creation_evidence(path: &Path) -> io::Result<Option<PathBuf>> {
    let marker = marker_path(path);
    match fs::symlink_metadata(&marker) {
        Err(e) if e.kind() == ErrorKind::NotFound => {}
        found => return found.map(|_| Some(marker)),
    }
    let decisions = match fs::read_dir(parent(path).join("decisions")) {
        Err(e) if matches!(e.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => return Ok(None),
        decisions => decisions?,
    };
    for entry in decisions {
        let file = entry?.path();
        if file.extension() == Some(OsStr::new("log")) {
            return Ok(Some(file));
        }
    }
    Ok(None)
}

/// The path of the marker file of the store at `path`.
fn marker_path(path: &Path) -> PathBuf {
    let mut marker = path.as_os_str().to_owned();
    marker.push(".made");
    marker.into()
}

/// Whether `path` still names the open `file`: data written to a moved or deleted file is missing at
/// the next start.
pub(super) fn is_in_place(file: &File, path: &Path) -> io::Result<bool> {
    let (named, open) = (fs::symlink_metadata(path)?, file.metadata()?);
    Ok((named.dev(), named.ino()) == (open.dev(), open.ino()))
}

/// The folder that contains `path`.
fn parent(path: &Path) -> &Path {
    path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Locks a file until it is closed. Returns false if it is still locked after `wait`.
fn lock_within(file: &File, wait: Duration) -> io::Result<bool> {
    let since = Instant::now();
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(true),
            Err(TryLockError::Error(e)) => return Err(e),
            Err(TryLockError::WouldBlock) if since.elapsed() >= wait => return Ok(false),
            Err(TryLockError::WouldBlock) => std::thread::sleep(RELEASE_POLL_INTERVAL),
        }
    }
}

fn create_folder(path: &Path) -> io::Result<()> {
    // The store contains pod names, which other users may not read.
    DirBuilder::new().recursive(true).mode(0o700).create(path)
}

/// Removes a folder if it exists.
pub(super) fn remove(path: &Path) -> io::Result<()> {
    unless_missing(fs::remove_dir_all(path))
}

/// The result of an operation on a file or folder; one that does not exist is no error.
pub(super) fn unless_missing(removed: io::Result<()>) -> io::Result<()> {
    match removed {
        Err(e) if e.kind() == ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

/// Copies sled's files. A file that is missing is missing in the copy, too: sled reports it, or does without it.
fn copy_files(from: &Path, to: &Path) -> io::Result<()> {
    let snapshot = newest_snapshot(from)?;
    for source in SLED_FILES.iter().map(|name| from.join(name)).chain(snapshot) {
        let target = to.join(source.file_name().unwrap_or_default());
        if source.is_dir() {
            fs::create_dir(&target)?;
            for entry in fs::read_dir(&source)? {
                let name = entry?.file_name();
                fs::copy(source.join(&name), target.join(&name))?;
            }
        } else {
            unless_missing(fs::copy(&source, &target).map(drop))?;
        }
    }
    Ok(())
}

/// Free bytes on the file system of this folder, for users other than root.
pub(super) fn free_bytes(folder: &Path) -> io::Result<u64> {
    let stats = rustix::fs::statvfs(folder)?;
    Ok(stats.f_bavail.saturating_mul(stats.f_frsize))
}

fn sync_all(path: &Path) -> io::Result<()> {
    for entry in fs::read_dir(path)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            sync_all(&entry.path())?;
        } else {
            File::open(entry.path())?.sync_all()?;
        }
    }
    sync_folder(path)
}

pub(super) fn sync_folder(path: &Path) -> io::Result<()> {
    File::open(path)?.sync_all()
}
