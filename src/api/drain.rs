//! Cordons, drains and their progress.

use super::health::HealthState;
use super::values::{same_variants, values};
use crate::{non_empty, rfc3339};
use berth_kernel::drain::marks;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// The drain state of a GPU: whether operators permit grants on it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Drain {
    /// The drain state.
    pub state: DrainState,
    /// The operator that changed it last.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = "admin")]
    pub by: Option<String>,
    /// The operator's reason.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = "fan replacement")]
    pub why: Option<String>,
    /// The time of the last change.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(format = DateTime, example = "2026-02-03T04:05:06.000Z")]
    pub since: Option<String>,
    /// The progress of the drain; only while it is draining.
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
    /// `api:` and the caller's name, `fleet:` and the UID of a GPUMaintenance, `taintRule:` and the UID of a DeviceTaintRule, or
    /// `operator` for a mark from a release in which marks had no owner.
    #[schema(example = "api:admin")]
    pub owner: String,
    /// Who set it last: the caller's name, or the kind and name of the object, such as `GPUMaintenance/fan`.
    #[serde(default)]
    #[schema(example = "admin")]
    pub by: String,
    /// The object to which the mark belongs, by kind and name; absent for a caller's mark. The mark is removed when the object is
    /// deleted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = "GPUMaintenance/fan")]
    pub object: Option<String>,
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
    MarkKind from marks::MarkKind {
        /// Nothing new is granted.
        Cordon = "cordon",
        /// Cordoned and drained.
        Drain = "drain",
    }
}

impl Mark {
    /// The mark of this owner.
    #[must_use]
    pub fn from_kernel(owner: &marks::Owner, mark: &marks::Mark) -> Self {
        Self {
            owner: owner.to_string(),
            by: mark.by.clone(),
            object: owner.is_object().then(|| mark.by.clone()),
            kind: (&mark.kind).into(),
            why: non_empty(&mark.why),
            since: rfc3339(mark.since_wall_ms),
            expired: mark.expired,
        }
    }
}

/// The command that deletes an object, and so removes its marks; `object`: see [`Mark::object`].
#[must_use]
pub fn deletion_command(object: &str) -> String {
    let (kind, name) = object.split_once('/').unwrap_or((object, ""));
    format!("kubectl delete {} {name}", kind.to_lowercase())
}

values! {
    /// The drain state of a GPU.
    DrainState from marks::Drain {
        /// It is granted as offered.
        Active = "active",
        /// Nothing new is granted on it.
        Cordoned = "cordoned",
        /// Nothing new is granted on it, and the ends of its allocations are waited for.
        Draining = "draining",
        /// Nothing is held on it any more.
        Drained = "drained",
    }
}

/// The progress of a drain.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct DrainProgress {
    /// Whether the GPU's pods are evicted.
    #[serde(default)]
    pub evict: bool,
    /// The deadline of the drain.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(format = DateTime, example = "2026-02-03T04:15:06.000Z")]
    pub deadline: Option<String>,
    /// Seconds until the deadline; 0 after it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = 540)]
    pub seconds_left: Option<u64>,
    /// The action at the deadline.
    pub at_deadline: AtDeadline,
    /// Whether the deadline has passed.
    pub late: bool,
    /// The reason why no pod can be evicted at present, if there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = "no pod is evicted while the API server cannot be used: no answer within 15 s")]
    pub warning: Option<String>,
    /// Live allocations that have devices on the GPU.
    #[schema(example = json!(["3f2a9c01-17"]))]
    pub allocations: Vec<String>,
    /// The number of processes on the GPU; absent if processes are not visible.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = 1)]
    pub processes: Option<u32>,
    /// The pods that hold these allocations, by name; unidentified ones are last.
    #[serde(default)]
    pub holders: Vec<DrainHolder>,
}

/// A pod that holds allocations on a GPU that is being drained.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct DrainHolder {
    /// The pod's namespace; absent until known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = "team")]
    pub namespace: Option<String>,
    /// The pod's name; absent until known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = "train-0")]
    pub pod: Option<String>,
    /// The pod's UID; absent until known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = "0b9d3b5e-1d3e-4b52-9d4c-1f6f1e0a7c11")]
    pub pod_uid: Option<String>,
    /// The pod's containers that hold the allocations.
    #[schema(example = json!(["main"]))]
    pub containers: Vec<String>,
    /// The pod's allocations on this GPU.
    #[schema(example = json!(["3f2a9c01-17"]))]
    pub allocations: Vec<String>,
    /// The state of the pod's eviction.
    pub state: DrainHolderState,
    /// What delays the eviction: the API server's message about a disruption budget, or the error of the request.
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
    /// Whether the API server or the kubelet's Pods API shows the pod at present. Otherwise its owner is not known.
    #[serde(default)]
    pub shown: bool,
    /// The controller that creates another pod in its place; absent if it has none, or is not shown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub owner: Option<PodOwner>,
}

/// The controller of a pod.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct PodOwner {
    /// Its kind.
    #[schema(example = "StatefulSet")]
    pub kind: String,
    /// Its name.
    #[schema(example = "train")]
    pub name: String,
}

/// The pods that a drain of a GPU would have to wait for, or evict.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct DrainPreview {
    /// The pods that hold allocations of the GPU, by name; unidentified ones are last.
    pub holders: Vec<DrainHolder>,
}

values! {
    /// The state of a pod's eviction.
    DrainHolderState {
        /// No source has identified the pod yet.
        NotKnown = "notKnown",
        /// The API server has not listed the pod, so it cannot be evicted.
        NotShown = "notShown",
        /// Its eviction was not requested, or not yet.
        NotAsked = "notAsked",
        /// A static pod, which cannot be evicted: remove its file from the kubelet's manifests.
        StaticPod = "staticPod",
        /// Its eviction was requested, and it is not being deleted yet.
        Asked = "asked",
        /// A disruption budget prevents the eviction; it is requested again every few seconds.
        DisruptionBudget = "disruptionBudget",
        /// The eviction request failed; it is repeated every few seconds.
        Failed = "failed",
        /// It is being deleted and has its grace period.
        Terminating = "terminating",
        /// The pod has finished or was deleted; the kubelet has not released its devices yet.
        Over = "over",
    }
}

/// The action at the deadline of a drain that is not complete.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub enum AtDeadline {
    /// The drain continues and is shown as late.
    #[default]
    Wait,
    /// The remaining pods are deleted with their own grace period, regardless of disruption budgets. Static pods
    /// remain. Only with `evict`.
    Delete,
    /// The drain ends; the GPU remains cordoned.
    GiveUp,
}

/// A cordon of a GPU.
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Cordon {
    /// The reason, at most 1024 bytes without control characters.
    #[serde(default)]
    #[schema(example = "tried from Swagger UI")]
    pub reason: String,
}

/// An order to drain a GPU.
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct DrainOrder {
    /// The reason, at most 1024 bytes without control characters.
    #[serde(default)]
    #[schema(example = "tried from Swagger UI")]
    pub reason: String,
    /// Whether to evict the GPU's pods through the API server's Eviction API, which respects disruption budgets.
    /// Otherwise the drain waits until they end.
    #[serde(default)]
    pub evict: bool,
    /// The deadline in seconds from now, at most a week. By default there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = 600)]
    pub deadline_seconds: Option<u32>,
    /// The action at the deadline.
    #[serde(default)]
    pub at_deadline: AtDeadline,
}

/// An order to mark a GPU healthy.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct MarkHealthy {
    /// `healthy`, the only allowed value.
    #[schema(value_type = String, example = "healthy")]
    pub state: HealthState,
    /// The reason, at most 1024 bytes without control characters.
    #[serde(default)]
    #[schema(example = "reseated the riser")]
    pub reason: String,
}

same_variants!(AtDeadline = marks::AtDeadline { Wait, Delete, GiveUp });
