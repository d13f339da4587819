//! Why allocations of finished pods cannot end at present: a required source cannot be read, or the sources
//! contradict each other. An operator is warned of it, since the GPUs of such pods stay allocated.

use super::ledger::Ledger;
use super::pods::Fate;
use super::reconcile::{Plan, ReconcileView};
use super::time::{Now, Timing};
use std::sync::Arc;

/// Why the kubelet's sources cannot be read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SourceError {
    /// The source and its error.
    pub reason: String,
    /// Since when, both clocks.
    pub since: Now,
}

/// Evidence without which allocations cannot end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stuck {
    /// Since when, milliseconds since 1970.
    pub since_wall_ms: u64,
    /// The missing evidence, and why it is missing.
    pub cause: Arc<str>,
    /// Number of live allocations that would not end if their pods did.
    pub allocations: usize,
}

impl Stuck {
    /// One sentence for people; `since` is the formatted time.
    #[must_use]
    pub fn describe(&self, since: &str) -> String {
        let Self { cause, allocations, .. } = self;
        let count = if *allocations == 1 { "1 allocation" } else { &format!("{allocations} allocations") };
        format!("since {since}: {cause}; {count} cannot end, so the GPUs of finished pods stay allocated")
    }
}

/// The missing evidence after a reconcile pass. An error counts only after the grace time of a grant, so that a kubelet
/// restart is not reported.
#[must_use]
pub(crate) fn find_stuck(
    ledger: &Ledger,
    view: &ReconcileView,
    plan: &Plan,
    timing: &Timing,
    now: Now,
) -> Option<Stuck> {
    let live = || ledger.live.values().filter(|a| !plan.ended.iter().any(|(id, _)| *id == a.id));
    let known = ledger.stuck.as_deref();
    if let Some(hold) = &plan.hold {
        let since_wall_ms =
            known.filter(|k| k.cause == *hold).map_or(now.wall_ms, |known| known.since_wall_ms);
        return Some(Stuck { since_wall_ms, cause: Arc::clone(hold), allocations: live().count() });
    }
    let error = view.source_error.as_ref()?;
    if !now.passed(error.since.mono_ms, timing.reply_settle_ms) {
        return None;
    }
    // Without a checkpoint the pods source (API server, Pods API) ends an allocation if `List` answers.
    let can_end = |fate| view.list.is_some() && view.checkpoint.is_none() && fate != Fate::Unknown;
    let allocations = live().filter(|a| !can_end(ledger.fate_of(a))).count();
    let stuck =
        Stuck { since_wall_ms: error.since.wall_ms, cause: error.reason.as_str().into(), allocations };
    (allocations > 0).then_some(stuck)
}
