//! Progress of drains: what time, scans and ended allocations change in them.

use crate::drain::marks::{Empty, Marks};
use crate::ids::names::{GpuId, PartId};
use crate::ids::time::{Now, Timing};
use crate::node::change::Change;
use crate::node::ledger::{GpuState, Ledger};
use crate::sharing::part_state::PartState;
use std::sync::Arc;

/// Expires deadlines, moves them with a clock that was set, and reopens drains of GPUs that are held again.
pub(crate) fn update_drains(ledger: &Ledger, now: Now) -> Vec<Change> {
    ledger.gpus.iter().filter_map(|(gpu, state)| update_drain(ledger, gpu, state, now)).collect()
}

/// When [`update_drains`] has a change next, monotonic milliseconds, if the ledger stays as it is and no clock is set.
pub(crate) fn next_drain_update(ledger: &Ledger, now: Now) -> Option<u64> {
    let next = |(gpu, state): (&GpuId, &Arc<GpuState>)| match update_drain(ledger, gpu, state, now) {
        Some(_) => Some(now.mono_ms),
        None => state
            .marks
            .orders()
            .filter_map(|order| order.gives_up_in_ms(now))
            .min()
            .map(|ms| now.mono_ms.saturating_add(ms)),
    };
    ledger.gpus.iter().filter_map(next).min()
}

fn update_drain(ledger: &Ledger, gpu: &GpuId, state: &GpuState, now: Now) -> Option<Change> {
    let changed = |marks| Some(Change::MarksChanged { gpu: gpu.clone(), marks });
    let is_held = is_held(ledger, gpu);
    // A container may be granted its former devices again (I4), so that the GPU is not empty.
    if is_held && state.marks.drained_wall_ms.is_some() {
        return changed(Marks { drained_wall_ms: None, ..state.marks.clone() });
    }
    // An empty GPU becomes drained, however late.
    let is_in_use = || {
        is_held
            || ledger.parts_of(gpu).any(|p| has_processes(ledger, &p.part.id))
            || has_processes(ledger, gpu.as_part())
    };
    if state.marks.orders().any(|order| order.must_give_up(now)) && is_in_use() {
        return changed(state.marks.after_deadlines(now));
    }
    if let Some(marks) = state.marks.after_clock_was_set(now) {
        return changed(marks);
    }
    (is_held && state.empty.is_some()).then(|| Change::EmptyChanged { gpu: gpu.clone(), empty: None })
}

/// What an inventory scan found on a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Occupancy {
    /// There are processes.
    Busy,
    /// There is no process, or the GPU is gone.
    Empty,
    /// The GPU could not be read, or does not list its processes.
    Unknown,
}

/// The change of one GPU's drain state by an inventory scan. Only scans make a GPU drained: a pod that was
/// force-deleted leaves the kubelet's `List` while its processes still run.
pub(crate) fn after_scan(
    ledger: &Ledger,
    gpu: &GpuId,
    found: impl FnOnce() -> Occupancy,
    now: Now,
) -> Option<Change> {
    let state = ledger.gpus.get(gpu)?;
    let emptied = |empty| (state.empty != empty).then(|| Change::EmptyChanged { gpu: gpu.clone(), empty });
    if state.marks.orders().next().is_none() || is_held(ledger, gpu) {
        return emptied(None);
    }
    let seen_empty = match found() {
        Occupancy::Busy => return emptied(None),
        Occupancy::Empty => true,
        Occupancy::Unknown => false,
    };
    if state.empty.is_some_and(|empty| empty.is_long_enough(seen_empty, &ledger.rules.timing, now)) {
        let marks = state.marks.after_drained(now);
        return Some(Change::MarksChanged { gpu: gpu.clone(), marks });
    }
    let (before, now) = (state.empty, now.mono_ms);
    emptied(Some(Empty {
        unused_since_mono_ms: before.map_or(now, |empty| empty.unused_since_mono_ms),
        // A scan that could not list processes restarts the period: two scans, and all between them, must
        // show the GPU empty.
        seen_since_mono_ms: seen_empty
            .then(|| before.and_then(|empty| empty.seen_since_mono_ms).unwrap_or(now)),
    }))
}

impl Empty {
    /// Whether the GPU has been empty long enough. `seen_empty`: whether the newest scan could list
    /// processes and found none.
    fn is_long_enough(self, seen_empty: bool, timing: &Timing, now: Now) -> bool {
        let empty_since = self.seen_since_mono_ms.filter(|_| seen_empty);
        // A GPU that cannot be read is drained once its last pod has had time to terminate, because most
        // drained GPUs are broken. So is one that can be read only intermittently.
        let unseen_ms = timing.drained_unseen_ms.max(timing.drained_ms);
        empty_since.is_some_and(|since| now.passed(since, timing.drained_ms))
            || now.passed(self.unused_since_mono_ms, unseen_ms)
    }
}

fn is_held(ledger: &Ledger, gpu: &GpuId) -> bool {
    ledger.parts_of(gpu).any(PartState::held)
}

/// As of the newest inventory scan.
fn has_processes(ledger: &Ledger, part: &PartId) -> bool {
    ledger.processes_on(part).is_some_and(|processes| processes > 0)
}

#[cfg(test)]
mod tests;
