//! `device-plugins/`, watched: is kubelet.sock another file, has the checkpoint been written?
//!
//! The folder is watched and not the files, since both are replaced rather than changed; and where
//! kubelet.sock is a symbolic link, the folder of its target, too. Events only cause a check of the
//! files, so a lost event costs one interval.

use super::checkpoint::CHECKPOINT_FILE;
use super::settings::Settings;
use crate::socket_path::{NoSocket, socket_metadata};
use notify::{RecommendedWatcher, RecursiveMode, Watcher};
use std::fs::{self, Metadata};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};
use tokio::sync::{Notify, watch};
use tokio::task::JoinHandle;

/// Tells one file from the next one of the same name. The inode alone would not do: a file system
/// may give the same number again at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileId {
    device: u64,
    inode: u64,
    /// Creation time, or change time where the file system keeps none; nanoseconds since 1970.
    created_ns: u128,
}

impl FileId {
    pub(super) fn of(metadata: &Metadata) -> Self {
        let created = metadata.created().ok().and_then(|at| at.duration_since(SystemTime::UNIX_EPOCH).ok());
        let changed = || {
            let seconds = u64::try_from(metadata.ctime()).unwrap_or(0);
            let nanoseconds = u32::try_from(metadata.ctime_nsec()).unwrap_or(0);
            Duration::new(seconds, nanoseconds)
        };
        Self {
            device: metadata.dev(),
            inode: metadata.ino(),
            created_ns: created.unwrap_or_else(changed).as_nanos(),
        }
    }

    /// When it was created, milliseconds since 1970.
    pub(super) fn created_wall_ms(&self) -> u64 {
        u64::try_from(self.created_ns / 1_000_000).unwrap_or(u64::MAX)
    }
}

/// What the last look found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Seen {
    /// kubelet.sock: the socket, or the target of a symbolic link to one.
    pub(super) kubelet: Result<FileId, NoSocket>,
    /// The checkpoint, whatever it is.
    pub(super) checkpoint: Option<FileId>,
}

/// The id of the socket at this path, if there is one. A symbolic link is none: this is for our own
/// sockets, which nothing else may stand for.
pub(super) fn socket_id(path: &Path) -> Option<FileId> {
    let metadata = fs::symlink_metadata(path).ok()?;
    let is_socket = metadata.file_type().is_socket();
    is_socket.then(|| FileId::of(&metadata))
}

/// Watches until it is dropped.
#[derive(Debug)]
pub(super) struct Folder {
    seen: watch::Receiver<Seen>,
    looking: JoinHandle<()>,
}

impl Folder {
    /// Looks once now, and from then on in a task of its own. The folder need not exist yet.
    pub(super) fn watch(settings: &Settings) -> Self {
        let paths = Paths {
            folder: settings.device_plugins(),
            kubelet: settings.kubelet_socket(),
            checkpoint: settings.device_plugins().join(CHECKPOINT_FILE),
        };
        let (sender, seen) = watch::channel(paths.look());
        let looking = tokio::spawn(look_on(paths, sender, settings.waits.look_again));
        Self { seen, looking }
    }

    pub(super) fn seen(&self) -> watch::Receiver<Seen> {
        self.seen.clone()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        self.looking.abort();
    }
}

struct Paths {
    folder: PathBuf,
    kubelet: PathBuf,
    checkpoint: PathBuf,
}

impl Paths {
    /// Where the socket lies that kubelet.sock is a symbolic link to. Where the target is not there,
    /// only the first of several links is followed.
    fn target_folder(&self) -> Option<PathBuf> {
        let link = fs::read_link(&self.kubelet).ok()?;
        let target = fs::canonicalize(&self.kubelet).unwrap_or_else(|_| self.folder.join(link));
        target.parent().map(Path::to_owned)
    }

    fn look(&self) -> Seen {
        Seen {
            kubelet: socket_metadata(&self.kubelet).map(|about| FileId::of(&about)),
            checkpoint: fs::symlink_metadata(&self.checkpoint).ok().map(|m| FileId::of(&m)),
        }
    }
}

async fn look_on(paths: Paths, sender: watch::Sender<Seen>, interval: Duration) {
    let event = Arc::new(Notify::new());
    let mut plugins = None;
    let mut target = None;
    loop {
        keep_watched(&mut plugins, Some(&paths.folder), &event);
        keep_watched(&mut target, paths.target_folder().as_deref(), &event);
        // After the watch is set, so that nothing falls in between.
        let seen = paths.look();
        sender.send_if_modified(|last| {
            let differs = *last != seen;
            *last = seen;
            differs
        });
        // Both outcomes mean: look again.
        let _ = tokio::time::timeout(interval, event.notified()).await;
    }
}

/// Watches the folder that is at this path now: it may have been made, or replaced, since the last look.
fn keep_watched(
    watching: &mut Option<(FileId, RecommendedWatcher)>,
    path: Option<&Path>,
    event: &Arc<Notify>,
) {
    let folder = path.and_then(|path| Some((path, FileId::of(&fs::metadata(path).ok()?))));
    if watching.as_ref().map(|(id, _)| *id) != folder.map(|(_, id)| id) {
        *watching = folder.and_then(|(path, id)| Some((id, watcher(path, event)?)));
    }
}

/// `None` where events cannot be had; the interval then has to do.
fn watcher(folder: &Path, event: &Arc<Notify>) -> Option<RecommendedWatcher> {
    let event = Arc::clone(event);
    let told = move |_| event.notify_one();
    let made = notify::recommended_watcher(told).and_then(|mut watcher| {
        watcher.watch(folder, RecursiveMode::NonRecursive)?;
        Ok(watcher)
    });
    match made {
        Ok(watcher) => Some(watcher),
        Err(error) => {
            tracing::warn!(
                folder = %folder.display(), %error,
                "cannot watch the kubelet's folder for events (raise fs.inotify.max_user_instances or max_user_watches); looking at it every second instead"
            );
            None
        }
    }
}
