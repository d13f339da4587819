//! What is told as events: the difference between two snapshots. Pure.

use berth_kernel::drain::{AtDeadline, Drain, Order};
use berth_kernel::evict::{HolderOn, Leaving, Outcome, Way, holders};
use berth_kernel::health::{Health, HealthState};
use berth_kernel::ledger::Ledger;
use berth_kernel::names::PartId;
use k8s_openapi::jiff::Timestamp;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Longest note of an event, bytes (events.k8s.io/v1 takes no longer one).
const NOTE_BYTES_MAX: usize = 1024;

/// One event to tell.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Notice {
    pub(super) about: About,
    /// Something is not as it should be.
    pub(super) warning: bool,
    /// As `kubectl describe` shows it.
    pub(super) reason: &'static str,
    /// What was done, or found.
    pub(super) action: &'static str,
    /// In words.
    pub(super) note: String,
}

/// What an event is about.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum About {
    /// This node.
    Node,
    /// A pod of it.
    Pod { namespace: String, name: String, uid: String },
}

/// What happened between two snapshots.
pub(super) fn news(old: &Ledger, new: &Ledger) -> Vec<Notice> {
    let mut notices = Vec::new();
    for (gpu, state) in &new.gpus {
        // One that is new to the node has turned nowhere.
        let Some(before) = old.gpus.get(gpu).filter(|before| !Arc::ptr_eq(before, state)) else {
            continue;
        };
        notices.extend(drain_news(new, gpu, &before.drain, &state.drain));
        notices.extend(health_news(new, gpu, &before.health, &state.health));
    }
    for gpu in old.gpus.keys().filter(|gpu| !new.gpus.contains_key(gpu)) {
        notices.push(calm(
            "GPUForgotten",
            "Forget",
            format!("{} was removed from the list", name_of(old, gpu)),
        ));
    }
    notices.extend(blocked_news(old, new));
    notices.extend(pod_news(old, new));
    match (old.hold.as_deref(), new.hold.as_deref()) {
        (before, Some(why)) if before != Some(why) => {
            notices.push(warning(
                "AllocationsOnHold",
                "Hold",
                format!("no allocation ends at present: {why}"),
            ));
        }
        (Some(_), None) => {
            notices.push(calm("AllocationsHoldOver", "Hold", "allocations end by themselves again".into()));
        }
        _ => {}
    }
    notices
}

pub(super) fn drain_news(ledger: &Ledger, gpu: &PartId, before: &Drain, now: &Drain) -> Option<Notice> {
    let name = name_of(ledger, gpu);
    let by = now.mark().map_or_else(String::new, |mark| by(&mark.by, &mark.why));
    let why_changed = before.mark().map(|m| &m.why) != now.mark().map(|m| &m.why);
    match (before, now) {
        (Drain::Active, Drain::Active) | (Drain::Drained(_), Drain::Drained(_)) => None,
        (_, Drain::Active) => Some(calm("GPUUncordoned", "Uncordon", format!("{name} may be granted again"))),
        (Drain::Cordoned(_), Drain::Cordoned(_)) if !why_changed => None,
        (Drain::Active | Drain::Cordoned(_), Drain::Cordoned(_)) => {
            Some(calm("GPUCordoned", "Cordon", format!("{name} is cordoned {by}")))
        }
        (Drain::Draining(..) | Drain::Drained(_), Drain::Cordoned(_)) => {
            Some(calm("GPUDrainStopped", "Drain", format!("{name} is no longer drained, but cordoned {by}")))
        }
        (Drain::Draining(_, first), Drain::Draining(_, order)) if first == order => None,
        (Drain::Drained(_), Drain::Draining(..)) => {
            Some(warning("GPUDraining", "Drain", format!("{name} was drained, but is held again")))
        }
        (_, Drain::Draining(_, order)) => {
            Some(calm("GPUDraining", "Drain", format!("{name} is being drained {by}{}", how(order))))
        }
        (_, Drain::Drained(_)) => {
            Some(calm("GPUDrained", "Drain", format!("{name} is drained: nobody holds it any more")))
        }
    }
}

/// What an order says, in words.
pub(super) fn how(order: &Order) -> String {
    let mut text = if order.evict { "; its pods are evicted" } else { "" }.to_owned();
    if let Some(deadline) = order.deadline_wall_ms {
        text += &format!("; until {}", moment(deadline));
        text += match order.at_deadline {
            AtDeadline::Wait => "",
            AtDeadline::Delete => ", then they are deleted",
            AtDeadline::GiveUp => ", then it is given up",
        };
    }
    text
}

pub(super) fn health_news(ledger: &Ledger, gpu: &PartId, before: &Health, now: &Health) -> Option<Notice> {
    let name = name_of(ledger, gpu);
    let why = if now.reason.is_empty() { String::new() } else { format!(": {}", now.reason) };
    let state = now.state.as_str();
    match (before.state, now.state) {
        (HealthState::Unhealthy, HealthState::Unhealthy) if before.reason != now.reason => {
            Some(warning("GPUUnhealthy", "Look", format!("{name} is unhealthy{why}")))
        }
        (before, now) if before == now => None,
        (_, HealthState::Vanished) => Some(warning("GPUVanished", "Look", format!("{name} is gone{why}"))),
        (HealthState::Vanished, HealthState::Healthy) => {
            Some(calm("GPUReturned", "Look", format!("{name} is there again, and healthy{why}")))
        }
        (HealthState::Vanished, _) => {
            Some(warning("GPUReturned", "Look", format!("{name} is there again, but {state}{why}")))
        }
        (_, HealthState::Healthy) => {
            Some(calm("GPUHealthy", "Look", format!("{name} is healthy again{why}")))
        }
        (_, HealthState::Unhealthy) => {
            Some(warning("GPUUnhealthy", "Look", format!("{name} is unhealthy{why}")))
        }
        (_, HealthState::Degraded) => {
            Some(warning("GPUDegraded", "Look", format!("{name} is degraded, and still granted{why}")))
        }
    }
}

/// Holders that came to stand in the way of a drain.
fn blocked_news(old: &Ledger, new: &Ledger) -> Vec<Notice> {
    let mut notices = Vec::new();
    for (gpu, _) in new.gpus.iter().filter(|(_, state)| state.drain.evicts()) {
        let before = blockers(old, gpu);
        for (pod, why) in blockers(new, gpu) {
            if before.get(&pod) != Some(&why) {
                let note = format!("{} cannot be drained yet: pod {pod} {why}", name_of(new, gpu));
                notices.push(warning("GPUDrainBlocked", "Drain", note));
            }
        }
    }
    notices
}

/// Who stands in the way of a drain that evicts, and why.
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
    let word = |text: &Option<String>| text.clone().unwrap_or_else(|| "?".into());
    format!("{}/{}", word(&holder.namespace), word(&holder.pod))
}

/// Pods that were sent away, told on the pods themselves.
fn pod_news(old: &Ledger, new: &Ledger) -> Vec<Notice> {
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
        notices.push(Notice {
            about: About::Pod {
                namespace: pod.namespace.clone(),
                name: pod.name.clone(),
                uid: pod.uid.clone(),
            },
            warning: false,
            reason: "GPUDrain",
            action: "Evict",
            note: bounded(format!("{what}: {}", drained_by(new, &asked.ask.gpu))),
        });
    }
    notices
}

fn drained_by(ledger: &Ledger, gpu: &PartId) -> String {
    let mark = ledger.gpus.get(gpu).and_then(|g| g.drain.mark());
    let by = mark.map_or_else(String::new, |mark| format!(" {}", by(&mark.by, &mark.why)));
    format!("{} is being drained{by}", name_of(ledger, gpu))
}

/// A GPU as people know it, by index, and as programs do.
pub(super) fn name_of(ledger: &Ledger, gpu: &PartId) -> String {
    let part = ledger.part(gpu).or_else(|| {
        let parts = ledger.parts.values().map(AsRef::as_ref);
        parts.into_iter().find(|p| p.part.gpu() == gpu)
    });
    part.map_or_else(|| gpu.to_string(), |p| format!("GPU {} ({gpu})", p.part.gpu_index))
}

/// Who did it and why.
pub(super) fn by(who: &str, why: &str) -> String {
    if why.is_empty() { format!("by {who}") } else { format!("by {who} ({why})") }
}

/// A moment as people read it, to the second.
pub(super) fn moment(wall_ms: u64) -> String {
    let seconds = i64::try_from(wall_ms / 1000).unwrap_or(i64::MAX);
    Timestamp::from_second(seconds).map_or_else(|_| "?".into(), |moment| moment.to_string())
}

/// Text of at most [`NOTE_BYTES_MAX`].
pub(super) fn bounded(note: String) -> String {
    if note.len() <= NOTE_BYTES_MAX {
        note
    } else {
        note[..note.floor_char_boundary(NOTE_BYTES_MAX)].to_owned()
    }
}

pub(super) fn calm(reason: &'static str, action: &'static str, note: String) -> Notice {
    Notice { about: About::Node, warning: false, reason, action, note: bounded(note) }
}

pub(super) fn warning(reason: &'static str, action: &'static str, note: String) -> Notice {
    Notice { warning: true, ..calm(reason, action, note) }
}

#[cfg(test)]
pub(super) mod tests;
