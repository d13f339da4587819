//! Comparisons of a policy's answers with actual decisions: replays and shadows. Explanations of allocations.

use crate::decision::DecisionRecord;
use crate::policy::Hook;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use utoipa::ToSchema;

/// The explanation of an allocation.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Explanation {
    /// The allocation.
    #[schema(example = "5eed0001-17")]
    pub allocation: String,
    /// The explanation in sentences.
    #[schema(example = json!(["Placed by timeslice: the least-held GPUs.", "No policy objected; admitted by default.", "default/trainer-0/main has 1 x nvidia.com/gpu.shared on GPU 2."]))]
    pub sentences: Vec<String>,
    /// The allocation's decisions that are still in the journal, placement first.
    pub decisions: Vec<DecisionRecord>,
}

/// A policy to compare.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Candidate {
    /// The policy's name, or `name@` and at least 12 digits of the digest instead of `digest`.
    #[schema(example = "binpack")]
    pub policy: String,
    /// The digest of the policy's version; by default the newest shipped version, or the only one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08")]
    pub digest: Option<String>,
    /// The policy's parameters, at most 6 KiB of JSON.
    #[serde(default)]
    #[schema(value_type = Object, example = json!({}))]
    pub parameters: Map<String, Value>,
}

/// The result of a replay.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Replay {
    /// The version of the policy.
    #[schema(example = "binpack@0123456789ab")]
    pub policy: String,
    /// The number of decisions that were read.
    #[schema(example = 1200)]
    #[serde(rename = "looked")]
    pub decisions: u64,
    /// The number of these that cannot be replayed.
    #[schema(example = 0)]
    pub unreadable: u64,
    /// The comparison of the answers with the decisions, by hook.
    pub counts: BTreeMap<Hook, Comparison>,
    /// The newest differences and faults, newest first; at most 200.
    pub differences: Vec<Difference>,
    /// The `cursor` of the next replay; absent if there are no more decisions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = "3500")]
    pub next: Option<String>,
}

/// The numbers of equal and different answers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Comparison {
    /// Answers with the same effect as the decision. The reason and the share of the GPU may differ.
    #[schema(example = 1100)]
    pub same: u64,
    /// Answers with another effect.
    #[schema(example = 80)]
    pub differs: u64,
    /// Answers among `differs` that deny what was granted.
    #[serde(default)]
    #[schema(example = 0)]
    pub denies: u64,
    /// Calls that passed, and questions for which the policy has no hook.
    #[schema(example = 20)]
    pub passes: u64,
    /// Calls that failed.
    #[schema(example = 0)]
    pub fails: u64,
    /// Questions for which the policy was not called, since the daemon was busy; only for shadows.
    #[schema(example = 0)]
    pub skipped: u64,
    /// Calls in which the policy was shown no pod that may have sent the request, so that a rule about pods had no effect: no
    /// source showed the node's pods, or not yet that pod. 0 for a policy that is known to have no such rules.
    #[serde(default)]
    #[schema(example = 0)]
    pub without_candidates: u64,
}

/// An answer that differs from the decision, or a fault.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Difference {
    /// The decision; absent if it is not recorded: an offer equal to the previous one is not recorded again,
    /// and without a journal nothing is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = 4710)]
    pub seq: Option<u64>,
    /// The time of the decision.
    #[schema(format = DateTime, example = "2026-02-03T04:05:06.000Z")]
    pub at: String,
    /// The hook.
    pub hook: Hook,
    /// Whether the policy failed.
    #[schema(example = false)]
    pub failed: bool,
    /// The difference or the fault, as a text.
    #[schema(example = "chooses GPU-a instead of GPU-b")]
    #[serde(rename = "words")]
    pub message: String,
}

/// The shadows of the stack.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct ShadowList {
    /// The shadows, oldest first; at most 4.
    pub items: Vec<Shadow>,
}

/// A policy that is called with each question to the stack, without effect.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Shadow {
    /// The number of the shadow.
    #[schema(example = 1)]
    pub id: u64,
    /// The policy's name and the beginning of its digest.
    #[schema(example = "binpack@0123456789ab")]
    pub policy: String,
    /// The digest of the policy's version.
    #[schema(example = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08")]
    pub digest: String,
    /// The policy's parameters.
    #[schema(value_type = Object, example = json!({}))]
    pub parameters: Value,
    /// The start of the shadow.
    #[schema(format = DateTime, example = "2026-02-03T04:05:06.000Z")]
    pub since: String,
    /// The comparison of its answers with the decisions, by hook.
    pub counts: BTreeMap<Hook, Comparison>,
    /// The newest differences and faults, newest first; at most 32.
    pub differences: Vec<Difference>,
}
