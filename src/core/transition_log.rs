//! Logs the transitions of the node that no operator ordered: health, the end of drains, whether devices can be passed
//! to containers, and GPUs that are used without an allocation. Operators' orders are logged by the admin API.

use crate::KernelHandle;
use crate::transition_stream::Batches;
use berth_kernel::drain::marks::{AtDeadline, Drain};
use berth_kernel::hardware::health::HealthState;
use berth_kernel::ids::names::GpuId;
use berth_kernel::ids::time::Now;
use berth_kernel::node::ledger::Ledger;
use berth_kernel::node::transitions::{GpuName, Transition};
use std::collections::BTreeMap;
use std::time::Duration;
use tokio::time::timeout;

/// Longest wait for a deadline before the wall clock, which may be set, is read again. A deadline that passes changes
/// no ledger.
const DEADLINE_WAIT_MAX: Duration = Duration::from_secs(10);
/// Most lines about single bypasses after one change: a job of eight ranks on each of two GPUs, and some more. The
/// others are logged as a number; the API lists them all.
const BYPASS_LINES_MAX: usize = 20;

/// Logs the transitions of each batch, and deadlines that are missed; returns when the batches end.
pub async fn run(kernel: KernelHandle, mut batches: Batches) {
    let mut log = Log::default();
    loop {
        let wait = next_deadline(&kernel.snapshot(), kernel.now()).map(|wait| wait.min(DEADLINE_WAIT_MAX));
        let lines = match timeout(wait.unwrap_or(Duration::MAX), batches.recv()).await {
            Ok(Some(batch)) => log.lines(&batch.transitions, &batch.ledger, kernel.now()),
            Ok(None) => return,
            Err(_) => log.late_lines(&kernel.snapshot(), kernel.now()),
        };
        lines.iter().for_each(Line::log);
    }
}

/// Logs what the last process left and what is still so after the first scan, since no transition reports it. `before`
/// is the ledger as the last process stored it.
pub fn log_unchanged(before: &Ledger, now: &Ledger) {
    unchanged_lines(before, now).iter().for_each(Line::log);
}

/// Time until the next deadline of a drain; `None` if there is none to come.
fn next_deadline(ledger: &Ledger, now: Now) -> Option<Duration> {
    let orders = ledger.gpus.values().flat_map(|state| state.marks.orders());
    let waits = orders.filter_map(|order| order.left_ms(now));
    waits.filter(|ms| *ms > 0).min().map(Duration::from_millis)
}

#[derive(Debug, PartialEq, Eq)]
struct Line {
    warning: bool,
    text: String,
}

impl Line {
    fn of(transition: &Transition, ledger: &Ledger) -> Self {
        let text = transition.describe(ledger, GpuName::IndexAndUuid);
        Self { warning: transition.is_warning(), text }
    }

    fn log(&self) {
        if self.warning {
            tracing::warn!("{}", self.text);
        } else {
            tracing::info!("{}", self.text);
        }
    }
}

/// What was logged so far.
#[derive(Default)]
struct Log {
    /// The missed deadlines that were logged, milliseconds since 1970.
    late: BTreeMap<GpuId, u64>,
}

impl Log {
    /// The lines to log for these transitions, which led to this ledger.
    fn lines(&mut self, transitions: &[Transition], ledger: &Ledger, now: Now) -> Vec<Line> {
        let mut lines = Vec::new();
        let mut bypasses = 0;
        for transition in transitions {
            match transition {
                _ if transition.is_minor() => {}
                // A healthy GPU has a reason only if an operator marked it healthy, which the handler has logged.
                Transition::HealthChanged { now, .. }
                    if now.state == HealthState::Healthy && !now.reason.is_empty() => {}
                Transition::HealthChanged { .. }
                | Transition::Contested(_)
                | Transition::LimitFailed(..)
                | Transition::LimitChanged(..)
                | Transition::GrantForged(..)
                | Transition::ContainerBypass(_)
                | Transition::StrategyChanged(_)
                | Transition::ResourceWithdrawn(..)
                | Transition::NodesChanged(_) => lines.push(Line::of(transition, ledger)),
                Transition::DrainChanged { before, now, .. } => {
                    let given_up = now.was_given_up() && !before.was_given_up();
                    if given_up || transition.is_warning() || matches!(now, Drain::Drained(_)) {
                        let line = Line::of(transition, ledger);
                        lines.push(Line { warning: line.warning || given_up, ..line });
                    }
                }
                Transition::BypassStarted(_) | Transition::BypassEnded(_) | Transition::BypassPossible(_) => {
                    bypasses += 1;
                    if bypasses <= BYPASS_LINES_MAX {
                        lines.push(Line::of(transition, ledger));
                    }
                }
                // Operators' orders, and what the API's events show.
                _ => {}
            }
        }
        if let Some(more) = bypasses.checked_sub(BYPASS_LINES_MAX).filter(|more| *more > 0) {
            let text = format!(
                "{more} more changes of processes or pods that use GPUs without an allocation (`berth process bypass` \
                 lists them)"
            );
            lines.push(Line { warning: true, text });
        }
        lines.extend(self.late_lines(ledger, now));
        lines
    }

    /// A line for each missed deadline, once. Drains that are given up at their deadline have another line.
    fn late_lines(&mut self, ledger: &Ledger, now: Now) -> Vec<Line> {
        let mut late = BTreeMap::new();
        let mut lines = Vec::new();
        for (gpu, state) in &ledger.gpus {
            let drain = state.drain();
            let order = drain.order();
            let order = order.filter(|o| o.is_late(now) && o.at_deadline != AtDeadline::GiveUp);
            let Some((order, deadline)) = order.and_then(|o| Some((o, o.deadline_wall_ms?))) else {
                continue;
            };
            late.insert(gpu.clone(), deadline);
            if self.late.get(gpu) == Some(&deadline) {
                continue;
            }
            let then = match order.at_deadline {
                AtDeadline::Delete => "the remaining pods are deleted",
                AtDeadline::Wait | AtDeadline::GiveUp => "the drain continues",
            };
            let gpu = GpuName::IndexAndUuid.of(ledger, gpu);
            let deadline = berth_kernel::ids::time::rfc3339_seconds(deadline);
            let text = format!("{gpu} was not drained by its deadline, {deadline}; {then}");
            lines.push(Line { warning: true, text });
        }
        self.late = late;
        lines
    }
}

/// The lines of [`log_unchanged`].
fn unchanged_lines(before: &Ledger, now: &Ledger) -> Vec<Line> {
    let mut lines = Vec::new();
    for (gpu, state) in &now.gpus {
        let Some(before) = before.gpus.get(gpu) else { continue };
        let (name, health) = (GpuName::IndexAndUuid.of(now, gpu), &state.health);
        if health.state != HealthState::Healthy
            && (health.state, &health.reason) == (before.health.state, &before.health.reason)
        {
            let state = if health.state == HealthState::Vanished { "gone" } else { health.state.as_str() };
            lines.push(Line { warning: true, text: format!("{name} is still {state}: {}", health.reason) });
        }
        if let (Drain::Draining(..), Drain::Draining(mark, order)) = (before.drain(), state.drain()) {
            let (by, conditions) = (mark.by_and_reason(), order.conditions());
            let text = format!("the drain of {name} {by} continues after the restart{conditions}");
            lines.push(Line { warning: false, text });
        }
    }
    lines
}

#[cfg(test)]
mod tests;
