//! The serialized form of a stack.

use berth_kernel::names::Digest;
use berth_kernel::record::StackHead;
use berth_kernel::stack as kernel;
use serde::{Deserialize, Serialize};

/// See [`StackHead`].
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub(in super::super) struct Stack {
    revision: u64,
    from_api: bool,
    by: String,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    why: String,
    since_ms: u64,
    entries: usize,
}

impl Stack {
    pub(in super::super) fn from_kernel(head: &StackHead) -> Self {
        Self {
            revision: head.revision,
            from_api: head.from_api,
            by: head.by.clone(),
            why: head.why.clone(),
            since_ms: head.since_wall_ms,
            entries: head.entries,
        }
    }

    pub(in super::super) fn into_kernel(self) -> StackHead {
        StackHead {
            revision: self.revision,
            from_api: self.from_api,
            by: self.by,
            why: self.why,
            since_wall_ms: self.since_ms,
            entries: self.entries,
        }
    }
}

/// See [`kernel::StackEntry`].
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
    pub(in super::super) fn from_kernel(entry: &kernel::StackEntry) -> Self {
        Self {
            name: entry.name.clone(),
            digest: entry.digest.to_string(),
            parameters: entry.parameters.clone(),
            may_deny: entry.permissions.deny,
            share_max: entry.permissions.share_max,
            resources: entry.permissions.resources.clone(),
            environment: entry.permissions.environment.clone(),
            on_fault: match entry.on_fault {
                kernel::OnFault::Skip => OnFault::Skip,
                kernel::OnFault::Deny => OnFault::Deny,
            },
        }
    }

    pub(in super::super) fn into_kernel(self) -> Result<kernel::StackEntry, String> {
        Ok(kernel::StackEntry {
            name: self.name,
            digest: Digest::parse(&self.digest).map_err(|e| e.to_string())?,
            parameters: self.parameters,
            permissions: kernel::Permissions {
                deny: self.may_deny,
                share_max: self.share_max,
                resources: self.resources,
                environment: self.environment,
            },
            on_fault: match self.on_fault {
                OnFault::Skip => kernel::OnFault::Skip,
                OnFault::Deny => kernel::OnFault::Deny,
            },
        })
    }
}
