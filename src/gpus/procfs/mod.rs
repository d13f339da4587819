//! Identifies processes and their owners by the node's `/proc`, behind the port [`Processes`].
//!
//! It reads `stat`, `cgroup` and `mountinfo`, which need no rights over the process and take none of its locks. Absent
//! on purpose: `cmdline`, `environ` and `exe`. They wait for the memory lock of the process, which a process that hangs
//! in the driver may hold for ever, and their content is private.

mod cgroup;
mod mounts;
mod stat;

use berth_kernel::ports::Processes;
use berth_kernel::process::{Owner, ProcessIdentity, ProcessVisibility, UnknownReason};
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
        let ignore = ignore.iter().map(|name| stat::truncate(name).to_owned()).collect();
        Self { root, ignore, known: Mutex::default() }
    }

    /// Identifies one process; returns its start, too.
    fn read_identity(
        &self,
        pid: u32,
        known: Option<&(u64, ProcessIdentity)>,
    ) -> Result<(u64, ProcessIdentity), UnknownReason> {
        let folder = self.root.join(pid.to_string());
        let before = self.stat(&folder)?;
        if let Some((started, who)) = known
            && *started == before.started_ticks
        {
            return Ok((*started, who.clone()));
        }
        let text = read_text(&folder.join("cgroup"), CGROUP_BYTES_MAX).map_err(|error| unseen(&error))?;
        let mut owner = cgroup::owner(&text);
        if let Owner::Pod(pod) = &mut owner {
            // The mounts may be unreadable or lack the name: then only the pod is known.
            let mounts = read_text_or_empty(&folder.join("mountinfo"), MOUNTS_BYTES_MAX);
            pod.container = mounts::container(&mounts, &pod.uid);
        }
        // The start is read again: if it changed, the files were of two processes with one id.
        let after = self.stat(&folder)?;
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

    fn stat(&self, folder: &Path) -> Result<stat::Stat, UnknownReason> {
        let text = read_text(&folder.join("stat"), STAT_BYTES_MAX).map_err(|error| unseen(&error))?;
        stat::parse(&text).ok_or(UnknownReason::Unreadable)
    }
}

impl Processes for ProcFs {
    fn sight(&self) -> ProcessVisibility {
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
        match self.sight() {
            ProcessVisibility::Visible => {}
            ProcessVisibility::Hidden { .. } => {
                return pids.iter().map(|pid| (*pid, unknown(UnknownReason::Hidden))).collect();
            }
            ProcessVisibility::Unsupported { .. } => {
                return pids.iter().map(|pid| (*pid, unknown(UnknownReason::Unreadable))).collect();
            }
        }
        // Valid after a panic, too: each identity in it is complete.
        let mut known = self.known.lock();
        let mut found = BTreeMap::new();
        let mut answer = BTreeMap::new();
        for (index, pid) in pids.iter().enumerate() {
            let identity = if index < PIDS_MAX {
                self.read_identity(*pid, known.get(pid))
            } else {
                Err(UnknownReason::TooMany)
            };
            answer.insert(
                *pid,
                identity.map_or_else(unknown, |(started, who)| {
                    found.insert(*pid, (started, who.clone()));
                    who
                }),
            );
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

fn read_text_or_empty(path: &Path, bytes_max: u64) -> String {
    read_text(path, bytes_max).unwrap_or_default()
}

fn unseen(error: &io::Error) -> UnknownReason {
    // ESRCH: the process ended while its file was open.
    let gone = error.kind() == ErrorKind::NotFound
        || error.raw_os_error() == Some(rustix::io::Errno::SRCH.raw_os_error());
    if gone { UnknownReason::Gone } else { UnknownReason::Unreadable }
}

#[cfg(test)]
mod tests;
