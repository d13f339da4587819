//! Waits for a change of the state file.

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::fs::inotify::{self, CreateFlags, WatchFlags};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::thread;
use std::time::Duration;

use crate::runtime::call::LOOK_AGAIN;

/// The changes of the folder of the state file, which is replaced or written.
pub(crate) struct Changes {
    /// `None` where the system has no events.
    files: Option<OwnedFd>,
    /// Can be read once no thread is to wait any more.
    ended: Option<OwnedFd>,
}

impl Changes {
    /// Those from now on.
    pub(crate) fn of(file: Option<&Path>) -> Self {
        let folder = file.and_then(Path::parent);
        let folder = folder.map(|folder| if folder.as_os_str().is_empty() { Path::new(".") } else { folder });
        let files = folder.and_then(|folder| {
            let files = inotify::init(CreateFlags::NONBLOCK | CreateFlags::CLOEXEC).ok()?;
            inotify::add_watch(
                &files,
                folder,
                WatchFlags::CREATE | WatchFlags::MODIFY | WatchFlags::MOVED_TO,
            )
            .ok()?;
            Some(files)
        });
        Self { files, ended: eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC).ok() }
    }

    /// Returns at the next change, at once if there was one since the last call, or after this time.
    pub(crate) fn wait(&self, time: Duration) {
        let (Some(files), Some(ended)) = (&self.files, &self.ended) else {
            return thread::sleep(time.min(LOOK_AGAIN));
        };
        let limit = Timespec::try_from(time).ok();
        let mut events = [PollFd::new(files, PollFlags::IN), PollFd::new(ended, PollFlags::IN)];
        // A failed or interrupted wait is a short one.
        let _ = poll(&mut events, limit.as_ref());
        let mut read = [0; 1024];
        while rustix::io::read(files, &mut read).is_ok_and(|read| read > 0) {}
    }

    /// Ends all waits, also later ones.
    pub(crate) fn end_waits(&self) {
        if let Some(ended) = &self.ended {
            let _ = rustix::io::write(ended, &1_u64.to_ne_bytes());
        }
    }
}
