//! Allocations, with their holders, limits and decisions.

use super::values::values;
use berth_kernel::evidence::attribution::Attributions;
use berth_kernel::evidence::{limits, part_use};
use berth_kernel::grants::allocation as kernel;
use berth_kernel::grants::claim::ClaimRequest;
use berth_kernel::ids::names::Resource;
use berth_kernel::ids::time::rfc3339;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use utoipa::ToSchema;

/// Allocations, newest first.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct AllocationList {
    /// Matching allocations, up to the limit.
    pub items: Vec<Allocation>,
    /// The number of all matching allocations.
    #[schema(example = 1)]
    pub total: usize,
    /// The `cursor` of the next page; absent on the last page.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = "1770092645000.5eed0001-17")]
    pub next: Option<String>,
}

/// The devices granted to one container.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Allocation {
    /// The permanent id of the allocation. The container has it in `BERTH_ALLOCATION_ID_...`.
    #[schema(example = "5eed0001-17")]
    pub id: String,
    /// Whether the allocation is live.
    pub state: AllocationState,
    /// The requested resource.
    #[schema(example = "nvidia.com/gpu")]
    pub resource: String,
    /// Ids of the granted devices.
    #[schema(example = json!(["GPU-8a56a4bc-e184-a047-2620-be19fdf913d5"]))]
    pub devices: Vec<String>,
    /// UUIDs of the devices' GPUs.
    #[schema(example = json!(["GPU-8a56a4bc-e184-a047-2620-be19fdf913d5"]))]
    pub gpus: Vec<String>,
    /// The time of the grant.
    #[schema(format = DateTime, example = "2026-02-03T04:05:06.000Z")]
    pub granted_at: String,
    /// The container that holds it; absent until a source has shown it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub holder: Option<Holder>,
    /// The request of a ResourceClaim that it is for; absent if a container has it from the device plugin.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub claim: Option<AllocationClaim>,
    /// Whether a later grant includes some of its devices, and no reconcile pass has shown yet which of the two is
    /// live.
    pub overlapped: bool,
    /// Its limits on each part, and their enforcement; absent if it may use all of its parts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limits: Option<AllocationLimits>,
    /// Its use of each part. Empty after the end.
    pub uses: Vec<PartUse>,
    /// The decision to grant it.
    pub decision: Decision,
    /// Present after the end.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ended: Option<End>,
}

values! {
    /// Whether an allocation is live.
    AllocationState {
        /// Its devices are held.
        Live = "live",
        /// It has ended and is part of the history.
        Ended = "ended",
    }
}

/// The container that holds an allocation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Holder {
    /// The pod's namespace.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = "default")]
    pub namespace: Option<String>,
    /// The pod's name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = "trainer-0")]
    pub pod: Option<String>,
    /// The pod's UID.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = "3f0c8f5e-7f5b-4a53-a0c8-4a34d0f0b6a1")]
    pub pod_uid: Option<String>,
    /// The container's name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = "main")]
    pub container: Option<String>,
}

/// The request of a ResourceClaim that an allocation is for. The allocation is held until the kubelet unprepares the claim.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct AllocationClaim {
    /// The claim's namespace.
    #[schema(example = "default")]
    pub namespace: String,
    /// The claim's name.
    #[schema(example = "trainer-0-gpu-x2k9p")]
    pub name: String,
    /// The claim's UID.
    #[schema(example = "6a1f5b0e-2f63-4b0a-9f57-0e0c6f4b8a11")]
    pub uid: String,
    /// The request's name in the claim; if it has subrequests, a slash and the name of the allocated one follow.
    #[schema(example = "gpu")]
    pub request: String,
    /// The names of the pods that the claim is reserved for, at most eight.
    #[schema(example = json!(["trainer-0"]))]
    pub pods: Vec<String>,
}

impl AllocationClaim {
    fn of(request: &ClaimRequest) -> Self {
        let ClaimRequest { claim, pod_claim_name: _, request, pods } = request;
        Self {
            namespace: claim.namespace.clone(),
            name: claim.name.clone(),
            uid: claim.uid.clone(),
            request: request.clone(),
            pods: pods.iter().map(|pod| pod.name.clone()).collect(),
        }
    }
}

/// The decision to grant an allocation, with its terms.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Decision {
    /// The policies that allowed it, or `baseline`, or `adopted`.
    #[schema(example = json!(["timeslice@0123456789ab"]))]
    pub by: Vec<String>,
    /// The policies' reasons.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[schema(example = "the emptiest GPU")]
    pub reason: String,
    /// Environment variables that policies added to the container.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub environment: BTreeMap<String, String>,
    /// The limits that the container is given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limits: Option<Limits>,
}

/// The limits of a container on each part.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Limits {
    /// MiB of memory.
    #[serde(rename = "memoryMiB", default, skip_serializing_if = "Option::is_none")]
    #[schema(example = 20389)]
    pub memory_mib: Option<u64>,
    /// Percent of compute.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = 25)]
    pub compute_percent: Option<u32>,
}

/// The limits of an allocation on each part, from its policies and from the size of its devices.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct AllocationLimits {
    /// MiB of memory.
    #[serde(rename = "memoryMiB", default, skip_serializing_if = "Option::is_none")]
    #[schema(example = 20389)]
    pub memory_mib: Option<u64>,
    /// Percent of compute.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = 25)]
    pub compute_percent: Option<u32>,
    /// What enforces them; with several parts, the weakest of what enforces them.
    pub enforced_by: EnforcedBy,
    /// The container's memory limits by GPU; absent without a guard, or if the guard limits none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub per_gpu: Vec<GpuLimit>,
    /// Whether the container is privileged, as the guard has shown, so that it can remove its limits.
    #[serde(default)]
    #[schema(example = false)]
    pub privileged: bool,
}

/// A container's memory limit on one GPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct GpuLimit {
    /// UUID of the GPU.
    #[schema(example = "GPU-8a56a4bc-e184-a047-2620-be19fdf913d5")]
    pub gpu: String,
    /// MiB that all allocations of the container together may use of the GPU.
    #[serde(rename = "grantedMiB")]
    #[schema(example = 20389)]
    pub granted_mib: u64,
    /// Whether it was set.
    pub state: LimitState,
    /// The limit that NVML reported when it was last read back, MiB; absent if nothing was read for a minute. The driver
    /// rounds down to pages of 2 MiB.
    #[serde(rename = "limitMiB", default, skip_serializing_if = "Option::is_none")]
    #[schema(example = 20388)]
    pub limit_mib: Option<u64>,
    /// MiB that the container used then.
    #[serde(rename = "usedMiB", default, skip_serializing_if = "Option::is_none")]
    #[schema(example = 18000)]
    pub used_mib: Option<u64>,
    /// When it was read back.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(format = DateTime, example = "2026-02-03T04:05:06.000Z")]
    pub read_at: Option<String>,
    /// How often the guard found that the limit had changed.
    #[serde(default)]
    #[schema(example = 0)]
    pub times_changed: u32,
    /// Why it is not set, or cannot be read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = "NVML has not answered for 2 s")]
    pub why: Option<String>,
}

values! {
    /// Whether a memory limit was set.
    LimitState from limits::LimitState {
        /// Not yet: the container has not started, NVML has not answered, or limits do not work on the GPU.
        Pending = "pending",
        /// Before the container's first instruction.
        Set = "set",
        /// While the container ran.
        Late = "late",
        /// It could not be set, or does not stay.
        Failed = "failed",
    }
}

impl GpuLimit {
    fn of(limit: &limits::MemoryLimit) -> Self {
        let reading = limit.reading.filter(|reading| !reading.is_stale);
        Self {
            gpu: limit.gpu.to_string(),
            granted_mib: limit.granted_mib,
            state: (&limit.state).into(),
            limit_mib: reading.map(|reading| reading.limit_mib),
            used_mib: reading.map(|reading| reading.used_mib),
            read_at: reading.map(|reading| rfc3339(reading.wall_ms)),
            times_changed: limit.times_changed,
            why: limit.why.as_deref().map(String::from),
        }
    }
}

values! {
    /// What enforces the limits of a container.
    EnforcedBy from part_use::EnforcedBy {
        /// Nothing: the container is given its limits, and may use more.
        None = "none",
        /// MPS.
        Mps = "mps",
        /// The driver: memory limits that the guard has set on the container's cgroup and read back. They limit memory, and
        /// not compute.
        MemoryLimits = "memoryLimits",
        /// The hardware.
        Mig = "mig",
    }
}

/// An allocation's use of one part.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct PartUse {
    /// The part: a GPU, or a MIG instance.
    #[schema(example = "GPU-8a56a4bc-e184-a047-2620-be19fdf913d5")]
    pub part: String,
    /// Limit on its memory on this part, in MiB.
    #[serde(rename = "memoryLimitMiB", default, skip_serializing_if = "Option::is_none")]
    #[schema(example = 20389)]
    pub memory_limit_mib: Option<u64>,
    /// Memory of the processes that certainly belong to it, in MiB; absent if processes are not visible.
    #[serde(rename = "memoryUsedMiB", default, skip_serializing_if = "Option::is_none")]
    #[schema(example = 18000)]
    pub memory_used_mib: Option<u64>,
    /// Whether that exceeds the limit; absent without a limit, or if it is not known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = false)]
    pub over_limit: Option<bool>,
    /// Host ids of the processes that certainly belong to it.
    #[schema(example = json!([4711]))]
    pub pids: Vec<u32>,
    /// Processes that belong to this or to another allocation: which of them is not known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shared: Option<SharedUse>,
}

/// Processes of several allocations that cannot be distinguished.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct SharedUse {
    /// Ids of the other allocations.
    #[schema(example = json!(["5eed0001-18"]))]
    pub with: Vec<String>,
    /// Host ids of the processes.
    #[schema(example = json!([4712]))]
    pub pids: Vec<u32>,
    /// Memory of the processes in MiB.
    #[schema(example = 512)]
    #[serde(rename = "memoryMiB")]
    pub memory_mib: u64,
}

/// The end of an allocation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct End {
    /// Why.
    pub reason: EndReason,
    /// The time of the end.
    #[schema(format = DateTime, example = "2026-02-03T04:15:06.000Z")]
    pub at: String,
}

values! {
    /// Why an allocation ended.
    EndReason from kernel::EndReason {
        /// Its pod is gone, and the kubelet's checkpoint no longer has it.
        Released = "released",
        /// No pod ever held it.
        NeverStarted = "neverStarted",
        /// Its pod is gone as another source shows; the kubelet's checkpoint could not be read.
        PodGone = "podGone",
        /// A later allocation holds its devices.
        Superseded = "superseded",
        /// An operator ended it.
        Operator = "operator",
    }
}

impl Allocation {
    /// The allocation with its use of each part; `mps` are the resources whose containers use MPS.
    pub fn of(owners: &Attributions<'_>, mps: &BTreeSet<Resource>, allocation: &kernel::Allocation) -> Self {
        let ledger = owners.ledger;
        let limits = part_use::limits(ledger, allocation, mps.contains(&allocation.resource));
        let live = allocation.ended.is_none();
        let gpus: BTreeSet<&str> = allocation
            .devices
            .iter()
            .map(|d| ledger.part(&d.part).map_or(&d.part, |p| p.part.gpu.as_part()).as_str())
            .collect();
        Self {
            id: allocation.id.to_string(),
            state: if live { AllocationState::Live } else { AllocationState::Ended },
            resource: allocation.resource.to_string(),
            devices: allocation.devices.iter().map(ToString::to_string).collect(),
            gpus: gpus.into_iter().map(String::from).collect(),
            granted_at: rfc3339(allocation.granted_wall_ms),
            holder: Holder::of(&allocation.holder),
            claim: allocation.origin.claim().map(AllocationClaim::of),
            overlapped: allocation.overlapped,
            limits: limits.map(|(limits, by)| AllocationLimits {
                memory_mib: limits.memory_mib,
                compute_percent: limits.compute_percent,
                enforced_by: (&by).into(),
                per_gpu: ledger.memory_limits_of(allocation).iter().map(GpuLimit::of).collect(),
                privileged: ledger.container_of(allocation).is_some_and(|container| container.is_privileged),
            }),
            uses: match live {
                true => part_use::part_uses(owners, allocation).iter().map(PartUse::of).collect(),
                false => Vec::new(),
            },
            decision: Decision::of(&allocation.decision),
            ended: allocation
                .ended
                .as_ref()
                .map(|end| End { reason: (&end.reason).into(), at: rfc3339(end.wall_ms) }),
        }
    }
}

impl PartUse {
    fn of(found: &part_use::PartUse) -> Self {
        Self {
            part: found.part.to_string(),
            memory_limit_mib: found.limits.memory_mib,
            memory_used_mib: found.memory_used_mib,
            over_limit: found.over_limit,
            pids: found.pids.clone(),
            shared: (!found.shared_pids.is_empty()).then(|| SharedUse {
                with: found.shared_with.iter().map(ToString::to_string).collect(),
                pids: found.shared_pids.clone(),
                memory_mib: found.shared_memory_mib,
            }),
        }
    }
}

impl Holder {
    /// The container; `None` if nothing of it is known.
    pub(crate) fn of(holder: &kernel::Holder) -> Option<Self> {
        (!holder.is_unknown()).then(|| Self {
            namespace: holder.namespace.clone(),
            pod: holder.pod.clone(),
            pod_uid: holder.pod_uid.clone(),
            container: holder.container.clone(),
        })
    }
}

impl Decision {
    fn of(decision: &kernel::Decision) -> Self {
        let limits = decision.limits;
        Self {
            by: decision.by.iter().map(ToString::to_string).collect(),
            reason: decision.reason.clone(),
            environment: decision.environment.iter().cloned().collect(),
            limits: (limits != kernel::Limits::default())
                .then_some(Limits { memory_mib: limits.memory_mib, compute_percent: limits.compute_percent }),
        }
    }
}
