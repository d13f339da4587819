//! A policy that is tried on the node as it stands, without effect.

use crate::decision::{DecisionCall, Outcome};
use crate::gpu::OfferLine;
use crate::policy::Hook;
use crate::stack::{OnFault, Permissions};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use utoipa::ToSchema;

/// What to try.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct NewTrial {
    /// The policy's name, or `name@` and at least 12 digits of a digest in place of `digest`.
    #[schema(example = "timeslice")]
    pub policy: String,
    /// Which version of it; if absent the newest shipped one, or the only one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08")]
    pub digest: Option<String>,
    /// What it is set to; at most 6 KiB of JSON.
    #[serde(default)]
    #[schema(value_type = Object, example = json!({"replicas": 4}))]
    pub parameters: Map<String, Value>,
    /// What it may do; if absent, what the entry of the active stack may that it takes the place of, or
    /// the default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub permissions: Option<Permissions>,
    /// What happens when it fails, the same way.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub on_fault: Option<OnFault>,
    /// Whether it is asked without the rest of the active stack. If not, it takes the place of the entry
    /// of the same name, or is asked first.
    #[serde(default)]
    #[schema(example = false)]
    pub alone: bool,
    /// What a container would ask for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub request: Option<TrialRequest>,
}

/// What a container would ask for.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct TrialRequest {
    /// The resource.
    #[schema(example = "nvidia.com/gpu.shared")]
    pub resource: String,
    /// How many devices, 1 to 2048.
    #[schema(example = 2, minimum = 1, maximum = 2048)]
    pub count: usize,
    /// The namespace of its pod; `default` if only the pod is named. With neither, policies are shown
    /// the pods that may be asking now.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = "team-a")]
    pub namespace: Option<String>,
    /// The name of its pod.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = "trainer-0")]
    pub pod: Option<String>,
}

/// What would come of a policy on the node as it stands.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Trial {
    /// The version that was tried.
    #[schema(example = "timeslice@0123456789ab")]
    pub policy: String,
    /// Who was asked, first asked first.
    #[schema(example = json!(["quota@aaaaaaaaaaaa", "timeslice@0123456789ab"]))]
    pub stack: Vec<String>,
    /// The entry of the active stack that it took the place of.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = "timeslice@bbbbbbbbbbbb")]
    pub instead_of: Option<String>,
    /// The state of the node that it was asked on: counts changes since the daemon started.
    #[schema(example = 812)]
    pub generation: u64,
    /// Why this stack would not be activated; absent where it would be.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = "policy timeslice@0123456789ab fails on this node: unreachable (trap)")]
    pub refused: Option<String>,
    /// What each part would be offered as. Where the stack would not be activated: as it is offered now.
    pub offers: Vec<TrialOffer>,
    /// Devices by resource.
    pub resources: Vec<TrialResource>,
    /// What would become of the request, if there was one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub request: Option<TrialOutcome>,
    /// What every policy was asked and said, in order.
    pub calls: Vec<TrialCall>,
}

/// What one part would be offered as.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct TrialOffer {
    /// The part.
    #[schema(example = "GPU-8a56a4bc-e184-a047-2620-be19fdf913d5")]
    pub part: String,
    /// As people know it: the GPU's index, and of an instance its profile.
    #[schema(example = "GPU 0")]
    pub name: String,
    /// Its resources then.
    pub offered: Vec<OfferLine>,
    /// Who offers that.
    #[schema(example = "timeslice@0123456789ab")]
    pub by: String,
    /// Its resources now.
    pub offered_now: Vec<OfferLine>,
    /// Who offers that.
    #[schema(example = "baseline")]
    pub by_now: String,
    /// Whether the two differ in more than who says so.
    #[schema(example = true)]
    pub differs: bool,
}

/// Devices of one resource.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct TrialResource {
    /// The resource.
    #[schema(example = "nvidia.com/gpu.shared")]
    pub resource: String,
    /// Devices that would be offered.
    #[schema(example = 32)]
    pub devices: usize,
    /// Those of them that could be had at once.
    #[schema(example = 32)]
    pub free: usize,
    /// Devices that are offered now.
    #[schema(example = 0)]
    pub devices_now: usize,
    /// Those that can be had now.
    #[schema(example = 0)]
    pub free_now: usize,
}

/// What would become of a request.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct TrialOutcome {
    /// The resource.
    #[schema(example = "nvidia.com/gpu.shared")]
    pub resource: String,
    /// How many devices.
    #[schema(example = 2)]
    pub count: usize,
    /// Pods that policies were shown as who may be asking, as namespace/pod.
    #[schema(example = json!(["team-a/trainer-0"]))]
    pub candidates: Vec<String>,
    /// Which devices; none where too few are free.
    #[schema(example = json!(["GPU-8a56a4bc-e184-a047-2620-be19fdf913d5::0"]))]
    pub devices: Vec<String>,
    /// The same as people know them.
    #[schema(example = json!(["GPU 0 share 0"]))]
    pub names: Vec<String>,
    /// Who chose them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = "timeslice@0123456789ab")]
    pub placed_by: Option<String>,
    /// Why these.
    #[schema(example = "the least-held GPUs")]
    pub placed_because: String,
    /// `granted`; `denied` by a policy; `refused` by the kernel.
    pub outcome: Outcome,
    /// Who is behind that.
    #[schema(example = json!(["baseline"]))]
    pub by: Vec<String>,
    /// Why, in words.
    #[schema(example = "")]
    pub reason: String,
    /// What policies would set in the container's environment.
    #[schema(example = json!({"MY_LIMIT": "4"}))]
    pub environment: BTreeMap<String, String>,
    /// Its limit of memory, MiB.
    #[serde(default, rename = "memoryLimitMiB", skip_serializing_if = "Option::is_none")]
    #[schema(example = 20_000)]
    pub memory_limit_mib: Option<u64>,
    /// Its limit of compute, percent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = 25)]
    pub compute_limit_percent: Option<u32>,
}

/// One call of a trial.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct TrialCall {
    /// Which hook.
    pub hook: Hook,
    /// What it said, in words.
    #[schema(example = "GPU 0 GPU 1: 4 x nvidia.com/gpu.shared (0 MiB, 0 %)")]
    pub words: String,
    /// What it logged.
    #[schema(example = json!(["two GPUs are idle"]))]
    pub log: Vec<String>,
    /// The call as a decision has it.
    #[serde(flatten)]
    pub call: DecisionCall,
}
