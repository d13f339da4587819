//! Computes the events of GPUs and evicted pods from the difference between two snapshots. Pure.

use berth_kernel::drain::{AtDeadline, Drain, Order};
use berth_kernel::evict::{HolderOn, Leaving, Outcome, Way, holders};
use berth_kernel::health::{Health, HealthState};
use berth_kernel::ledger::Ledger;
use berth_kernel::names::PartId;
use k8s_openapi::jiff::Timestamp;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Longest note of an event, bytes (the limit of events.k8s.io/v1).
const NOTE_BYTES_MAX: usize = 1024;

/// One Kubernetes event to publish.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct PendingEvent {
    pub(super) regarding: Regarding,
    /// Whether its type is `Warning`, else `Normal`.
    pub(super) warning: bool,
    /// CamelCase, as `kubectl describe` shows it.
    pub(super) reason: &'static str,
    /// The `action` of events.k8s.io/v1: what was done.
    pub(super) action: &'static str,
    /// The text.
    pub(super) note: String,
}

/// The object that an event is about.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Regarding {
    /// This node.
    Node,
    /// A pod of this node.
    Pod { namespace: String, name: String, uid: String },
}

/// The events of the changes from one snapshot to a later one.
pub(super) fn events_between(old: &Ledger, new: &Ledger) -> Vec<PendingEvent> {
    let mut notices = Vec::new();
    for (gpu, state) in &new.gpus {
        // A GPU that is new to the node has no earlier state.
        let Some(before) = old.gpus.get(gpu).filter(|before| !Arc::ptr_eq(before, state)) else {
            continue;
        };
        notices.extend(drain_event(new, gpu, &before.drain, &state.drain));
        notices.extend(health_event(new, gpu, &before.health, &state.health));
    }
    for gpu in old.gpus.keys().filter(|gpu| !new.gpus.contains_key(gpu)) {
        notices.push(normal(
            "GPUForgotten",
            "Forget",
            format!("{} was removed from the list", gpu_name(old, gpu)),
        ));
    }
    notices.extend(blocked_drain_events(old, new));
    notices.extend(pod_events(old, new));
    match (old.hold.as_deref(), new.hold.as_deref()) {
        (before, Some(why)) if before != Some(why) => {
            notices.push(warning(
                "AllocationsOnHold",
                "Hold",
                format!("no allocation ends at present: {why}"),
            ));
        }
        (Some(_), None) => {
            notices.push(normal("AllocationsHoldOver", "Hold", "allocations end by themselves again".into()));
        }
        _ => {}
    }
    notices
}

/// The event of a changed drain state, if the change is worth one.
pub(super) fn drain_event(
    ledger: &Ledger,
    gpu: &PartId,
    before: &Drain,
    now: &Drain,
) -> Option<PendingEvent> {
    let name = gpu_name(ledger, gpu);
    let by = now.mark().map_or_else(String::new, |mark| author(&mark.by, &mark.why));
    let why_changed = before.mark().map(|m| &m.why) != now.mark().map(|m| &m.why);
    match (before, now) {
        (Drain::Active, Drain::Active) | (Drain::Drained(_), Drain::Drained(_)) => None,
        (_, Drain::Active) => {
            Some(normal("GPUUncordoned", "Uncordon", format!("{name} may be granted again")))
        }
        (Drain::Cordoned(_), Drain::Cordoned(_)) if !why_changed => None,
        (Drain::Active | Drain::Cordoned(_), Drain::Cordoned(_)) => {
            Some(normal("GPUCordoned", "Cordon", format!("{name} is cordoned {by}")))
        }
        (Drain::Draining(..) | Drain::Drained(_), Drain::Cordoned(_)) => Some(normal(
            "GPUDrainStopped",
            "Drain",
            format!("{name} is no longer drained, but cordoned {by}"),
        )),
        (Drain::Draining(_, first), Drain::Draining(_, order)) if first == order => None,
        (Drain::Drained(_), Drain::Draining(..)) => {
            Some(warning("GPUDraining", "Drain", format!("{name} was drained, but is held again")))
        }
        (_, Drain::Draining(_, order)) => Some(normal(
            "GPUDraining",
            "Drain",
            format!("{name} is being drained {by}{}", order_suffix(order)),
        )),
        (_, Drain::Drained(_)) => {
            Some(normal("GPUDrained", "Drain", format!("{name} is drained: no allocation is left on it")))
        }
    }
}

/// The conditions of a drain order, to be appended to a text; empty for a plain drain.
pub(super) fn order_suffix(order: &Order) -> String {
    let mut text = if order.evict { "; its pods are evicted" } else { "" }.to_owned();
    if let Some(deadline) = order.deadline_wall_ms {
        text += &format!("; until {}", format_time(deadline));
        text += match order.at_deadline {
            AtDeadline::Wait => "",
            AtDeadline::Delete => ", then they are deleted",
            AtDeadline::GiveUp => ", then it is given up",
        };
    }
    text
}

/// The event of a changed health, if the change is worth one.
pub(super) fn health_event(
    ledger: &Ledger,
    gpu: &PartId,
    before: &Health,
    now: &Health,
) -> Option<PendingEvent> {
    let name = gpu_name(ledger, gpu);
    let why = if now.reason.is_empty() { String::new() } else { format!(": {}", now.reason) };
    let state = now.state.as_str();
    match (before.state, now.state) {
        (HealthState::Unhealthy, HealthState::Unhealthy) if before.reason != now.reason => {
            Some(warning("GPUUnhealthy", "Look", format!("{name} is unhealthy{why}")))
        }
        (before, now) if before == now => None,
        (_, HealthState::Vanished) => Some(warning("GPUVanished", "Look", format!("{name} is gone{why}"))),
        (HealthState::Vanished, HealthState::Healthy) => {
            Some(normal("GPUReturned", "Look", format!("{name} is back, and healthy{why}")))
        }
        (HealthState::Vanished, _) => {
            Some(warning("GPUReturned", "Look", format!("{name} is back, but {state}{why}")))
        }
        (_, HealthState::Healthy) => {
            Some(normal("GPUHealthy", "Look", format!("{name} is healthy again{why}")))
        }
        (_, HealthState::Unhealthy) => {
            Some(warning("GPUUnhealthy", "Look", format!("{name} is unhealthy{why}")))
        }
        (_, HealthState::Degraded) => {
            Some(warning("GPUDegraded", "Look", format!("{name} is degraded, and still granted{why}")))
        }
    }
}

/// The events of pods that block a drain with eviction, and did not before or for another reason.
fn blocked_drain_events(old: &Ledger, new: &Ledger) -> Vec<PendingEvent> {
    let mut notices = Vec::new();
    for (gpu, _) in new.gpus.iter().filter(|(_, state)| state.drain.evicts()) {
        let before = blockers(old, gpu);
        for (pod, why) in blockers(new, gpu) {
            if before.get(&pod) != Some(&why) {
                let note = format!("{} cannot be drained yet: pod {pod} {why}", gpu_name(new, gpu));
                notices.push(warning("GPUDrainBlocked", "Drain", note));
            }
        }
    }
    notices
}

/// The pods that block a drain with eviction, by name, and why.
fn blockers(ledger: &Ledger, gpu: &PartId) -> BTreeMap<String, String> {
    if !ledger.gpus.get(gpu).is_some_and(|g| g.drain.evicts()) {
        return BTreeMap::new();
    }
    let why = |holder: &HolderOn| match &holder.leaving {
        Leaving::Static => Some("is a static pod: take its file out of the kubelet's manifests".to_owned()),
        Leaving::Budget { message } => Some(format!("waits for its disruption budget: {message}")),
        Leaving::Failed { message } => Some(format!("cannot be asked to leave: {message}")),
        _ => None,
    };
    let holders = holders(ledger, gpu).into_iter();
    holders.filter_map(|h| why(&h).map(|why| (pod_name(&h), why))).collect()
}

fn pod_name(holder: &HolderOn) -> String {
    let or_unknown = |text: &Option<String>| text.clone().unwrap_or_else(|| "?".into());
    format!("{}/{}", or_unknown(&holder.namespace), or_unknown(&holder.pod))
}

/// The events of evicted and deleted pods, each regarding its pod.
fn pod_events(old: &Ledger, new: &Ledger) -> Vec<PendingEvent> {
    if Arc::ptr_eq(&old.evictions, &new.evictions) {
        return Vec::new();
    }
    let mut notices = Vec::new();
    for (uid, asked) in new.evictions.iter().filter(|(_, asked)| asked.outcome == Outcome::Taken) {
        let known = old.evictions.get(uid);
        if known.is_some_and(|known| known.outcome == Outcome::Taken && known.ask.way == asked.ask.way) {
            continue;
        }
        let pod = &asked.ask.pod;
        let what = match asked.ask.way {
            Way::Evict => "evicted",
            Way::Delete => "deleted at the deadline of a drain",
        };
        notices.push(PendingEvent {
            regarding: Regarding::Pod {
                namespace: pod.namespace.clone(),
                name: pod.name.clone(),
                uid: pod.uid.clone(),
            },
            warning: false,
            reason: "GPUDrain",
            action: "Evict",
            note: truncate_note(format!("{what}: {}", drained_by(new, &asked.ask.gpu))),
        });
    }
    notices
}

fn drained_by(ledger: &Ledger, gpu: &PartId) -> String {
    let mark = ledger.gpus.get(gpu).and_then(|g| g.drain.mark());
    let by = mark.map_or_else(String::new, |mark| format!(" {}", author(&mark.by, &mark.why)));
    format!("{} is being drained{by}", gpu_name(ledger, gpu))
}

/// The name of a GPU in texts: its index and its UUID.
pub(super) fn gpu_name(ledger: &Ledger, gpu: &PartId) -> String {
    let part = ledger.part(gpu).or_else(|| {
        let parts = ledger.parts.values().map(AsRef::as_ref);
        parts.into_iter().find(|p| p.part.gpu() == gpu)
    });
    part.map_or_else(|| gpu.to_string(), |p| format!("GPU {} ({gpu})", p.part.gpu_index))
}

/// The author and reason of a cordon or drain: `by ada (fan)`.
pub(super) fn author(who: &str, why: &str) -> String {
    if why.is_empty() { format!("by {who}") } else { format!("by {who} ({why})") }
}

/// A time in RFC 3339, to the second.
pub(super) fn format_time(wall_ms: u64) -> String {
    let seconds = i64::try_from(wall_ms / 1000).unwrap_or(i64::MAX);
    Timestamp::from_second(seconds).map_or_else(|_| "?".into(), |time| time.to_string())
}

/// Cuts a note at [`NOTE_BYTES_MAX`].
pub(super) fn truncate_note(note: String) -> String {
    if note.len() <= NOTE_BYTES_MAX {
        note
    } else {
        note[..note.floor_char_boundary(NOTE_BYTES_MAX)].to_owned()
    }
}

/// An event of type `Normal` regarding the node.
pub(super) fn normal(reason: &'static str, action: &'static str, note: String) -> PendingEvent {
    PendingEvent { regarding: Regarding::Node, warning: false, reason, action, note: truncate_note(note) }
}

/// An event of type `Warning` regarding the node.
pub(super) fn warning(reason: &'static str, action: &'static str, note: String) -> PendingEvent {
    PendingEvent { warning: true, ..normal(reason, action, note) }
}

#[cfg(test)]
pub(super) mod tests;
