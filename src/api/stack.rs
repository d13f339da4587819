//! The stack of policies and their call statistics; the history of active stacks, and rollbacks.

use crate::gpu::OfferLine;
use crate::non_empty;
use crate::policy::{Hook, parameters};
use crate::values::{same_variants, values};
use berth_kernel::ids::time::rfc3339;
use berth_kernel::node::ledger::Ledger;
use berth_kernel::policy::{hooks as policy, stack as kernel};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use utoipa::{IntoParams, ToSchema};

/// The active stack.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Stack {
    /// The number of activations; also the ETag of this resource.
    #[schema(example = 3)]
    pub revision: u64,
    /// Where the stack comes from: the configuration file or the API.
    pub source: StackSource,
    /// The caller that activated it.
    #[schema(example = "admin")]
    pub by: String,
    /// The caller's reason.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = "fewer replicas for the weekend")]
    pub why: Option<String>,
    /// The time of the activation; absent before the first one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(format = DateTime, example = "2026-02-03T04:05:06.000Z")]
    pub since: Option<String>,
    /// When a break-glass ends; absent for every other stack.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(format = DateTime, example = "2026-02-03T06:05:06.000Z")]
    pub until: Option<String>,
    /// Its policies, in the order in which they are called. If all pass, the built-in baseline answers.
    pub entries: Vec<StackEntry>,
    /// The stack of the configuration file.
    pub file_stack: FileStack,
    /// Warnings on this node: those of its policies, such as a GPU in their parameters that does not exist, resources that
    /// are not offered because of MIG, and policies whose rules about pods have no effect, since no source shows the pods.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schema(example = json!(["policy timeslice@9f86d081884c: only[0]: no GPU of this node matches {model: NVIDIA L4*}"]))]
    pub warnings: Vec<String>,
    /// What the requested change would do; only in the response to a dry run, which shows the active stack, unchanged.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub preview: Option<StackPreview>,
}

/// What the activation of a stack would change.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct StackPreview {
    /// Where the stack would come from.
    pub source: StackSource,
    /// The policies of the stack, in the order in which they would be called.
    pub entries: Vec<StackEntry>,
    /// The offers of the parts with this stack, beside the present ones.
    pub offers: Vec<TrialOffer>,
    /// The devices by resource. Devices that are held stay listed until they are free, also those that the stack no
    /// longer offers.
    pub resources: Vec<TrialResource>,
    /// The warnings that the stack would have on this node.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schema(example = json!(["policy timeslice@9f86d081884c: only[0]: no GPU of this node matches {model: NVIDIA L4*}"]))]
    pub warnings: Vec<String>,
}

/// The offer of one part.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct TrialOffer {
    /// The part.
    #[schema(example = "GPU-8a56a4bc-e184-a047-2620-be19fdf913d5")]
    pub part: String,
    /// The part's short name: the GPU's index, and the profile of a MIG instance.
    #[schema(example = "GPU 0")]
    pub name: String,
    /// The resources that would be offered.
    pub offered: Vec<OfferLine>,
    /// The policy that makes this offer, or `baseline`.
    #[schema(example = "timeslice@0123456789ab")]
    pub by: String,
    /// The resources that are offered now.
    pub offered_now: Vec<OfferLine>,
    /// The policy that makes the present offer, or `baseline`.
    #[schema(example = "baseline")]
    pub by_now: String,
    /// Whether the two offers differ.
    #[schema(example = true)]
    pub differs: bool,
}

/// The number of devices of one resource.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct TrialResource {
    /// The resource.
    #[schema(example = "nvidia.com/gpu.shared")]
    pub resource: String,
    /// Devices that would be offered.
    #[schema(example = 32)]
    pub devices: usize,
    /// Devices of these that could be granted immediately.
    #[schema(example = 32)]
    pub free: usize,
    /// Devices that are offered now.
    #[schema(example = 0)]
    pub devices_now: usize,
    /// Devices that can be granted now.
    #[schema(example = 0)]
    pub free_now: usize,
}

values! {
    /// The source of a stack.
    StackSource {
        /// It was activated through this API, and overrides that of the file.
        Api = "api",
        /// The node's GPUNode named the stack, which overrides the stacks of the API and of the configuration file.
        Fleet = "fleet",
        /// It is the configuration file's.
        File = "file",
        /// A caller activated it for a while in place of the stack that the node's GPUNode names.
        BreakGlass = "breakGlass",
    }
}

impl StackSource {
    /// The source of a stack.
    #[must_use]
    pub fn of(stack: &kernel::Stack) -> Self {
        match stack.origin {
            kernel::StackOrigin::File => Self::File,
            kernel::StackOrigin::Api => Self::Api,
            kernel::StackOrigin::Fleet { .. } => Self::Fleet,
            kernel::StackOrigin::BreakGlass { .. } => Self::BreakGlass,
        }
    }
}

/// One policy of the stack.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct StackEntry {
    /// The policy's name.
    #[schema(example = "timeslice")]
    pub policy: String,
    /// The digest of the policy's version.
    #[schema(example = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08")]
    pub digest: String,
    /// The version, as the policy reports it; absent if this node does not have it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = "0.1.0")]
    pub version: Option<String>,
    /// The parameters that are passed to the policy in every call.
    #[schema(value_type = Object, example = json!({"replicas": 4}))]
    pub parameters: Value,
    /// The policy's permissions.
    pub permissions: Permissions,
    /// The effect of a fault of the policy.
    pub on_fault: OnFault,
    /// Its call statistics since this stack was activated; absent if it is not active.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub record: Option<Record>,
}

/// The permissions of a policy.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Permissions {
    /// Whether it may deny an allocation.
    pub deny: bool,
    /// The number of devices of one resource into which it may divide a GPU, 1 to 128.
    #[schema(example = 128, minimum = 1, maximum = 128)]
    pub share_max: u32,
    /// Resources that it may offer: exact names, or prefixes that end in `*`.
    #[schema(example = json!(["nvidia.com/gpu", "nvidia.com/gpu.shared", "nvidia.com/mig-*"]))]
    pub resources: Vec<String>,
    /// Environment variables that it may set: exact names, or prefixes that end in `*`.
    #[schema(example = json!(["MY_LIMIT"]))]
    pub environment: Vec<String>,
}

/// The effect of a policy's fault.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub enum OnFault {
    /// The policy is treated as if it had passed.
    #[default]
    Skip,
    /// The allocation is denied.
    Deny,
}

/// Call statistics of a policy since the activation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Record {
    /// The number of calls by hook.
    #[schema(example = json!({"offer": 12, "place": 3}))]
    pub calls: BTreeMap<Hook, u64>,
    /// Statistics by hook.
    pub hooks: BTreeMap<Hook, HookRecord>,
    /// The policy's faults.
    pub faults: Faults,
    /// Whether the policy is no longer called, after several faults in a row. `DELETE
    /// /stack/entries/{place}/suspension` or another activation ends the suspension.
    pub suspended: bool,
}

/// Statistics of one hook's calls. Percentiles are upper bounds, since times are counted in buckets: 30, 60, 100, 200
/// and 300 microseconds, 1, 3, 10, 100 and 500 milliseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct HookRecord {
    /// All calls: answers, passes and faults.
    #[schema(example = 12)]
    pub calls: u64,
    /// Calls that passed the question to the next policy.
    #[schema(example = 2)]
    pub passes: u64,
    /// Calls that failed.
    #[schema(example = 0)]
    pub faults: u64,
    /// Median of the wall time in microseconds.
    #[schema(example = 60)]
    pub p50_microseconds: u64,
    /// 99th percentile of the wall time in microseconds.
    #[schema(example = 200)]
    pub p99_microseconds: u64,
    /// Maximum of the wall time in microseconds.
    #[schema(example = 181)]
    pub worst_microseconds: u64,
}

/// The faults of a policy.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Faults {
    /// Faults by kind.
    #[schema(example = json!({"trap": 1}))]
    pub by_kind: BTreeMap<FaultKind, u64>,
    /// Consecutive faults of one hook that the policy caused itself.
    #[schema(example = 0)]
    pub in_a_row: u32,
    /// The last fault.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = "offer: trap: unreachable")]
    pub last: Option<String>,
}

values! {
    // By spelling, as hooks.
    /// How a policy failed.
    FaultKind from policy::FaultKind {
        /// Its answer is malformed or breaks a rule.
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
    /// Whether a stack of the API or of the node's GPUNode overrides it; `DELETE /stack/override` ends the former.
    pub shadowed: bool,
    /// Why it cannot be used; absent if it can.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// Its policies, in the order in which they are called.
    pub entries: Vec<StackEntry>,
}

/// A stack to activate.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
// Of a schema `Stack`, generators for Go call the constructor `NewStack`.
#[schema(as = StackSpec)]
pub struct NewStack {
    /// Its policies, in the order in which they are called; at most 16. An empty stack has the built-in baseline
    /// only.
    pub entries: Vec<NewStackEntry>,
    /// The person for whom the change is made; at most 128 bytes. It follows the name of the token's owner.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = "alice")]
    pub by: Option<String>,
    /// The reason, at most 1024 bytes without control characters.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[schema(example = "fewer replicas for the weekend")]
    pub reason: String,
    /// Activates the stack for so many seconds in place of the one that the node's GPUNode names, 60 to 86400; needs a `reason`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 60, maximum = 86400, example = 7200)]
    pub break_glass_seconds: Option<u64>,
}

/// One policy of a stack to activate.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[schema(as = StackEntrySpec)]
pub struct NewStackEntry {
    /// The policy's name, or `name@` and at least 12 digits of the digest instead of `digest`.
    #[schema(example = "timeslice")]
    pub policy: String,
    /// The digest of the policy's version; by default the newest shipped version, or the only one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08")]
    pub digest: Option<String>,
    /// The parameters that are passed to the policy in every call, at most 6 KiB of JSON.
    #[serde(default)]
    #[schema(value_type = Object, example = json!({"replicas": 4}))]
    pub parameters: Map<String, Value>,
    /// The policy's permissions.
    #[serde(default)]
    pub permissions: Permissions,
    /// The effect of a fault of the policy.
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
        let kernel::Permissions { deny, share_max, resources, environment } = permissions.clone();
        Self { deny, share_max, resources, environment }
    }
}

impl From<Permissions> for kernel::Permissions {
    fn from(permissions: Permissions) -> Self {
        let Permissions { deny, share_max, resources, environment } = permissions;
        Self { deny, share_max, resources, environment }
    }
}

same_variants!(OnFault = kernel::OnFault { Skip, Deny });

impl StackEntry {
    /// The body of a stack's entry, with a `record` if the stack is active.
    #[must_use]
    pub fn of(ledger: &Ledger, entry: &kernel::StackEntry, record: Option<Record>) -> Self {
        Self {
            policy: entry.name.clone(),
            digest: entry.digest.to_string(),
            version: ledger.policies.get(&entry.digest).map(|version| version.version.clone()),
            parameters: parameters(&entry.parameters),
            permissions: (&entry.permissions).into(),
            on_fault: entry.on_fault.into(),
            record,
        }
    }
}

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
    /// Where the stack comes from: the configuration file or the API.
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
pub struct ChangeNote {
    /// The person for whom the change is made; at most 128 bytes. It follows the name of the token's owner.
    #[param(example = "alice")]
    pub by: Option<String>,
    /// The reason, at most 1024 bytes without control characters.
    #[serde(default)]
    #[param(required = false, example = "packs batch jobs")]
    pub reason: String,
}

/// The query of a change of the stack.
#[derive(Clone, Copy, Debug, Default, Deserialize, IntoParams)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct StackChange {
    /// Whether to change nothing, and show in `preview` what the change would do.
    #[serde(default)]
    #[param(required = false, example = true)]
    pub dry_run: bool,
}

/// The query of a reset of the stack.
#[derive(Clone, Debug, Default, Deserialize, IntoParams)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct StackReset {
    /// The person for whom the change is made; at most 128 bytes. It follows the name of the token's owner.
    #[param(example = "alice")]
    pub by: Option<String>,
    /// The reason, at most 1024 bytes without control characters.
    #[serde(default)]
    #[param(required = false, example = "the new file has it")]
    pub reason: String,
    /// Whether to change nothing, and show in `preview` what the change would do.
    #[serde(default)]
    #[param(required = false, example = true)]
    pub dry_run: bool,
}

impl Activation {
    /// The activation of `stack`.
    #[must_use]
    pub fn of(ledger: &Ledger, stack: &kernel::Stack) -> Self {
        Self {
            revision: stack.revision,
            active: stack.revision == ledger.stack.revision,
            source: StackSource::of(stack),
            by: non_empty(&stack.by),
            why: non_empty(&stack.why),
            since: (stack.since_wall_ms > 0).then(|| rfc3339(stack.since_wall_ms)),
            entries: stack.entries.iter().map(|e| StackEntry::of(ledger, e, None)).collect(),
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
