//! Watches `device-plugins/` for a replaced kubelet.sock, a newly written checkpoint, and sockets of other plugins.
//!
//! The folder is watched and not the files, since both files are replaced rather than changed. Where
//! kubelet.sock is a symbolic link, its target's folder is watched too. Events only cause a check of
//! the files, which are checked at times without one, too.

use super::settings::Settings;
use crate::socket_path::{NoSocket, socket_metadata};
use crate::timeouts::FolderTimeouts;
use berth_core::next_beat;
use berth_files::FolderEvents;
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::{self, Metadata};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};
use tokio::sync::watch;
use tokio::task::JoinHandle;

/// The name of the kubelet's checkpoint inside `device-plugins/`.
pub const CHECKPOINT_FILE: &str = "kubelet_internal_checkpoint";
/// The names of Berth's sockets inside `device-plugins/` begin with this.
pub(super) const SOCKET_PREFIX: &str = "berth-";

/// Distinguishes a file from its successor of the same name. The inode alone is not enough: a file
/// system may reuse the number at once.
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

/// Most sockets of the folder that are compared; a node has one for each resource of its device plugins.
const SOCKETS_MAX: usize = 1024;

/// The watched files as of the last check.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct FolderState {
    /// kubelet.sock: the socket, or the target of a symbolic link to one.
    pub(super) kubelet: Result<FileId, NoSocket>,
    /// The checkpoint, whatever its file type.
    pub(super) checkpoint: Option<FileId>,
    /// All sockets of the folder, Berth's own included.
    pub(super) sockets: BTreeMap<OsString, FileId>,
}

/// The id of the socket at this path. `None` for anything else, symbolic links included: Berth's own
/// sockets are never links.
pub(super) fn socket_id(path: &Path) -> Option<FileId> {
    let metadata = fs::symlink_metadata(path).ok()?;
    let is_socket = metadata.file_type().is_socket();
    is_socket.then(|| FileId::of(&metadata))
}

/// The id of kubelet.sock, or of the target of a symbolic link to it.
pub(super) fn kubelet_id(settings: &Settings) -> Result<FileId, NoSocket> {
    socket_metadata(&settings.kubelet_socket()).map(|metadata| FileId::of(&metadata))
}

/// The id of the kubelet's checkpoint in this folder, whatever its file type.
pub(super) fn checkpoint_id(folder: &Path) -> Option<FileId> {
    fs::symlink_metadata(folder.join(CHECKPOINT_FILE)).ok().map(|metadata| FileId::of(&metadata))
}

/// Watches the folder until it is dropped.
#[derive(Debug)]
pub(super) struct FolderWatcher {
    state: watch::Receiver<FolderState>,
    task: JoinHandle<()>,
}

impl FolderWatcher {
    /// Checks the files once now, and from then on in a task of its own. The folder need not exist yet.
    pub(super) fn watch(settings: &Settings) -> Self {
        let paths = Paths { folder: settings.device_plugins.clone(), kubelet: settings.kubelet_socket() };
        let (sender, state) = watch::channel(paths.check());
        let task = tokio::spawn(watch_paths(paths, sender, settings.timeouts.folder));
        Self { state, task }
    }

    pub(super) fn subscribe(&self) -> watch::Receiver<FolderState> {
        self.state.clone()
    }
}

impl Drop for FolderWatcher {
    fn drop(&mut self) {
        self.task.abort();
    }
}

struct Paths {
    folder: PathBuf,
    kubelet: PathBuf,
}

impl Paths {
    /// The folder of the socket that kubelet.sock links to. If the target does not exist, only the first
    /// of several links is followed.
    fn target_folder(&self) -> Option<PathBuf> {
        let link = fs::read_link(&self.kubelet).ok()?;
        let target = fs::canonicalize(&self.kubelet).unwrap_or_else(|_| self.folder.join(link));
        target.parent().map(Path::to_owned)
    }

    fn check(&self) -> FolderState {
        FolderState {
            kubelet: socket_metadata(&self.kubelet).map(|metadata| FileId::of(&metadata)),
            checkpoint: checkpoint_id(&self.folder),
            sockets: self.sockets(),
        }
    }

    fn sockets(&self) -> BTreeMap<OsString, FileId> {
        let entries = fs::read_dir(&self.folder).into_iter().flatten().flatten();
        let sockets = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_socket()));
        let ids = sockets.filter_map(|entry| Some((entry.file_name(), FileId::of(&entry.metadata().ok()?))));
        ids.take(SOCKETS_MAX).collect()
    }
}

async fn watch_paths(paths: Paths, sender: watch::Sender<FolderState>, timeouts: FolderTimeouts) {
    let mut events = match FolderEvents::new() {
        Ok(events) => Some(events),
        Err(error) => {
            warn_no_events(&paths.folder, &error);
            None
        }
    };
    let mut is_warned = events.is_none();
    loop {
        let target = paths.target_folder();
        let mut has_events = false;
        if let Some(events) = &mut events {
            match events.watch([Some(paths.folder.as_path()), target.as_deref()].into_iter().flatten()) {
                // A folder that does not exist yet has no events.
                Ok(()) => has_events = paths.folder.is_dir(),
                Err(error) if !std::mem::replace(&mut is_warned, true) => {
                    warn_no_events(&paths.folder, &error);
                }
                Err(_) => {}
            }
        }
        // After the watches are set, so that no change is missed in between.
        let state = paths.check();
        sender.send_if_modified(|last| {
            let differs = *last != state;
            *last = state;
            differs
        });
        let changed = async {
            match &mut events {
                Some(events) => events.changed().await,
                None => std::future::pending().await,
            }
        };
        // An event and the timeout both lead to the next check.
        let interval = if has_events { timeouts.recheck_interval } else { timeouts.check_interval };
        let _ = tokio::time::timeout_at(next_beat(interval), changed).await;
    }
}

fn warn_no_events(folder: &Path, error: &std::io::Error) {
    tracing::warn!(
        folder = %folder.display(), %error,
        "cannot watch the kubelet's folder for events, so it is checked every second: raise \
         fs.inotify.max_user_instances or max_user_watches"
    );
}
