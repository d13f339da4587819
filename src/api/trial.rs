//! Trials: a policy applied to the node's present state, without effect.

use crate::decision::{DecisionCall, Outcome};
use crate::policy::Hook;
use crate::stack::{NewStackEntry, OnFault, Permissions, TrialOffer, TrialResource};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use utoipa::ToSchema;

/// A trial to run.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[schema(as = TrialSpec)]
pub struct NewTrial {
    /// The policy's name, or `name@` and at least 12 digits of the digest instead of `digest`. Absent with `entries`.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[schema(example = "timeslice")]
    pub policy: String,
    /// The whole stack to try, as `PUT /api/v1/stack` takes it, instead of one policy beside the active ones. Without any
    /// other key but `request`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub entries: Option<Vec<NewStackEntry>>,
    /// The digest of the policy's version; by default the newest shipped version, or the only one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08")]
    pub digest: Option<String>,
    /// The policy's parameters, at most 6 KiB of JSON.
    #[serde(default)]
    #[schema(value_type = Object, example = json!({"replicas": 4}))]
    pub parameters: Map<String, Value>,
    /// The policy's permissions; by default those of the replaced entry of the active stack, or the default
    /// permissions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub permissions: Option<Permissions>,
    /// The effect of a fault of the policy; by default that of the replaced entry, or `skip`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub on_fault: Option<OnFault>,
    /// Whether to call the policy without the rest of the active stack. Otherwise it replaces the entry of the same
    /// name, or is called first.
    #[serde(default)]
    #[schema(example = false)]
    pub alone: bool,
    /// The request of a container.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub request: Option<TrialRequest>,
}

/// A container's request for devices.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct TrialRequest {
    /// The resource.
    #[schema(example = "nvidia.com/gpu.shared")]
    pub resource: String,
    /// The number of devices, 1 to 2048.
    #[schema(example = 2, minimum = 1, maximum = 2048)]
    pub count: usize,
    /// The namespace of the container's pod, `default` if only `pod` or `labels` are present. Without all three, policies are
    /// shown the pods that may be requesting devices now.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = "team-a")]
    pub namespace: Option<String>,
    /// The name of the container's pod.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = "trainer-0")]
    pub pod: Option<String>,
    /// The labels of the container's pod, at most 64. They are added to the labels of a pod of the node with the same
    /// name, and replace those with the same key.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schema(example = json!({"tier": "gold"}))]
    pub labels: BTreeMap<String, String>,
}

/// The effects of a policy on the node's present state.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Trial {
    /// The version of the policy; of a whole stack its first one, or empty.
    #[schema(example = "timeslice@0123456789ab")]
    pub policy: String,
    /// The policies of the trial, in the order in which they were called.
    #[schema(example = json!(["quota@aaaaaaaaaaaa", "timeslice@0123456789ab"]))]
    pub stack: Vec<String>,
    /// The entry of the active stack that the policy replaced.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = "timeslice@bbbbbbbbbbbb")]
    pub instead_of: Option<String>,
    /// The generation of the node's state: the number of changes since the daemon started.
    #[schema(example = 812)]
    pub generation: u64,
    /// The reason why an activation of this stack would be refused; absent if it would succeed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = "policy timeslice@0123456789ab fails on this node: unreachable (trap)")]
    pub refused: Option<String>,
    /// The warnings that the stack would have on this node, as in `preview` of a dry run of its activation.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schema(example = json!(["policy timeslice@9f86d081884c: only[0]: no GPU of this node matches {model: NVIDIA L4*}"]))]
    pub warnings: Vec<String>,
    /// The offers of the parts with this stack, or the present offers if the activation would be refused.
    pub offers: Vec<TrialOffer>,
    /// The devices by resource.
    pub resources: Vec<TrialResource>,
    /// The outcome of the request; absent without one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub request: Option<TrialOutcome>,
    /// The calls of policies, in order.
    pub calls: Vec<TrialCall>,
}

/// The outcome of a request.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct TrialOutcome {
    /// The resource.
    #[schema(example = "nvidia.com/gpu.shared")]
    pub resource: String,
    /// The number of devices.
    #[schema(example = 2)]
    pub count: usize,
    /// The pods that were passed to policies as candidates, as namespace/pod.
    #[schema(example = json!(["team-a/trainer-0"]))]
    pub candidates: Vec<String>,
    /// Ids of the chosen devices; empty if too few are free.
    #[schema(example = json!(["GPU-8a56a4bc-e184-a047-2620-be19fdf913d5::0"]))]
    pub devices: Vec<String>,
    /// Short names of the chosen devices.
    #[schema(example = json!(["GPU 0 share 0"]))]
    pub names: Vec<String>,
    /// The policy that chose the devices, or `baseline`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = "timeslice@0123456789ab")]
    pub placed_by: Option<String>,
    /// The reason for the choice.
    #[schema(example = "the least-held GPUs")]
    pub placed_because: String,
    /// `granted`, `denied` by a policy, or `refused` by the daemon.
    pub outcome: Outcome,
    /// The policies that decided the outcome, or `baseline`.
    #[schema(example = json!(["baseline"]))]
    pub by: Vec<String>,
    /// The reason of the outcome.
    #[schema(example = "")]
    pub reason: String,
    /// The environment variables that policies would set in the container.
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
    /// The hook.
    pub hook: Hook,
    /// The policy's answer, as a text.
    #[schema(example = "GPU 0 GPU 1: 4 x nvidia.com/gpu.shared (0 MiB, 0 %)")]
    #[serde(rename = "words")]
    pub message: String,
    /// The policy's log lines.
    #[schema(example = json!(["two GPUs are idle"]))]
    pub log: Vec<String>,
    /// The call, in the form of a recorded decision.
    #[serde(flatten)]
    pub call: DecisionCall,
}
