//! Logs changes of GPUs that no operator ordered, with or without an API server: changes of health, and the end of
//! drains. Orders of operators are logged by the admin API.

use super::transitions::{author, drain_event, format_time, gpu_name, health_event, order_suffix};
use berth_core::admission::Door;
use berth_kernel::drain::{AtDeadline, Drain, was_given_up};
use berth_kernel::health::{Health, HealthState};
use berth_kernel::ledger::{GpuState, Ledger};
use berth_kernel::names::PartId;
use berth_kernel::time::Now;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::timeout;

/// How often deadlines are compared with the clock: a deadline that passes changes no ledger.
const DEADLINE_CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// Logs the changes of each snapshot; never returns. `before` is the ledger as the last process stored it.
pub(super) async fn keep(door: &Door, before: Arc<Ledger>) {
    let mut snapshots = door.watch();
    snapshots.mark_changed();
    let mut log = Log::new(before);
    loop {
        if let Ok(Err(_)) = timeout(DEADLINE_CHECK_INTERVAL, snapshots.changed()).await {
            return std::future::pending().await;
        }
        let ledger = snapshots.borrow_and_update().clone();
        for Line { warning, text } in log.step(ledger, door.now()) {
            if warning {
                tracing::warn!("{text}");
            } else {
                tracing::info!("{text}");
            }
        }
    }
}

#[derive(Debug, PartialEq, Eq)]
struct Line {
    warning: bool,
    text: String,
}

/// What was logged so far.
struct Log {
    /// The snapshot of the last step.
    last: Arc<Ledger>,
    /// Whether a snapshot of this process was compared yet.
    begun: bool,
    /// The missed deadlines that were logged, milliseconds since 1970.
    late: BTreeMap<PartId, u64>,
}

impl Log {
    fn new(last: Arc<Ledger>) -> Self {
        Self { last, begun: false, late: BTreeMap::new() }
    }

    /// The lines to log for this snapshot.
    fn step(&mut self, ledger: Arc<Ledger>, now: Now) -> Vec<Line> {
        let first = !std::mem::replace(&mut self.begun, true);
        let mut lines = Vec::new();
        for (gpu, state) in &ledger.gpus {
            let before = self.last.gpus.get(gpu);
            if first || before.is_none_or(|before| !Arc::ptr_eq(before, state)) {
                // A GPU that is new to the node counts as healthy before.
                let healthy = || GpuState::new(Health::healthy(now));
                let before = before.map_or_else(healthy, |before| GpuState::clone(before));
                lines.extend(health_line(&ledger, gpu, &before.health, &state.health, first));
                lines.extend(drain_line(&ledger, gpu, &before.drain, &state.drain, first));
            }
            lines.extend(self.late_line(&ledger, gpu, &state.drain, now));
        }
        self.late.retain(|gpu, _| ledger.gpus.contains_key(gpu));
        self.last = ledger;
        lines
    }

    /// The line for a missed deadline, once. Drains that are given up at their deadline have another line.
    fn late_line(&mut self, ledger: &Ledger, gpu: &PartId, drain: &Drain, now: Now) -> Option<Line> {
        let late = drain.order().filter(|o| o.is_late(now) && o.at_deadline != AtDeadline::GiveUp);
        let Some((order, deadline)) = late.and_then(|order| order.deadline_wall_ms.map(|at| (order, at)))
        else {
            self.late.remove(gpu);
            return None;
        };
        if self.late.insert(gpu.clone(), deadline) == Some(deadline) {
            return None;
        }
        let then = match order.at_deadline {
            AtDeadline::Delete => "the pods that are left are deleted",
            AtDeadline::Wait | AtDeadline::GiveUp => "the drain goes on",
        };
        let name = gpu_name(ledger, gpu);
        let text = format!("{name} was not drained by its deadline, {}; {then}", format_time(deadline));
        Some(Line { warning: true, text })
    }
}

fn health_line(ledger: &Ledger, gpu: &PartId, before: &Health, now: &Health, first: bool) -> Option<Line> {
    // Healthy with a reason: an operator marked it healthy, which the admin API logs.
    if now.state == HealthState::Healthy && !now.reason.is_empty() {
        return None;
    }
    if let Some(notice) = health_event(ledger, gpu, before, now) {
        return Some(Line { warning: notice.warning, text: notice.note });
    }
    if !first || now.state == HealthState::Healthy {
        return None;
    }
    let state = if now.state == HealthState::Vanished { "gone" } else { now.state.as_str() };
    let text = format!("{} is still {state}: {}", gpu_name(ledger, gpu), now.reason);
    Some(Line { warning: true, text })
}

fn drain_line(ledger: &Ledger, gpu: &PartId, before: &Drain, now: &Drain, first: bool) -> Option<Line> {
    if let (true, Drain::Draining(..), Drain::Draining(mark, order)) = (first, before, now) {
        let (name, by) = (gpu_name(ledger, gpu), author(&mark.by, &mark.why));
        let text = format!("the drain of {name} {by} goes on after the restart{}", order_suffix(order));
        return Some(Line { warning: false, text });
    }
    let notice = drain_event(ledger, gpu, before, now)?;
    let given_up = was_given_up(now) && !was_given_up(before);
    let drained = matches!(now, Drain::Drained(_));
    let line = Line { warning: notice.warning || given_up, text: notice.note };
    (line.warning || drained).then_some(line)
}

#[cfg(test)]
mod tests;
