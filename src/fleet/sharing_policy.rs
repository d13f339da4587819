//! SharingPolicy: the stack of many nodes, and how a change of it reaches them.
// KubeSchema copies the structs into functions.
#![expect(unreachable_pub)]
// Each column has a name.
#![expect(clippy::duplicated_attributes)]

use crate::gpu_node::{EntrySpec, GateSpec, OnFault, PermissionsSpec, SOAK, duration};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, LabelSelector};
use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::time::Duration;

/// Nodes that get a revision in a second, unless `perSecond` says otherwise.
pub const PER_SECOND: u32 = 10;
/// See [`HaltAt::nodes`].
pub const HALT_AT_NODES: u32 = 10;
/// See [`HaltAt::percent`].
pub const HALT_AT_PERCENT: u32 = 5;
/// Most revisions in [`SharingPolicyStatus::halted`].
pub const HALTED_MAX: usize = 8;

/// The annotation that pauses the rollout: `true`.
pub const PAUSED: &str = "fleet.berth.dev/paused";
/// The annotation that halts the rollout of the revision that it names and takes it back: `REVISION/ATTEMPT`.
pub const UNDO: &str = "fleet.berth.dev/undo";
/// The annotation by which a revision whose rollout was halted is tried again, with a higher attempt: `REVISION/ATTEMPT`.
pub const ATTEMPT: &str = "fleet.berth.dev/attempt";
/// The annotation that has the tags resolved again when its value changes.
pub const RESOLVE: &str = "fleet.berth.dev/resolve";

/// The stack of the nodes that a selector matches.
#[derive(CustomResource, KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[kube(
    group = "fleet.berth.dev",
    version = "v1alpha1",
    kind = "SharingPolicy",
    plural = "sharingpolicies",
    singular = "sharingpolicy",
    shortname = "gsp",
    doc = "The stack of policies of the nodes that a selector matches. The controller names it in the GPUNodes of these nodes, a few at a time.",
    derive = "PartialEq",
    status = "SharingPolicyStatus",
    printcolumn(name = "PRIORITY", type_ = "integer", json_path = ".spec.priority"),
    printcolumn(name = "STEP", type_ = "integer", json_path = ".status.rollout.step"),
    printcolumn(name = "TOTAL", type_ = "integer", json_path = ".status.rollout.total"),
    printcolumn(name = "ASSIGNED", type_ = "integer", json_path = ".status.rollout.assigned"),
    printcolumn(name = "SETTLED", type_ = "integer", json_path = ".status.rollout.settled"),
    printcolumn(name = "FAILED", type_ = "integer", json_path = ".status.rollout.failed"),
    printcolumn(
        name = "READY",
        type_ = "string",
        json_path = ".status.conditions[?(@.type==\"Ready\")].status"
    ),
    printcolumn(
        name = "WHY",
        type_ = "string",
        json_path = ".status.conditions[?(@.type==\"Ready\")].reason"
    ),
    printcolumn(name = "AGE", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(rename_all = "camelCase")]
pub struct SharingPolicySpec {
    /// Of the SharingPolicies that match a node, the one with the highest priority decides its stack; 0 if absent. Of two with the
    /// same priority the first by name decides, and the other is `Overlapped`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = -1_000_000, max = 1_000_000))]
    pub priority: Option<i32>,
    /// Selects nodes by the labels of their Node objects; `{}` selects all nodes. A node without a GPUNode is left out.
    #[schemars(schema_with = "crate::label_selector")]
    pub node_selector: LabelSelector,
    /// The policies in the order of their calls.
    #[schemars(length(max = 8), extend("x-kubernetes-list-type" = "atomic"))]
    pub stack: Vec<StackEntry>,
    /// The test of the new policies on each node before their activation, as in a GPUNode; none if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gate: Option<GateSpec>,
    /// How a change reaches the nodes. If absent: one node of each model, then 10 % of the nodes, then all, with a soak of 10 minutes
    /// each.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rollout: Option<RolloutSpec>,
}

/// A policy of a stack.
#[derive(KubeSchema, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("has(self.ref) != (has(self.shipped) && self.shipped)").message("set either ref or shipped: true")
)]
pub struct StackEntry {
    /// The name of the policy.
    #[schemars(length(min = 1, max = 63))]
    pub name: String,
    /// The repository with a tag or a digest, such as `registry.example/team/policy:1.4`. The controller resolves a tag once for each
    /// change of the specification; nodes get digests.
    #[serde(default, rename = "ref", skip_serializing_if = "Option::is_none")]
    #[schemars(
        length(max = 455),
        regex(
            pattern = "^[a-z0-9.-]+(:[0-9]+)?(/[a-z0-9]([a-z0-9._-]*[a-z0-9])?)+(:[A-Za-z0-9_][A-Za-z0-9._-]{0,127}|@sha256:[0-9a-f]{64})$"
        )
    )]
    pub reference: Option<String>,
    /// Whether the policy is the one of this name that the daemon of the node has built in.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shipped: Option<bool>,
    /// The policy's parameters.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "crate::any_object")]
    pub parameters: Option<Map<String, Value>>,
    /// What the policy may do. An absent field has the default that the same key has in the daemon's configuration file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub permissions: Option<PermissionsSpec>,
    /// The effect of a fault of the policy; `skip` if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub on_fault: Option<OnFault>,
}

/// How a change reaches the nodes.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RolloutSpec {
    /// The steps. A step ends when its nodes have settled.
    #[schemars(length(min = 1, max = 6), extend("x-kubernetes-list-type" = "atomic"))]
    #[x_kube(
        validation = Rule::new("self.all(step, has(step.percent) != has(step.nodesPerModel))").message("a step has either percent or nodesPerModel"),
        validation = Rule::new("self.filter(step, has(step.percent)).map(step, step.percent).isSorted()").message("the percentages must not decrease"),
        validation = Rule::new("has(self[size(self) - 1].percent) && self[size(self) - 1].percent == 100").message("the last step must have percent: 100")
    )]
    pub steps: Vec<Step>,
    /// How many nodes are assigned a revision in a second; 10 if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 50))]
    pub per_second: Option<u32>,
    /// When the rollout is halted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub halt_at: Option<HaltAt>,
    /// What follows when the rollout is halted; `undo` if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub on_halt: Option<OnHalt>,
}

/// A step of a rollout.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Step {
    /// So many nodes of each GPU model.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 100))]
    pub nodes_per_model: Option<u32>,
    /// So many of 100 nodes, with those of the steps before.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 100))]
    pub percent: Option<u32>,
    /// How long the stack must be active on each node of the step, without a suspended policy, before the node is settled: 10s to 24h;
    /// 10m if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 32))]
    #[x_kube(
        validation = Rule::new("duration(self) >= duration('10s') && duration(self) <= duration('24h')").message("soak must be a duration from 10s to 24h")
    )]
    pub soak: Option<String>,
}

impl Step {
    /// How long the stack must be active on each node.
    #[must_use]
    pub fn soak(&self) -> Duration {
        self.soak.as_deref().and_then(duration).unwrap_or(SOAK)
    }
}

/// When a rollout is halted: at whichever of the two numbers is reached first. Nodes that go away after they were assigned the
/// revision, before they have settled, count as failed, except the first of them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct HaltAt {
    /// So many nodes have failed; 10 if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 10_000))]
    pub nodes: Option<u32>,
    /// So many of 100 nodes that were assigned the revision have failed, rounded up; 5 if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 100))]
    pub percent: Option<u32>,
}

/// What follows when a rollout is halted. `undo`: all nodes are assigned the revision whose rollout was complete last. `hold`: no
/// node is assigned another revision.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub enum OnHalt {
    /// All nodes are assigned the revision whose rollout was complete last.
    #[default]
    Undo,
    /// No node is assigned another revision.
    Hold,
}

impl SharingPolicySpec {
    /// The steps of the rollout.
    #[must_use]
    pub fn steps(&self) -> Vec<Step> {
        let steps = self.rollout.as_ref().map(|rollout| rollout.steps.clone()).unwrap_or_default();
        if !steps.is_empty() {
            return steps;
        }
        let percent = |percent| Step { percent: Some(percent), ..Step::default() };
        vec![Step { nodes_per_model: Some(1), ..Step::default() }, percent(10), percent(100)]
    }

    /// Nodes that get a revision in a second.
    #[must_use]
    pub fn per_second(&self) -> u32 {
        self.rollout.as_ref().and_then(|rollout| rollout.per_second).unwrap_or(PER_SECOND)
    }

    /// What follows when the rollout is halted.
    #[must_use]
    pub fn on_halt(&self) -> OnHalt {
        self.rollout.as_ref().and_then(|rollout| rollout.on_halt).unwrap_or_default()
    }

    /// The numbers at which the rollout is halted: of nodes, and of 100 nodes.
    #[must_use]
    pub fn halt_at(&self) -> (u32, u32) {
        let halt_at = self.rollout.as_ref().and_then(|rollout| rollout.halt_at.clone()).unwrap_or_default();
        (halt_at.nodes.unwrap_or(HALT_AT_NODES), halt_at.percent.unwrap_or(HALT_AT_PERCENT))
    }
}

/// What the controller reports of a SharingPolicy.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct SharingPolicyStatus {
    /// The `metadata.generation` that the controller has read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// The stack of the specification, with digests in place of tags.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resolved: Option<ResolvedStack>,
    /// The stack whose rollout was complete last.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub good: Option<GoodStack>,
    /// The rollout of the resolved stack.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rollout: Option<RolloutStatus>,
    /// The revisions whose rollout was halted, the newest last.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 8), extend("x-kubernetes-list-type" = "atomic"))]
    pub halted: Option<Vec<HaltedRevision>>,
    /// `Ready`, `Reconciling` and `Stalled`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "crate::conditions")]
    pub conditions: Option<Vec<Condition>>,
}

/// The stack of a specification, with digests in place of tags.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ResolvedStack {
    /// The `metadata.generation` of the specification.
    pub generation: i64,
    /// The annotation `fleet.berth.dev/resolve` when the tags were resolved.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resolve: Option<String>,
    /// The first 12 hexadecimal digits of the SHA-256 of the entries.
    pub revision: String,
    /// The entries, as in a GPUNode.
    #[schemars(extend("x-kubernetes-list-type" = "atomic"))]
    pub entries: Vec<EntrySpec>,
}

/// A stack that has settled on all nodes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct GoodStack {
    /// The revision.
    pub revision: String,
    /// The number of the attempt.
    pub attempt: u32,
    /// The entries, as in a GPUNode.
    #[schemars(extend("x-kubernetes-list-type" = "atomic"))]
    pub entries: Vec<EntrySpec>,
}

/// The rollout of a revision.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct RolloutStatus {
    /// The revision.
    pub revision: String,
    /// The number of the attempt.
    pub attempt: u32,
    /// How far it is.
    pub phase: RolloutPhase,
    /// The current step; the first is 1.
    pub step: u32,
    /// The nodes whose stack this policy decides.
    pub total: u32,
    /// Those whose GPUNode names the revision.
    pub assigned: u32,
    /// Those that have settled on it.
    pub settled: u32,
    /// Those that have failed, or have not settled in time.
    pub failed: u32,
    /// Those that are away: the Node is not ready, no heartbeat for 25 minutes, or another stack for a limited time. They are assigned the revision in the
    /// last step, and are not waited for.
    pub away: u32,
}

/// How far a rollout is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum RolloutPhase {
    /// The nodes of the step are assigned the revision.
    #[default]
    Assigning,
    /// The nodes of the step were assigned the revision, and have not all settled.
    Soaking,
    /// All nodes that are not away were assigned the revision, and have settled or failed.
    Complete,
    /// Too many nodes have failed. The revision is not assigned again, unless with a new attempt.
    Halted,
    /// A phase of a later release.
    #[serde(other)]
    #[schemars(skip)]
    Other,
}

/// A revision whose rollout was halted.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct HaltedRevision {
    /// The revision.
    pub revision: String,
    /// The number of the attempt.
    pub attempt: u32,
    /// Why.
    pub reason: String,
}
