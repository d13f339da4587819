//! The history of active stacks, and rollbacks.

use super::text::non_empty;
use crate::stack::{StackEntry, StackSource};
use berth_kernel::date::rfc3339;
use berth_kernel::ledger::Ledger;
use berth_kernel::stack as kernel;
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

/// Recent activations, newest first.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct ActivationList {
    /// At most 16 activations. The first one is active.
    pub items: Vec<Activation>,
}

/// An activation of a stack.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Activation {
    /// Identifies the activation in a rollback; 0 is the state before the first activation.
    #[schema(example = 3)]
    pub revision: u64,
    /// Whether this stack is active.
    pub active: bool,
    /// The source of the error.
    pub source: StackSource,
    /// The caller that activated it, and the person that the caller named.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = "alice")]
    pub by: Option<String>,
    /// The caller's reason.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = "fewer replicas for the weekend")]
    pub why: Option<String>,
    /// The time of the activation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(format = DateTime, example = "2026-02-03T04:05:06.000Z")]
    pub since: Option<String>,
    /// Its policies, in the order in which they are called.
    pub entries: Vec<StackEntry>,
    /// Labels of its versions that have been deleted. A rollback to this stack is refused while any is missing.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schema(example = json!(["quota@9f86d081884c"]))]
    pub gone: Vec<String>,
}

/// A rollback to an earlier activation.
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Rollback {
    /// The revision to activate again; by default the one before the active one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = 2)]
    pub revision: Option<u64>,
    /// The person for whom the change is made; at most 128 bytes. It follows the name of the token's owner.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = "alice")]
    pub by: Option<String>,
    /// The reason, at most 1024 bytes without control characters.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[schema(example = "the new one denies too much")]
    pub reason: String,
}

/// The author and the reason of a change, as query parameters of requests without a JSON body.
#[derive(Clone, Debug, Default, Deserialize, IntoParams)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct Word {
    /// The person for whom the change is made; at most 128 bytes. It follows the name of the token's owner.
    #[param(example = "alice")]
    pub by: Option<String>,
    /// The reason, at most 1024 bytes without control characters.
    #[serde(default)]
    #[param(required = false, example = "packs batch jobs")]
    pub reason: String,
}

impl Activation {
    /// The activation of `stack`.
    #[must_use]
    pub fn of(ledger: &Ledger, stack: &kernel::Stack) -> Self {
        let version = |e: &kernel::StackEntry| ledger.policies.get(&e.digest).map(|v| v.version.clone());
        Self {
            revision: stack.revision,
            active: stack.revision == ledger.stack.revision,
            source: StackSource::of(stack),
            by: non_empty(&stack.by),
            why: non_empty(&stack.why),
            since: (stack.since_wall_ms > 0).then(|| rfc3339(stack.since_wall_ms)),
            entries: stack.entries.iter().map(|e| StackEntry::of(e, version(e), None)).collect(),
            gone: gone(ledger, stack),
        }
    }
}

/// Labels of the stack's versions that have been deleted from this node.
#[must_use]
pub fn gone(ledger: &Ledger, stack: &kernel::Stack) -> Vec<String> {
    let entries = stack.entries.iter();
    let gone = entries.filter(|e| !ledger.policies.contains_key(&e.digest));
    gone.map(kernel::StackEntry::label).collect()
}
