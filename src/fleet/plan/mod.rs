//! The plan: what the controller writes next, as a pure function of the objects that it watches.
//!
//! All numbers are counted from the objects each time, so a controller that was restarted, or another one, goes on where the
//! last one stopped. A controller remembers only when it saw something first ([`Memory`]): these waits begin again with a new one.
//! The status of a SharingPolicy is written before nodes are assigned what it says; a revision is assigned only while the status that the
//! API server has names it.

mod conditions;
mod members;
mod rollout;

use crate::gpu_node::{EntrySpec, GpuNode, StackSpec};
use crate::sharing_policy::{SharingPolicy, SharingPolicyStatus};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use members::{Owners, owners};
use std::collections::BTreeMap;
use std::time::Duration;

/// The objects as the controller has last read them, by name.
#[derive(Clone, Debug, Default)]
pub struct View {
    /// The nodes.
    pub nodes: BTreeMap<String, NodeFacts>,
    /// The GPUNodes; `status.gpus` is not used.
    pub gpu_nodes: BTreeMap<String, GpuNode>,
    /// The SharingPolicies.
    pub policies: BTreeMap<String, SharingPolicy>,
}

/// What is used of a Node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeFacts {
    /// Its UID.
    pub uid: String,
    /// Its labels.
    pub labels: BTreeMap<String, String>,
    /// Whether the condition `Ready` is True, and `MaintenanceInProgress` (Kubernetes 1.37) is not.
    pub is_ready: bool,
}

/// The time of a plan.
#[derive(Clone, Debug)]
pub struct Now {
    /// Since the controller began, on a clock that never jumps.
    pub since_start: Duration,
    /// The wall clock, for the times of conditions only.
    pub wall: Time,
}

/// What the controller has seen happen.
#[derive(Clone, Debug, Default)]
pub struct Memory {
    /// By the UID of the GPUNode.
    seen: BTreeMap<String, Seen>,
}

/// What was seen of a GPUNode, and when.
#[derive(Clone, Debug, Default)]
struct Seen {
    heartbeat: Option<Time>,
    heartbeat_at: Duration,
    assigned: Option<Key>,
    /// When `assigned` was seen first, or the node was away last before it tried that.
    assigned_at: Duration,
    /// Whether the node was not away at some time since then.
    was_present: bool,
}

/// A revision of the stack that a SharingPolicy names, and its attempt.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Key {
    /// The name of the SharingPolicy.
    pub policy: String,
    /// The revision.
    pub revision: String,
    /// The number of the attempt.
    pub attempt: u32,
}

impl Key {
    /// Of the stack that a node was assigned.
    #[must_use]
    pub fn of(stack: &StackSpec) -> Self {
        Self {
            policy: stack.policy.clone(),
            revision: stack.revision.clone(),
            attempt: stack.attempt.unwrap_or(1),
        }
    }
}

/// What the tags of a specification stand for: its `metadata.generation` and the annotation `fleet.berth.dev/resolve`, and the
/// entries or why there are none.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Resolution {
    /// The specification that was resolved.
    pub of: (i64, Option<String>),
    /// The entries, or why there are none.
    pub entries: Result<Vec<EntrySpec>, String>,
}

/// What is to be written.
#[derive(Clone, Debug, Default)]
pub struct Plan {
    /// Stacks of GPUNodes.
    pub assignments: Vec<Assignment>,
    /// Statuses of SharingPolicies that have changed, by name.
    pub statuses: Vec<(String, SharingPolicyStatus)>,
    /// The names of the SharingPolicies whose tags must be resolved.
    pub unresolved: Vec<String>,
}

/// The stack of a GPUNode.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Assignment {
    /// The name of the GPUNode.
    pub node: String,
    /// Its stack.
    pub stack: StackSpec,
}

/// What is to be written next. To be called once a second: each policy assigns a stack to at most `perSecond` nodes. `resolutions` are by the
/// name of the SharingPolicy.
#[must_use]
pub fn plan(view: &View, memory: &mut Memory, resolutions: &BTreeMap<String, Resolution>, now: &Now) -> Plan {
    memory.observe(view, now.since_start);
    let Owners { mut members, overlapped, invalid } = owners(view, memory, now.since_start);
    let mut plan = Plan::default();
    for (name, policy) in &view.policies {
        if policy.metadata.deletion_timestamp.is_some() {
            continue;
        }
        let rollout = rollout::Rollout {
            name,
            policy,
            resolution: resolutions.get(name),
            members: members.remove(name).unwrap_or_default(),
            overlapped_by: overlapped.get(name).map(String::as_str),
            invalid: invalid.get(name).map(String::as_str),
        };
        rollout.plan(now, &mut plan);
    }
    plan
}

impl Memory {
    fn observe(&mut self, view: &View, now: Duration) {
        let mut seen = BTreeMap::new();
        for object in view.gpu_nodes.values() {
            let Some(uid) = &object.metadata.uid else { continue };
            let mut one = self.seen.remove(uid).unwrap_or_default();
            let heartbeat = object.status.as_ref().and_then(|status| status.heartbeat_time.clone());
            if one.heartbeat != heartbeat {
                (one.heartbeat, one.heartbeat_at) = (heartbeat, now);
            }
            let assigned = object.spec.stack.as_ref().map(Key::of);
            if one.assigned != assigned {
                (one.assigned, one.assigned_at, one.was_present) = (assigned, now, false);
            }
            seen.insert(uid.clone(), one);
        }
        self.seen = seen;
    }
}

#[cfg(test)]
mod tests;
