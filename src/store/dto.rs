//! The serialized form of the kernel's types. The kernel's own types are not serializable, so that a
//! change to them cannot silently change the records on disk.
//!
//! Field names are short, since every record contains them. Unknown fields count as damage.

mod allocation;
mod health;
mod marks;
mod part;
mod policy;
mod stack;

pub(super) use allocation::Allocation;
pub(super) use health::Health;
pub(super) use marks::{Marks, MarksOfFormat1};
pub(super) use part::Part;
pub(super) use policy::Policy;
pub(super) use stack::{Stack, StackEntry};

use berth_kernel::record;
use serde::{Deserialize, Serialize};

/// See [`record::Meta`].
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub(super) struct Meta {
    store: u32,
    next: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    kubelet_seen_ms: Option<u64>,
}

impl Meta {
    pub(super) fn from_kernel(meta: &record::Meta) -> Self {
        Self { store: meta.store, next: meta.next_number, kubelet_seen_ms: meta.kubelet_seen_wall_ms }
    }

    pub(super) fn into_kernel(self) -> record::Meta {
        record::Meta { store: self.store, next_number: self.next, kubelet_seen_wall_ms: self.kubelet_seen_ms }
    }
}
