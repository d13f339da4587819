//! Policies on trial: asked about the past, or beside the active stack.

use crate::decision::DecisionRecord;
use crate::policy::Hook;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use utoipa::ToSchema;

/// Why an allocation is where it is.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Explanation {
    /// The allocation.
    #[schema(example = "5eed0001-17")]
    pub allocation: String,
    /// In plain words, one after the other.
    #[schema(example = json!(["5eed0001-17 is 1 x nvidia.com/gpu.shared on GPU 2 for default/trainer-0/main."]))]
    pub sentences: Vec<String>,
    /// The decisions behind it that are still on the record: placement first.
    pub decisions: Vec<DecisionRecord>,
}

/// A policy to try.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Candidate {
    /// Its name, or `name@` and at least 12 digits of a digest in place of `digest`.
    #[schema(example = "binpack")]
    pub policy: String,
    /// Which version of it; if absent the newest shipped one, or the only one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08")]
    pub digest: Option<String>,
    /// What it is set to; at most 6 KiB of JSON.
    #[serde(default)]
    #[schema(value_type = Object, example = json!({}))]
    pub parameters: Map<String, Value>,
}

/// What a replay found.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Replay {
    /// The version that was asked.
    #[schema(example = "binpack@0123456789ab")]
    pub policy: String,
    /// Decisions that were looked at.
    #[schema(example = 1200)]
    pub looked: u64,
    /// Of these, such as cannot be asked again.
    #[schema(example = 0)]
    pub unreadable: u64,
    /// How the answers stand to what came of the questions, by hook.
    pub counts: BTreeMap<Hook, Comparison>,
    /// The newest differences and faults, newest first; at most 200.
    pub differences: Vec<Difference>,
    /// If there is more: `cursor` of the next replay.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = "3500")]
    pub next: Option<String>,
}

/// How answers stand to what came of the questions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Comparison {
    /// To the same effect; reasons may differ, and which share of a GPU it is.
    #[schema(example = 1100)]
    pub same: u64,
    /// Otherwise.
    #[schema(example = 80)]
    pub differs: u64,
    /// It left the answer to others, or has no such hook.
    #[schema(example = 20)]
    pub passes: u64,
    /// It failed.
    #[schema(example = 0)]
    pub fails: u64,
    /// It was not asked, since the daemon had better things to do; only for shadows.
    #[schema(example = 0)]
    pub skipped: u64,
}

/// One answer that was different.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Difference {
    /// The decision; absent if it is not recorded: an offer equal to the previous one is not recorded again,
    /// and without a journal nothing is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = 4710)]
    pub seq: Option<u64>,
    /// When the question was asked.
    #[schema(format = DateTime, example = "2026-02-03T04:05:06.000Z")]
    pub at: String,
    /// Which hook.
    pub hook: Hook,
    /// Whether the candidate failed.
    #[schema(example = false)]
    pub failed: bool,
    /// How it differs, or fails.
    #[schema(example = "chooses GPU-a instead of GPU-b")]
    pub words: String,
}

/// Policies that are asked beside the stack.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct ShadowList {
    /// In the order in which they came; at most 4.
    pub items: Vec<Shadow>,
}

/// A policy that is asked whatever the stack is asked, without effect.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Shadow {
    /// Its number.
    #[schema(example = 1)]
    pub id: u64,
    /// Its name, and the beginning of its digest.
    #[schema(example = "binpack@0123456789ab")]
    pub policy: String,
    /// Which version.
    #[schema(example = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08")]
    pub digest: String,
    /// What it is set to.
    #[schema(value_type = Object, example = json!({}))]
    pub parameters: Value,
    /// Since when.
    #[schema(format = DateTime, example = "2026-02-03T04:05:06.000Z")]
    pub since: String,
    /// How its answers stand to what came of the questions, by hook.
    pub counts: BTreeMap<Hook, Comparison>,
    /// The newest differences and faults, newest first; at most 32.
    pub differences: Vec<Difference>,
}
