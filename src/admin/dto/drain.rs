//! What operators say of a GPU, and how far it is drained.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Whether an operator lets a GPU be granted.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Drain {
    /// `active`, `cordoned`, `draining` or `drained`.
    #[schema(example = "draining")]
    pub state: String,
    /// Who turned it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = "admin")]
    pub by: Option<String>,
    /// Why, in the operator's words.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = "fan replacement")]
    pub why: Option<String>,
    /// When.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(format = DateTime, example = "2026-02-03T04:05:06.000Z")]
    pub since: Option<String>,
    /// While it is draining: how far it is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub progress: Option<DrainProgress>,
}

/// How far a GPU is drained.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct DrainProgress {
    /// By when it is to be done.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(format = DateTime, example = "2026-02-03T04:15:06.000Z")]
    pub deadline: Option<String>,
    /// What becomes of it then.
    pub at_deadline: AtDeadline,
    /// Whether the deadline is over.
    pub late: bool,
    /// Live allocations that still name it.
    #[schema(example = json!(["3f2a9c01-17"]))]
    pub allocations: Vec<String>,
    /// Processes that are still seen on it; absent where they cannot be seen.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = 1)]
    pub processes: Option<u32>,
}

/// What becomes of a drain that is not done by its deadline.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub enum AtDeadline {
    /// It goes on, and is shown as late.
    #[default]
    Wait,
    /// It is called off; the GPU stays cordoned.
    GiveUp,
}

/// Why a GPU is cordoned.
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Cordon {
    /// In the operator's words; at most 1024 bytes, no control characters.
    #[serde(default)]
    #[schema(example = "fan replacement")]
    pub reason: String,
}

/// How a GPU is to be emptied.
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct DrainOrder {
    /// In the operator's words; at most 1024 bytes, no control characters.
    #[serde(default)]
    #[schema(example = "fan replacement")]
    pub reason: String,
    /// By when it is to be done, seconds from now; at most a week. Without it there is no end.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = 600)]
    pub deadline_seconds: Option<u32>,
    /// What becomes of it then.
    #[serde(default)]
    pub at_deadline: AtDeadline,
}

/// An operator's word on a GPU's health.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct MarkHealthy {
    /// `healthy`; nothing else can be said.
    #[schema(example = "healthy")]
    pub state: String,
    /// In the operator's words; at most 1024 bytes, no control characters.
    #[serde(default)]
    #[schema(example = "reseated the riser")]
    pub reason: String,
}
