//! The stack: which policies are asked, in which order, and how they fare.

use crate::policy::Hook;
use crate::values::values;
use berth_kernel::policy;
use berth_kernel::stack as kernel;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use utoipa::ToSchema;

/// The active stack.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Stack {
    /// Counts activations; the ETag of this resource.
    #[schema(example = 3)]
    pub revision: u64,
    /// Where it comes from.
    pub source: StackSource,
    /// Who activated it.
    #[schema(example = "admin")]
    pub by: String,
    /// Why, in their words.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = "fewer replicas for the weekend")]
    pub why: Option<String>,
    /// When; absent before the first activation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(format = DateTime, example = "2026-02-03T04:05:06.000Z")]
    pub since: Option<String>,
    /// Its policies, first asked first. If all pass, the built-in baseline answers.
    pub entries: Vec<StackEntry>,
    /// The stack of the configuration file.
    pub file_stack: FileStack,
    /// What its policies warn of on this node, such as a GPU that their parameters name and that is not
    /// there, and resources that MIG keeps from being offered.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schema(example = json!(["policy timeslice@9f86d081884c: only[0]: no GPU of this node fits {model: NVIDIA L4*}"]))]
    pub warnings: Vec<String>,
}

values! {
    /// Where a stack comes from.
    StackSource {
        /// It was activated through this API, and wins over the file's.
        Api = "api",
        /// It is the configuration file's.
        File = "file",
    }
}

impl StackSource {
    /// The source of a stack.
    #[must_use]
    pub fn of(stack: &kernel::Stack) -> Self {
        if stack.from_api { Self::Api } else { Self::File }
    }
}

/// One policy of the stack.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct StackEntry {
    /// Its name.
    #[schema(example = "timeslice")]
    pub policy: String,
    /// Which version of it.
    #[schema(example = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08")]
    pub digest: String,
    /// By its own word; absent where this node does not know it (any more).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = "0.1.0")]
    pub version: Option<String>,
    /// Handed to it with every question.
    #[schema(value_type = Object, example = json!({"replicas": 4}))]
    pub parameters: Value,
    /// What it may do.
    pub permissions: Permissions,
    /// What happens when it fails.
    pub on_fault: OnFault,
    /// Its call statistics since this stack was activated; absent if it is not active.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub record: Option<Record>,
}

/// What a policy may do.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Permissions {
    /// May it deny an Allocate?
    pub deny: bool,
    /// Into how many devices of one resource it may cut a GPU, 1 to 128.
    #[schema(example = 128, minimum = 1, maximum = 128)]
    pub share_max: u32,
    /// Resources that it may name: exact, or ending in `*`.
    #[schema(example = json!(["nvidia.com/gpu", "nvidia.com/gpu.shared", "nvidia.com/mig-*"]))]
    pub resources: Vec<String>,
    /// Environment keys that it may set: exact, or ending in `*`.
    #[schema(example = json!(["MY_LIMIT"]))]
    pub environment: Vec<String>,
}

/// What happens when a policy fails.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub enum OnFault {
    /// As if it had passed.
    #[default]
    Skip,
    /// Allocate is denied.
    Deny,
}

/// Call statistics of a policy since the activation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Record {
    /// Calls by hook.
    #[schema(example = json!({"offer": 12, "place": 3}))]
    pub calls: BTreeMap<Hook, u64>,
    /// How these calls went, by hook.
    pub hooks: BTreeMap<Hook, HookRecord>,
    /// Faults.
    pub faults: Faults,
    /// Whether it is no longer asked, after several faults in a row; `DELETE
    /// /stack/entries/{place}/suspension`, or another activation, has it asked again.
    pub suspended: bool,
}

/// How the calls of one hook went. A percentile is an upper bound, since
/// times are counted in steps: 30, 60, 100, 200, 300 microseconds, 1, 3, 10, 100 and 500 milliseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct HookRecord {
    /// All calls: answers, passes and faults.
    #[schema(example = 12)]
    pub calls: u64,
    /// How often it left the answer to others.
    #[schema(example = 2)]
    pub passes: u64,
    /// How often it failed.
    #[schema(example = 0)]
    pub faults: u64,
    /// Half of the calls took at most so long, microseconds.
    #[schema(example = 60)]
    pub p50_microseconds: u64,
    /// All but one in a hundred took at most so long, microseconds.
    #[schema(example = 200)]
    pub p99_microseconds: u64,
    /// The longest one, microseconds.
    #[schema(example = 181)]
    pub worst_microseconds: u64,
}

/// What went wrong in a policy.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Faults {
    /// Faults by kind.
    #[schema(example = json!({"trap": 1}))]
    pub by_kind: BTreeMap<FaultKind, u64>,
    /// Faults in a row by its own doing.
    #[schema(example = 0)]
    pub in_a_row: u32,
    /// The last one, in words.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = "offer: trap: unreachable")]
    pub last: Option<String>,
}

values! {
    // By spelling, as hooks.
    /// How a policy failed.
    FaultKind from policy::FaultKind {
        /// Its answer is malformed, or names what it may not.
        Answer = "answer",
        /// It used up its fuel.
        Fuel = "fuel",
        /// It exceeded its limit of memory, tables or stack.
        Memory = "memory",
        /// It could not be called.
        Missing = "missing",
        /// It refused its parameters.
        Parameters = "parameters",
        /// It took too long.
        Time = "time",
        /// It trapped for another reason.
        Trap = "trap",
    }
}

/// The stack of the configuration file.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct FileStack {
    /// Whether a stack activated through the API wins over it; `DELETE /stack/override` ends that.
    pub shadowed: bool,
    /// Why it cannot be used, if it cannot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trouble: Option<String>,
    /// Its policies.
    pub entries: Vec<StackEntry>,
}

/// A stack to activate.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct NewStack {
    /// Its policies, first asked first; at most 16. None leaves the built-in baseline alone.
    pub entries: Vec<NewStackEntry>,
    /// The person for whom the change is made; at most 128 bytes. It follows the name of the token's owner.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = "alice")]
    pub by: Option<String>,
    /// In their words; at most 1024 bytes, no control characters.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[schema(example = "fewer replicas for the weekend")]
    pub reason: String,
}

/// One policy of a stack to activate.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct NewStackEntry {
    /// Its name, or `name@` and at least 12 digits of a digest in place of `digest`.
    #[schema(example = "timeslice")]
    pub policy: String,
    /// Which version of it; if absent the newest shipped one, or the only one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08")]
    pub digest: Option<String>,
    /// Handed to it with every question; at most 6 KiB of JSON.
    #[serde(default)]
    #[schema(value_type = Object, example = json!({"replicas": 4}))]
    pub parameters: Map<String, Value>,
    /// What it may do.
    #[serde(default)]
    pub permissions: Permissions,
    /// What happens when it fails.
    #[serde(default)]
    pub on_fault: OnFault,
}

impl Default for Permissions {
    fn default() -> Self {
        Self::from(&kernel::Permissions::default())
    }
}

impl From<&kernel::Permissions> for Permissions {
    fn from(permissions: &kernel::Permissions) -> Self {
        Self {
            deny: permissions.deny,
            share_max: permissions.share_max,
            resources: permissions.resources.clone(),
            environment: permissions.environment.clone(),
        }
    }
}

impl From<Permissions> for kernel::Permissions {
    fn from(permissions: Permissions) -> Self {
        Self {
            deny: permissions.deny,
            share_max: permissions.share_max,
            resources: permissions.resources,
            environment: permissions.environment,
        }
    }
}

impl From<kernel::OnFault> for OnFault {
    fn from(on_fault: kernel::OnFault) -> Self {
        match on_fault {
            kernel::OnFault::Skip => Self::Skip,
            kernel::OnFault::Deny => Self::Deny,
        }
    }
}

impl From<OnFault> for kernel::OnFault {
    fn from(on_fault: OnFault) -> Self {
        match on_fault {
            OnFault::Skip => Self::Skip,
            OnFault::Deny => Self::Deny,
        }
    }
}

impl StackEntry {
    /// An entry of a stack; `record` where it is active.
    #[must_use]
    pub fn of(entry: &kernel::StackEntry, version: Option<String>, record: Option<Record>) -> Self {
        Self {
            policy: entry.name.clone(),
            digest: entry.digest.to_string(),
            version,
            parameters: serde_json::from_str(&entry.parameters)
                .unwrap_or_else(|_| Value::String(entry.parameters.clone())),
            permissions: (&entry.permissions).into(),
            on_fault: entry.on_fault.into(),
            record,
        }
    }
}
