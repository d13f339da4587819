//! Named steps of a turn, and the one function that observes them.
//!
//! The program that is shipped sets no observer, and [`pass`] then reads one atomic value. The crash
//! tests set one that ends the process at a given step, as `kill -9` does.

use std::sync::OnceLock;

/// A step. In the order of a turn that grants something.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Decided; nothing is written.
    BeforeAppend,
    /// sled has taken the writes and not flushed them.
    StoreTaken,
    /// sled has flushed them; its log is not synced.
    StoreFlushed,
    /// The log is synced; the counter beside it is not yet raised.
    StoreSynced,
    /// The counter is raised.
    StoreCounted,
    /// The store has answered; the ledger in memory is the old one.
    AfterAppend,
    /// The ledger in memory is the new one; no reader has it.
    AfterApply,
    /// The snapshot is published.
    AfterPublish,
    /// The turn is over; the caller has no answer.
    BeforeReply,
    /// Opening: the copy was found whole and is gone; the store itself is not open.
    StoreChecked,
    /// Opening: the store is open; its counter and names are not synced.
    StoreOpened,
}

impl Step {
    /// All of them.
    pub const ALL: [Self; 11] = [
        Self::BeforeAppend,
        Self::StoreTaken,
        Self::StoreFlushed,
        Self::StoreSynced,
        Self::StoreCounted,
        Self::AfterAppend,
        Self::AfterApply,
        Self::AfterPublish,
        Self::BeforeReply,
        Self::StoreChecked,
        Self::StoreOpened,
    ];

    /// Its name in the reports of the crash tests.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::BeforeAppend => "before-append",
            Self::StoreTaken => "store-taken",
            Self::StoreFlushed => "store-flushed",
            Self::StoreSynced => "store-synced",
            Self::StoreCounted => "store-counted",
            Self::AfterAppend => "after-append",
            Self::AfterApply => "after-apply",
            Self::AfterPublish => "after-publish",
            Self::BeforeReply => "before-reply",
            Self::StoreChecked => "store-checked",
            Self::StoreOpened => "store-opened",
        }
    }
}

static OBSERVER: OnceLock<fn(Step)> = OnceLock::new();

/// Has each step that the process passes from now on reported to `observer`, on the thread that passes
/// it. Only the first call has an effect.
pub fn observe(observer: fn(Step)) {
    let _ = OBSERVER.set(observer);
}

/// The process passes a step.
pub fn pass(step: Step) {
    if let Some(observer) = OBSERVER.get() {
        observer(step);
    }
}
