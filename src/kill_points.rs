//! Named steps of a turn at which a test may end the process at once, as `kill -9` does.
//!
//! Without the cargo feature `kill-points`, which nothing that is shipped has, [`pass`] is empty.
//! With it, `BERTH_KILL_AT=after-append:3` ends the process at the third passage of that step. The
//! harness in `tests/harness/src/crash` is what sets it.

/// A step. In the order of a turn that grants something.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Point {
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
    /// The ledger in memory is the new one; nobody was shown it.
    AfterApply,
    /// The snapshot is published.
    AfterPublish,
    /// The turn is over; whoever asked has no answer.
    BeforeReply,
    /// Opening: the copy was found whole and is gone; the store itself is not open.
    StoreChecked,
    /// Opening: the store is open; its counter and names are not synced.
    StoreOpened,
}

impl Point {
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

    /// Its name in `BERTH_KILL_AT`.
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

/// Whether this build has the steps.
pub const COMPILED_IN: bool = cfg!(feature = "kill-points");

/// The process passes a step.
#[cfg(not(feature = "kill-points"))]
#[inline]
pub fn pass(_: Point) {}

/// The process passes a step, and ends here if it was told to.
#[cfg(feature = "kill-points")]
pub fn pass(point: Point) {
    use std::sync::OnceLock;
    use std::sync::atomic::{AtomicU32, Ordering};

    static WANTED: OnceLock<Option<(String, u32)>> = OnceLock::new();
    static PASSED: AtomicU32 = AtomicU32::new(0);
    let wanted = WANTED.get_or_init(|| {
        let text = std::env::var("BERTH_KILL_AT").ok()?;
        let (name, passage) = text.split_once(':')?;
        Some((name.to_owned(), passage.parse().ok()?))
    });
    let Some((name, passage)) = wanted else { return };
    if name == point.as_str() && PASSED.fetch_add(1, Ordering::SeqCst) + 1 == *passage {
        // Not `abort`: no handler, no message, nothing flushed.
        let _ = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
        // The signal is on its way; not one step further.
        loop {
            std::thread::park();
        }
    }
}
