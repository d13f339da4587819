//! Processes on GPUs: NVML's data, their identity by the node's `/proc`, and when they were first seen.
//! [`crate::evidence::attribution`] relates them to allocations.

use crate::ids::names::{GpuId, PartId};
use crate::ids::time::Now;
use std::collections::BTreeMap;

/// Most processes of one GPU that are tracked: two for each of 128 shares. Others are only counted, in
/// [`crate::hardware::gpu::Usage`].
pub const PROCESSES_PER_GPU_MAX: usize = 256;

/// One process on one part.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Process {
    /// Its id, in the PID namespace of the backend.
    pub pid: u32,
    /// The MIG instance if NVML reports it, otherwise the GPU.
    pub part: PartId,
    /// What it uses the part for.
    pub uses: Uses,
    /// Its memory there, MiB; `None` where NVML does not report it.
    pub memory_mib: Option<u64>,
    /// Its identity.
    pub identity: ProcessIdentity,
}

/// What a process uses a GPU for. NVML has a list for each kind; a process can be in several.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Uses {
    /// It has a compute context (CUDA).
    pub compute: bool,
    /// It is a client of MPS.
    pub mps: bool,
    /// It has a graphics context (OpenGL, Vulkan, a display server).
    pub graphics: bool,
}

impl Uses {
    /// The union of both.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        Self {
            compute: self.compute || other.compute,
            mps: self.mps || other.mps,
            graphics: self.graphics || other.graphics,
        }
    }

    pub(crate) fn is_graphics_only(self) -> bool {
        self.graphics && !self.compute && !self.mps
    }
}

/// The identity of a process.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ProcessIdentity {
    /// Its command name, as `ps -o comm` shows it: at most 15 bytes. A process may set any name.
    pub name: Option<String>,
    /// Its start time, in the kernel's clock ticks since boot: distinguishes it from a later process with
    /// the same id.
    pub started_ticks: Option<u64>,
    /// Its owner.
    pub owner: Owner,
    /// Whether the configuration ignores its name (`processes.ignore`).
    pub ignored: bool,
}

/// The owner of a process, by its cgroup.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Owner {
    /// A container of a pod.
    Pod(PodProcess),
    /// The host, or a container that is not of a pod.
    NoPod {
        /// That container's id.
        container_id: Option<String>,
    },
    /// Not known.
    Unknown(UnknownReason),
}

impl Default for Owner {
    fn default() -> Self {
        Self::Unknown(UnknownReason::NotLookedUp)
    }
}

impl Owner {
    /// The process's pod, if it is in one.
    #[must_use]
    pub fn pod(&self) -> Option<&PodProcess> {
        match self {
            Self::Pod(pod) => Some(pod),
            Self::NoPod { .. } | Self::Unknown(_) => None,
        }
    }
}

/// A process in a pod.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PodProcess {
    /// The pod's UID in the name of its cgroup: for a static pod the hash of its manifest, which its
    /// mirror at the API server has as annotation `kubernetes.io/config.hash`.
    pub uid: String,
    /// The container's id at its runtime.
    pub container_id: Option<String>,
    /// The container's name in the pod, if its mounts show it.
    pub container: Option<String>,
}

/// Why the owner of a process is not known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UnknownReason {
    /// It was not looked up in `/proc`.
    NotLookedUp,
    /// The daemon's process ids differ from NVML's: see [`ProcessVisibility::Hidden`].
    Hidden,
    /// The process does not exist (any more); NVML may list a context whose process has exited.
    Gone,
    /// Its files in `/proc` cannot be read.
    Unreadable,
    /// One scan resolves fewer processes than there are.
    TooMany,
}

impl UnknownReason {
    /// One sentence for people.
    #[must_use]
    pub fn describe(self) -> &'static str {
        match self {
            Self::NotLookedUp => "its owner has not been looked up",
            Self::Hidden => "its owner is not visible: the daemon is in a PID namespace of its own",
            Self::Gone => {
                "NVML lists it, but there is no such process: it exited, or its context was left behind"
            }
            Self::Unreadable => "its owner cannot be read from /proc",
            Self::TooMany => "there are more processes on the GPUs than one scan resolves",
        }
    }
}

/// Whether the daemon can identify the owners of processes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ProcessVisibility {
    /// NVML's process ids are those of the daemon's `/proc`.
    Visible,
    /// They are not, or NVML omits processes that the daemon may not see: an empty list does not mean
    /// that there are none.
    Hidden {
        /// The reason.
        why: String,
        /// How to fix it.
        fix: String,
    },
    /// The backend does not list processes.
    Unsupported {
        /// The reason.
        why: String,
    },
}

impl Default for ProcessVisibility {
    fn default() -> Self {
        Self::Unsupported { why: "the GPUs have not been scanned yet".into() }
    }
}

/// A process in the ledger.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TrackedProcess {
    /// The process.
    pub process: Process,
    /// When it was first seen.
    pub first: Now,
    /// Since when no allocation explains it; `None` while one does, or if its name is ignored.
    pub unexplained_since: Option<Now>,
    /// Whether that has lasted long enough to be reported as a bypass.
    pub is_reported: bool,
}

/// All processes of the newest scan.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ProcessTable {
    /// Whether their owners are visible.
    pub process_visibility: ProcessVisibility,
    /// Whether the lists are complete even if owners are not visible.
    pub complete: bool,
    /// Processes by GPU, including those of its MIG instances. A GPU without an entry does not list its
    /// processes.
    pub by_gpu: BTreeMap<GpuId, Vec<TrackedProcess>>,
}
