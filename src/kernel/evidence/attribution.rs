//! Which allocation a process uses, and which processes use a GPU without one (`bypass`). The answer
//! depends only on the newest ledger: a holder that a source shows later explains a process from then on.

use crate::evidence::pods::{Pod, PodBypass, Stage};
use crate::grants::allocation::Allocation;
use crate::grants::claim::ClaimRequest;
use crate::grants::history::EndedAllocation;
use crate::hardware::process::{Owner, PodProcess, Process, TrackedProcess, UnknownReason};
use crate::ids::names::{AllocationId, GpuId, PartId};
use crate::node::ledger::Ledger;
use std::collections::{BTreeMap, BTreeSet};

/// The relation of a process on a GPU to the live allocations.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Attribution {
    /// It uses this allocation.
    To(AllocationId),
    /// It uses one of these, all of one pod: the pod's containers share the GPU, and the process's
    /// container is not known.
    OneOf(Vec<AllocationId>),
    /// It may use one of these: their holders, or the process's owner, are not known (yet).
    Possibly(Vec<AllocationId>),
    /// It has the name of a process that the configuration ignores.
    Ignored,
    /// No allocation explains it.
    Unexplained(Reason),
}

/// Why no allocation explains a process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reason {
    /// Its pod holds nothing on this node.
    PodHoldsNothing {
        /// How the pod's spec gives access to GPUs without a grant, where a source shows that.
        by: Option<PodBypass>,
    },
    /// Its pod holds other GPUs, or other parts of this one.
    PodHoldsOthers {
        /// How the pod's spec gives access to more GPUs, where a source shows that.
        by: Option<PodBypass>,
    },
    /// Another container of its pod holds the GPU.
    ContainerHoldsNothing {
        /// The process's container.
        container: String,
    },
    /// Its pod's allocation has ended, and it still runs.
    Leftover {
        /// The allocation.
        allocation: AllocationId,
    },
    /// It is in no pod.
    HostProcess,
    /// Its owner cannot be determined, and no allocation holds the GPU.
    Unknown(UnknownReason),
}

impl Reason {
    /// Its value in the API.
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

    /// A sentence for people, with the usual cause.
    #[must_use]
    pub fn describe(&self) -> String {
        match self {
            Self::PodHoldsNothing { by } => {
                format!("its pod was granted no GPU of this node: {}", bypass_cause(by.as_ref()))
            }
            Self::PodHoldsOthers { by } => {
                format!(
                    "its pod was granted other GPUs or parts and also uses this one: {}",
                    bypass_cause(by.as_ref())
                )
            }
            Self::ContainerHoldsNothing { container } => {
                format!(
                    "its container {container} was granted none of this GPU; another container of the pod was"
                )
            }
            Self::Leftover { allocation } => {
                format!(
                    "its allocation {allocation} has ended, and it still runs: its pod was force-deleted, or is slow to terminate"
                )
            }
            Self::HostProcess => {
                "it is in no pod: it was started on the host, or by another container runtime".into()
            }
            Self::Unknown(unseen) => unseen.describe().into(),
        }
    }
}

fn bypass_cause(by: Option<&PodBypass>) -> String {
    by.map_or_else(
        || "it sets NVIDIA_VISIBLE_DEVICES itself, is privileged, or mounts the devices".into(),
        PodBypass::describe,
    )
}

/// A process that uses a GPU without an allocation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bypass {
    /// Why no allocation explains it.
    pub reason: Reason,
    /// Since when no allocation explains it, milliseconds since 1970.
    pub since_wall_ms: u64,
    /// The GPU.
    pub gpu: GpuId,
    /// The process.
    pub process: Process,
}

/// The relation of a process on `gpu` to the live allocations.
#[must_use]
pub fn attribute_process(ledger: &Ledger, gpu: &GpuId, process: &Process) -> Attribution {
    find_attribution(ledger, gpu, process)
        .unwrap_or_else(|| Attribution::Unexplained(unexplained_reason(ledger, gpu, process)))
}

/// As [`attribute_process`], but `None` where no allocation explains the process. The reason is left out because it
/// may need a search of all ended allocations, and each inventory scan calls this for every process.
pub(crate) fn find_attribution(ledger: &Ledger, gpu: &GpuId, process: &Process) -> Option<Attribution> {
    let candidates = holders(ledger, gpu, &process.part);
    match &process.identity.owner {
        Owner::Pod(pod) => {
            let of_same_pod: Vec<_> =
                candidates.iter().copied().filter(|a| is_held_by(a, &pod.uid)).collect();
            let may_have_unrecorded_pods = |a: &&Allocation| {
                a.pod_uids().next().is_none()
                    || a.origin.claim().is_some_and(ClaimRequest::may_have_more_pods)
            };
            let possible: Vec<_> =
                candidates.iter().copied().filter(may_have_unrecorded_pods).map(|a| a.id).collect();
            if !of_same_pod.is_empty() {
                select_within_pod(&of_same_pod, pod)
            } else if !possible.is_empty() {
                Some(Attribution::Possibly(possible))
            } else {
                process.identity.ignored.then_some(Attribution::Ignored)
            }
        }
        _ if process.identity.ignored => Some(Attribution::Ignored),
        Owner::NoPod { .. } => None,
        Owner::Unknown(_) if candidates.is_empty() => None,
        Owner::Unknown(_) => Some(Attribution::Possibly(candidates.iter().map(|a| a.id).collect())),
    }
}

/// Why no allocation explains a process for which [`find_attribution`] is `None`.
fn unexplained_reason(ledger: &Ledger, gpu: &GpuId, process: &Process) -> Reason {
    match &process.identity.owner {
        Owner::Pod(pod) => {
            let pod_holds_part =
                || holders(ledger, gpu, &process.part).into_iter().any(|a| is_held_by(a, &pod.uid));
            match &pod.container {
                Some(container) if pod_holds_part() => {
                    Reason::ContainerHoldsNothing { container: container.clone() }
                }
                _ => unexplained_pod_reason(ledger, gpu, &pod.uid),
            }
        }
        Owner::NoPod { .. } => Reason::HostProcess,
        Owner::Unknown(unseen) => Reason::Unknown(*unseen),
    }
}

/// All processes on the GPUs of one snapshot with their allocations, computed once for many queries.
pub struct Attributions<'l> {
    /// The snapshot.
    pub ledger: &'l Ledger,
    on: BTreeMap<&'l GpuId, Vec<(&'l TrackedProcess, Attribution)>>,
}

impl<'l> Attributions<'l> {
    /// Attributes the processes of the ledger's newest inventory scan.
    #[must_use]
    pub fn new(ledger: &'l Ledger) -> Self {
        let on = ledger.processes.by_gpu.iter().map(|(gpu, processes)| {
            (
                gpu,
                processes.iter().map(|seen| (seen, attribute_process(ledger, gpu, &seen.process))).collect(),
            )
        });
        Self { ledger, on: on.collect() }
    }

    /// The processes on a GPU and its instances; `None` where the GPU does not list its processes.
    #[must_use]
    pub fn on(&self, gpu: &GpuId) -> Option<&[(&'l TrackedProcess, Attribution)]> {
        self.on.get(gpu).map(Vec::as_slice)
    }

    /// All processes that no allocation has explained for the grace period, in the order of the GPUs.
    #[must_use]
    pub fn bypasses(&self) -> Vec<Bypass> {
        let processes =
            self.on.iter().flat_map(|(gpu, on_gpu)| on_gpu.iter().map(move |process| (*gpu, process)));
        let bypasses = processes.filter_map(|(gpu, (seen, attribution))| {
            // A holder may have become known since the scan.
            let Attribution::Unexplained(reason) = attribution else { return None };
            let since = seen.unexplained_since.filter(|_| seen.is_reported)?;
            Some(Bypass {
                reason: reason.clone(),
                since_wall_ms: since.wall_ms,
                gpu: gpu.clone(),
                process: seen.process.clone(),
            })
        });
        bypasses.collect()
    }
}

/// Pods of this node whose spec gives access to GPUs without a grant, whether or not they use it. Empty
/// where no source shows pods.
pub fn pods_with_gpu_bypass(ledger: &Ledger) -> impl Iterator<Item = (&Pod, &PodBypass)> {
    let pods = ledger.pods.iter().flat_map(|view| view.pods.values());
    let unfinished = pods.filter(|pod| pod.stage != Stage::Finished);
    unfinished.filter_map(|pod| Some((pod.as_ref(), pod.bypass.as_ref()?)))
}

/// The live allocations that a process on `part` of `gpu` may use: those of that part and, because NVML does
/// not always name the instance, those of the whole GPU or of all its instances.
fn holders<'l>(ledger: &'l Ledger, gpu: &GpuId, part: &PartId) -> Vec<&'l Allocation> {
    let split = part == gpu.as_part() && ledger.part(part).is_none_or(|p| p.part.mig_enabled);
    if split {
        return ledger.allocations_on(ledger.parts_of(gpu));
    }
    // By their ids: a scan of a large node attributes thousands of processes in one turn of the keeper.
    let ids = BTreeSet::from([part, gpu.as_part()]);
    ledger.allocations_on(ids.into_iter().filter_map(|id| ledger.part(id)))
}

fn is_held_by(allocation: &Allocation, uid: &str) -> bool {
    allocation.pod_uids().any(|pod| pod == uid)
}

/// Which of a pod's allocations a process of that pod uses; `None` if other containers hold them.
fn select_within_pod(allocations: &[&Allocation], pod: &PodProcess) -> Option<Attribution> {
    let held_by = |container: &Option<String>| -> Vec<&Allocation> {
        allocations.iter().filter(|a| a.holder.container == *container).copied().collect()
    };
    let candidates = match &pod.container {
        None => allocations.to_vec(),
        Some(_) => match (held_by(&pod.container), held_by(&None)) {
            (named, _) if !named.is_empty() => named,
            (_, unnamed) if !unnamed.is_empty() => unnamed,
            _ => return None,
        },
    };
    // A newer grant of the same devices to the same container replaces an older one (I7).
    let newest: Vec<_> = candidates.iter().filter(|a| !a.overlapped).map(|a| a.id).collect();
    Some(match newest.as_slice() {
        [] => Attribution::OneOf(candidates.iter().map(|a| a.id).collect()),
        [only] => Attribution::To(*only),
        _ => Attribution::OneOf(newest),
    })
}

/// Why no allocation explains a process of a pod.
fn unexplained_pod_reason(ledger: &Ledger, gpu: &GpuId, uid: &str) -> Reason {
    let on_gpu =
        |past: &EndedAllocation<'_>| past.devices().iter().any(|d| ledger.gpu_id_of(&d.part) == *gpu);
    let was_held = |past: &EndedAllocation<'_>| {
        let mut of_claim = past.claim().into_iter().flat_map(|request| &request.pods);
        past.pod_uid() == Some(uid) || of_claim.any(|pod| pod.uid == uid)
    };
    if let Some(ended) = ledger.ended.iter().rev().find(|past| was_held(past) && on_gpu(past)) {
        return Reason::Leftover { allocation: ended.id };
    }
    let by = ledger.pods.as_ref().and_then(|view| view.pods.get(uid)?.bypass.clone());
    match ledger.live.values().any(|a| is_held_by(a, uid)) {
        true => Reason::PodHoldsOthers { by },
        false => Reason::PodHoldsNothing { by },
    }
}

#[cfg(test)]
pub(crate) mod tests;
