//! Whose allocation a process uses, and who uses a GPU without one (`bypass`). Pure, and on the
//! newest ledger: a holder that is learned a second later explains a process a second later.

use super::allocation::Allocation;
use super::history::Past;
use super::ledger::Ledger;
use super::names::{AllocationId, PartId};
use super::pod_bypass::PodBypass;
use super::pods::{Pod, Stage};
use super::process::{Owner, PodProcess, Process, Seen, Unseen};
use std::collections::{BTreeMap, BTreeSet};

/// Whose a process on a GPU is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Belongs {
    /// It uses this allocation.
    To(AllocationId),
    /// It uses one of these, all of one pod: its containers share the GPU, and which of them the
    /// process is in cannot be told.
    Among(Vec<AllocationId>),
    /// It may use one of these: whose they are, or whose it is, is not known (yet).
    Perhaps(Vec<AllocationId>),
    /// A daemon that the configuration ignores.
    Ignored,
    /// No allocation explains it.
    Nobody(Reason),
}

/// Why no allocation explains a process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reason {
    /// Its pod holds nothing on this node.
    PodHoldsNothing {
        /// How its spec lets it reach GPUs all the same, where a source shows that.
        by: Option<PodBypass>,
    },
    /// Its pod holds other GPUs, or other parts of this one.
    PodHoldsOthers {
        /// How its spec lets it reach further ones, where a source shows that.
        by: Option<PodBypass>,
    },
    /// Another container of its pod holds the GPU.
    ContainerHoldsNothing {
        /// The container that it runs in.
        container: String,
    },
    /// Its pod's allocation has ended, and it runs on.
    Leftover {
        /// The allocation.
        allocation: AllocationId,
    },
    /// It is in no pod.
    HostProcess,
    /// Whose it is cannot be seen, and nobody holds the GPU.
    Unknown(Unseen),
}

impl Reason {
    /// As the API writes it.
    #[must_use]
    pub fn as_str(&self) -> &'static str {
        match self {
            Self::PodHoldsNothing { .. } => "podHoldsNothing",
            Self::PodHoldsOthers { .. } => "podHoldsOthers",
            Self::ContainerHoldsNothing { .. } => "containerHoldsNothing",
            Self::Leftover { .. } => "leftover",
            Self::HostProcess => "hostProcess",
            Self::Unknown(_) => "unknown",
        }
    }

    /// In words, with what it usually comes from.
    #[must_use]
    pub fn words(&self) -> String {
        match self {
            Self::PodHoldsNothing { by } => {
                format!("its pod was granted no GPU of this node: {}", how(by.as_ref()))
            }
            Self::PodHoldsOthers { by } => {
                format!(
                    "its pod was granted other GPUs or parts and reaches this one, too: {}",
                    how(by.as_ref())
                )
            }
            Self::ContainerHoldsNothing { container } => {
                format!(
                    "its container {container} was granted none of this GPU; another container of the pod was"
                )
            }
            Self::Leftover { allocation } => {
                format!(
                    "its allocation {allocation} has ended, and it still runs: its pod was deleted by force, or dies slowly"
                )
            }
            Self::HostProcess => {
                "it is in no pod: it was started on the host, or by another container runtime".into()
            }
            Self::Unknown(unseen) => unseen.words().into(),
        }
    }
}

fn how(by: Option<&PodBypass>) -> String {
    by.map_or_else(
        || "it sets NVIDIA_VISIBLE_DEVICES itself, is privileged, or mounts the devices".into(),
        PodBypass::words,
    )
}

/// A process that uses a GPU without an allocation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bypass {
    /// Why nothing explains it.
    pub reason: Reason,
    /// Since when that is so, milliseconds since 1970.
    pub since_wall_ms: u64,
    /// The GPU.
    pub gpu: PartId,
    /// The process.
    pub process: Process,
}

/// Whose a process on `gpu` is.
#[must_use]
pub fn belongs(ledger: &Ledger, gpu: &PartId, process: &Process) -> Belongs {
    explained(ledger, gpu, process).unwrap_or_else(|| Belongs::Nobody(reason(ledger, gpu, process)))
}

/// Whose a process on `gpu` is, or `None` where it is nobody's. Why it is nobody's may have to be
/// looked for among all ended allocations, and a look asks this of every process.
pub(super) fn explained(ledger: &Ledger, gpu: &PartId, process: &Process) -> Option<Belongs> {
    let here = holders(ledger, gpu, &process.part);
    match &process.who.owner {
        Owner::Pod(pod) => {
            let mine: Vec<_> = here.iter().copied().filter(|a| of_pod(a, &pod.uid)).collect();
            let unheld = |a: &&Allocation| a.holder.pod_uid.is_none();
            let nameless: Vec<_> = here.iter().copied().filter(unheld).map(|a| a.id).collect();
            if !mine.is_empty() {
                within_pod(&mine, pod)
            } else if !nameless.is_empty() {
                Some(Belongs::Perhaps(nameless))
            } else {
                process.who.ignored.then_some(Belongs::Ignored)
            }
        }
        _ if process.who.ignored => Some(Belongs::Ignored),
        Owner::NoPod { .. } => None,
        Owner::Unknown(_) if here.is_empty() => None,
        Owner::Unknown(_) => Some(Belongs::Perhaps(here.iter().map(|a| a.id).collect())),
    }
}

/// Why a process is nobody's, by [`explained`].
fn reason(ledger: &Ledger, gpu: &PartId, process: &Process) -> Reason {
    match &process.who.owner {
        Owner::Pod(pod) => {
            let mine = || holders(ledger, gpu, &process.part).into_iter().any(|a| of_pod(a, &pod.uid));
            match &pod.container {
                Some(container) if mine() => Reason::ContainerHoldsNothing { container: container.clone() },
                _ => stranger(ledger, gpu, &pod.uid),
            }
        }
        Owner::NoPod { .. } => Reason::HostProcess,
        Owner::Unknown(unseen) => Reason::Unknown(*unseen),
    }
}

/// Everybody on the GPUs of one snapshot, and whose they are: found once, for many questions.
pub struct Owners<'l> {
    /// The snapshot.
    pub ledger: &'l Ledger,
    on: BTreeMap<&'l PartId, Vec<(&'l Seen, Belongs)>>,
}

impl<'l> Owners<'l> {
    /// Of the newest look, by the newest ledger.
    #[must_use]
    pub fn of(ledger: &'l Ledger) -> Self {
        let on = ledger.processes.on.iter().map(|(gpu, all)| {
            (gpu, all.iter().map(|seen| (seen, belongs(ledger, gpu, &seen.process))).collect())
        });
        Self { ledger, on: on.collect() }
    }

    /// Who is on a GPU, those on its instances among them; `None` where it does not tell.
    #[must_use]
    pub fn on(&self, gpu: &PartId) -> Option<&[(&'l Seen, Belongs)]> {
        self.on.get(gpu).map(Vec::as_slice)
    }

    /// Every use of the node's GPUs that nothing explains for so long that it is told, GPU by GPU.
    #[must_use]
    pub fn bypasses(&self) -> Vec<Bypass> {
        let all = self.on.iter().flat_map(|(gpu, all)| all.iter().map(move |one| (*gpu, one)));
        let told = all.filter_map(|(gpu, (seen, whose))| {
            // Whose it is may have been learned since that look.
            let Belongs::Nobody(reason) = whose else { return None };
            let since = seen.alone_since.filter(|_| seen.told)?;
            Some(Bypass {
                reason: reason.clone(),
                since_wall_ms: since.wall_ms,
                gpu: gpu.clone(),
                process: seen.process.clone(),
            })
        });
        told.collect()
    }
}

/// Pods of this node whose spec lets them reach GPUs past every grant, whether or not they do. Empty
/// where no source shows pods.
pub fn reaching(ledger: &Ledger) -> impl Iterator<Item = (&Pod, &PodBypass)> {
    let pods = ledger.pods.iter().flat_map(|view| view.pods.values());
    let alive = pods.filter(|pod| pod.stage != Stage::Finished);
    alive.filter_map(|pod| Some((pod.as_ref(), pod.bypass.as_ref()?)))
}

/// The live allocations that may be behind a process on `part` of `gpu`: those of that part, and, since
/// NVML does not always name the instance, those of the whole GPU or of all its instances.
fn holders<'l>(ledger: &'l Ledger, gpu: &PartId, part: &PartId) -> Vec<&'l Allocation> {
    let split = part == gpu && ledger.part(gpu).is_none_or(|p| p.part.mig_enabled);
    let ids: BTreeSet<AllocationId> = if split {
        let parts = ledger.parts.values().filter(|p| p.part.gpu() == gpu);
        parts.flat_map(|p| p.devices.values()).flat_map(|d| d.holders.iter().copied()).collect()
    } else {
        let parts = BTreeSet::from([part, gpu]).into_iter().filter_map(|id| ledger.part(id));
        parts.flat_map(|p| p.devices.values()).flat_map(|d| d.holders.iter().copied()).collect()
    };
    ids.iter().filter_map(|id| ledger.live.get(id)).map(AsRef::as_ref).collect()
}

fn of_pod(allocation: &Allocation, uid: &str) -> bool {
    allocation.holder.pod_uid.as_deref() == Some(uid)
}

/// Which of a pod's allocations a process of that pod uses; `None` if other containers hold them.
fn within_pod(mine: &[&Allocation], pod: &PodProcess) -> Option<Belongs> {
    let held_by = |container: &Option<String>| -> Vec<&Allocation> {
        mine.iter().filter(|a| a.holder.container == *container).copied().collect()
    };
    let candidates = match &pod.container {
        None => mine.to_vec(),
        Some(_) => match (held_by(&pod.container), held_by(&None)) {
            (named, _) if !named.is_empty() => named,
            (_, nameless) if !nameless.is_empty() => nameless,
            _ => return None,
        },
    };
    // An older grant of the same devices to the same container has a newer one over it (I7).
    let newest: Vec<_> = candidates.iter().filter(|a| !a.overlapped).map(|a| a.id).collect();
    Some(match newest.as_slice() {
        [] => Belongs::Among(candidates.iter().map(|a| a.id).collect()),
        [only] => Belongs::To(*only),
        _ => Belongs::Among(newest),
    })
}

/// Why nothing explains a process of a pod.
fn stranger(ledger: &Ledger, gpu: &PartId, uid: &str) -> Reason {
    let on_gpu = |past: &Past<'_>| {
        past.devices().iter().any(|d| ledger.part(&d.part).map_or(&d.part, |p| p.part.gpu()) == gpu)
    };
    if let Some(ended) = ledger.ended.iter().rev().find(|past| past.pod_uid() == Some(uid) && on_gpu(past)) {
        return Reason::Leftover { allocation: ended.id };
    }
    let by = ledger.pods.as_ref().and_then(|view| view.pods.get(uid)?.bypass.clone());
    match ledger.live.values().any(|a| of_pod(a, uid)) {
        true => Reason::PodHoldsOthers { by },
        false => Reason::PodHoldsNothing { by },
    }
}

#[cfg(test)]
pub(crate) mod tests;
