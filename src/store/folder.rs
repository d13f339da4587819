//! The store's folder: who may use it, how it comes to be, and the copy that is tried first.
//!
//! ```text
//! <path>/            0700
//!   lock             held as long as the store is open
//!   data/            sled's files, and the counter; appears whole, by one rename
//!   data.new/        a store in the making; swept away at the next start
//!   data.check/      a copy of data/ that sled opens first; swept away at once
//! ```

use super::trouble::Trouble;
use crate::ports::StoreError;
use std::ffi::OsStr;
use std::fs::{self, DirBuilder, File, OpenOptions, TryLockError};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// How long a lock may outlive its holder: sled's threads finish what they have begun, a daemon
/// that was told to end is ending, and a child process has a copy until it runs its own program.
const RELEASE_WAIT: Duration = Duration::from_secs(1);
/// How often that is looked at.
const RELEASE_STEP: Duration = Duration::from_millis(2);
/// A snapshot that sled was writing when its process died. It would take it for the newest one and
/// call the store corrupt; it is of no use, since nothing is done in its name before its rename.
const UNFINISHED: &str = ".generating";

/// A locked folder.
#[derive(Debug)]
pub(super) struct Folder {
    path: PathBuf,
    /// Errors in words.
    pub(super) trouble: Trouble,
    /// Closing it releases the lock, so it goes last.
    _lock: File,
}

impl Folder {
    /// Makes the folder if need be and locks it.
    pub(super) fn lock(path: &Path) -> Result<Self, StoreError> {
        let trouble = Trouble::new(path);
        if !path.is_dir() {
            make_folder(path).map_err(|e| trouble.io("making its folder", &e))?;
            // The name of a new folder is in the one above.
            let above = path.parent().filter(|p| !p.as_os_str().is_empty());
            sync_folder(above.unwrap_or(Path::new("."))).map_err(|e| trouble.io("making its folder", &e))?;
        }
        let lock = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .open(path.join("lock"))
            .map_err(|e| trouble.io("opening its file lock", &e))?;
        if !lock_within(&lock, RELEASE_WAIT).map_err(|e| trouble.io("locking it", &e))? {
            return Err(trouble.locked());
        }
        Ok(Self { path: path.to_owned(), trouble, _lock: lock })
    }

    /// Where sled's files are.
    pub(super) fn data(&self) -> PathBuf {
        self.path.join("data")
    }

    /// sled's log.
    pub(super) fn log(&self) -> PathBuf {
        self.data().join("db")
    }

    /// Where the counter is.
    pub(super) fn counter(&self) -> PathBuf {
        self.data().join("counter")
    }

    /// What its files take, bytes: sled's log, a snapshot of it, and values too large for the log.
    pub(super) fn bytes(&self) -> io::Result<u64> {
        let mut sum = 0;
        for folder in [self.data(), self.data().join("blobs")] {
            let entries = match fs::read_dir(folder) {
                Ok(entries) => entries,
                Err(e) if e.kind() == io::ErrorKind::NotFound => continue,
                Err(e) => return Err(e),
            };
            for entry in entries {
                // A file may go while they are counted.
                let file = entry?.metadata().ok().filter(fs::Metadata::is_file);
                sum += file.map_or(0, |file| file.len());
            }
        }
        Ok(sum)
    }

    /// Whether there is a store.
    pub(super) fn is_made(&self) -> Result<bool, StoreError> {
        fs::exists(self.data()).map_err(|e| self.trouble.io("looking for it", &e))
    }

    /// Makes the store: `fill` gets an empty folder. What it leaves there is durable and becomes
    /// `data/` in one step, so that a half-made store is never met.
    pub(super) fn make(&self, fill: impl FnOnce(&Path) -> Result<(), StoreError>) -> Result<(), StoreError> {
        let new = self.path.join("data.new");
        let io = |e: &io::Error| self.trouble.io("making it", e);
        remove(&new).map_err(|e| io(&e))?;
        make_folder(&new).map_err(|e| io(&e))?;
        fill(&new)?;
        sync_all(&new)
            .and_then(|()| fs::rename(&new, self.data()))
            .and_then(|()| sync_folder(&self.path))
            .map_err(|e| io(&e))
    }

    /// Calls `look` with a copy of `data/`. sled repairs what it opens, by cutting off what it
    /// cannot read; a store that it cannot read in full must stay as it is for a better tool.
    pub(super) fn try_on_copy<T>(
        &self,
        look: impl FnOnce(&Path) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        let copy = self.path.join("data.check");
        let io = |e: &io::Error| self.trouble.io("copying it to check it", e);
        remove(&copy).map_err(|e| io(&e))?;
        let looked = make_folder(&copy)
            .and_then(|()| copy_files(&self.data(), &copy))
            .map_err(|e| io(&e))
            .and_then(|()| look(&copy));
        match (looked, remove(&copy)) {
            (Ok(_), Err(e)) => Err(io(&e)),
            (looked, _) => looked,
        }
    }

    /// Removes what a killed process left unfinished.
    pub(super) fn sweep(&self) -> Result<(), StoreError> {
        let sweep = || {
            for entry in fs::read_dir(self.data())? {
                let path = entry?.path();
                if is_unfinished(&path) {
                    fs::remove_file(path)?;
                }
            }
            Ok(())
        };
        sweep().map_err(|e: io::Error| self.trouble.io("opening it", &e))
    }

    /// Makes the names of sled's files durable: it renames its snapshots and leaves it at that.
    pub(super) fn sync_names(&self) -> Result<(), StoreError> {
        sync_folder(&self.data()).map_err(|e| self.trouble.io("opening it", &e))
    }

    /// Opens sled's log for syncing. It must be there and be writable.
    pub(super) fn open_log(&self) -> Result<File, StoreError> {
        let opened = OpenOptions::new().read(true).write(true).open(self.log());
        opened.map_err(|e| match e.kind() {
            ErrorKind::NotFound => self.trouble.damaged("its file data/db is missing"),
            _ => self.trouble.io("opening its file data/db", &e),
        })
    }

    /// Waits until no handle of sled's has the log. Answers whether that came true in time.
    pub(super) fn wait_released(&self) -> Result<bool, StoreError> {
        let log = self.open_log()?;
        lock_within(&log, RELEASE_WAIT).map_err(|e| self.trouble.io("locking it", &e))
    }

    /// Drops what the system remembers of the log, so that what is read next is what the drive has.
    /// After a failed sync the pages that did not reach it count as written, and a later sync would
    /// say that all is well.
    pub(super) fn forget_log(&self) -> Result<(), StoreError> {
        let log = self.open_log()?;
        rustix::fs::fadvise(&log, 0, None, rustix::fs::Advice::DontNeed)
            .map_err(|e| self.trouble.io("reading it back", &e.into()))
    }

    /// Whether `log` is still the file of that name: what is written to a file that was moved or
    /// deleted would not be found at the next start.
    pub(super) fn is_in_place(&self, log: &File) -> io::Result<bool> {
        let (named, open) = (fs::metadata(self.log())?, log.metadata()?);
        Ok((named.dev(), named.ino()) == (open.dev(), open.ino()))
    }
}

/// Locks a file until it is closed. Answers whether that came true in time.
fn lock_within(file: &File, wait: Duration) -> io::Result<bool> {
    let since = Instant::now();
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(true),
            Err(TryLockError::Error(e)) => return Err(e),
            Err(TryLockError::WouldBlock) if since.elapsed() >= wait => return Ok(false),
            Err(TryLockError::WouldBlock) => std::thread::sleep(RELEASE_STEP),
        }
    }
}

fn make_folder(path: &Path) -> io::Result<()> {
    // Pod names are nobody else's business.
    DirBuilder::new().recursive(true).mode(0o700).create(path)
}

fn is_unfinished(path: &Path) -> bool {
    let name = path.file_name().map(OsStr::to_string_lossy);
    name.is_some_and(|name| name.ends_with(UNFINISHED))
}

/// Folders are copied with what is in them; sled has one, `blobs`, which stays empty here.
fn copy_files(from: &Path, to: &Path) -> io::Result<()> {
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let (source, target) = (entry.path(), to.join(entry.file_name()));
        let kind = entry.file_type()?;
        if kind.is_dir() {
            fs::create_dir(&target)?;
            copy_files(&source, &target)?;
        } else if kind.is_file() && !is_unfinished(&source) {
            fs::copy(&source, &target)?;
        }
    }
    Ok(())
}

fn remove(path: &Path) -> io::Result<()> {
    match fs::remove_dir_all(path) {
        Err(e) if e.kind() == ErrorKind::NotFound => Ok(()),
        other => other,
    }
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

fn sync_folder(path: &Path) -> io::Result<()> {
    File::open(path)?.sync_all()
}
