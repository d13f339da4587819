//! What the passing of time changes in the ledger, and when it changes something next.

use crate::drain::eviction_plan;
use crate::drain::progress::{next_drain_update, update_drains};
use crate::evidence::limits;
use crate::ids::time::{Now, Timing};
use crate::node::change::Change;
use crate::node::ledger::Ledger;
use crate::sharing::breaker;
use crate::sharing::listing::unlisting_due;
use crate::sharing::part_state::PartState;
use crate::sharing::reoffer::delisting_due;
use std::sync::Arc;

/// The changes that are due at `now`.
pub(crate) fn changes(ledger: &Ledger, now: Now) -> Vec<Change> {
    let timing = &ledger.rules.timing;
    let is_due = |due: Option<u64>| due.is_some_and(|due| now.mono_ms >= due);
    let mut changes = Vec::new();
    for (resource, state) in ledger.breakers.iter() {
        if let Some(breaker) = breaker::after_tick(state, timing, now) {
            changes.push(Change::BreakerChanged { resource: resource.clone(), breaker });
        }
    }
    for part in ledger.parts.values().filter(|p| p.present) {
        let due = part.devices.iter().filter(|(_, device)| is_due(delisting_due(device, timing)));
        changes.extend(due.map(|((resource, share), _)| Change::Delisted(part.key(resource, *share))));
    }
    let unlisted = ledger.gpus.iter().filter(|(gpu, state)| is_due(unlisting_due(ledger, gpu, state)));
    changes.extend(unlisted.map(|(gpu, _)| Change::Unlisted(gpu.clone())));
    let gone = ledger.parts.iter().filter(|(_, part)| is_due(forgetting_due(ledger, part, timing)));
    changes.extend(gone.map(|(id, _)| Change::PartForgotten(id.clone())));
    changes.extend(update_drains(ledger, now));
    changes.extend(limits::with_stale_readings(ledger, now).map(|view| Change::RuntimeSeen(Arc::new(view))));
    changes.extend(eviction_plan::prune_evictions(ledger));
    // Each end prunes as many as it adds; more are left to prune after the limit was lowered.
    changes.extend(ledger.ended.to_prune(ledger.rules.history, None).into_iter().map(Change::Pruned));
    changes
}

/// When [`Command::Tick`] changes this ledger next, monotonic milliseconds, if no other command changes it before;
/// `None` if never. May be too early, but never too late, unless the wall clock is set: recorded deadlines of drains
/// follow it.
///
/// [`Command::Tick`]: crate::node::command::Command::Tick
#[must_use]
pub fn next_tick(ledger: &Ledger, now: Now) -> Option<u64> {
    let timing = &ledger.rules.timing;
    let is_due_now = eviction_plan::prune_evictions(ledger).is_some()
        || !ledger.ended.to_prune(ledger.rules.history, None).is_empty();
    let breakers = ledger.breakers.values().map(|state| breaker::next_change(state, timing));
    let present = ledger.parts.values().filter(|part| part.present);
    let devices = present.flat_map(|part| part.devices.values());
    let delistings = devices.filter_map(|device| delisting_due(device, timing));
    let unlistings = ledger.gpus.iter().filter_map(|(gpu, state)| unlisting_due(ledger, gpu, state));
    let gone = ledger.parts.values().filter_map(|part| forgetting_due(ledger, part, timing));
    let others = is_due_now.then_some(now.mono_ms).into_iter().chain(next_drain_update(ledger, now));
    let others = others.chain(limits::next_expiry(ledger));
    breakers.chain(delistings).chain(unlistings).chain(gone).chain(others).min()
}

/// When a part that will not come back under its id is forgotten, monotonic milliseconds: a MIG instance that was
/// destroyed on a GPU that is still present. A GPU itself may come back, so only an operator removes it.
fn forgetting_due(ledger: &Ledger, part: &PartState, timing: &Timing) -> Option<u64> {
    let is_gone = !part.present
        && !part.part.is_whole_gpu()
        && ledger.parts_of(&part.part.gpu).any(|p| p.present)
        && !part.held();
    let idle_since = part.present_changed_mono_ms.max(part.idle_since_mono_ms);
    let named = part.devices.values().filter_map(|device| device.last_allocate_mono_ms).max();
    let named = named.map_or(0, |at| at.saturating_add(timing.allocate_grace_ms));
    is_gone.then(|| idle_since.saturating_add(timing.retire_ms).max(named))
}
