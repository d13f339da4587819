//! GPUMaintenance: takes GPUs of a node out of use while the object exists.
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

/// Most pods in [`MaintenanceStatus::blockers`].
pub const BLOCKERS_MAX: usize = 8;
/// The UUID that stands for all GPUs of the node, also for those that are added later.
pub const ALL_GPUS: &str = "*";

/// Takes GPUs of a node out of use. Deleting the object puts them back.
#[derive(CustomResource, KubeSchema, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[kube(
    group = "fleet.berth.dev",
    version = "v1alpha1",
    kind = "GPUMaintenance",
    root = "GpuMaintenance",
    plural = "gpumaintenances",
    singular = "gpumaintenance",
    shortname = "gm",
    doc = "Takes GPUs of a node out of use. Deleting the object puts them back.",
    derive = "PartialEq",
    status = "MaintenanceStatus",
    selectable = ".spec.nodeName",
    printcolumn(name = "NODE", type_ = "string", json_path = ".spec.nodeName"),
    printcolumn(name = "MODE", type_ = "string", json_path = ".spec.mode"),
    printcolumn(name = "STATE", type_ = "string", json_path = ".status.state"),
    printcolumn(name = "HOLDERS", type_ = "integer", json_path = ".status.holders"),
    printcolumn(
        name = "WHY",
        type_ = "string",
        json_path = ".status.conditions[?(@.type==\"Reconciling\")].reason"
    ),
    printcolumn(name = "AGE", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[x_kube(
    validation = Rule::new("self == oldSelf").message("the specification cannot be changed: delete the object and create another one"),
    validation = Rule::new("self.mode == 'drain' || !(has(self.evict) || has(self.deadline))").message("evict and deadline are allowed only with mode: drain"),
    validation = Rule::new("!has(self.atDeadline) || has(self.deadline)").message("atDeadline is allowed only with a deadline"),
    validation = Rule::new("!has(self.atDeadline) || self.atDeadline != 'delete' || (has(self.evict) && self.evict)").message("atDeadline: delete is allowed only with evict: true")
)]
#[serde(rename_all = "camelCase")]
pub struct MaintenanceSpec {
    /// The name of the node.
    #[schemars(length(min = 1, max = 253))]
    pub node_name: String,
    /// The UUIDs of the GPUs, as `nvidia-smi -L` prints them; `*` alone for all GPUs of the node.
    #[schemars(
        length(min = 1, max = 16),
        inner(
            length(max = 64),
            regex(pattern = "^([*]|GPU-[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12})$")
        )
    )]
    #[x_kube(
        merge_strategy = ListMerge::Set,
        validation = Rule::new("self == ['*'] || self.all(uuid, uuid != '*')").message("'*' stands for all GPUs of the node: remove the other UUIDs")
    )]
    pub uuids: Vec<String>,
    /// What is done with the GPUs.
    pub mode: Mode,
    /// Whether these pods are evicted, within their disruption budgets.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub evict: Option<bool>,
    /// How long the drain may take, counted from its start on the node: 10s to 24h.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 32))]
    #[x_kube(
        validation = Rule::new("duration(self) >= duration('10s') && duration(self) <= duration('24h')").message("the deadline must be a duration from 10s to 24h")
    )]
    pub deadline: Option<String>,
    /// What happens if pods still hold the GPUs at the deadline.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub at_deadline: Option<AtDeadline>,
    /// The reason, for people who read the object.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 512), regex(pattern = "^[^\\x00-\\x1f\\x7f-\\x9f]*$"))]
    pub reason: Option<String>,
}

/// `cordon`: nothing new is granted on the GPUs. `drain`: the daemon also waits until the pods that hold them have ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub enum Mode {
    /// Nothing new is granted on the GPUs; pods that hold them keep them.
    Cordon,
    /// Cordoned, and the daemon waits until the pods that hold them have ended.
    Drain,
    /// A mode of a later release, which this daemon does not know.
    #[serde(other)]
    #[schemars(skip)]
    Other,
}

/// What happens if pods still hold the GPUs at the deadline. `wait` (the default): the drain continues. `giveUp`: the drain stops, and
/// the GPUs stay cordoned. `delete`: the remaining pods are deleted, regardless of their disruption budgets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub enum AtDeadline {
    /// It continues.
    Wait,
    /// It stops; the GPUs stay cordoned.
    GiveUp,
    /// The remaining pods are deleted, regardless of their disruption budgets.
    Delete,
    /// A value of a later release, which this daemon does not know: it waits.
    #[serde(other)]
    #[schemars(skip)]
    Other,
}

impl MaintenanceSpec {
    /// Whether the specification selects this GPU.
    #[must_use]
    pub fn selects(&self, uuid: &str) -> bool {
        self.uuids.iter().any(|own| own == uuid || own == ALL_GPUS)
    }

    /// The deadline. The API server has validated it; if it cannot be parsed, there is none.
    #[must_use]
    pub fn deadline(&self) -> Option<Duration> {
        let parsed: GoDuration = self.deadline.as_deref()?.parse().ok()?;
        (!parsed.is_negative()).then(|| parsed.into())
    }
}

/// What the node's daemon reports of a GPUMaintenance.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct MaintenanceStatus {
    /// The state of the GPU that is furthest from the goal; absent while there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub state: Option<MaintenanceState>,
    /// When the first GPU was taken out of use for this object.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "crate::time")]
    pub since: Option<Time>,
    /// The pods that hold its GPUs; an allocation whose pod is unknown counts as one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub holders: Option<u32>,
    /// The first eight of these pods, as `namespace/name`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 8))]
    pub blockers: Option<Vec<String>>,
    /// `Drained`, `Reconciling` and `Stalled`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "crate::conditions")]
    pub conditions: Option<Vec<Condition>>,
}

/// The state of a GPU that a GPUMaintenance takes out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub enum MaintenanceState {
    /// It is not out of use yet.
    Pending,
    /// Pods that hold it are waited for.
    Draining,
    /// Nothing new is granted on it.
    Cordoned,
    /// Nothing holds it.
    Drained,
    /// A state of a later release.
    #[serde(other)]
    #[schemars(skip)]
    Other,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_specification_is_about_its_gpus_and_has_a_deadline() {
        let spec = |uuids: &[&str], deadline: Option<&str>| MaintenanceSpec {
            node_name: "n".into(),
            uuids: uuids.iter().map(|uuid| (*uuid).to_owned()).collect(),
            mode: Mode::Drain,
            evict: None,
            deadline: deadline.map(str::to_owned),
            at_deadline: None,
            reason: None,
        };
        assert!(spec(&["GPU-1"], None).selects("GPU-1") && !spec(&["GPU-1"], None).selects("GPU-2"));
        assert!(spec(&["*"], None).selects("GPU-2"));
        for (text, seconds) in [("90s", Some(90)), ("1h30m", Some(5400)), ("-1m", None), ("soon", None)] {
            assert_eq!(spec(&["*"], Some(text)).deadline(), seconds.map(Duration::from_secs), "{text}");
        }
    }
}
