//! Policy versions and the stack, as written.

use crate::kernel::names::Digest;
use crate::kernel::policy as kernel;
use crate::kernel::record::StackHead;
use crate::kernel::stack;
use serde::{Deserialize, Serialize};

/// See [`kernel::PolicyVersion`].
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub(in super::super) struct Policy {
    name: String,
    version: String,
    summary: String,
    hooks: Vec<Hook>,
    schema: String,
    artifact: String,
    bytes: u64,
    shipped: bool,
    since_ms: u64,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
enum Hook {
    Describe,
    Offer,
    Place,
    Admit,
    Triage,
}

impl Hook {
    fn of(hook: kernel::Hook) -> Self {
        match hook {
            kernel::Hook::Describe => Self::Describe,
            kernel::Hook::Offer => Self::Offer,
            kernel::Hook::Place => Self::Place,
            kernel::Hook::Admit => Self::Admit,
            kernel::Hook::Triage => Self::Triage,
        }
    }

    fn read(self) -> kernel::Hook {
        match self {
            Self::Describe => kernel::Hook::Describe,
            Self::Offer => kernel::Hook::Offer,
            Self::Place => kernel::Hook::Place,
            Self::Admit => kernel::Hook::Admit,
            Self::Triage => kernel::Hook::Triage,
        }
    }
}

impl Policy {
    pub(in super::super) fn of(version: &kernel::PolicyVersion) -> Self {
        Self {
            name: version.name.clone(),
            version: version.version.clone(),
            summary: version.summary.clone(),
            hooks: version.hooks.iter().copied().map(Hook::of).collect(),
            schema: version.parameters_schema.clone(),
            artifact: version.artifact.to_string(),
            bytes: version.bytes,
            shipped: version.shipped,
            since_ms: version.since_wall_ms,
        }
    }

    pub(in super::super) fn read(self, digest: Digest) -> Result<kernel::PolicyVersion, String> {
        Ok(kernel::PolicyVersion {
            name: self.name,
            version: self.version,
            summary: self.summary,
            hooks: self.hooks.into_iter().map(Hook::read).collect(),
            parameters_schema: self.schema,
            digest,
            artifact: Digest::parse(&self.artifact).map_err(|e| e.to_string())?,
            bytes: self.bytes,
            shipped: self.shipped,
            since_wall_ms: self.since_ms,
        })
    }
}

/// See [`StackHead`].
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub(in super::super) struct Stack {
    revision: u64,
    from_api: bool,
    by: String,
    since_ms: u64,
    entries: usize,
}

impl Stack {
    pub(in super::super) fn of(head: &StackHead) -> Self {
        Self {
            revision: head.revision,
            from_api: head.from_api,
            by: head.by.clone(),
            since_ms: head.since_wall_ms,
            entries: head.entries,
        }
    }

    pub(in super::super) fn read(self) -> StackHead {
        StackHead {
            revision: self.revision,
            from_api: self.from_api,
            by: self.by,
            since_wall_ms: self.since_ms,
            entries: self.entries,
        }
    }
}

/// See [`stack::StackEntry`].
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub(in super::super) struct StackEntry {
    name: String,
    digest: String,
    parameters: String,
    may_deny: bool,
    share_max: u32,
    resources: Vec<String>,
    environment: Vec<String>,
    on_fault: OnFault,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
enum OnFault {
    Skip,
    Deny,
}

impl StackEntry {
    pub(in super::super) fn of(entry: &stack::StackEntry) -> Self {
        Self {
            name: entry.name.clone(),
            digest: entry.digest.to_string(),
            parameters: entry.parameters.clone(),
            may_deny: entry.permissions.deny,
            share_max: entry.permissions.share_max,
            resources: entry.permissions.resources.clone(),
            environment: entry.permissions.environment.clone(),
            on_fault: match entry.on_fault {
                stack::OnFault::Skip => OnFault::Skip,
                stack::OnFault::Deny => OnFault::Deny,
            },
        }
    }

    pub(in super::super) fn read(self) -> Result<stack::StackEntry, String> {
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
            on_fault: match self.on_fault {
                OnFault::Skip => stack::OnFault::Skip,
                OnFault::Deny => stack::OnFault::Deny,
            },
        })
    }
}
