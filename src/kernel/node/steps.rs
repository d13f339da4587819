//! Named steps of a turn, and their observer.
//!
//! The released program sets no observer; [`pass`] then only reads one atomic value. The crash tests set an
//! observer that kills the process at a given step, as `kill -9` does.

use std::sync::OnceLock;

/// A step, in the order of a turn that grants something.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// The command is decided; nothing is written.
    BeforeAppend,
    /// sled has taken the writes and not flushed them.
    StoreTaken,
    /// sled has flushed them; its log is not synced.
    StoreFlushed,
    /// The log is synced; the separate counter is not yet raised.
    StoreSynced,
    /// The counter is raised.
    StoreCounted,
    /// The append has returned; the ledger in memory is the old one.
    AfterAppend,
    /// The ledger in memory is the new one; it is not yet published.
    AfterApply,
    /// The snapshot is published.
    AfterPublish,
    /// The turn is over; the caller has no reply.
    BeforeReply,
    /// Opening: a copy of the store was checked and deleted; the store itself is not open.
    StoreChecked,
    /// Opening: the store is open; its counter and directory entries are not synced.
    StoreOpened,
}

impl Step {
    /// All steps.
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

/// Sets the function that is called at each step, on the thread that reaches it. Only the first call has
/// an effect.
pub fn observe(observer: fn(Step)) {
    let _ = OBSERVER.set(observer);
}

/// Reports a step to the observer.
pub fn pass(step: Step) {
    if let Some(observer) = OBSERVER.get() {
        observer(step);
    }
}
