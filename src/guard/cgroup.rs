//! The cgroup of a container, which shows whether processes of it are left.

use berth_proto::nri::Container;
use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Component, Path, PathBuf};

/// Hierarchies of cgroup v1 in which a container has a cgroup of its own, whatever its limits are. The first that exists is
/// used; `devices` comes first, since it controls access to devices.
const V1_CONTROLLERS: [&str; 3] = ["devices", "pids", "freezer"];
/// The name of the cgroup in which crun starts a container's processes.
const CRUN_SUBGROUP: &str = "container";
/// How many levels of cgroups below a container's own are looked into: a container may have an init system.
const DEPTH_MAX: usize = 8;

/// The folder of a container's cgroup.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ContainerCgroup {
    path: PathBuf,
}

impl ContainerCgroup {
    /// The cgroup of a process, below the folder where the cgroups of the node are mounted.
    ///
    /// # Errors
    /// If the process is gone, or it has no cgroup in a hierarchy that is mounted there.
    pub(crate) fn of_process(pid: u32, cgroup_root: &Path) -> io::Result<Self> {
        let text = fs::read_to_string(format!("/proc/{pid}/cgroup"))?;
        Self::find(&text, cgroup_root).ok_or_else(|| {
            let text = format!("no cgroup of process {pid} is below {}", cgroup_root.display());
            io::Error::new(ErrorKind::NotFound, text)
        })
    }

    /// The cgroup of a container that runs; if it cannot be found, the log has the cause.
    pub(crate) fn of_container(container: &Container, cgroup_root: &Path) -> Option<Self> {
        if container.pid == 0 {
            return None;
        }
        let cgroup = Self::of_process(container.pid, cgroup_root);
        cgroup
            .inspect_err(|error| {
                tracing::warn!(
                    container = container.id,
                    %error,
                    "the cgroup of a container was not found: its memory limits cannot be set, access to its devices cannot \
                     be denied, and processes that outlive it are not noticed; set `guard.cgroupRoot` to the folder where \
                     the node's cgroups are mounted"
                );
            })
            .ok()
    }

    /// The cgroup in a process's `cgroup` file: a line for each hierarchy, `0::PATH` in v2, `N:names:PATH` in v1.
    fn find(text: &str, cgroup_root: &Path) -> Option<Self> {
        let lines = || {
            text.lines().filter_map(|line| {
                let mut fields = line.splitn(3, ':').skip(1);
                Some((fields.next()?, fields.next()?))
            })
        };
        // In a mount of cgroup v2 the hierarchy's folder is the mount itself, and in one of v1 there is one for each
        // controller.
        let is_v2 = cgroup_root.join("cgroup.controllers").exists();
        let hierarchies: Vec<(&str, PathBuf)> = match is_v2 {
            true => vec![("", cgroup_root.to_owned())],
            false => V1_CONTROLLERS.map(|controller| (controller, cgroup_root.join(controller))).into(),
        };
        // A line of v2 has no controllers.
        let in_hierarchy = |(controller, mount): (&str, PathBuf)| {
            let mut lines =
                lines().filter(|(controllers, _)| controllers.split(',').any(|name| name == controller));
            lines.next().map(|(_, path)| (mount, path))
        };
        let mut folders = hierarchies.into_iter().filter_map(in_hierarchy).filter_map(|(mount, path)| {
            let path = Path::new(path.strip_prefix('/')?);
            // The path of another cgroup namespace begins with `..`; the root is no container's.
            let is_below = path.components().all(|part| matches!(part, Component::Normal(_)));
            (is_below && path != Path::new("")).then(|| mount.join(path))
        });
        folders.find(|folder| folder.is_dir()).map(|path| Self { path })
    }

    /// The cgroup of a container with this id, which is this cgroup or one above it: an init system in the container moves
    /// its first process. `None` if no name has the id, by which runtimes name a container's cgroup: the process's id may be that
    /// of another process by now.
    pub(crate) fn of_whole_container(&self, id: &str) -> Option<Self> {
        let whole = self.path.ancestors().filter(|folder| {
            folder.file_name().is_some_and(|name| name.to_str().is_some_and(|name| name.contains(id)))
        });
        whole.last().map(|path| Self { path: path.to_owned() })
    }

    /// The cgroup of a container with this id in which its first process began to run, although an init system may have moved
    /// that process further down since. crun has such a cgroup below the container's own (crun(1),
    /// `run.oci.systemd.subgroup`).
    pub(crate) fn at_start(self, id: &str) -> Self {
        let Some(whole) = self.of_whole_container(id) else { return self };
        let of_crun = whole.path.join(CRUN_SUBGROUP);
        if self.path.starts_with(&of_crun) { Self { path: of_crun } } else { whole }
    }

    #[cfg(test)]
    pub(crate) fn at(path: &Path) -> Self {
        Self { path: path.to_owned() }
    }

    #[cfg(test)]
    pub(crate) fn find_for_tests(text: &str, cgroup_root: &Path) -> Self {
        Self::find(text, cgroup_root).unwrap()
    }

    /// Its folder.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Whether processes are left in it. A cgroup that cannot be read counts as having some, and one that does not exist
    /// as having none.
    pub(crate) fn has_processes(&self) -> bool {
        match fs::read_to_string(self.path.join("cgroup.events")) {
            Ok(events) => !events.lines().any(|line| line == "populated 0"),
            // cgroup v1 has no such file.
            Err(error) if error.kind() == ErrorKind::NotFound => has_processes_below(&self.path, DEPTH_MAX),
            Err(_) => true,
        }
    }
}

fn has_processes_below(folder: &Path, depth: usize) -> bool {
    match fs::read_to_string(folder.join("cgroup.procs")) {
        Ok(processes) if processes.is_empty() => {}
        Err(error) if error.kind() == ErrorKind::NotFound => return false,
        Ok(_) | Err(_) => return true,
    }
    let Ok(entries) = fs::read_dir(folder) else { return false };
    let folders = entries.flatten().filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
    folders.into_iter().any(|entry| depth == 0 || has_processes_below(&entry.path(), depth - 1))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn v2() -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        fs::write(root.path().join("cgroup.controllers"), "cpu memory").unwrap();
        root
    }

    #[test]
    fn it_is_where_the_process_is_in_v2_and_below_a_controller_in_v1() {
        let text = "4:devices:/kubepods/pod1/c1\n3:cpu,cpuacct:/kubepods/pod1/c1\n0::/kubepods/pod1/c1\n";
        let v2 = v2();
        assert_eq!(ContainerCgroup::find(text, v2.path()), None, "the folder does not exist");
        let folder = v2.path().join("kubepods/pod1/c1");
        fs::create_dir_all(&folder).unwrap();
        assert_eq!(ContainerCgroup::find(text, v2.path()), Some(ContainerCgroup { path: folder }));
        let v1 = tempfile::tempdir().unwrap();
        let folder = v1.path().join("devices/kubepods/pod1/c1");
        fs::create_dir_all(&folder).unwrap();
        assert_eq!(ContainerCgroup::find(text, v1.path()), Some(ContainerCgroup { path: folder }));
    }

    #[test]
    fn the_cgroup_of_a_whole_container_has_its_id() {
        let containerd = "/c/kubepods.slice/cri-containerd-4711.scope";
        let crio = "/c/kubepods/crio-4711.scope";
        let below = |folder: &str, name: &str| format!("{folder}/{name}");
        for (path, whole, at_start) in [
            ("/c/kubepods/pod1/4711".into(), Some("/c/kubepods/pod1/4711"), "/c/kubepods/pod1/4711".into()),
            (containerd.into(), Some(containerd), containerd.into()),
            (below(containerd, "init.scope"), Some(containerd), containerd.into()),
            (below(crio, "container"), Some(crio), below(crio, "container")),
            (below(crio, "container/init.scope"), Some(crio), below(crio, "container")),
            ("/c/kubepods/other".into(), None, "/c/kubepods/other".to_owned()),
        ] {
            let cgroup = ContainerCgroup::at(Path::new(&path));
            let found = cgroup.of_whole_container("4711");
            assert_eq!(found.as_ref().map(ContainerCgroup::path), whole.map(Path::new), "{path}");
            assert_eq!(cgroup.at_start("4711").path(), Path::new(&at_start), "{path}");
        }
    }

    #[test]
    fn a_path_outside_of_the_mount_and_the_root_are_no_containers() {
        let root = v2();
        for text in ["0::/\n", "0::/../../etc\n", "0::relative\n", "", "0:\n"] {
            assert_eq!(ContainerCgroup::find(text, root.path()), None, "{text:?}");
        }
    }

    #[test]
    fn this_process_has_a_cgroup_and_is_in_it() {
        let mounts = ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"];
        let found = mounts
            .iter()
            .filter_map(|root| ContainerCgroup::of_process(std::process::id(), Path::new(root)).ok());
        for cgroup in found {
            assert!(cgroup.has_processes(), "{cgroup:?}");
        }
        ContainerCgroup::of_process(u32::MAX, Path::new("/sys/fs/cgroup")).unwrap_err();
    }

    #[test]
    fn it_has_processes_until_the_kernel_says_that_it_has_none() {
        let root = v2();
        let cgroup = ContainerCgroup { path: root.path().join("c1") };
        assert!(!cgroup.has_processes(), "it does not exist");
        fs::create_dir(&cgroup.path).unwrap();
        let events = cgroup.path.join("cgroup.events");
        for (text, expected) in
            [("populated 1\nfrozen 0\n", true), ("populated 0\nfrozen 0\n", false), ("", true)]
        {
            fs::write(&events, text).unwrap();
            assert_eq!(cgroup.has_processes(), expected, "{text:?}");
        }
        // cgroup v1, with a cgroup of the container's own below.
        fs::remove_file(&events).unwrap();
        let inner = cgroup.path.join("init");
        fs::create_dir(&inner).unwrap();
        for (outer, inner_text, expected) in [("", "", false), ("7\n", "", true), ("", "8\n", true)] {
            fs::write(cgroup.path.join("cgroup.procs"), outer).unwrap();
            fs::write(inner.join("cgroup.procs"), inner_text).unwrap();
            assert_eq!(cgroup.has_processes(), expected, "{outer:?} {inner_text:?}");
        }
    }
}
