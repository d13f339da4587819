//! The serialized form of the kernel's types. The kernel's own types are not serializable, so that a
//! change to them cannot silently change the records on disk.
//!
//! Field names are short, since every record contains them. Unknown fields count as damage. A type with
//! `remote` has the fields of the kernel's type of that name, which serde then converts.

mod allocation;
mod marks;
mod part;
mod via;

pub(super) use allocation::Allocation;
pub(super) use marks::{Marks, MarksOfFormat1};
pub(super) use part::Part;
pub(super) use via::Via;

use base64::Engine;
use base64::engine::general_purpose::STANDARD as BASE64;
use berth_kernel::hardware::gpu::Reading;
use berth_kernel::hardware::health::{HealthState, PastHealth};
use berth_kernel::hardware::judgement as kernel_judgement;
use berth_kernel::hardware::triage::Severity;
use berth_kernel::ids::names::{Digest, GpuId, PartId};
use berth_kernel::node::record;
use berth_kernel::policy::hooks as kernel;
use berth_kernel::policy::stack;
use berth_kernel::policy::version::{Origin, PolicyVersion, Signature};
use serde::{Deserialize, Serialize};

/// See [`record::Meta`].
#[derive(Serialize, Deserialize)]
pub(super) struct Meta(#[serde(with = "MetaFields")] pub(super) record::Meta);

#[derive(Serialize, Deserialize)]
#[serde(remote = "record::Meta", deny_unknown_fields, rename_all = "camelCase")]
struct MetaFields {
    store: u32,
    #[serde(rename = "next")]
    next_number: u64,
    #[serde(rename = "kubeletSeenMs", default, skip_serializing_if = "Option::is_none")]
    kubelet_seen_wall_ms: Option<u64>,
}

/// See [`record::HealthRecord`].
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub(super) struct Health {
    #[serde(with = "State")]
    state: HealthState,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    reason: String,
    since_ms: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    quiet_ms: Option<u64>,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    until_reset: bool,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    before: Vec<PastState>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    judged: Vec<Judgement>,
}

#[derive(Serialize, Deserialize)]
struct PastState(#[serde(with = "PastHealthFields")] PastHealth);

#[derive(Serialize, Deserialize)]
#[serde(remote = "PastHealth", deny_unknown_fields, rename_all = "camelCase")]
struct PastHealthFields {
    #[serde(with = "State")]
    state: HealthState,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    reason: String,
    #[serde(rename = "sinceMs")]
    since_wall_ms: u64,
}

/// See [`kernel_judgement::Judgement`].
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct Judgement {
    /// None of the fields of a reading: an error of a scan.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    part: Option<String>,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    source: String,
    #[serde(default, skip_serializing_if = "is_zero")]
    code: u64,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    detail: String,
    by: String,
    #[serde(default, skip_serializing_if = "is_zero")]
    revision: u64,
    severity: String,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    reason: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    quiet_ms: Option<u64>,
}

#[allow(clippy::trivially_copy_pass_by_ref)] // As serde calls it.
fn is_zero(number: &u64) -> bool {
    *number == 0
}

impl Judgement {
    fn from_kernel(judgement: &kernel_judgement::Judgement) -> Self {
        let reading = judgement.reading.as_ref();
        let text =
            |of: fn(&Reading) -> &String| reading.map(|reading| of(reading).clone()).unwrap_or_default();
        Self {
            part: reading.map(|reading| reading.part.to_string()),
            source: text(|reading| &reading.source),
            code: reading.map_or(0, |reading| reading.code),
            detail: text(|reading| &reading.detail),
            by: judgement.by.as_str().to_owned(),
            revision: judgement.revision,
            severity: judgement.severity.as_str().to_owned(),
            reason: judgement.reason.clone(),
            quiet_ms: judgement.quiet_ms,
        }
    }

    fn into_kernel(self) -> Result<kernel_judgement::Judgement, String> {
        let Self { part, source, code, detail, by, revision, severity, reason, quiet_ms } = self;
        let part = part.map(|part| PartId::parse(&part).map_err(|error| error.to_string())).transpose()?;
        let unknown = format!("the severity {severity:?} is not known");
        let severity = Severity::parse(&severity).ok_or(unknown)?;
        Ok(kernel_judgement::Judgement {
            reading: part.map(|part| Reading { part, source, code, detail }),
            by: by.into(),
            revision,
            severity,
            reason,
            quiet_ms,
            at_mono_ms: 0,
        })
    }
}

#[derive(Serialize, Deserialize)]
#[serde(remote = "HealthState", rename_all = "camelCase")]
enum State {
    Healthy,
    Degraded,
    Unhealthy,
    Vanished,
}

impl Health {
    pub(super) fn from_kernel(health: &record::HealthRecord) -> Self {
        Self {
            state: health.state,
            reason: health.reason.clone(),
            since_ms: health.since_wall_ms,
            quiet_ms: health.quiet_ms,
            until_reset: health.until_reset,
            before: health.history.iter().cloned().map(PastState).collect(),
            judged: health.judgements.iter().map(Judgement::from_kernel).collect(),
        }
    }

    pub(super) fn into_kernel(self, gpu: GpuId) -> Result<record::HealthRecord, String> {
        let judgements = self.judged.into_iter().map(Judgement::into_kernel);
        Ok(record::HealthRecord {
            gpu,
            state: self.state,
            reason: self.reason,
            since_wall_ms: self.since_ms,
            quiet_ms: self.quiet_ms,
            until_reset: self.until_reset,
            history: self.before.into_iter().map(|past| past.0).collect(),
            judgements: judgements.collect::<Result<_, _>>()?,
        })
    }
}

/// See [`kernel::PolicyVersion`].
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub(super) struct Policy {
    name: String,
    version: String,
    summary: String,
    hooks: Vec<Hook>,
    schema: String,
    artifact: String,
    bytes: u64,
    shipped: bool,
    since_ms: u64,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    by: String,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    why: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    signature: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    signed_by: Option<String>,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    once_shipped: bool,
}

#[derive(Serialize, Deserialize)]
struct Hook(#[serde(with = "HookName")] kernel::Hook);

#[derive(Serialize, Deserialize)]
#[serde(remote = "kernel::Hook", rename_all = "camelCase")]
enum HookName {
    Describe,
    Offer,
    Place,
    Admit,
    Triage,
}

impl Policy {
    pub(super) fn from_kernel(version: &PolicyVersion) -> Self {
        Self {
            name: version.name.clone(),
            version: version.version.clone(),
            summary: version.summary.clone(),
            hooks: version.hooks.iter().copied().map(Hook).collect(),
            schema: version.parameters_schema.clone(),
            artifact: version.artifact.to_string(),
            bytes: version.bytes,
            shipped: version.shipped,
            since_ms: version.since_wall_ms,
            by: version.origin.by.clone(),
            why: version.origin.why.clone(),
            signature: version.origin.signature.map(|s| BASE64.encode(s.0)),
            signed_by: version.origin.signed_by.clone(),
            once_shipped: version.origin.once_shipped,
        }
    }

    pub(super) fn into_kernel(self, digest: Digest) -> Result<PolicyVersion, String> {
        Ok(PolicyVersion {
            name: self.name,
            version: self.version,
            summary: self.summary,
            hooks: self.hooks.into_iter().map(|hook| hook.0).collect(),
            parameters_schema: self.schema,
            digest,
            artifact: Digest::parse(&self.artifact).map_err(|e| e.to_string())?,
            bytes: self.bytes,
            shipped: self.shipped,
            since_wall_ms: self.since_ms,
            origin: Origin {
                by: self.by,
                why: self.why,
                signature: self.signature.as_deref().map(parse_signature).transpose()?,
                signed_by: self.signed_by,
                once_shipped: self.once_shipped,
            },
        })
    }
}

fn parse_signature(text: &str) -> Result<Signature, String> {
    let bytes = BASE64.decode(text).map_err(|e| format!("the signature: {e}"))?;
    let bytes = bytes.try_into().map_err(|_| "the signature is not 64 bytes long".to_owned())?;
    Ok(Signature(bytes))
}

/// See [`record::StackHead`].
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub(super) struct Stack {
    revision: u64,
    from_api: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    fleet: Option<FleetRevision>,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    settled: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    break_glass_until_ms: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    failed: Option<FailedRevision>,
    by: String,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    why: String,
    since_ms: u64,
    entries: usize,
}

/// See [`stack::FleetRevision`].
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct FleetRevision {
    policy: String,
    revision: String,
    attempt: u32,
}

impl FleetRevision {
    fn from_kernel(revision: stack::FleetRevision) -> Self {
        let stack::FleetRevision { policy, revision, attempt } = revision;
        Self { policy, revision, attempt }
    }

    fn into_kernel(self) -> stack::FleetRevision {
        let Self { policy, revision, attempt } = self;
        stack::FleetRevision { policy, revision, attempt }
    }
}

/// See [`stack::FailedRevision`].
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct FailedRevision {
    fleet: FleetRevision,
    reason: String,
}

impl Stack {
    pub(super) fn from_kernel(head: &record::StackHead) -> Self {
        let record::StackHead { revision, origin, failed, by, why, since_wall_ms, entries } = head.clone();
        let from_api = origin == stack::StackOrigin::Api;
        let (fleet, settled) = match &origin {
            stack::StackOrigin::Fleet { revision, is_settled } => {
                (Some(FleetRevision::from_kernel(revision.clone())), *is_settled)
            }
            _ => (None, false),
        };
        let break_glass_until_ms = match origin {
            stack::StackOrigin::BreakGlass { until_wall_ms } => Some(until_wall_ms),
            _ => None,
        };
        let failed = failed.map(|failed| FailedRevision {
            fleet: FleetRevision::from_kernel(failed.revision),
            reason: failed.reason,
        });
        let since_ms = since_wall_ms;
        Self { revision, from_api, fleet, settled, break_glass_until_ms, failed, by, why, since_ms, entries }
    }

    pub(super) fn into_kernel(self) -> record::StackHead {
        let Self {
            revision,
            from_api,
            fleet,
            settled,
            break_glass_until_ms,
            failed,
            by,
            why,
            since_ms,
            entries,
        } = self;
        let origin = match (fleet, break_glass_until_ms) {
            (Some(revision), _) => {
                stack::StackOrigin::Fleet { revision: revision.into_kernel(), is_settled: settled }
            }
            (None, Some(until_wall_ms)) => stack::StackOrigin::BreakGlass { until_wall_ms },
            (None, None) if from_api => stack::StackOrigin::Api,
            (None, None) => stack::StackOrigin::File,
        };
        let failed = failed.map(|FailedRevision { fleet, reason }| {
            Box::new(stack::FailedRevision { revision: fleet.into_kernel(), reason })
        });
        record::StackHead { revision, origin, failed, by, why, since_wall_ms: since_ms, entries }
    }
}

/// See [`stack::StackEntry`].
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub(super) struct StackEntry {
    name: String,
    digest: String,
    parameters: String,
    may_deny: bool,
    share_max: u32,
    resources: Vec<String>,
    environment: Vec<String>,
    #[serde(with = "OnFault")]
    on_fault: stack::OnFault,
}

#[derive(Serialize, Deserialize)]
#[serde(remote = "stack::OnFault", rename_all = "camelCase")]
enum OnFault {
    Skip,
    Deny,
}

impl StackEntry {
    pub(super) fn from_kernel(entry: &stack::StackEntry) -> Self {
        Self {
            name: entry.name.clone(),
            digest: entry.digest.to_string(),
            parameters: entry.parameters.clone(),
            may_deny: entry.permissions.deny,
            share_max: entry.permissions.share_max,
            resources: entry.permissions.resources.clone(),
            environment: entry.permissions.environment.clone(),
            on_fault: entry.on_fault,
        }
    }

    pub(super) fn into_kernel(self) -> Result<stack::StackEntry, String> {
        Ok(stack::StackEntry {
            name: self.name,
            digest: Digest::parse(&self.digest).map_err(|e| e.to_string())?,
            parameters: self.parameters,
            permissions: stack::Permissions {
                deny: self.may_deny,
                share_max: self.share_max,
                resources: self.resources,
                environment: self.environment,
            },
            on_fault: self.on_fault,
        })
    }
}
