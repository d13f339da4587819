//! The kubelet's folders, sockets and checkpoint.

use super::line::{Level, Line};
use crate::config::Config;
use berth_kubelet::checkpoint::{CHECKPOINT_BYTES_MAX, CHECKPOINT_FILE};
use berth_kubelet::{NoSocket, socket_metadata};
use rustix::fs::{Access, FileType, Mode, OFlags, access};
use rustix::io::Errno;
use serde::Deserialize;
use serde::de::IgnoredAny;
use std::fs::{File, symlink_metadata};
use std::io::Read;
use std::os::unix::net::UnixStream;
use std::path::Path;

/// The fix for a missing kubelet folder.
const FOLDER_FIX: &str =
    "run on the node, or mount it into the pod with a hostPath; set another path with --kubelet-dir";

pub(super) fn all(config: &Config) -> [Line; 4] {
    let plugins = config.kubelet_dir.join("device-plugins");
    [
        folder(&plugins),
        connect(
            "kubelet socket",
            &plugins.join("kubelet.sock"),
            "start the kubelet (systemctl status kubelet); berth waits for it",
        ),
        connect(
            "pod-resources socket",
            &config.kubelet_dir.join("pod-resources/kubelet.sock"),
            "start the kubelet, or mount pod-resources/ into the pod; without it holders have no names",
        ),
        checkpoint(&plugins.join(CHECKPOINT_FILE), config.skip_adoption),
    ]
}

fn folder(path: &Path) -> Line {
    const CHECK: &str = "kubelet folder";
    let shown = path.display();
    match symlink_metadata(path) {
        Err(error) => Line::fail(CHECK, format!("{shown}: {error}"), FOLDER_FIX),
        Ok(metadata) if !metadata.is_dir() => {
            Line::fail(CHECK, format!("{shown} is not a folder"), FOLDER_FIX)
        }
        Ok(_) => match access(path, Access::WRITE_OK | Access::EXEC_OK) {
            Ok(()) => Line::ok(CHECK, format!("{shown} exists and is writable")),
            Err(Errno::ROFS) => Line::fail(
                CHECK,
                format!("{shown} is read-only"),
                "mount it writable: berth creates sockets in it",
            ),
            Err(error) => Line::fail(CHECK, format!("{shown} is not writable: {error}"), "run as root"),
        },
    }
}

/// Whether a process answers on the socket at `path`; `fix` is for a missing process.
fn connect(check: &'static str, path: &Path, fix: &'static str) -> Line {
    let shown = path.display();
    match socket_metadata(path) {
        Ok(_) => match UnixStream::connect(path) {
            Ok(_) => Line::ok(check, format!("{shown} answers")),
            Err(error) => Line::warn(check, format!("{shown} does not answer: {error}"), fix),
        },
        Err(NoSocket::Absent) => Line::warn(check, format!("{shown} does not exist"), fix),
        Err(reason @ NoSocket::DanglingLink) => {
            Line::warn(check, format!("{shown} {reason}"), reason.advice())
        }
        Err(reason) => Line::fail(check, format!("{shown} {reason}"), reason.advice()),
    }
}

/// The structure that the checkpoints of all kubelet releases share. The entries are not shown.
#[derive(Deserialize)]
struct Checkpoint {
    #[serde(rename = "Data")]
    data: Data,
}

#[derive(Deserialize)]
struct Data {
    #[serde(rename = "PodDeviceEntries")]
    entries: Option<Vec<IgnoredAny>>,
}

fn checkpoint(path: &Path, skip_adoption: bool) -> Line {
    match read_checkpoint(path) {
        line if skip_adoption && line.level == Level::Fail => Line {
            level: Level::Warn,
            fix: Some("the devices of running pods are not adopted, because of --skip-adoption".into()),
            ..line
        },
        line => line,
    }
}

fn read_checkpoint(path: &Path) -> Line {
    const CHECK: &str = "checkpoint";
    let shown = path.display();
    let fix = "running pods cannot be adopted from it, so berth does not register: once the node is drained, delete \
               it and restart the kubelet; or start berth with --skip-adoption";
    let bytes = match read(path) {
        Ok(Some(bytes)) => bytes,
        Ok(None) => return Line::ok(CHECK, format!("{shown} does not exist yet: no pod holds a device")),
        Err(reason) => return Line::fail(CHECK, format!("{shown} {reason}"), fix),
    };
    match serde_json::from_slice::<Checkpoint>(&bytes) {
        Ok(checkpoint) => {
            let entries = checkpoint.data.entries.map_or(0, |e| e.len());
            Line::ok(CHECK, format!("{shown} is readable: {entries} entries"))
        }
        Err(error) => {
            Line::fail(CHECK, format!("{shown} is not in a format that berth knows ({error})"), fix)
        }
    }
}

/// The file's bytes; `None` if it does not exist.
fn read(path: &Path) -> Result<Option<Vec<u8>>, String> {
    // Non-blocking, so that a pipe does not block the check.
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = match rustix::fs::open(path, flags, Mode::empty()) {
        Ok(file) => file,
        Err(Errno::NOENT) => return Ok(None),
        Err(error) => return Err(format!("cannot be opened: {error}")),
    };
    let stat = rustix::fs::fstat(&file).map_err(|e| format!("cannot be inspected: {e}"))?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
        return Err("is not a regular file".into());
    }
    let mut bytes = Vec::new();
    let mut limited = File::from(file).take(CHECKPOINT_BYTES_MAX + 1);
    limited.read_to_end(&mut bytes).map_err(|e| format!("cannot be read: {e}"))?;
    if u64::try_from(bytes.len()).unwrap_or(u64::MAX) > CHECKPOINT_BYTES_MAX {
        return Err(format!("is larger than the limit of {CHECKPOINT_BYTES_MAX} bytes"));
    }
    Ok(Some(bytes))
}
