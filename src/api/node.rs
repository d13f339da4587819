//! The node, and the liveness and readiness of its daemon.

use super::configuration::ConfigurationState;
use super::process::ProcessSight;
use super::stack::StackSource;
use super::values::values;
use berth_kernel::evidence::runtime::RuntimeView;
use berth_kernel::grants::bypass as kernel;
use berth_kernel::ids::names::GpuId;
use berth_kernel::sharing::capacity;
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use utoipa::ToSchema;

/// The node and its daemon.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Node {
    /// The node's name.
    #[schema(example = "gpu-node-1")]
    pub name: String,
    /// The daemon's version.
    #[schema(example = "0.1.0")]
    pub version: String,
    /// When the daemon started: events and readings of GPUs are kept in memory from then on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(format = DateTime, example = "2026-02-03T04:05:06.000Z")]
    pub started_at: Option<String>,
    /// The generation of the node's state. Each change increments it.
    #[schema(example = 42)]
    pub generation: u64,
    /// Whether the daemon is ready, as in `/readyz`.
    pub ready: bool,
    /// The checks of readiness.
    pub checks: Vec<Check>,
    /// The source of the GPUs.
    #[schema(example = "8 simulated H100")]
    pub gpu_source: String,
    /// Version of the driver; absent without one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = "580.65.06")]
    pub driver_version: Option<String>,
    /// CUDA version of the driver; absent without one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = "13.0")]
    pub cuda_version: Option<String>,
    /// How GPUs are passed to containers; absent until the GPUs were found.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device_list_strategy: Option<DeviceListStrategy>,
    /// The resources, with their devices and their registration with the kubelet.
    pub resources: Vec<ResourceState>,
    /// Why the store of allocations cannot be written at present; nothing is granted then. Absent while it can.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub store_error: Option<String>,
    /// The release of the driver, during which no GPU is granted; absent if the driver is in use.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub driver_release: Option<DriverRelease>,
    /// The connection to the API server; absent if it is not used.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub api_server: Option<StepState>,
    /// The guard, which shows the containers of the node before they run; absent from releases without it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub guard: Option<Guard>,
    /// The DRA driver; absent if it is not enabled.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dra: Option<Dra>,
    /// The GPUNode and the GPUMaintenances of the node; absent if `fleet.enabled` is false.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fleet: Option<Fleet>,
    /// The reason why no allocation ends at present.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hold: Option<String>,
    /// Whether the daemon can identify the processes on the GPUs.
    pub processes: ProcessSight,
    /// The configuration file; absent if the daemon runs without one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub configuration: Option<ConfigurationState>,
    /// Revision of the active stack.
    #[schema(example = 3)]
    pub stack_revision: u64,
    /// Where the active stack comes from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stack_source: Option<StackSource>,
    /// Whether the configuration file has a stack that is not used, since a stack of the API or of the node's GPUNode is active;
    /// `DELETE /stack/override` ends the former.
    #[serde(default)]
    pub file_stack_overridden: bool,
    /// Why the active stack may offer less than its operator expects, or its rules about pods have no effect, as in
    /// `GET /stack`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schema(example = json!(["policy timeslice@9f86d081884c: only[0]: no GPU of this node matches {model: NVIDIA L4*}"]))]
    pub warnings: Vec<String>,
    /// Numbers of objects.
    pub counts: Counts,
}

/// The DRA driver, and the ResourceSlices of the GPUs that are granted through it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Dra {
    /// The driver's name.
    #[schema(example = "gpu.nvidia.com")]
    pub driver: String,
    /// Whether the kubelet has registered the driver and is connected to it.
    pub registered: bool,
    /// Why it is not registered.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = "the kubelet has not called it yet")]
    pub why: Option<String>,
    /// The generation of the node's pool of ResourceSlices; 0 before the first was published.
    #[schema(example = 3)]
    pub generation: i64,
    /// The number of published devices.
    #[schema(example = 8)]
    pub devices: usize,
    /// Whether the API server drops the taints of devices, so that those that are to be given to no further claim are left
    /// out instead.
    pub drops_taints: bool,
    /// Why no shares are published; absent if they are.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(
        example = "the scheduler of Kubernetes v1.36.1 can allocate a GPU both whole and in shares: upgrade to 1.36.2 or later"
    )]
    pub no_shares: Option<String>,
    /// Why GPUs that are offered both whole and in shares are published whole only; absent if they are published both ways.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = "the API server drops counters")]
    pub no_counters: Option<String>,
    /// Why the ResourceSlices are not up to date.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = "no answer within 15 s")]
    pub slices_error: Option<String>,
    /// Why the marks of DeviceTaintRules may be out of date: the rules cannot be watched, or a mark cannot be set or removed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = "the DeviceTaintRules: they cannot be watched")]
    pub taint_rules_error: Option<String>,
}

/// The stack that the GPUNode of the node names.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct FleetStack {
    /// The name of the stack.
    #[schema(example = "team-share")]
    pub policy: String,
    /// The revision of the stack.
    #[schema(example = "3f9c01ab77de")]
    pub revision: String,
    /// The progress: `Pulling`, `Soaking`, `Settled`, `RolledBack`, `Failed` or `Refused`.
    #[schema(example = "Soaking")]
    pub phase: String,
    /// Why the stack has not settled.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(
        example = "the stack is settled if none of its policies is suspended within 600 s of the activation"
    )]
    pub why: Option<String>,
}

/// The GPUNode and the GPUMaintenances of the node. They are up to date if there is no error.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Fleet {
    /// The stack that the GPUNode names; absent if it names none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stack: Option<FleetStack>,
    /// Why changes of the stack that the GPUNode names are not seen.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = "no answer within 15 s")]
    pub stack_error: Option<String>,
    /// Why the GPUNode is not up to date.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = "no answer within 15 s")]
    pub gpu_node_error: Option<String>,
    /// Why changes of this node's GPUMaintenances are not seen. The daemon continues to carry out those that it knows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = "the GPUMaintenances of this node: they cannot be watched")]
    pub maintenances_error: Option<String>,
    /// Why the status of a GPUMaintenance is not up to date.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = "no answer within 15 s")]
    pub status_error: Option<String>,
    /// Why the marks of deleted GPUMaintenances are kept.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = "the CustomResourceDefinition is being deleted")]
    pub removal_error: Option<String>,
}

/// The guard, a plugin of the container runtime in a process of its own. Without it the holder of an allocation is
/// known later, and its end only from the kubelet and the API server.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Guard {
    /// Whether it is connected to the daemon and to the container runtime, and has shown all containers.
    pub connected: bool,
    /// Its version; absent before its first connection to the daemon.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = "0.1.0")]
    pub version: Option<String>,
    /// The container runtime and its version; absent before the guard's first connection to it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = "containerd 2.2.9")]
    pub runtime: Option<String>,
    /// Why it is not connected, and what to do.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(
        example = "/run/berth-guard/guard.sock does not exist: run `berth guard` on this node, which creates it"
    )]
    pub why: Option<String>,
    /// Whether it can limit the memory of containers, by GPU.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub memory_limits: Vec<GpuLimits>,
    /// Why the guard can limit memory on no GPU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = "`enforce.memory` is `off`")]
    pub memory_limits_error: Option<String>,
    /// What the guard does about containers that can use GPUs that were not allocated to them; absent for a guard of an
    /// older release.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = "report")]
    pub bypass_action: Option<BypassAction>,
}

values! {
    /// What the guard does about a container that can use GPUs that were not allocated to it.
    BypassAction from kernel::BypassAction {
        /// Nothing: Berth reports the processes and pods.
        Report = "report",
        /// It removes the container's access to them.
        Strip = "strip",
        /// It refuses the container.
        Deny = "deny",
    }
}

/// Whether the guard can limit the memory of containers on a GPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct GpuLimits {
    /// UUID of the GPU.
    #[schema(example = "GPU-8a56a4bc-e184-a047-2620-be19fdf913d5")]
    pub gpu: String,
    /// Whether a limit that the guard set was read back.
    pub supported: bool,
    /// Why not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = "the driver cannot limit memory (nvmlDeviceSetMemoryLimits_v1: not supported)")]
    pub why: Option<String>,
}

impl Guard {
    /// Adds what the guard reports that it can enforce.
    #[must_use]
    pub fn with_view(self, view: &RuntimeView) -> Self {
        let support = &view.limit_support;
        let of_gpu = |(gpu, why): (&GpuId, &Option<Arc<str>>)| GpuLimits {
            gpu: gpu.to_string(),
            supported: why.is_none(),
            why: why.as_deref().map(String::from),
        };
        let memory_limits = support.gpus.iter().map(of_gpu).collect();
        Self {
            memory_limits,
            memory_limits_error: support.why.as_deref().map(String::from),
            bypass_action: view.bypass_action.as_ref().map(BypassAction::from),
            ..self
        }
    }
}

/// A release of the driver: the daemon has closed NVML, and scans no GPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct DriverRelease {
    /// Who released it.
    #[schema(example = "admin")]
    pub by: String,
    /// The reason, where one was given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = "driver upgrade")]
    pub why: Option<String>,
    /// Since when.
    #[schema(format = DateTime, example = "2026-02-03T04:05:06.000Z")]
    pub since: String,
    /// When the daemon uses the driver again at the latest; earlier if another driver is loaded.
    #[schema(format = DateTime, example = "2026-02-03T04:35:06.000Z")]
    pub until: String,
}

/// An order to release the driver.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct ReleaseOrder {
    /// The reason, at most 1024 bytes without control characters.
    #[schema(example = "tried from Swagger UI")]
    pub reason: String,
    /// After how many seconds the daemon uses the driver again at the latest: 1 to 86400.
    #[schema(example = 1800, minimum = 1, maximum = 86400)]
    pub for_seconds: u32,
    /// Release it even if pods hold GPUs. Their containers are not stopped, and while one of them uses its GPU, the driver
    /// cannot be unloaded.
    pub force: bool,
}

impl ReleaseOrder {
    /// The longest release, seconds: a day.
    pub const SECONDS_MAX: u32 = 24 * 3600;
}

impl Default for ReleaseOrder {
    /// Half an hour, longer than the installation of a driver takes.
    fn default() -> Self {
        Self { reason: String::new(), for_seconds: 1800, force: false }
    }
}

/// How GPUs are passed to containers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct DeviceListStrategy {
    /// Whether the setting is `auto`, so that the daemon chooses what works on this node.
    pub auto: bool,
    /// `envvar`, `volume-mounts`, `cdi-annotations`, `cdi-cri`; empty if none can work: then no device is offered.
    #[schema(example = json!(["cdi-cri"]))]
    pub strategies: Vec<String>,
    /// The kind of the CDI devices, with a CDI strategy.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = "nvidia.com/gpu")]
    pub cdi_kind: Option<String>,
    /// Why these strategies are used; if none can work, the cause and the remedy.
    #[schema(example = "the container runtime has CDI, and /etc/cdi/nvidia.yaml names every GPU")]
    pub reason: String,
    /// Why containers may get no GPU, or only a part of the driver, although a strategy is in use; with the remedy.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub warnings: Vec<String>,
}

/// Numbers of objects on the node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Counts {
    /// GPUs, including vanished ones, excluded ones and those whose UUID is not known.
    #[schema(example = 8)]
    pub gpus: usize,
    /// GPUs that the driver has and whose UUID is not known; `GET /gpus` lists them.
    #[serde(default)]
    #[schema(example = 0)]
    pub unidentified_gpus: usize,
    /// GPUs that the configuration excludes.
    #[serde(default)]
    #[schema(example = 0)]
    pub excluded_gpus: usize,
    /// GPUs that are healthy or degraded.
    #[schema(example = 8)]
    pub working_gpus: usize,
    /// GPUs that are cordoned.
    #[schema(example = 0)]
    pub cordoned_gpus: usize,
    /// Live allocations.
    #[schema(example = 5)]
    pub allocations: usize,
    /// Ended allocations in the history.
    #[schema(example = 100)]
    pub ended_allocations: usize,
    /// Uses of GPUs without an allocation.
    #[schema(example = 0)]
    pub bypasses: usize,
    /// Pods whose spec permits the use of GPUs without an allocation; absent if no source shows pods.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = 0)]
    pub bypassing_pods: Option<usize>,
    /// Versions of policies.
    #[schema(example = 3)]
    pub policies: usize,
}

/// A resource and its registration with the kubelet.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct ResourceState {
    /// The resource.
    #[schema(example = "nvidia.com/gpu")]
    pub resource: String,
    /// Whether the resource is registered and the kubelet watches its devices.
    pub registration: StepState,
    /// The number of devices that the kubelet is shown.
    #[schema(example = 8)]
    pub devices: u32,
    /// The number of these that an allocation holds.
    #[schema(example = 5)]
    pub held: u32,
    /// The number of these that can be granted now.
    #[schema(example = 2)]
    pub free: u32,
    /// The number of these that are not held, on GPUs that work and are not cordoned, and cannot be granted now; `notFree`
    /// has the reasons.
    #[serde(default)]
    #[schema(example = 0)]
    pub withdrawn: u32,
    /// The number of these that are not held, on GPUs that are cordoned or drained.
    #[serde(default)]
    #[schema(example = 0)]
    pub cordoned: u32,
    /// The number of these that are not held, on GPUs that are unhealthy or vanished. `devices` is the sum of `held`, `free`,
    /// `withdrawn`, `cordoned` and `unhealthy`.
    #[serde(default)]
    #[schema(example = 1)]
    pub unhealthy: u32,
    /// Why devices are neither held nor free, by state, GPU and reason.
    #[serde(default)]
    pub not_free: Vec<NotFree>,
    /// The reason why its free devices are withdrawn after a series of denials.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = "3 denials in a minute: withdrawn for 10 s")]
    pub breaker: Option<String>,
}

/// Devices of a resource that are neither held nor free, for one reason.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct NotFree {
    /// What keeps them from being granted.
    pub state: NotFreeState,
    /// The number of devices.
    #[schema(example = 1)]
    pub devices: u32,
    /// The reason. It begins with the GPU if it is about one.
    #[schema(example = "GPU 3: XID 79: GPU has fallen off the bus")]
    pub reason: String,
    /// UUID of the GPU that it is about; absent if the reason concerns the whole node or the whole resource.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = "GPU-8a56a4bc-e184-a047-2620-be19fdf913d5")]
    pub gpu: Option<String>,
}

values! {
    /// What keeps a device that is not held from being granted.
    NotFreeState from capacity::NotFreeState {
        /// Its GPU works and is not cordoned, but the device cannot be granted now: the reason says why.
        Withdrawn = "withdrawn",
        /// Its GPU is cordoned or drained.
        Cordoned = "cordoned",
        /// Its GPU is unhealthy or vanished.
        Unhealthy = "unhealthy",
    }
}

/// A step of the daemon's start.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct StepState {
    /// Whether the step is done.
    pub done: bool,
    /// What the step waits for, and what to do.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = "no kubelet.sock in /var/lib/kubelet/device-plugins")]
    pub waiting: Option<String>,
}

/// A check of readiness or liveness.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Check {
    /// The name of the check: `gpus`, `adoption`, `store`, `kubelet`, ...
    #[schema(example = "kubelet")]
    pub name: String,
    /// Whether the check passed. The daemon is ready, or alive, if all checks pass.
    pub ok: bool,
    /// An explanation of the result.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = "waiting: no kubelet.sock in /var/lib/kubelet/device-plugins")]
    pub detail: Option<String>,
}

/// The daemon is alive.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Alive {
    /// Always true; a daemon that is not alive responds with status 503 or not at all.
    pub alive: bool,
    /// The checks of liveness: `keeper`, `policies`, `scans`, `kubelet`, `streams`.
    pub checks: Vec<Check>,
}

/// The daemon is ready.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Ready {
    /// Always true; a daemon that is not ready responds with a problem of status 503.
    pub ready: bool,
    /// The checks of readiness.
    pub checks: Vec<Check>,
}
