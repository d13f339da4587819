//! The kubelet's folders, sockets and checkpoint, as the daemon will need them.

use super::line::{Level, Line};
use crate::config::Config;
use berth_kubelet::{NoSocket, socket_metadata};
use rustix::fs::{Access, FileType, Mode, OFlags, access};
use rustix::io::Errno;
use serde::Deserialize;
use serde::de::IgnoredAny;
use std::fs::{File, symlink_metadata};
use std::io::Read;
use std::os::unix::net::UnixStream;
use std::path::Path;

/// Most bytes of a checkpoint that the daemon reads.
const CHECKPOINT_BYTES_MAX: u64 = 64 * 1024 * 1024;
/// What to do where the kubelet's folder is not to be seen.
const FOLDER_FIX: &str =
    "run on the node, or mount it into the pod with a hostPath; another place: --kubelet-dir";

pub(super) fn all(config: &Config) -> [Line; 4] {
    let plugins = config.kubelet_dir.join("device-plugins");
    [
        folder(&plugins),
        socket(&plugins.join("kubelet.sock")),
        pod_resources(&config.kubelet_dir.join("pod-resources/kubelet.sock")),
        checkpoint(&plugins.join("kubelet_internal_checkpoint"), config.skip_adoption),
    ]
}

fn folder(path: &Path) -> Line {
    const CHECK: &str = "kubelet folder";
    let shown = path.display();
    match symlink_metadata(path) {
        Err(error) => Line::fail(CHECK, format!("{shown}: {error}"), FOLDER_FIX),
        Ok(about) if !about.is_dir() => Line::fail(CHECK, format!("{shown} is no folder"), FOLDER_FIX),
        Ok(_) => match access(path, Access::WRITE_OK | Access::EXEC_OK) {
            Ok(()) => Line::ok(CHECK, format!("{shown} is there and writable")),
            Err(Errno::ROFS) => Line::fail(
                CHECK,
                format!("{shown} is read-only"),
                "mount it writable: sockets are made in it",
            ),
            Err(error) => Line::fail(CHECK, format!("{shown} is not writable: {error}"), "run as root"),
        },
    }
}

fn socket(path: &Path) -> Line {
    answers("kubelet socket", path, "start the kubelet (systemctl status kubelet); berth waits for it")
}

fn pod_resources(path: &Path) -> Line {
    let start = "start the kubelet, or mount pod-resources/ into the pod; without it holders have no names";
    answers("pod-resources socket", path, start)
}

/// Whether a process answers on the socket at `path`; `start` mends it where there is none.
fn answers(check: &'static str, path: &Path, start: &'static str) -> Line {
    let shown = path.display();
    match socket_metadata(path) {
        Ok(_) => match UnixStream::connect(path) {
            Ok(_) => Line::ok(check, format!("{shown} answers")),
            Err(error) => Line::warn(check, format!("{shown} does not answer: {error}"), start),
        },
        Err(NoSocket::Absent) => Line::warn(check, format!("{shown} is not there"), start),
        Err(why @ NoSocket::DanglingLink) => Line::warn(check, format!("{shown} {why}"), why.advice()),
        Err(why) => Line::fail(check, format!("{shown} {why}"), why.advice()),
    }
}

/// The part of the checkpoint that every release of the kubelet has written. What is in it is for
/// the daemon, and not for a terminal.
#[derive(Deserialize)]
struct Shape {
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
            fix: Some("running pods are not adopted, as --skip-adoption says".into()),
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
        Ok(None) => return Line::ok(CHECK, format!("{shown} is not there yet: no pod holds a device")),
        Err(why) => return Line::fail(CHECK, format!("{shown} {why}"), fix),
    };
    match serde_json::from_slice::<Shape>(&bytes) {
        Ok(shape) => {
            let entries = shape.data.entries.map_or(0, |e| e.len());
            Line::ok(CHECK, format!("{shown} can be read: {entries} entries"))
        }
        Err(error) => {
            Line::fail(CHECK, format!("{shown} is not in a format that berth knows ({error})"), fix)
        }
    }
}

/// `None` where there is none.
fn read(path: &Path) -> Result<Option<Vec<u8>>, String> {
    // Not blocking, so that a pipe in its place does not hold the check up.
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = match rustix::fs::open(path, flags, Mode::empty()) {
        Ok(file) => file,
        Err(Errno::NOENT) => return Ok(None),
        Err(error) => return Err(format!("cannot be opened: {error}")),
    };
    let about = rustix::fs::fstat(&file).map_err(|e| format!("cannot be looked at: {e}"))?;
    if FileType::from_raw_mode(about.st_mode) != FileType::RegularFile {
        return Err("is no regular file".into());
    }
    let mut bytes = Vec::new();
    let mut limited = File::from(file).take(CHECKPOINT_BYTES_MAX + 1);
    limited.read_to_end(&mut bytes).map_err(|e| format!("cannot be read: {e}"))?;
    if u64::try_from(bytes.len()).unwrap_or(u64::MAX) > CHECKPOINT_BYTES_MAX {
        return Err(format!("is larger than the {CHECKPOINT_BYTES_MAX} bytes that are read"));
    }
    Ok(Some(bytes))
}
