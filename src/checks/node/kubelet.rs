//! The kubelet's folders, sockets and checkpoint.
//!
//! A kubelet has two folders that one path cannot name: `device-plugins` is in /var/lib/kubelet whatever its settings,
//! `pod-resources` in its `--root-dir`. Where the configured one is not the kubelet's, `/proc/net/unix` has the right
//! one, also of a kubelet inside another program.

use super::line::{Level, Line};
use berth_config::Config;
use berth_files::socket::connect_within;
use berth_kubelet::checkpoint::{CHECKPOINT_BYTES_MAX, CHECKPOINT_FILE};
use berth_kubelet::{NoConnection, NoSocket, permission_advice, socket_metadata};
use rustix::fs::{Access, FileType, Mode, OFlags, access};
use rustix::io::Errno;
use serde::Deserialize;
use serde::de::IgnoredAny;
use std::fs::{File, read_to_string, symlink_metadata};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The fix for a missing kubelet folder.
const FOLDER_FIX: &str =
    "run on the node, or mount it into the pod with a hostPath; set another path with --device-plugins-dir";
/// The longest wait for a connection to a socket whose process is stopped.
const CONNECT_MAX: Duration = Duration::from_secs(1);

pub(super) fn all(config: &Config) -> Vec<Line> {
    let (plugins, pods) = (&config.kubelet.device_plugins_dir, config.kubelet.root_dir.join("pod-resources"));
    let listening = listening_sockets(&config.gpus.processes.proc_root);
    let mut kubelet = connect(
        "kubelet socket",
        &plugins.join("kubelet.sock"),
        "start the kubelet (systemctl status kubelet); berth waits for it",
    );
    let has_kubelet = kubelet.level == Level::Ok;
    let is_kubelets = |path: &&PathBuf| path.ends_with("device-plugins/kubelet.sock");
    if let Some(found) = listening.iter().find(is_kubelets).and_then(|path| path.parent())
        && kubelet.level == Level::Warn
        && found != plugins
    {
        let found = found.display();
        kubelet.fix = Some(format!(
            "the kubelet listens in {found}: set devicePluginsDir: {found} (--device-plugins-dir, or the chart's value)"
        ));
    }
    let mut pod_resources = connect(
        "pod-resources socket",
        &pods.join("kubelet.sock"),
        "start the kubelet, or mount pod-resources/ into the pod; without it no allocation ends",
    );
    if pod_resources.level == Level::Warn && has_kubelet {
        pod_resources.level = Level::Fail;
        // The kubelet binds this socket under another name and renames it.
        let is_pod_resources = |folder: &&Path| folder.ends_with("pod-resources") && *folder != pods;
        let found = listening.iter().filter_map(|path| path.parent()).find(is_pod_resources);
        pod_resources.fix = Some(match found.and_then(Path::parent).map(Path::display) {
            Some(root) => format!(
                "a process listens in {root}/pod-resources: set kubeletRootDir: {root} (--kubelet-root-dir, or the \
                 chart's value); without this socket no allocation ends"
            ),
            None => "set kubeletRootDir to the kubelet's --root-dir (--kubelet-root-dir, or the chart's value); `ps -C \
                     kubelet -o args` on the node shows it; without this socket no allocation ends"
                .into(),
        });
    }
    let mut lines = vec![
        folder("kubelet folder", plugins),
        kubelet,
        pod_resources,
        checkpoint(&plugins.join(CHECKPOINT_FILE), config.kubelet.skip_adoption),
    ];
    lines.extend(config.dra.enabled.then(|| dra_folders(config)));
    lines
}

/// The folders of the DRA driver's sockets. The daemon creates its own one in `plugins`.
fn dra_folders(config: &Config) -> Line {
    const CHECK: &str = "DRA driver";
    let root = &config.kubelet.root_dir;
    let own = root.join("plugins").join(&config.dra.driver);
    let folders = [root.join("plugins_registry"), if own.exists() { own } else { root.join("plugins") }];
    let problem = folders.iter().map(|path| folder(CHECK, path)).find(|line| line.level != Level::Ok);
    match problem {
        Some(line) => Line::warn(
            CHECK,
            line.detail,
            format!(
                "mount it writable, as the chart does with `config.dra.enabled`, and set kubeletRootDir to the kubelet's \
                 --root-dir; without it no claim for {} is prepared",
                config.dra.driver
            ),
        ),
        None => {
            let shown = folders.each_ref().map(|path| path.display().to_string()).join(" and ");
            Line::ok(CHECK, format!("{shown} are writable, for {}", config.dra.driver))
        }
    }
}

/// The paths of the sockets on which processes of the node listen, as far as this process can see them: all of the node
/// in the host's network or PID namespace; otherwise only those of its own network namespace.
fn listening_sockets(proc_root: &Path) -> Vec<PathBuf> {
    /// The flag `__SO_ACCEPTCON`.
    const LISTENS: u32 = 0x10000;
    let tables = ["1/net/unix", "net/unix"].map(|table| read_to_string(proc_root.join(table)));
    let lines = tables.iter().flatten().flat_map(|table| table.lines());
    let path = |line: &str| {
        // Num RefCount Protocol Flags Type St Inode Path
        let mut columns = line.split_ascii_whitespace();
        let flags = u32::from_str_radix(columns.nth(3)?, 16).ok()?;
        // An abstract socket has a name that begins with @.
        let at = line.find(" /")? + 1;
        (flags & LISTENS != 0).then(|| PathBuf::from(&line[at..]))
    };
    lines.filter_map(path).collect()
}

fn folder(check: &'static str, path: &Path) -> Line {
    let shown = path.display();
    match symlink_metadata(path) {
        Err(error) => Line::fail(check, format!("{shown}: {error}"), FOLDER_FIX),
        Ok(metadata) if !metadata.is_dir() => {
            Line::fail(check, format!("{shown} is not a folder"), FOLDER_FIX)
        }
        Ok(_) => match access(path, Access::WRITE_OK | Access::EXEC_OK) {
            Ok(()) => Line::ok(check, format!("{shown} exists and is writable")),
            Err(Errno::ROFS) => Line::fail(
                check,
                format!("{shown} is read-only"),
                "mount it writable: berth creates sockets in it",
            ),
            Err(Errno::ACCESS) => {
                Line::fail(check, format!("{shown} is not writable: {}", Errno::ACCESS), permission_advice())
            }
            Err(error) => Line::fail(check, format!("{shown} is not writable: {error}"), FOLDER_FIX),
        },
    }
}

/// Whether a process answers on the socket at `path`; `fix` is for a missing process.
fn connect(check: &'static str, path: &Path, fix: &'static str) -> Line {
    let shown = path.display();
    match socket_metadata(path) {
        Ok(_) => match connect_within(path, CONNECT_MAX).map_err(|error| NoConnection::new(path, &error)) {
            Ok(_) => Line::ok(check, format!("{shown} answers")),
            Err(NoConnection { is_denied: true, what, fix }) => Line::fail(check, what, fix),
            Err(NoConnection { what, .. }) => Line::warn(check, what, fix),
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
            fix: Some("make the checkpoint readable and remove --skip-adoption: with it, devices of running pods are not adopted".into()),
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
        Err((reason, advice)) => {
            let fix = advice.unwrap_or_else(|| fix.into());
            return Line::fail(CHECK, format!("{shown} {reason}"), fix);
        }
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
///
/// # Errors
/// The reason, and what to do if it is a missing permission.
fn read(path: &Path) -> Result<Option<Vec<u8>>, (String, Option<String>)> {
    // Non-blocking, so that a pipe does not block the check.
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = match rustix::fs::open(path, flags, Mode::empty()) {
        Ok(file) => file,
        Err(Errno::NOENT) => return Ok(None),
        Err(error) => {
            let is_denied = [Errno::ACCESS, Errno::PERM].contains(&error);
            return Err((format!("cannot be opened: {error}"), is_denied.then(permission_advice)));
        }
    };
    let stat = rustix::fs::fstat(&file).map_err(|e| (format!("cannot be inspected: {e}"), None))?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
        return Err(("is not a regular file".into(), None));
    }
    let mut bytes = Vec::new();
    let mut limited = File::from(file).take(CHECKPOINT_BYTES_MAX + 1);
    limited.read_to_end(&mut bytes).map_err(|e| (format!("cannot be read: {e}"), None))?;
    if u64::try_from(bytes.len()).unwrap_or(u64::MAX) > CHECKPOINT_BYTES_MAX {
        return Err((format!("is larger than the limit of {CHECKPOINT_BYTES_MAX} bytes"), None));
    }
    Ok(Some(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixListener;

    #[test]
    fn sockets_on_which_a_process_listens_are_found_by_the_name_that_was_bound() {
        let folder = tempfile::tempdir().unwrap();
        let (bound, renamed) = (folder.path().join("3712"), folder.path().join("kubelet.sock"));
        let listener = UnixListener::bind(&bound).unwrap();
        std::fs::rename(&bound, &renamed).unwrap();
        let _client = std::os::unix::net::UnixStream::connect(&renamed).unwrap();
        let found = || listening_sockets(Path::new("/proc"));
        assert!(found().contains(&bound));
        drop(listener);
        assert!(!found().contains(&bound));
        assert!(listening_sockets(folder.path()).is_empty(), "no table");
    }
}
