//! The policy versions of this node.

use super::values::values;
use crate::non_empty;
use berth_kernel::ids::time::rfc3339;
use berth_kernel::node::ledger::Ledger;
use berth_kernel::policy::hooks::{self as kernel};
use berth_kernel::policy::version::PolicyVersion;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::ToSchema;

/// Policy versions, by name and age.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct PolicyList {
    /// Matching versions, up to the limit.
    pub items: Vec<Policy>,
    /// The `cursor` of the next page; absent on the last page.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(
        example = "timeslice.1770092645000.9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"
    )]
    pub next: Option<String>,
}

/// One version of a policy.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Policy {
    /// The policy's name, as the policy reports it.
    #[schema(example = "timeslice")]
    pub name: String,
    /// The version, as the policy reports it.
    #[schema(example = "0.1.0")]
    pub version: String,
    /// One sentence about the policy, as the policy reports it.
    #[schema(example = "Offers every GPU as N replicas")]
    pub summary: String,
    /// sha256 of the component.
    #[schema(example = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08")]
    pub digest: String,
    /// The hooks that the policy implements.
    #[schema(example = json!(["offer", "place"]))]
    pub hooks: Vec<Hook>,
    /// Size of the component in bytes.
    #[schema(example = 48213)]
    pub bytes: u64,
    /// Whether the policy is shipped with the daemon.
    pub shipped: bool,
    /// Whether the version is in the active stack.
    pub active: bool,
    /// The time at which the version was added to this node.
    #[schema(format = DateTime, example = "2026-02-03T04:05:06.000Z")]
    pub since: String,
    /// The caller that uploaded it, and the person that the caller named; absent for a shipped policy.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = "admin")]
    pub by: Option<String>,
    /// The caller's reason.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = "packs batch jobs")]
    pub why: Option<String>,
    /// The trusted key that signed it; absent if it is not signed or no trusted key is configured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = "release")]
    pub signed_by: Option<String>,
}

values! {
    // By spelling, so that maps by hook have this order of keys.
    /// A hook, which is a kind of call of a policy.
    Hook {
        /// Whether devices may be granted.
        Admit = "admit",
        /// What parts are offered as.
        Offer = "offer",
        /// Which devices are preferred.
        Place = "place",
        /// What a reading means for a GPU's health.
        Triage = "triage",
    }
}

impl From<kernel::Hook> for Hook {
    fn from(hook: kernel::Hook) -> Self {
        match hook {
            // Every policy has it; it is not a question about the node, and in no answer.
            kernel::Hook::Describe => Self::Other(hook.to_string()),
            kernel::Hook::Offer => Self::Offer,
            kernel::Hook::Place => Self::Place,
            kernel::Hook::Admit => Self::Admit,
            kernel::Hook::Triage => Self::Triage,
        }
    }
}

/// One version of a policy, with the schema of its parameters.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct PolicyDetail {
    /// The version.
    #[serde(flatten)]
    pub policy: Policy,
    /// JSON schema of its parameters.
    #[schema(value_type = Object, example = json!({"type": "object", "properties": {"replicas": {"type": "integer"}}}))]
    pub parameters_schema: serde_json::Value,
}

impl Policy {
    /// The body of a version.
    #[must_use]
    pub fn of(ledger: &Ledger, version: &PolicyVersion) -> Self {
        Self {
            name: version.name.clone(),
            version: version.version.clone(),
            summary: version.summary.clone(),
            digest: version.digest.to_string(),
            hooks: version.hooks.iter().copied().map(Hook::from).collect(),
            bytes: version.bytes,
            shipped: version.shipped,
            active: ledger.stack.has(&version.digest),
            since: rfc3339(version.since_wall_ms),
            by: non_empty(&version.origin.by),
            why: non_empty(&version.origin.why),
            signed_by: version.origin.signed_by.clone(),
        }
    }
}

impl PolicyDetail {
    /// The body of a version, with the schema of its parameters.
    #[must_use]
    pub fn of(ledger: &Ledger, version: &PolicyVersion) -> Self {
        Self {
            policy: Policy::of(ledger, version),
            parameters_schema: parameters(&version.parameters_schema),
        }
    }
}

/// Parameters, or their schema, as JSON; as a string if they are not valid JSON.
#[must_use]
pub fn parameters(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|_| Value::String(text.to_owned()))
}
