//! GPUNode: the stack that a node is to activate, and its GPUs as its daemon reports them.
// KubeSchema copies the structs into functions.
#![expect(unreachable_pub)]
// Each column has a name.
#![expect(clippy::duplicated_attributes)]

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use kube::core::Duration as GoDuration;
use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// Most GPUs in a status.
pub const GPUS_MAX: usize = 16;
/// Most models in a status.
pub const MODELS_MAX: usize = 16;
/// The longest JSON of [`GpuNodeStatus::gpus`], bytes.
pub const GPUS_BYTES_MAX: usize = 6 * 1024;

/// Most entries of a stack.
pub const ENTRIES_MAX: usize = 8;
/// The longest JSON of [`StackSpec::entries`], bytes: the API server keeps and sends the object as a whole.
pub const ENTRIES_BYTES_MAX: usize = 3 * 1024;
/// How long a stack must be active, without a suspended policy, before it is settled, unless `soak` says otherwise.
pub const SOAK: Duration = Duration::from_secs(600);

/// The stack that a node is to activate, and its GPUs.
#[derive(CustomResource, KubeSchema, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[kube(
    group = "fleet.berth.dev",
    version = "v1alpha1",
    kind = "GPUNode",
    root = "GpuNode",
    plural = "gpunodes",
    singular = "gpunode",
    shortname = "gn",
    doc = "The stack that a node is to activate, and its GPUs. The node's daemon creates the object and reports in its status.",
    derive = "PartialEq",
    status = "GpuNodeStatus",
    printcolumn(name = "GPUS", type_ = "integer", json_path = ".status.summary.gpus"),
    printcolumn(name = "AVAILABLE", type_ = "integer", json_path = ".status.summary.available"),
    printcolumn(name = "OUT", type_ = "integer", json_path = ".status.summary.out"),
    printcolumn(name = "HELD", type_ = "integer", json_path = ".status.summary.held"),
    printcolumn(name = "POLICY", type_ = "string", json_path = ".spec.stack.policy"),
    printcolumn(name = "STACK", type_ = "string", json_path = ".status.stack.phase"),
    printcolumn(
        name = "WHY",
        type_ = "string",
        json_path = ".status.conditions[?(@.type==\"GPUsAvailable\")].reason"
    ),
    printcolumn(name = "SEEN", type_ = "date", json_path = ".status.heartbeatTime"),
    printcolumn(name = "AGE", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(rename_all = "camelCase")]
pub struct GpuNodeSpec {
    /// The stack that the node activates, in place of a stack of the configuration file or of the node's API. If `stack` is absent,
    /// the active stack stays.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stack: Option<StackSpec>,
}

/// A stack of policies.
#[derive(KubeSchema, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct StackSpec {
    /// The name of the stack that commands and events show, such as the name of a team. The name has no other effect.
    #[schemars(length(min = 1, max = 253), regex(pattern = "^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"))]
    pub policy: String,
    /// 12 hexadecimal digits, such as the first 12 of the SHA-256 of the entries. Change the revision whenever the entries change.
    #[schemars(regex(pattern = "^[0-9a-f]{12}$"))]
    pub revision: String,
    /// The number of the attempt, 1 if absent. Increase it to try again a revision that has failed on the node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 1_000_000))]
    pub attempt: Option<u32>,
    /// How long the stack must be active, without a suspended policy, before the stack is settled: 10s to 24h; 10m if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 32))]
    #[x_kube(
        validation = Rule::new("duration(self) >= duration('10s') && duration(self) <= duration('24h')").message("soak must be a duration from 10s to 24h")
    )]
    pub soak: Option<String>,
    /// The test of the new policies of the stack before its activation; none if absent. A policy is new if the active stack does not
    /// have the same entry. Admissions are decisions of the hook `admit`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gate: Option<GateSpec>,
    /// The policies in the order of their calls.
    #[schemars(length(max = 8), extend("x-kubernetes-list-type" = "atomic"))]
    pub entries: Vec<EntrySpec>,
}

impl StackSpec {
    /// How long the stack must be active, without a suspended policy, before the stack is settled.
    #[must_use]
    pub fn soak(&self) -> Duration {
        self.soak.as_deref().and_then(duration).unwrap_or(SOAK)
    }
}

/// The longest duration, as in the rules of `soak` and `shadowFor`.
const DURATION_MAX: Duration = Duration::from_secs(24 * 3600);

/// A duration of a specification; `None` if it is none, which the API server has ruled out.
pub(crate) fn duration(text: &str) -> Option<Duration> {
    let given = text.parse::<GoDuration>().ok().filter(|given| !given.is_negative())?;
    Some(Duration::from(given).min(DURATION_MAX))
}

/// The test of the new policies of a stack before its activation.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("has(self.replayDecisions) || has(self.shadowFor)").message("gate needs replayDecisions or shadowFor, or both")
)]
pub struct GateSpec {
    /// How many recorded admissions of the node are replayed with each new policy, the newest first; none if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 10_000))]
    pub replay_decisions: Option<u32>,
    /// How long each new policy is then a shadow, which answers the node's admissions without effect: 10s to 24h; not at all if
    /// absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 32))]
    #[x_kube(
        validation = Rule::new("duration(self) >= duration('10s') && duration(self) <= duration('24h')").message("shadowFor must be a duration from 10s to 24h")
    )]
    pub shadow_for: Option<String>,
    /// The highest percentage of its answers, to recorded and to live admissions separately, with which a policy may deny what was
    /// granted, or fail; 0 if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 100))]
    pub max_new_denials_percent: Option<u32>,
}

impl GateSpec {
    /// How long each policy answers the node's admissions; `None` for not at all.
    #[must_use]
    pub fn shadow_for(&self) -> Option<Duration> {
        self.shadow_for.as_deref().and_then(duration)
    }
}

/// A policy of a stack.
#[derive(KubeSchema, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("has(self.ref) == has(self.manifest)").message("set both ref and manifest, or neither of them"),
    validation = Rule::new("has(self.layer) != (has(self.shipped) && self.shipped)").message("set either layer or shipped: true"),
    validation = Rule::new("has(self.layer) || !has(self.ref)").message("ref is not allowed with shipped: true")
)]
pub struct EntrySpec {
    /// The name of the policy.
    #[schemars(length(min = 1, max = 63))]
    pub name: String,
    /// `sha256:` and the digest of the policy's module, which `berth policy list -o json` shows on the node and `berth policy pack`
    /// prints.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(regex(pattern = "^sha256:[0-9a-f]{64}$"))]
    pub layer: Option<String>,
    /// Whether the policy is the one of this name that the daemon has built in.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shipped: Option<bool>,
    /// The repository, without a tag, from which a node that does not have the policy pulls it, such as
    /// `registry.example/team/policy`. The configuration file of the daemon must allow it (`fleet.repositories`).
    #[serde(default, rename = "ref", skip_serializing_if = "Option::is_none")]
    #[schemars(
        length(max = 255),
        regex(pattern = "^[a-z0-9.-]+(:[0-9]+)?(/[a-z0-9]([a-z0-9._-]*[a-z0-9])?)+$")
    )]
    pub repository: Option<String>,
    /// `sha256:` and the digest of the policy's manifest in the repository `ref`, which `berth policy pack` prints.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(regex(pattern = "^sha256:[0-9a-f]{64}$"))]
    pub manifest: Option<String>,
    /// The policy's parameters, a JSON object as text, which the policy gets unchanged.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 2048))]
    pub parameters: Option<String>,
    /// What the policy may do. An absent field has the default that the same key has in the configuration file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub permissions: Option<PermissionsSpec>,
    /// The effect of a fault of the policy; `skip` if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub on_fault: Option<OnFault>,
}

/// What a policy may do.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct PermissionsSpec {
    /// Whether it may deny an allocation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub deny: Option<bool>,
    /// The greatest number of devices of one resource into which the policy may divide a GPU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 128))]
    pub share_max: Option<u32>,
    /// Resources that it may offer: exact names, or prefixes that end in `*`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 16), inner(length(min = 1, max = 308)), extend("x-kubernetes-list-type" = "atomic"))]
    pub resources: Option<Vec<String>>,
    /// Environment variables that it may set: exact names, or prefixes that end in `*`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 16), inner(length(min = 1, max = 256)), extend("x-kubernetes-list-type" = "atomic"))]
    pub environment: Option<Vec<String>>,
}

/// The effect of a policy's fault. `skip`: the policy is treated as if it had passed. `deny`: the allocation is denied.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub enum OnFault {
    /// The policy is treated as if it had passed.
    Skip,
    /// The allocation is denied.
    Deny,
    /// An effect of a later release, which this daemon does not know.
    #[serde(other)]
    #[schemars(skip)]
    Other,
}

/// What the daemon reports.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct GpuNodeStatus {
    /// The `metadata.generation` that the daemon has read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// When the daemon wrote the status. The daemon writes it at least every 18 minutes, even if nothing has changed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "crate::time")]
    pub heartbeat_time: Option<Time>,
    /// Numbers over all GPUs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub summary: Option<Summary>,
    /// The models of the GPUs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 16))]
    pub models: Option<Vec<String>>,
    /// The active stack, and the progress of the stack that `spec.stack` names.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stack: Option<StackStatus>,
    /// The GPUs, at most 16.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 16), extend("x-kubernetes-list-type" = "atomic"))]
    pub gpus: Option<Vec<GpuStatus>>,
    /// `GPUsAvailable`: False while a GPU is out of use, with the causes. `Synced`: False while the node does not have the stack of
    /// the specification. `PolicyPulled`: False while a policy of the stack that has a `ref` is not on the node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "crate::conditions")]
    pub conditions: Option<Vec<Condition>>,
}

/// The stack of a node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct StackStatus {
    /// Who decided on the active stack: `file`, `api`, `fleet`, or `breakGlass` if a caller has activated
    /// it for a limited time in place of the GPUNode's stack.
    #[serde(default)]
    pub origin: String,
    /// The revision of the active stack; absent unless `origin` is `fleet`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub active: Option<String>,
    /// The revision that was settled last.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub good: Option<String>,
    /// The progress of the stack that `spec.stack` names; absent if `spec.stack` is absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub phase: Option<StackPhase>,
    /// The revision that has failed or was refused.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failed: Option<FailedRevision>,
}

/// The progress of the stack that `spec.stack` names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum StackPhase {
    /// A policy of the stack is not on the node yet, and is pulled if its entry has a `ref`; or the daemon cannot activate the stack at
    /// present. The daemon retries.
    Pulling,
    /// The gate tests the new policies of the stack. The active stack has not changed.
    Gating,
    /// The stack is active. The daemon rolls the stack back if one of its policies is suspended.
    Soaking,
    /// The stack is active, and its soak has ended.
    Settled,
    /// A policy of the stack was suspended during the soak, and the daemon activated an earlier stack again.
    RolledBack,
    /// A policy of the stack was suspended during the soak, and no earlier stack could be activated again.
    Failed,
    /// A caller has activated another stack on the node for a while. The daemon returns to the stack of the specification by itself.
    LocalOverride,
    /// The stack cannot be used on the node, or has not passed its gate. The active stack has not changed.
    Refused,
    /// A phase of a later release.
    #[serde(other)]
    #[schemars(skip)]
    Other,
}

impl StackPhase {
    /// The phase as the status has it.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Pulling => "Pulling",
            Self::Gating => "Gating",
            Self::Soaking => "Soaking",
            Self::Settled => "Settled",
            Self::RolledBack => "RolledBack",
            Self::Failed => "Failed",
            Self::LocalOverride => "LocalOverride",
            Self::Refused => "Refused",
            Self::Other => "Other",
        }
    }
}

/// A revision that failed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct FailedRevision {
    /// The revision.
    pub revision: String,
    /// The attempt that failed.
    pub attempt: u32,
    /// Why the attempt failed.
    pub reason: String,
}

/// Numbers over all GPUs of a node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Summary {
    /// GPUs, without those that the configuration excludes.
    pub gpus: u32,
    /// Those that are granted.
    pub available: u32,
    /// Those that are not: cordoned, drained, unhealthy or gone.
    pub out: u32,
    /// Devices that the policies offer.
    pub offered: u32,
    /// Devices that are held.
    pub held: u32,
}

/// One GPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct GpuStatus {
    /// Its index on the node, as in `nvidia-smi`; absent for a GPU that is gone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub index: Option<u32>,
    /// Its UUID.
    pub uuid: String,
    /// The position of its model in `models`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model: Option<u32>,
    /// `healthy`, `degraded`, `unhealthy` or `vanished`.
    pub health: String,
    /// `active`, `cordoned`, `draining` or `drained`.
    pub drain: String,
    /// Who has cordoned or drained it. Long names are cut, and only those that fit are listed.
    pub marks: Vec<String>,
    /// Devices that the policies offer on it.
    pub offered: u32,
    /// Devices that are held on it.
    pub held: u32,
}
