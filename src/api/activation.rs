//! The stacks that were active, and the way back to one.

use super::text::non_empty;
use crate::stack::{StackEntry, StackSource};
use berth_kernel::date::rfc3339;
use berth_kernel::ledger::Ledger;
use berth_kernel::stack as kernel;
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

/// The newest activations, newest first.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct ActivationList {
    /// At most 16, the active one first.
    pub items: Vec<Activation>,
}

/// One activation.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Activation {
    /// What it is rolled back to by; 0 is what was there before the first activation.
    #[schema(example = 3)]
    pub revision: u64,
    /// Whether it is active.
    pub active: bool,
    /// Where it comes from.
    pub source: StackSource,
    /// Who activated it, and for whom by their own word.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = "alice")]
    pub by: Option<String>,
    /// Why, in their words.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = "fewer replicas for the weekend")]
    pub why: Option<String>,
    /// When.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(format = DateTime, example = "2026-02-03T04:05:06.000Z")]
    pub since: Option<String>,
    /// Its policies, first asked first.
    pub entries: Vec<StackEntry>,
    /// Versions of it that were deleted since, by label: while they are gone it cannot be rolled back to.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schema(example = json!(["quota@9f86d081884c"]))]
    pub gone: Vec<String>,
}

/// Which activation to go back to.
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Rollback {
    /// Of the history; the one before the active one if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = 2)]
    pub revision: Option<u64>,
    /// The person for whom the change is made; at most 128 bytes. It follows the name of the token's owner.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = "alice")]
    pub by: Option<String>,
    /// In their words; at most 1024 bytes, no control characters.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[schema(example = "the new one denies too much")]
    pub reason: String,
}

/// Who does something and why, where there is no body to say it in.
#[derive(Clone, Debug, Default, Deserialize, IntoParams)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct Word {
    /// The person for whom the change is made; at most 128 bytes. It follows the name of the token's owner.
    #[param(example = "alice")]
    pub by: Option<String>,
    /// In their words; at most 1024 bytes, no control characters.
    #[serde(default)]
    #[param(required = false, example = "packs batch jobs")]
    pub reason: String,
}

impl Activation {
    /// Of a stack that was active.
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

/// Labels of the versions of a stack that this node does not know any more.
#[must_use]
pub fn gone(ledger: &Ledger, stack: &kernel::Stack) -> Vec<String> {
    let entries = stack.entries.iter();
    let gone = entries.filter(|e| !ledger.policies.contains_key(&e.digest));
    gone.map(kernel::StackEntry::label).collect()
}
