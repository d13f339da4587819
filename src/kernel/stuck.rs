//! Why allocations of finished pods cannot end at present: a required source cannot be read, or the sources
//! contradict each other. An operator is warned of it, since the GPUs of such pods stay allocated.

use super::ledger::Ledger;
use super::pods::Fate;
use super::reconcile::{Plan, RoundView};
use super::time::{Now, Timing};
use std::sync::Arc;

/// Why the kubelet's accounts could not be had, as the front end that asks for them knows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SourceError {
    /// In words: the source and its error.
    pub reason: String,
    /// Since when, both clocks.
    pub since: Now,
}

/// Evidence without which allocations cannot end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stuck {
    /// Since when, milliseconds since 1970.
    pub since_wall_ms: u64,
    /// What is missing, and why.
    pub cause: Arc<str>,
    /// Live allocations that wait for it: none of them would end if its pod did.
    pub allocations: usize,
}

/// What is stuck after a round. An error counts only after the grace time of a grant, so that a kubelet restart is not
/// reported.
#[must_use]
pub fn after_round(
    ledger: &Ledger,
    view: &RoundView,
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
    // Without a checkpoint the source of all pods (API server, Pods API) ends an allocation, where `List` answers.
    let judged = |fate| view.list.is_some() && view.checkpoint.is_none() && fate != Fate::Unknown;
    let allocations = live().filter(|a| !judged(ledger.fate_of(a))).count();
    let stuck =
        Stuck { since_wall_ms: error.since.wall_ms, cause: error.reason.as_str().into(), allocations };
    (allocations > 0).then_some(stuck)
}

impl Stuck {
    /// In one sentence; `since` is the moment as its readers write it.
    #[must_use]
    pub fn describe(&self, since: &str) -> String {
        let Self { cause, allocations, .. } = self;
        let count = if *allocations == 1 { "1 allocation" } else { &format!("{allocations} allocations") };
        format!("since {since}: {cause}; {count} cannot end, so the GPUs of finished pods stay allocated")
    }
}
