//! What shows that another process serves a resource of Berth. A kubelet that ends streams does not: it may be slow, or
//! still process the end of an earlier plugin.

use super::checkpoint;
use super::folder::SOCKET_PREFIX;
use berth_files::socket::connect_within;
use berth_kernel::ids::names::{DeviceId, Resource};
use std::collections::BTreeSet;
use std::fmt;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The process that listens on a socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Listener {
    /// Its id; `None` if it is in another PID namespace.
    pid: Option<i32>,
}

impl fmt::Display for Listener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.pid {
            Some(pid) => write!(f, "process {pid}"),
            None => f.write_str("a process"),
        }
    }
}

/// The process that listens on the socket at `path`; `None` if none does. Must be called in a tokio runtime.
pub(super) fn listener(path: &Path) -> Option<Listener> {
    match connect_within(path, Duration::ZERO) {
        Ok(stream) => Some(Listener { pid: peer(stream.into()) }),
        // It listens, and its queue is full.
        Err(error) if error.kind() == std::io::ErrorKind::TimedOut => Some(Listener { pid: None }),
        Err(_) => None,
    }
}

fn peer(stream: OwnedFd) -> Option<i32> {
    let stream = std::os::unix::net::UnixStream::from(stream);
    stream.set_nonblocking(true).ok()?;
    let peer = tokio::net::UnixStream::from_std(stream).ok()?.peer_cred().ok()?;
    peer.pid().filter(|pid| *pid > 0)
}

/// What to search for in the folder of the plugins' sockets.
pub(super) struct Search {
    pub(super) folder: PathBuf,
    pub(super) resource: Resource,
    /// The ids that Berth lists under the resource.
    pub(super) listed: BTreeSet<DeviceId>,
    /// When Berth last registered the resource, milliseconds since 1970. An older checkpoint may have the devices of a
    /// plugin that has ended.
    pub(super) registered_wall_ms: u64,
}

impl Search {
    /// What shows another plugin for the resource at present; `None` if nothing does. Reads the checkpoint.
    pub(super) fn evidence(&self) -> Option<String> {
        self.nvidias_socket().or_else(|| self.foreign_ids())
    }

    /// NVIDIA's plugin, and HAMi's, serve `nvidia.com/NAME` on `nvidia-NAME.sock`.
    fn nvidias_socket(&self) -> Option<String> {
        let name = self.resource.as_str().strip_prefix("nvidia.com/")?;
        let path = self.folder.join(format!("nvidia-{name}.sock"));
        let listener = listener(&path)?;
        Some(format!(
            "{listener} listens on {}, on which NVIDIA's device plugin serves {}",
            path.display(),
            self.resource
        ))
    }

    /// The kubelet's own record of the devices that the newest plugin listed.
    fn foreign_ids(&self) -> Option<String> {
        let (ids, file) = checkpoint::registered_ids(&self.folder, &self.resource)?;
        if file.created_wall_ms() < self.registered_wall_ms {
            return None;
        }
        let is_listed = |id: &String| DeviceId::parse(id).is_ok_and(|id| self.listed.contains(&id));
        let foreign = ids.iter().find(|id| !is_listed(id))?;
        Some(format!(
            "the kubelet has the device {foreign:?} of {}, which berth does not list",
            self.resource
        ))
    }

    /// The sockets of other plugins on which a process listens, sorted.
    pub(super) fn other_plugins(&self) -> Vec<String> {
        let entries = std::fs::read_dir(&self.folder).into_iter().flatten().flatten();
        let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
        let is_other = |name: &String| name != "kubelet.sock" && !name.starts_with(SOCKET_PREFIX);
        let paths = names.filter(is_other).take(OTHERS_MAX).map(|name| (self.folder.join(&name), name));
        let mut others: Vec<String> =
            paths.filter(|(path, _): &(PathBuf, _)| listener(path).is_some()).map(|(_, name)| name).collect();
        others.sort();
        others
    }
}

/// Most files of the folder that are examined for [`Search::other_plugins`].
const OTHERS_MAX: usize = 32;

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixListener;

    #[tokio::test]
    async fn only_a_listening_socket_or_a_foreign_id_shows_another_plugin() {
        let folder = tempfile::tempdir().unwrap();
        let search = Search {
            folder: folder.path().to_owned(),
            resource: Resource::parse("nvidia.com/gpu.shared").unwrap(),
            listed: BTreeSet::from([DeviceId::parse("GPU-0::1").unwrap()]),
            registered_wall_ms: 1,
        };
        assert_eq!(search.evidence(), None, "an empty folder");
        let bind = |name: &str| UnixListener::bind(folder.path().join(name)).unwrap();
        let others =
            [bind("nvidia-gpu.sock"), bind("berth-0.sock"), bind("kubelet.sock"), bind("sriov.sock")];
        assert_eq!(search.evidence(), None, "plugins of other resources");
        assert_eq!(search.other_plugins(), ["nvidia-gpu.sock", "sriov.sock"]);
        drop(others);
        assert_eq!(search.other_plugins(), [""; 0], "files that ended plugins left");
        drop(bind("nvidia-gpu.shared.sock"));
        assert_eq!(search.evidence(), None, "a plugin that has ended");
        std::fs::remove_file(folder.path().join("nvidia-gpu.shared.sock")).unwrap();
        let nvidias = bind("nvidia-gpu.shared.sock");
        let evidence = search.evidence().unwrap();
        let own = format!("process {} listens on ", std::process::id());
        assert!(evidence.starts_with(&own) && evidence.contains("nvidia-gpu.shared.sock"), "{evidence}");
        drop(nvidias);
        let checkpoint = |ids: &str| {
            let registered = format!(r#"{{"nvidia.com/gpu":["x"],"nvidia.com/gpu.shared":{ids}}}"#);
            let text = format!(
                r#"{{"Data":{{"PodDeviceEntries":null,"RegisteredDevices":{registered}}},"Checksum":1}}"#
            );
            std::fs::write(folder.path().join(checkpoint::CHECKPOINT_FILE), text).unwrap();
        };
        for ids in ["null", "[]", r#"["GPU-0::1"]"#] {
            checkpoint(ids);
            assert_eq!(search.evidence(), None, "{ids}");
        }
        checkpoint(r#"["GPU-0::1","GPU-0::7"]"#);
        assert!(search.evidence().unwrap().contains("\"GPU-0::7\" of nvidia.com/gpu.shared"));
        let later = Search { registered_wall_ms: u64::MAX, ..search };
        assert_eq!(later.evidence(), None, "the checkpoint is older than the registration");
    }
}
