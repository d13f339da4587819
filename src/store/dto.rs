//! What is written of the kernel's types, field by field. The kernel's own types are not
//! serializable, so that a change there cannot change what is on disk unseen.
//!
//! Names as in `codec`: short, since they are in every record. Unknown fields are damage.

mod allocation;
mod part;
mod policy;
mod stack;

pub(super) use allocation::Allocation;
pub(super) use part::Part;
pub(super) use policy::Policy;
pub(super) use stack::{Stack, StackEntry};

use crate::kernel::{drain, record};
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
    pub(super) fn of(meta: &record::Meta) -> Self {
        Self { store: meta.store, next: meta.next_number, kubelet_seen_ms: meta.kubelet_seen_wall_ms }
    }

    pub(super) fn read(self) -> record::Meta {
        record::Meta { store: self.store, next_number: self.next, kubelet_seen_wall_ms: self.kubelet_seen_ms }
    }
}

/// See [`drain::Drain`].
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub(super) enum Drain {
    Active,
    Cordoned(Mark),
}

/// See [`drain::Mark`].
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub(super) struct Mark {
    by: String,
    why: String,
    since_ms: u64,
}

impl Drain {
    pub(super) fn of(drain: &drain::Drain) -> Self {
        match drain {
            drain::Drain::Active => Self::Active,
            drain::Drain::Cordoned(mark) => Self::Cordoned(Mark {
                by: mark.by.clone(),
                why: mark.why.clone(),
                since_ms: mark.since_wall_ms,
            }),
        }
    }

    pub(super) fn read(self) -> drain::Drain {
        match self {
            Self::Active => drain::Drain::Active,
            Self::Cordoned(mark) => drain::Drain::Cordoned(drain::Mark {
                by: mark.by,
                why: mark.why,
                since_wall_ms: mark.since_ms,
            }),
        }
    }
}
