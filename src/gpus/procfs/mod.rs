//! Identifies processes and their owners by the node's `/proc`, behind the port [`Processes`].
//!
//! It reads `stat`, `cgroup` and `mountinfo`, which need no rights over the process and take none of its locks. Absent
//! on purpose: `cmdline`, `environ` and `exe`. They wait for the memory lock of the process, which a process that hangs
//! in the driver may hold forever, and their content is private.

mod cgroup;

use berth_kernel::hardware::process::{Owner, ProcessIdentity, ProcessVisibility, UnknownReason};
use berth_kernel::node::ports::Processes;
use parking_lot::Mutex;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::{File, read_link};
use std::io::{self, ErrorKind, Read};
use std::path::{Path, PathBuf};

/// The host's PID namespace, the first one of each Linux system. `PROC_PID_INIT_INO` of the kernel's
/// `include/linux/proc_ns.h`, `PID_NS_INIT_INO` of its `linux/nsfs.h`.
const HOST_PID_NAMESPACE: &str = "pid:[4026531836]";

/// Most processes that one call identifies: 128 on each of 16 GPUs. At 5 us for each `stat` file that is 10 ms every
/// five seconds.
const PIDS_MAX: usize = 2048;
/// Bytes of a command name that the kernel keeps: `TASK_COMM_LEN` (16) less the terminating NUL.
const NAME_BYTES: usize = 15;
/// Most bytes read of a `stat` file: 52 numbers and a name of at most 64 bytes.
const STAT_BYTES_MAX: u64 = 4 * 1024;
/// Most bytes read of a `cgroup` file: a dozen v1 hierarchies with paths of at most 4 KiB; the first ones suffice.
const CGROUP_BYTES_MAX: u64 = 16 * 1024;
/// Most bytes read of a `mountinfo` file: a container has some dozen mounts of 200 bytes; the needed one is among the
/// first that the kubelet requests.
const MOUNTS_BYTES_MAX: u64 = 256 * 1024;

/// The node's `/proc` as the port [`Processes`].
pub struct ProcFs {
    root: PathBuf,
    /// Names of ignored processes, truncated as in the kernel.
    ignore: BTreeSet<String>,
    /// The identities from the last call, by process id and start: a known process costs only one `stat`.
    known: Mutex<BTreeMap<u32, (u64, ProcessIdentity)>>,
}

impl ProcFs {
    /// Reads the `/proc` at `root`. Processes with one of the names in `ignore` are marked as ignored; only the first
    /// 15 bytes of a name are compared, since the kernel keeps no more.
    #[must_use]
    pub fn new(root: PathBuf, ignore: &[String]) -> Self {
        let ignore = ignore.iter().map(|name| truncate(name).to_owned()).collect();
        Self { root, ignore, known: Mutex::default() }
    }

    /// Identifies one process; returns its start, too.
    fn read_identity(
        &self,
        pid: u32,
        known: Option<&(u64, ProcessIdentity)>,
    ) -> Result<(u64, ProcessIdentity), UnknownReason> {
        let folder = self.root.join(pid.to_string());
        let before = read_stat(&folder)?;
        if let Some((started, who)) = known
            && *started == before.started_ticks
        {
            return Ok((*started, who.clone()));
        }
        let text = read_text(&folder.join("cgroup"), CGROUP_BYTES_MAX).map_err(|error| unseen(&error))?;
        let mut owner = cgroup::owner(&text);
        if let Owner::Pod(pod) = &mut owner {
            // The mounts may be unreadable or lack the name: then only the pod is known.
            let mounts = read_text(&folder.join("mountinfo"), MOUNTS_BYTES_MAX).unwrap_or_default();
            pod.container = container(&mounts, &pod.uid);
        }
        // The start is read again: if it changed, the files were of two processes with one id.
        let after = read_stat(&folder)?;
        if after.started_ticks != before.started_ticks {
            return Err(UnknownReason::Gone);
        }
        let who = ProcessIdentity {
            ignored: self.ignore.contains(&before.name),
            name: Some(before.name),
            started_ticks: Some(before.started_ticks),
            owner,
        };
        Ok((before.started_ticks, who))
    }
}

fn read_stat(folder: &Path) -> Result<Stat, UnknownReason> {
    let text = read_text(&folder.join("stat"), STAT_BYTES_MAX).map_err(|error| unseen(&error))?;
    parse_stat(&text).ok_or(UnknownReason::Unreadable)
}

impl Processes for ProcFs {
    fn process_visibility(&self) -> ProcessVisibility {
        match read_link(self.root.join("self/ns/pid")) {
            Ok(own) if own.as_os_str() == HOST_PID_NAMESPACE => ProcessVisibility::Visible,
            Ok(own) => ProcessVisibility::Hidden {
                why: format!(
                    "berth runs in a PID namespace of its own ({}, the host's is {HOST_PID_NAMESPACE}): NVML reports \
                     process ids of the host, or omits those processes",
                    own.display()
                ),
                fix: "set hostPID: true in the pod template of berth's DaemonSet".into(),
            },
            Err(error) => ProcessVisibility::Unsupported {
                why: format!("{} cannot be read: {error}", self.root.join("self/ns/pid").display()),
            },
        }
    }

    fn identify(&self, pids: &BTreeSet<u32>) -> BTreeMap<u32, ProcessIdentity> {
        let unknown =
            |unseen| ProcessIdentity { owner: Owner::Unknown(unseen), ..ProcessIdentity::default() };
        let hidden = match self.process_visibility() {
            ProcessVisibility::Visible => None,
            ProcessVisibility::Hidden { .. } => Some(UnknownReason::Hidden),
            ProcessVisibility::Unsupported { .. } => Some(UnknownReason::Unreadable),
        };
        if let Some(reason) = hidden {
            return pids.iter().map(|pid| (*pid, unknown(reason))).collect();
        }
        // Valid after a panic, too: each identity in it is complete.
        let mut known = self.known.lock();
        let mut found = BTreeMap::new();
        let mut answer = BTreeMap::new();
        for (index, pid) in pids.iter().enumerate() {
            let identity = match index < PIDS_MAX {
                true => self.read_identity(*pid, known.get(pid)),
                false => Err(UnknownReason::TooMany),
            };
            if let Ok(identity) = &identity {
                found.insert(*pid, identity.clone());
            }
            answer.insert(*pid, identity.map_or_else(unknown, |(_, who)| who));
        }
        *known = found;
        answer
    }
}

/// The first bytes of a file as text; `/proc` may contain bytes that are not UTF-8, since processes choose their names.
fn read_text(path: &Path, bytes_max: u64) -> io::Result<String> {
    let mut bytes = Vec::new();
    File::open(path)?.take(bytes_max).read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

fn unseen(error: &io::Error) -> UnknownReason {
    // ESRCH: the process ended while its file was open.
    let gone = error.kind() == ErrorKind::NotFound
        || error.raw_os_error() == Some(rustix::io::Errno::SRCH.raw_os_error());
    if gone { UnknownReason::Gone } else { UnknownReason::Unreadable }
}

/// The fields of `/proc/PID/stat` that are used.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Stat {
    /// The command name.
    name: String,
    /// When it started, clock ticks since boot.
    started_ticks: u64,
}

/// Parses `PID (NAME) STATE ...` (`man 5 proc_pid_stat`). A name may contain spaces and parentheses, so it ends at the
/// last closing one.
fn parse_stat(text: &str) -> Option<Stat> {
    /// `starttime` is field 22; the first one after the name is field 3.
    const START_AFTER_NAME: usize = 22 - 3;
    let (before, rest) = text.rsplit_once(')')?;
    let (_, name) = before.split_once('(')?;
    let started_ticks = rest.split_ascii_whitespace().nth(START_AFTER_NAME)?.parse().ok()?;
    Some(Stat { name: name.to_owned(), started_ticks })
}

/// Truncates a name as the kernel does.
fn truncate(name: &str) -> &str {
    &name[..name.floor_char_boundary(NAME_BYTES)]
}

/// The name of the container of its pod that a process is in, by its `mountinfo` file; `None` if no mount has one, or
/// several have different ones.
///
/// The kubelet mounts a file for the termination message into each container, at `/dev/termination-log` unless the pod
/// sets another path, from `<kubelet>/pods/<UID>/containers/<NAME>/<random>`; that path is the root of the bind mount
/// (kubelet 1.36, `makeMounts` in `pkg/kubelet/kuberuntime`). No other file of the container has its name.
fn container(text: &str, pod_uid: &str) -> Option<String> {
    // Field 4 is the root of the mount within its file system (`man 5 proc_pid_mountinfo`).
    let roots = text.lines().filter_map(|line| line.split(' ').nth(3));
    let names: BTreeSet<&str> = roots.filter_map(|root| container_name(root, pod_uid)).collect();
    match names.len() {
        1 => names.first().map(|name| (*name).to_owned()),
        _ => None,
    }
}

/// The container's name in the root of a mount of this pod.
fn container_name<'t>(root: &'t str, pod_uid: &str) -> Option<&'t str> {
    let mut last = root.rsplit('/');
    let (_random, name, containers) = (last.next()?, last.next()?, last.next()?);
    let (uid, pods) = (last.next()?, last.next()?);
    (pods == "pods" && uid == pod_uid && containers == "containers" && !name.is_empty()).then_some(name)
}

#[cfg(test)]
mod tests;
