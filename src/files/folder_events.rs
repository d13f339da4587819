//! Waits for changes in folders (inotify(7)).
//!
//! An event only says that something may have changed: the caller checks the files themselves, and checks them at times
//! without an event too, since some file systems have none.

use rustix::fs::inotify::{self, CreateFlags, WatchFlags};
use rustix::io::Errno;
use std::collections::BTreeSet;
use std::future::pending;
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use tokio::io::unix::AsyncFd;

/// Entries that come, go, are renamed, written, or get other rights; and the same of the folder itself. Absent on
/// purpose: that a file is opened or read, as the caller does.
const WATCHED: WatchFlags = WatchFlags::CREATE
    .union(WatchFlags::DELETE)
    .union(WatchFlags::MOVE)
    .union(WatchFlags::CLOSE_WRITE)
    .union(WatchFlags::ATTRIB)
    .union(WatchFlags::DELETE_SELF)
    .union(WatchFlags::MOVE_SELF)
    .union(WatchFlags::ONLYDIR);
/// Bytes of events that are read at once.
const BUFFER_BYTES: usize = 4096;

/// Watches folders until it is dropped.
#[derive(Debug)]
pub struct FolderEvents {
    inotify: AsyncFd<OwnedFd>,
    /// The system's numbers of the watches.
    watches: BTreeSet<i32>,
}

impl FolderEvents {
    /// Watches nothing yet. Must be called in a tokio runtime.
    ///
    /// # Errors
    /// If the user has too many instances (`fs.inotify.max_user_instances`).
    pub fn new() -> io::Result<Self> {
        let inotify = inotify::init(CreateFlags::NONBLOCK | CreateFlags::CLOEXEC)?;
        #[allow(unsafe_code, reason = "the runtime polls a descriptor")]
        // SAFETY: an `OwnedFd` keeps its descriptor open and the same until it is dropped, and `AsyncFd` drops it after
        // it has ended the polling.
        let inotify = unsafe { AsyncFd::register(inotify) }?;
        Ok(Self { inotify, watches: BTreeSet::new() })
    }

    /// Watches the folders that are at these paths now, in place of those before. To be called before each check of the
    /// files: a folder may be created or replaced. A folder that does not exist is left out. Earlier events are
    /// dropped.
    ///
    /// # Errors
    /// If a folder cannot be watched (`fs.inotify.max_user_watches`); the others are watched.
    pub fn watch<'p>(&mut self, folders: impl IntoIterator<Item = &'p Path>) -> io::Result<()> {
        let (mut watches, mut result) = (BTreeSet::new(), Ok(()));
        for folder in folders {
            // For a folder that is watched already, this changes nothing and returns its number.
            match inotify::add_watch(&self.inotify, folder, WATCHED) {
                Ok(watch) => drop(watches.insert(watch)),
                Err(Errno::NOENT | Errno::NOTDIR) => {}
                Err(error) => result = Err(error.into()),
            }
        }
        for ended in self.watches.difference(&watches) {
            // Fails for a folder that was deleted: its watch ended with it.
            let _ = inotify::remove_watch(&self.inotify, *ended);
        }
        self.watches = watches;
        // Those until now, and the ends of watches: the check that follows sees what has changed.
        self.drain();
        result
    }

    /// Returns at the next event, or at once if there was one since the last call of this or of [`Self::watch`].
    pub async fn changed(&mut self) {
        while let Ok(mut ready) = self.inotify.readable().await {
            if self.drain() {
                // There may be more: then the next call returns at once.
                return;
            }
            ready.clear_ready();
        }
        // Only while the runtime stops.
        pending::<()>().await;
    }

    /// Reads the events of the present. Returns whether there were any.
    fn drain(&self) -> bool {
        let mut buffer = [0; BUFFER_BYTES];
        let mut any = false;
        while rustix::io::read(self.inotify.get_ref(), &mut buffer).is_ok_and(|read| read > 0) {
            any = true;
        }
        any
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::time::Duration;
    use tokio::time::timeout;

    const SOON: Duration = Duration::from_secs(20);
    const NEVER: Duration = Duration::from_millis(50);

    #[tokio::test]
    async fn changes_are_events_and_reads_are_none() {
        let folder = tempfile::tempdir().unwrap();
        let (file, missing) = (folder.path().join("file"), folder.path().join("missing"));
        let mut events = FolderEvents::new().unwrap();
        events.watch([folder.path(), &missing]).unwrap();
        assert!(timeout(NEVER, events.changed()).await.is_err());
        fs::write(&file, "1").unwrap();
        timeout(SOON, events.changed()).await.unwrap();
        assert_eq!(fs::read(&file).unwrap(), b"1");
        assert!(timeout(NEVER, events.changed()).await.is_err(), "a read");
        // Written in place, replaced, deleted.
        fs::write(&file, "2").unwrap();
        timeout(SOON, events.changed()).await.unwrap();
        fs::write(folder.path().join("new"), "3").unwrap();
        fs::rename(folder.path().join("new"), &file).unwrap();
        timeout(SOON, events.changed()).await.unwrap();
        fs::remove_file(&file).unwrap();
        timeout(SOON, events.changed()).await.unwrap();
        // A folder that is created later, and replaced.
        fs::create_dir(&missing).unwrap();
        timeout(SOON, events.changed()).await.unwrap();
        events.watch([missing.as_path()]).unwrap();
        fs::write(&file, "4").unwrap();
        assert!(timeout(NEVER, events.changed()).await.is_err(), "no longer watched");
        fs::write(missing.join("file"), "5").unwrap();
        timeout(SOON, events.changed()).await.unwrap();
        fs::rename(&missing, folder.path().join("old")).unwrap();
        fs::create_dir(&missing).unwrap();
        timeout(SOON, events.changed()).await.unwrap();
        events.watch([missing.as_path()]).unwrap();
        fs::write(missing.join("file"), "6").unwrap();
        timeout(SOON, events.changed()).await.unwrap();
    }
}
