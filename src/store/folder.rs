//! The store's folder: who may use it, how it comes to be, and what its files may be.
//!
//! ```text
//! <path>.made        says that a store was made: if there is none any more, the daemon does not start
//! <path>/            0700
//!   lock             held as long as the store is open
//!   reserve          room on the disk for opening the store ([`super::reserve`])
//!   data/            sled's files, and the counter; appears whole, by one rename
//!   data.new/        a store in the making; swept away at the next start
//!   data.check/      a copy of data/ that sled opens first, where it cannot be in memory ([`super::copy`])
//! ```

use super::trouble::Trouble;
use berth_files::{self, Links};
use berth_kernel::ports::StoreError;
use std::ffi::OsStr;
use std::fs::{self, DirBuilder, File, OpenOptions, TryLockError};
use std::io::{self, ErrorKind, Write};
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
/// Most bytes of a store's files: some ten times what the longest history takes.
const FILES_BYTES_MAX: u64 = 1 << 30;
/// What the file beside the folder says.
const MADE: &[u8] = b"berth made a store here. If it is missing, berth does not start: put it back, or run\n\
`berth state import FILE`; `berth state init` begins with an empty one.\n";

/// A locked folder.
#[derive(Debug)]
pub(super) struct Folder {
    pub(super) path: PathBuf,
    /// The file that says that a store was made.
    made: PathBuf,
    /// Errors in words.
    pub(super) trouble: Trouble,
    /// Closing it releases the lock, so it goes last.
    pub(super) lock: File,
}

impl Folder {
    /// Makes the folder if need be and locks it.
    pub(super) fn lock(path: &Path) -> Result<Self, StoreError> {
        let trouble = Trouble::new(path);
        if !path.is_dir() {
            make_folder(path).map_err(|e| trouble.io("making its folder", &e))?;
            // The name of a new folder is in the one above.
            sync_folder(parent(path)).map_err(|e| trouble.io("making its folder", &e))?;
        }
        let mut options = OpenOptions::new();
        options.write(true).create(true).truncate(false).mode(0o600);
        let lock = berth_files::open_with(&mut options, &path.join("lock"), Links::Refuse)
            .map_err(|e| trouble.io("opening its file lock", &e))?;
        if !lock_within(&lock, RELEASE_WAIT).map_err(|e| trouble.io("locking it", &e))? {
            return Err(trouble.locked());
        }
        Ok(Self { path: path.to_owned(), made: made(path), trouble, lock })
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
        fs::exists(self.data()).map_err(|e| self.trouble.io("checking whether it is there", &e))
    }

    /// Refuses a folder whose store is gone: an empty one in its place would forget every cordon, the
    /// stack and who holds what.
    pub(super) fn check_never_made(&self) -> Result<(), StoreError> {
        match made_before(&self.path) {
            Ok(Some(made)) => Err(StoreError::Gone {
                path: self.path.display().to_string(),
                made: made.display().to_string(),
            }),
            Ok(None) => Ok(()),
            Err(e) => Err(self.trouble.io("checking whether it was there", &e)),
        }
    }

    /// Writes beside the folder that a store was made in it, where nothing says so yet.
    pub(super) fn note_made(&self) -> Result<(), StoreError> {
        let written = match OpenOptions::new().write(true).create_new(true).mode(0o600).open(&self.made) {
            Ok(mut file) => file
                .write_all(MADE)
                .and_then(|()| file.sync_all())
                .and_then(|()| sync_folder(parent(&self.path))),
            Err(e) if e.kind() == ErrorKind::AlreadyExists => Ok(()),
            Err(e) => Err(e),
        };
        written.map_err(|e| self.trouble.io("noting that it was made", &e))
    }

    /// Makes the store: `fill` gets an empty folder. What it leaves there is durable and becomes
    /// `data/` in one step, so that a half-made store is never met.
    pub(super) fn make(&self, fill: impl FnOnce(&Path) -> Result<(), StoreError>) -> Result<(), StoreError> {
        let new = self.path.join("data.new");
        let io = |e: &io::Error| self.trouble.io("making it", e);
        remove(&new).map_err(|e| io(&e))?;
        make_folder(&new).map_err(|e| io(&e))?;
        fill(&new)?;
        self.place(&new)
    }

    /// Makes a folder of the same file system `data/`, in one step.
    pub(super) fn place(&self, new: &Path) -> Result<(), StoreError> {
        sync_all(new)
            .and_then(|()| fs::rename(new, self.data()))
            .and_then(|()| sync_folder(&self.path))
            .map_err(|e| self.trouble.io("making it", &e))?;
        self.note_made()
    }

    /// Checks the kind and the size of the files that sled and this module open: sled would wait for
    /// the other end of a FIFO, and read a device without end.
    pub(super) fn check_files(&self) -> Result<(), StoreError> {
        let io = |e: &io::Error| self.trouble.io("opening it", e);
        let mut bytes = 0;
        for entry in fs::read_dir(self.data()).map_err(|e| io(&e))? {
            let entry = entry.map_err(|e| io(&e))?;
            let name = entry.file_name().to_string_lossy().into_owned();
            if !matches!(&*name, "db" | "conf" | "counter") && !name.starts_with("snap.") {
                continue;
            }
            let about = entry.metadata().map_err(|e| io(&e))?;
            berth_files::regular(about.file_type())
                .map_err(|e| self.trouble.io(&format!("opening its file data/{name}"), &e))?;
            bytes += about.len();
        }
        if bytes > FILES_BYTES_MAX {
            let most = FILES_BYTES_MAX >> 20;
            return Err(self
                .trouble
                .damaged(format!("its files have {bytes} bytes, and never more than {most} MiB")));
        }
        Ok(())
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
        let opened =
            berth_files::open_with(OpenOptions::new().read(true).write(true), &self.log(), Links::Refuse);
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
}

/// The file that shows that a store was made at `path`: the one that says so, or a file of decisions, which
/// a daemon writes only once its store is open. Stores made by earlier versions have the latter alone.
fn made_before(path: &Path) -> io::Result<Option<PathBuf>> {
    let made = made(path);
    if is_there(fs::symlink_metadata(&made))? {
        return Ok(Some(made));
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

/// The file that says that a store was made at `path`.
fn made(path: &Path) -> PathBuf {
    let mut made = path.as_os_str().to_owned();
    made.push(".made");
    made.into()
}

fn is_there(about: io::Result<fs::Metadata>) -> io::Result<bool> {
    match about {
        Ok(_) => Ok(true),
        Err(e) if e.kind() == ErrorKind::NotFound => Ok(false),
        Err(e) => Err(e),
    }
}

/// Whether `file` is still the one of that name: what is written to a file that was moved or deleted
/// would not be found at the next start.
pub(super) fn is_in_place(file: &File, path: &Path) -> io::Result<bool> {
    let (named, open) = (fs::symlink_metadata(path)?, file.metadata()?);
    Ok((named.dev(), named.ino()) == (open.dev(), open.ino()))
}

/// The folder that a path's name is in.
fn parent(path: &Path) -> &Path {
    path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."))
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

pub(super) fn is_unfinished(path: &Path) -> bool {
    let name = path.file_name().map(OsStr::to_string_lossy);
    name.is_some_and(|name| name.ends_with(UNFINISHED))
}

pub(super) fn remove(path: &Path) -> io::Result<()> {
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
