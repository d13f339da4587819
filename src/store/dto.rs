//! The serialized form of the kernel's types. The kernel's own types are not serializable, so that a
//! change to them cannot silently change the records on disk.
//!
//! Field names are short, since every record contains them. Unknown fields count as damage.

mod allocation;
mod health;
mod part;
mod policy;
mod stack;

pub(super) use allocation::Allocation;
pub(super) use health::Health;
pub(super) use part::Part;
pub(super) use policy::Policy;
pub(super) use stack::{Stack, StackEntry};

use berth_kernel::{drain, record};
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

/// See [`drain::Drain`].
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub(super) enum Drain {
    Active,
    Cordoned(Mark),
    Draining(Mark, Order),
    Drained(Mark),
}

/// See [`drain::Order`].
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub(super) struct Order {
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    evict: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    deadline_ms: Option<u64>,
    at_deadline: AtDeadline,
}

/// See [`drain::AtDeadline`].
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) enum AtDeadline {
    Wait,
    Delete,
    GiveUp,
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
    pub(super) fn from_kernel(drain: &drain::Drain) -> Self {
        match drain {
            drain::Drain::Active => Self::Active,
            drain::Drain::Cordoned(mark) => Self::Cordoned(Mark::from_kernel(mark)),
            drain::Drain::Draining(mark, order) => {
                Self::Draining(Mark::from_kernel(mark), Order::from_kernel(order))
            }
            drain::Drain::Drained(mark) => Self::Drained(Mark::from_kernel(mark)),
        }
    }

    pub(super) fn into_kernel(self) -> drain::Drain {
        match self {
            Self::Active => drain::Drain::Active,
            Self::Cordoned(mark) => drain::Drain::Cordoned(mark.into_kernel()),
            Self::Draining(mark, order) => drain::Drain::Draining(mark.into_kernel(), order.into_kernel()),
            Self::Drained(mark) => drain::Drain::Drained(mark.into_kernel()),
        }
    }
}

impl Mark {
    fn from_kernel(mark: &drain::Mark) -> Self {
        Self { by: mark.by.clone(), why: mark.why.clone(), since_ms: mark.since_wall_ms }
    }

    fn into_kernel(self) -> drain::Mark {
        drain::Mark { by: self.by, why: self.why, since_wall_ms: self.since_ms }
    }
}

impl Order {
    fn from_kernel(order: &drain::Order) -> Self {
        let at_deadline = match order.at_deadline {
            drain::AtDeadline::Wait => AtDeadline::Wait,
            drain::AtDeadline::Delete => AtDeadline::Delete,
            drain::AtDeadline::GiveUp => AtDeadline::GiveUp,
        };
        Self { evict: order.evict, deadline_ms: order.deadline_wall_ms, at_deadline }
    }

    fn into_kernel(self) -> drain::Order {
        let at_deadline = match self.at_deadline {
            AtDeadline::Wait => drain::AtDeadline::Wait,
            AtDeadline::Delete => drain::AtDeadline::Delete,
            AtDeadline::GiveUp => drain::AtDeadline::GiveUp,
        };
        drain::Order { evict: self.evict, deadline_wall_ms: self.deadline_ms, at_deadline }
    }
}
