//! What operators say of a GPU, and how far it is drained.

use super::gpu::HealthState;
use super::values::values;
use crate::rfc3339;
use berth_kernel::drain;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Whether an operator lets a GPU be granted.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Drain {
    /// How far it is taken out.
    pub state: DrainState,
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
    /// The cordons and drains on it, at most one per owner. It is granted again once it has none.
    #[serde(default)]
    pub marks: Vec<Mark>,
}

/// One owner's cordon or drain of a GPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Mark {
    /// `api:` and the caller's name, or `operator` for a mark from a release in which marks had no owner.
    #[schema(example = "api:admin")]
    pub owner: String,
    /// Whether it also drains the GPU.
    pub kind: MarkKind,
    /// The reason, where one was given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = "fan replacement")]
    pub why: Option<String>,
    /// When it was set.
    #[schema(format = DateTime, example = "2026-02-03T04:05:06.000Z")]
    pub since: String,
    /// Whether it was a drain that was given up at its deadline.
    #[serde(default)]
    pub expired: bool,
}

values! {
    /// The kind of a mark.
    MarkKind from drain::MarkKind {
        /// Nothing new is granted.
        Cordon = "cordon",
        /// Cordoned and drained.
        Drain = "drain",
    }
}

impl Mark {
    /// The mark of this owner.
    #[must_use]
    pub fn from_kernel(owner: &drain::Owner, mark: &drain::Mark) -> Self {
        Self {
            owner: owner.to_string(),
            kind: (&mark.kind).into(),
            why: Some(mark.why.clone()).filter(|why| !why.is_empty()),
            since: rfc3339(mark.since_wall_ms),
            expired: mark.expired,
        }
    }
}

values! {
    /// How far an operator has taken a GPU out.
    DrainState from drain::Drain {
        /// It is granted as offered.
        Active = "active",
        /// Nothing new is granted on it.
        Cordoned = "cordoned",
        /// Nothing new is granted on it, and what is held is awaited.
        Draining = "draining",
        /// Nothing is held on it any more.
        Drained = "drained",
    }
}

/// How far a GPU is drained.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct DrainProgress {
    /// Whether its pods are asked to leave.
    #[serde(default)]
    pub evict: bool,
    /// By when it is to be done.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(format = DateTime, example = "2026-02-03T04:15:06.000Z")]
    pub deadline: Option<String>,
    /// Seconds until then; 0 once it is over.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = 540)]
    pub seconds_left: Option<u64>,
    /// What becomes of it then.
    pub at_deadline: AtDeadline,
    /// Whether the deadline is over.
    pub late: bool,
    /// What keeps its pods from being asked at all, if something does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = "no pod is evicted while the API server cannot be used: no answer within 15 s")]
    pub warning: Option<String>,
    /// Live allocations that still name it.
    #[schema(example = json!(["3f2a9c01-17"]))]
    pub allocations: Vec<String>,
    /// Processes that are still seen on it; absent where they cannot be seen.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = 1)]
    pub processes: Option<u32>,
    /// Whose they are, by name; those that are not known yet come last.
    #[serde(default)]
    pub holders: Vec<DrainHolder>,
}

/// A pod that holds something of a GPU that is being drained.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct DrainHolder {
    /// Its namespace, once known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = "team")]
    pub namespace: Option<String>,
    /// Its name, once known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = "train-0")]
    pub pod: Option<String>,
    /// Its UID, once known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = "0b9d3b5e-1d3e-4b52-9d4c-1f6f1e0a7c11")]
    pub pod_uid: Option<String>,
    /// Its containers that hold something.
    #[schema(example = json!(["main"]))]
    pub containers: Vec<String>,
    /// What it holds of this GPU.
    #[schema(example = json!(["3f2a9c01-17"]))]
    pub allocations: Vec<String>,
    /// How far it is on its way out.
    pub state: DrainHolderState,
    /// What keeps it: the API server's words on its disruption budget, or why it could not be asked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = "The disruption budget web needs 3 healthy pods and has 3 currently")]
    pub message: Option<String>,
    /// Since when its eviction is requested, or it is being deleted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(format = DateTime, example = "2026-02-03T04:05:06.000Z")]
    pub since: Option<String>,
    /// It belongs to a DaemonSet, which creates it again on this node: on another GPU, or waiting for one.
    #[serde(default)]
    pub comes_back: bool,
}

values! {
    /// How far a pod is on its way out.
    DrainHolderState {
        /// No source has said yet who it is.
        NotKnown = "notKnown",
        /// The API server has not shown it, so it cannot be asked.
        NotShown = "notShown",
        /// Its eviction was not requested, or not yet.
        NotAsked = "notAsked",
        /// A static pod, which cannot be evicted: remove its file from the kubelet's manifests.
        StaticPod = "staticPod",
        /// Its eviction was requested, and it is not being deleted yet.
        Asked = "asked",
        /// Its disruption budget keeps it; it is asked again every few seconds.
        DisruptionBudget = "disruptionBudget",
        /// It could not be asked; it is asked again every few seconds.
        Failed = "failed",
        /// It is being deleted and has its grace period.
        Terminating = "terminating",
        /// Finished or deleted; the kubelet has yet to let go of its devices.
        Over = "over",
    }
}

/// What becomes of a drain that is not done by its deadline.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub enum AtDeadline {
    /// It goes on, and is shown as late.
    #[default]
    Wait,
    /// Pods that are still there are deleted, with their own grace period and whatever their disruption
    /// budgets say. Static pods stay. Only with `evict`.
    Delete,
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
    /// Whether its pods are asked to leave, through the API server's Eviction API: disruption budgets
    /// hold. Without it they end by themselves or by `kubectl`.
    #[serde(default)]
    pub evict: bool,
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
    #[schema(value_type = String, example = "healthy")]
    pub state: HealthState,
    /// In the operator's words; at most 1024 bytes, no control characters.
    #[serde(default)]
    #[schema(example = "reseated the riser")]
    pub reason: String,
}

impl From<drain::AtDeadline> for AtDeadline {
    fn from(at: drain::AtDeadline) -> Self {
        match at {
            drain::AtDeadline::Wait => Self::Wait,
            drain::AtDeadline::Delete => Self::Delete,
            drain::AtDeadline::GiveUp => Self::GiveUp,
        }
    }
}

impl From<AtDeadline> for drain::AtDeadline {
    fn from(at: AtDeadline) -> Self {
        match at {
            AtDeadline::Wait => Self::Wait,
            AtDeadline::Delete => Self::Delete,
            AtDeadline::GiveUp => Self::GiveUp,
        }
    }
}
