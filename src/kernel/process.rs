//! Processes on GPUs: what NVML tells of them, who they are by the node's `/proc`, and since when
//! they are seen. Whose allocation they use is [`super::belongs`].

use super::belongs::{Belongs, explained};
use super::gpu::Inventory;
use super::ledger::Ledger;
use super::names::PartId;
use super::time::Now;
use std::collections::{BTreeMap, BTreeSet};

/// Most processes of one GPU that are told one by one: two for each of 128 shares. What is beyond
/// still counts in [`super::gpu::Usage`].
pub const PROCESSES_PER_GPU_MAX: usize = 256;

/// One process on one part.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Process {
    /// Its id, in the PID namespace that the backend speaks of.
    pub pid: u32,
    /// The MIG instance, where NVML names one; else the GPU.
    pub part: PartId,
    /// What it uses the part for.
    pub uses: Uses,
    /// Memory that it has there, MiB; `None` where NVML does not say.
    pub memory_mib: Option<u64>,
    /// Who it is.
    pub who: Who,
}

/// What a process uses a GPU for. NVML lists each kind apart; one process can be in several lists.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Uses {
    /// It has a compute context (CUDA).
    pub compute: bool,
    /// It is a client of MPS.
    pub mps: bool,
    /// It draws (OpenGL, Vulkan, a display server).
    pub graphics: bool,
}

impl Uses {
    /// Both together.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        Self {
            compute: self.compute || other.compute,
            mps: self.mps || other.mps,
            graphics: self.graphics || other.graphics,
        }
    }

    fn only_draws(self) -> bool {
        self.graphics && !self.compute && !self.mps
    }
}

/// Who a process is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Who {
    /// Its command name, as `ps -o comm` shows it: at most 15 bytes. Every process chooses its own.
    pub name: Option<String>,
    /// When it started, in the kernel's clock ticks since boot: tells a process from a later one with
    /// the same id.
    pub started_ticks: Option<u64>,
    /// Whose it is.
    pub owner: Owner,
    /// Its name is among those that the configuration ignores (`processes.ignore`).
    pub ignored: bool,
}

/// Whose a process is, by its cgroup.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Owner {
    /// A container of a pod.
    Pod(PodProcess),
    /// No pod: the host itself, or a container that no kubelet started.
    NoPod {
        /// That container's id.
        container_id: Option<String>,
    },
    /// Nobody could tell.
    Unknown(Unseen),
}

impl Default for Owner {
    fn default() -> Self {
        Self::Unknown(Unseen::NotAsked)
    }
}

impl Owner {
    /// The pod, if it is one's.
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
    /// The pod's UID, as the kubelet names its cgroup: for a static pod that is the hash of its
    /// manifest, which its mirror at the API server has as annotation `kubernetes.io/config.hash`.
    pub uid: String,
    /// The container's id at its runtime.
    pub container_id: Option<String>,
    /// The container's name in the pod, where its mounts show it.
    pub container: Option<String>,
}

/// Why nobody could tell whose a process is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unseen {
    /// The backend's list was not held against `/proc`.
    NotAsked,
    /// The daemon sees other process ids than NVML tells: see [`Sight::Hidden`].
    Hidden,
    /// There is no such process (any more); NVML may list a context whose process has died.
    Gone,
    /// `/proc` did not say.
    Unreadable,
    /// More processes than one look asks about.
    TooMany,
}

impl Unseen {
    /// In words.
    #[must_use]
    pub fn words(self) -> &'static str {
        match self {
            Self::NotAsked => "nobody has asked whose it is",
            Self::Hidden => "whose it is cannot be seen: the daemon is in a PID namespace of its own",
            Self::Gone => {
                "NVML lists it, and there is no such process: it ended, or its context was left behind"
            }
            Self::Unreadable => "whose it is cannot be read from /proc",
            Self::TooMany => "more processes are on the GPUs than one look asks about",
        }
    }
}

/// How far the daemon can tell whose processes are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Sight {
    /// NVML's process ids are those of the daemon's `/proc`.
    Visible,
    /// They are not, or NVML leaves out what the daemon may not see: a list without processes does
    /// not mean that there are none.
    Hidden {
        /// Why.
        why: String,
        /// What to do.
        fix: String,
    },
    /// Processes are not told at all.
    Unsupported {
        /// Why.
        why: String,
    },
}

impl Default for Sight {
    fn default() -> Self {
        Self::Unsupported { why: "nobody has looked yet".into() }
    }
}

/// One process as the ledger keeps it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Seen {
    /// It.
    pub process: Process,
    /// When it was first seen.
    pub first: Now,
    /// Since when no allocation explains it; `None` while one does, or its name is ignored.
    pub alone_since: Option<Now>,
    /// Whether that has lasted so long that it is told as a bypass.
    pub told: bool,
}

/// All processes of the newest look.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ProcessTable {
    /// How far one can tell whose they are.
    pub sight: Sight,
    /// Whether none means none even where whose they are is hidden.
    pub complete: bool,
    /// By GPU, those of its MIG instances among them. A GPU that is not here does not tell.
    pub on: BTreeMap<PartId, Vec<Seen>>,
}

impl ProcessTable {
    /// The table after a look: who was seen before keeps since when. What nothing explains for
    /// `grace_ms` is told.
    #[must_use]
    pub fn after_look(ledger: &Ledger, inventory: &Inventory, grace_ms: u64, now: Now) -> Self {
        let on = inventory.processes.iter().map(|(gpu, processes)| {
            let known = ledger.processes.on.get(gpu).map_or(&[][..], Vec::as_slice);
            let known: BTreeMap<_, _> = known.iter().map(|seen| (key(&seen.process), seen)).collect();
            let seen = processes.iter().take(PROCESSES_PER_GPU_MAX).map(|process| {
                let before = known.get(&key(process));
                let alone = explained(ledger, gpu, process).is_none();
                let alone_since = alone.then(|| before.and_then(|b| b.alone_since).unwrap_or(now));
                Seen {
                    process: process.clone(),
                    first: before.map_or(now, |b| b.first),
                    alone_since,
                    told: alone_since.is_some_and(|since| now.passed(since.mono_ms, grace_ms)),
                }
            });
            (gpu.clone(), seen.collect())
        });
        Self { sight: inventory.sight.clone(), complete: inventory.processes_complete, on: on.collect() }
    }

    /// How many processes keep a part busy; `None` where that cannot be seen. For a GPU those of all
    /// its instances.
    #[must_use]
    pub fn count(&self, ledger: &Ledger, part: &PartId) -> Option<u32> {
        let gpu = ledger.part(part).map_or(part, |p| p.part.gpu());
        let seen = self.on.get(gpu)?;
        let here = |seen: &&Seen| part == gpu || seen.process.part == *part;
        let busy = seen.iter().filter(here).filter(|s| keeps_busy(ledger, gpu, &s.process));
        let pids: BTreeSet<u32> = busy.map(|s| s.process.pid).collect();
        // Where it is not told in which PID namespace the daemon is, NVML may leave processes out, too.
        let hides = pids.is_empty() && !self.complete && self.sight != Sight::Visible;
        (!hides).then(|| u32::try_from(pids.len()).unwrap_or(u32::MAX))
    }
}

/// What tells one process on a GPU from another.
fn key(process: &Process) -> (u32, &PartId, Option<u64>) {
    (process.pid, &process.part, process.who.started_ticks)
}

/// Whether a process stands in the way of a GPU that is to be drained. The daemons of the
/// configuration's list do not, nor does a display server of the host, which would keep its GPU for
/// ever. What an allocation explains always does, whatever it calls itself.
fn keeps_busy(ledger: &Ledger, gpu: &PartId, process: &Process) -> bool {
    match explained(ledger, gpu, process) {
        Some(Belongs::To(_) | Belongs::Among(_)) => true,
        Some(Belongs::Ignored) => false,
        Some(Belongs::Perhaps(_) | Belongs::Nobody(_)) | None => {
            !process.uses.only_draws() || process.who.owner.pod().is_some()
        }
    }
}

impl Ledger {
    /// Processes that use a part, by the newest look; `None` where they cannot be seen. Where the
    /// backend only counts, what it counts.
    #[must_use]
    pub fn processes_on(&self, part: &PartId) -> Option<u32> {
        let gpu = self.part(part).map_or(part, |p| p.part.gpu());
        if self.processes.on.contains_key(gpu) {
            return self.processes.count(self, part);
        }
        self.usage.get(part).map(|u| u.processes)
    }

    /// How far one can tell whose the processes on this node's GPUs are.
    #[must_use]
    pub fn sight(&self) -> Sight {
        let untold = self.processes.on.is_empty() && self.parts.values().any(|p| p.present);
        if untold && self.processes.sight == Sight::Visible {
            return Sight::Unsupported { why: "no GPU of this node tells its processes one by one".into() };
        }
        self.processes.sight.clone()
    }
}

#[cfg(test)]
mod tests;
