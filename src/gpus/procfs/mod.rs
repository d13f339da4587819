//! Who processes are, as the node's `/proc` tells, behind the port [`Processes`].
//!
//! Read are `stat`, `cgroup` and `mountinfo`, which need no rights over the process and take none of
//! its own locks. Absent on purpose: `cmdline`, `environ` and `exe`. Those wait for the memory lock of
//! the process, which one that hangs in the driver may hold for ever, and hold what is nobody's
//! business.

mod cgroup;
mod mounts;
mod stat;

use berth_kernel::ports::Processes;
use berth_kernel::process::{Owner, Sight, Unseen, Who};
use parking_lot::Mutex;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::{File, read_link};
use std::io::{self, ErrorKind, Read};
use std::path::{Path, PathBuf};

/// The first PID namespace of every Linux system: the host's. `PROC_PID_INIT_INO` of the kernel's
/// `include/linux/proc_ns.h`, `PID_NS_INIT_INO` of its `linux/nsfs.h`.
const HOST_PID_NAMESPACE: &str = "pid:[4026531836]";

/// Most processes that one look asks about: 128 on each of 16 GPUs. At 5 us a `stat` file that is 10 ms
/// every five seconds.
const ASKED_MAX: usize = 2048;
/// Most bytes read of a `stat` file: 52 numbers and a name of at most 64 bytes.
const STAT_BYTES_MAX: u64 = 4 * 1024;
/// Most bytes read of a `cgroup` file: a dozen v1 hierarchies with a path of at most 4 KiB, of which
/// the first ones suffice.
const CGROUP_BYTES_MAX: u64 = 16 * 1024;
/// Most bytes read of a `mountinfo` file: a container has some dozen mounts of 200 bytes; the one that
/// matters is among the first that the kubelet asked for.
const MOUNTS_BYTES_MAX: u64 = 256 * 1024;

/// The node's `/proc` as the port [`Processes`].
pub struct ProcFs {
    root: PathBuf,
    /// Names of daemons, cut as the kernel cuts them.
    ignore: BTreeSet<String>,
    /// Who was found, by process id and start: from the second look on, a process costs one `stat`.
    known: Mutex<BTreeMap<u32, (u64, Who)>>,
}

impl ProcFs {
    /// Over the `/proc` at `root`. Processes that are called as one of `ignore` are marked so; the
    /// kernel keeps the first 15 bytes of a name, so only those are compared.
    #[must_use]
    pub fn new(root: PathBuf, ignore: &[String]) -> Self {
        let ignore = ignore.iter().map(|name| stat::cut(name).to_owned()).collect();
        Self { root, ignore, known: Mutex::default() }
    }

    fn one(&self, pid: u32, known: Option<&(u64, Who)>) -> Result<(u64, Who), Unseen> {
        let folder = self.root.join(pid.to_string());
        let before = self.stat(&folder)?;
        if let Some((started, who)) = known
            && *started == before.started_ticks
        {
            return Ok((*started, who.clone()));
        }
        let text = text(&folder.join("cgroup"), CGROUP_BYTES_MAX).map_err(|error| unseen(&error))?;
        let mut owner = cgroup::owner(&text);
        if let Owner::Pod(pod) = &mut owner {
            // Not every pod's mounts can be read, or tell: then the pod is known and the container is not.
            let mounts = text_or_nothing(&folder.join("mountinfo"), MOUNTS_BYTES_MAX);
            pod.container = mounts::container(&mounts, &pod.uid);
        }
        // What was read between two looks at the start is of one process, not of two with one id.
        let after = self.stat(&folder)?;
        if after.started_ticks != before.started_ticks {
            return Err(Unseen::Gone);
        }
        let who = Who {
            ignored: self.ignore.contains(&before.name),
            name: Some(before.name),
            started_ticks: Some(before.started_ticks),
            owner,
        };
        Ok((before.started_ticks, who))
    }

    fn stat(&self, folder: &Path) -> Result<stat::Stat, Unseen> {
        let text = text(&folder.join("stat"), STAT_BYTES_MAX).map_err(|error| unseen(&error))?;
        stat::parse(&text).ok_or(Unseen::Unreadable)
    }
}

impl Processes for ProcFs {
    fn sight(&self) -> Sight {
        match read_link(self.root.join("self/ns/pid")) {
            Ok(own) if own.as_os_str() == HOST_PID_NAMESPACE => Sight::Visible,
            Ok(own) => Sight::Hidden {
                why: format!(
                    "berth runs in a PID namespace of its own ({}, the host's is {HOST_PID_NAMESPACE}): NVML tells it \
                     process ids of the host, or leaves those processes out",
                    own.display()
                ),
                fix: "set hostPID: true in the pod template of berth's DaemonSet".into(),
            },
            Err(error) => Sight::Unsupported {
                why: format!("{} cannot be read: {error}", self.root.join("self/ns/pid").display()),
            },
        }
    }

    fn who(&self, pids: &BTreeSet<u32>) -> BTreeMap<u32, Who> {
        let unknown = |unseen| Who { owner: Owner::Unknown(unseen), ..Who::default() };
        match self.sight() {
            Sight::Visible => {}
            Sight::Hidden { .. } => return pids.iter().map(|pid| (*pid, unknown(Unseen::Hidden))).collect(),
            Sight::Unsupported { .. } => {
                return pids.iter().map(|pid| (*pid, unknown(Unseen::Unreadable))).collect();
            }
        }
        // What a panic left behind is some identities, each of them whole.
        let mut known = self.known.lock();
        let mut found = BTreeMap::new();
        let mut answer = BTreeMap::new();
        for (asked, pid) in pids.iter().enumerate() {
            let one = if asked < ASKED_MAX { self.one(*pid, known.get(pid)) } else { Err(Unseen::TooMany) };
            answer.insert(
                *pid,
                one.map_or_else(unknown, |(started, who)| {
                    found.insert(*pid, (started, who.clone()));
                    who
                }),
            );
        }
        *known = found;
        answer
    }
}

/// A file's beginning. `/proc` shows bytes that need not be UTF-8 (names are the processes' own).
fn text(path: &Path, bytes_max: u64) -> io::Result<String> {
    let mut bytes = Vec::new();
    File::open(path)?.take(bytes_max).read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

fn text_or_nothing(path: &Path, bytes_max: u64) -> String {
    text(path, bytes_max).unwrap_or_default()
}

fn unseen(error: &io::Error) -> Unseen {
    // A process that ends while its files are open answers ESRCH.
    let gone = error.kind() == ErrorKind::NotFound
        || error.raw_os_error() == Some(rustix::io::Errno::SRCH.raw_os_error());
    if gone { Unseen::Gone } else { Unseen::Unreadable }
}

#[cfg(test)]
mod tests;
