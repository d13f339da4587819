//! Processes on GPUs, their pods and allocations, and those that use a GPU without an allocation.

use super::values::values;
use berth_kernel::evidence::attribution::{Attribution, Bypass as Found, Reason};
use berth_kernel::evidence::pods::{Pod, PodBypass};
use berth_kernel::evidence::runtime;
use berth_kernel::hardware::process::{
    self as kernel, Owner, PodProcess, ProcessVisibility, TrackedProcess, Uses,
};
use berth_kernel::ids::names::AllocationId;
use berth_kernel::ids::time::rfc3339;
use berth_kernel::node::ledger::Ledger;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Whether the daemon can identify the processes on the GPUs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct ProcessSight {
    /// The visibility of processes.
    pub state: SightState,
    /// The reason why processes are not visible.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = "berth runs in a PID namespace of its own")]
    pub why: Option<String>,
    /// What to do about it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = "set hostPID: true in the pod template of berth's DaemonSet")]
    pub fix: Option<String>,
}

values! {
    /// The visibility of the processes on GPUs.
    SightState {
        /// The daemon can identify processes.
        Visible = "visible",
        /// NVML's process ids differ from those that the daemon sees, or NVML omits processes. An empty list does not
        /// mean that there are no processes.
        PidsHidden = "pidsHidden",
        /// Processes are not listed, or not one by one.
        Unsupported = "unsupported",
    }
}

/// The processes on one GPU.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct ProcessList {
    /// Whether the daemon can identify the processes.
    pub sight: ProcessSight,
    /// The listed ones, by part and process id. At most 256 of a GPU.
    pub items: Vec<Process>,
}

/// One process on a GPU.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Process {
    /// The process id on the host.
    #[schema(example = 4711)]
    pub pid: u32,
    /// The command name, at most 15 bytes. A process can choose any name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = "python3")]
    pub name: Option<String>,
    /// The GPU's UUID.
    #[schema(example = "GPU-8a56a4bc-e184-a047-2620-be19fdf913d5")]
    pub gpu: String,
    /// The MIG instance if NVML reports it, otherwise the GPU.
    #[schema(example = "GPU-8a56a4bc-e184-a047-2620-be19fdf913d5")]
    pub part: String,
    /// How it uses the GPU.
    pub uses: Vec<ProcessUse>,
    /// The process's memory on the part in MiB; absent if NVML does not report it.
    #[serde(rename = "memoryMiB", default, skip_serializing_if = "Option::is_none")]
    #[schema(example = 1024)]
    pub memory_mib: Option<u64>,
    /// The process's pod; absent if it is in none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod: Option<ProcessPod>,
    /// The id of the process's container; absent if it is in none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = "8b1a9953c4611296a827abf8c47804d78b1a9953c4611296a827abf8c47804d7")]
    pub container_id: Option<String>,
    /// The time at which the process was first seen.
    #[schema(format = DateTime, example = "2026-02-03T04:05:06.000Z")]
    pub since: String,
    /// What permits its use of the GPU.
    pub right: Right,
    /// The allocation that it uses; several if it uses, or may use, one of them.
    #[schema(example = json!(["5eed0001-17"]))]
    pub allocations: Vec<String>,
    /// The reason why it has no single allocation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = "it is in no pod: it was started on the host, or by another container runtime")]
    pub reason: Option<String>,
}

values! {
    /// How a process uses a GPU.
    ProcessUse {
        /// It computes.
        Compute = "compute",
        /// It computes as a client of MPS.
        Mps = "mps",
        /// It draws.
        Graphics = "graphics",
    }
}

/// The pod of a process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct ProcessPod {
    /// The pod's UID, from the name of its cgroup.
    #[schema(example = "3f0c8f5e-7f5b-4a53-a0c8-4a34d0f0b6a1")]
    pub uid: String,
    /// The pod's namespace; absent until a source has shown it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = "default")]
    pub namespace: Option<String>,
    /// The pod's name; absent until a source has shown it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = "trainer-0")]
    pub name: Option<String>,
    /// The container's name; absent if its mounts do not show it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = "main")]
    pub container: Option<String>,
}

values! {
    /// What permits a process's use of a GPU.
    Right {
        /// One allocation.
        Allocation = "allocation",
        /// One of several allocations of its pod: which one is not known.
        Shared = "shared",
        /// Possibly one of several allocations, since the process's pod or the allocations' holders are unknown.
        Unclear = "unclear",
        /// The configuration ignores the process (`processes.ignore`).
        Ignored = "ignored",
        /// No allocation yet; after some seconds the process counts as a bypass.
        Settling = "settling",
        /// No allocation.
        Bypass = "bypass",
    }
}

/// Uses of GPUs without an allocation.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct BypassList {
    /// Whether the daemon can identify processes.
    pub sight: ProcessSight,
    /// Processes on GPUs without an allocation, by GPU, up to the limit.
    pub items: Vec<Bypass>,
    /// The number of all matching processes.
    #[schema(example = 1)]
    pub total: usize,
    /// The `cursor` of the next page; absent on the last page.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(
        example = "GPU-8a56a4bc-e184-a047-2620-be19fdf913d5 4711 GPU-8a56a4bc-e184-a047-2620-be19fdf913d5"
    )]
    pub next: Option<String>,
    /// Pods whose spec permits the use of GPUs without an allocation; absent if no source shows the node's pods.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pods: Option<Vec<ReachingPod>>,
    /// Containers that could use GPUs that were not allocated to them and that the guard restricted or refused, or could not
    /// stop, by pod: the latest entry of each container whose pod still runs.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub containers: Vec<ContainerBypass>,
}

/// What the guard did about a container that could use GPUs that were not allocated to it.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct ContainerBypass {
    /// The pod's UID.
    #[schema(example = "3f0c8f5e-7f5b-4a53-a0c8-4a34d0f0b6a1")]
    pub uid: String,
    /// The pod's namespace.
    #[schema(example = "default")]
    pub namespace: String,
    /// The pod's name.
    #[schema(example = "trainer-0")]
    pub pod: String,
    /// The container's name.
    #[schema(example = "main")]
    pub container: String,
    /// What the guard did.
    pub outcome: BypassOutcome,
    /// How the container could use them.
    #[schema(example = "NVIDIA_VISIBLE_DEVICES is \"all\"")]
    pub detail: String,
    /// Why the guard could not stop it, or what that does not cover.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(
        example = "it ran before the guard: device files that it has opened stay open; delete the pod to close them"
    )]
    pub why: Option<String>,
    /// When the guard did it last.
    #[schema(format = DateTime, example = "2026-02-03T04:05:06.000Z")]
    pub at: String,
    /// The number of times; the kubelet retries a refused container.
    #[schema(example = 1)]
    pub count: u32,
}

values! {
    /// What the guard did about a container.
    BypassOutcome from runtime::BypassOutcome {
        /// It could do nothing.
        Failed = "failed",
        /// It removed the container's access to them.
        Stripped = "stripped",
        /// It refused the container.
        Denied = "denied",
    }
}

impl ContainerBypass {
    /// The body of what the guard did.
    #[must_use]
    pub fn of(bypass: &runtime::ContainerBypass) -> Self {
        Self {
            uid: bypass.pod_uid.clone(),
            namespace: bypass.namespace.clone(),
            pod: bypass.pod.clone(),
            container: bypass.container.clone(),
            outcome: (&bypass.outcome).into(),
            detail: bypass.detail.clone(),
            why: bypass.why.as_deref().map(String::from),
            at: rfc3339(bypass.wall_ms),
            count: bypass.count,
        }
    }
}

/// A process that uses a GPU without an allocation.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Bypass {
    /// Why no allocation explains it.
    pub reason: BypassReason,
    /// The reason as a sentence, with the usual cause.
    #[schema(example = "its pod was granted no GPU of this node")]
    pub detail: String,
    /// The time since which the process has no allocation.
    #[schema(format = DateTime, example = "2026-02-03T04:05:06.000Z")]
    pub since: String,
    /// The process's pod; absent if it is in none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod: Option<ProcessPod>,
    /// The GPU's UUID.
    #[schema(example = "GPU-8a56a4bc-e184-a047-2620-be19fdf913d5")]
    pub gpu: String,
    /// The MIG instance if NVML reports it, otherwise the GPU.
    #[schema(example = "GPU-8a56a4bc-e184-a047-2620-be19fdf913d5")]
    pub part: String,
    /// The process id on the host.
    #[schema(example = 4711)]
    pub pid: u32,
    /// The command name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = "python3")]
    pub name: Option<String>,
    /// The process's memory on the part in MiB; absent if NVML does not report it.
    #[serde(rename = "memoryMiB", default, skip_serializing_if = "Option::is_none")]
    #[schema(example = 1024)]
    pub memory_mib: Option<u64>,
}

values! {
    /// Why no allocation explains that a process uses a GPU.
    BypassReason from Reason {
        /// Its pod was granted no GPU.
        PodHoldsNothing = "podHoldsNothing",
        /// Its pod was granted others.
        PodHoldsOthers = "podHoldsOthers",
        /// Another container of its pod was granted it.
        ContainerHoldsNothing = "containerHoldsNothing",
        /// Its allocation has ended.
        Leftover = "leftover",
        /// It is in no pod.
        HostProcess = "hostProcess",
        /// Its owner cannot be determined.
        Unknown = "unknown",
    }
}

/// A pod whose spec permits the use of GPUs without an allocation.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct ReachingPod {
    /// The pod's UID.
    #[schema(example = "3f0c8f5e-7f5b-4a53-a0c8-4a34d0f0b6a1")]
    pub uid: String,
    /// The pod's namespace.
    #[schema(example = "default")]
    pub namespace: String,
    /// The pod's name.
    #[schema(example = "trainer-0")]
    pub name: String,
    /// The setting that permits it.
    #[schema(example = "its container main sets NVIDIA_VISIBLE_DEVICES itself")]
    pub detail: String,
}

impl ProcessSight {
    /// The body of a process visibility.
    #[must_use]
    pub fn of(sight: ProcessVisibility) -> Self {
        match sight {
            ProcessVisibility::Visible => Self { state: SightState::Visible, why: None, fix: None },
            ProcessVisibility::Hidden { why, fix } => {
                Self { state: SightState::PidsHidden, why: Some(why), fix: Some(fix) }
            }
            ProcessVisibility::Unsupported { why } => {
                Self { state: SightState::Unsupported, why: Some(why), fix: None }
            }
        }
    }
}

impl Process {
    /// The body of a process on the GPU `gpu`, with its allocations.
    #[must_use]
    pub fn of(ledger: &Ledger, gpu: &str, seen: &TrackedProcess, attribution: &Attribution) -> Self {
        let kernel::Process { pid, part, uses, memory_mib, identity: who } = &seen.process;
        let (right, allocations, reason) = match attribution {
            Attribution::To(id) => (Right::Allocation, vec![*id], None),
            Attribution::OneOf(ids) => (Right::Shared, ids.clone(), Some(AMONG.to_owned())),
            Attribution::Possibly(ids) => (Right::Unclear, ids.clone(), Some(perhaps(&who.owner))),
            Attribution::Ignored => (Right::Ignored, vec![], Some(IGNORED.to_owned())),
            Attribution::Unexplained(reason) if !seen.is_reported => {
                (Right::Settling, vec![], Some(reason.describe()))
            }
            Attribution::Unexplained(reason) => (Right::Bypass, vec![], Some(reason.describe())),
        };
        Self {
            pid: *pid,
            name: who.name.clone(),
            gpu: gpu.to_owned(),
            part: part.to_string(),
            uses: process_uses(*uses),
            memory_mib: *memory_mib,
            pod: who.owner.pod().map(|pod| ProcessPod::of(ledger, pod)),
            container_id: match &who.owner {
                Owner::Pod(PodProcess { container_id, .. }) | Owner::NoPod { container_id } => {
                    container_id.clone()
                }
                Owner::Unknown(_) => None,
            },
            since: rfc3339(seen.first.wall_ms),
            right,
            allocations: allocations.iter().map(AllocationId::to_string).collect(),
            reason,
        }
    }
}

const AMONG: &str = "several containers of its pod share the GPU, and which of them it is in is not known";
const IGNORED: &str = "its name is among those that the configuration ignores";

fn perhaps(owner: &Owner) -> String {
    match owner {
        Owner::Unknown(unseen) => unseen.describe().into(),
        Owner::Pod(_) | Owner::NoPod { .. } => "whose these allocations are is not known yet".into(),
    }
}

fn process_uses(uses: Uses) -> Vec<ProcessUse> {
    let Uses { compute, mps, graphics } = uses;
    let all = [(ProcessUse::Compute, compute), (ProcessUse::Mps, mps), (ProcessUse::Graphics, graphics)];
    all.into_iter().filter(|(_, does)| *does).map(|(kind, _)| kind).collect()
}

impl ProcessPod {
    fn of(ledger: &Ledger, pod: &PodProcess) -> Self {
        let known = ledger.pod_by_uid(&pod.uid);
        Self {
            uid: pod.uid.clone(),
            namespace: known.as_ref().and_then(|k| k.namespace.clone()),
            name: known.and_then(|k| k.pod),
            container: pod.container.clone(),
        }
    }
}

impl Bypass {
    /// The body of a bypass.
    #[must_use]
    pub fn of(ledger: &Ledger, found: &Found) -> Self {
        let process = &found.process;
        Self {
            reason: (&found.reason).into(),
            detail: found.reason.describe(),
            since: rfc3339(found.since_wall_ms),
            pod: process.identity.owner.pod().map(|pod| ProcessPod::of(ledger, pod)),
            gpu: found.gpu.to_string(),
            part: process.part.to_string(),
            pid: process.pid,
            name: process.identity.name.clone(),
            memory_mib: process.memory_mib,
        }
    }
}

impl ReachingPod {
    /// The body of a pod and the setting that permits its use of GPUs.
    #[must_use]
    pub fn of((pod, by): (&Pod, &PodBypass)) -> Self {
        Self {
            uid: pod.uid.clone(),
            namespace: pod.namespace.clone(),
            name: pod.name.clone(),
            detail: by.describe(),
        }
    }
}
