//! What is told: the difference between two snapshots. Pure.
//!
//! So whoever changes something need not think of telling it. What comes and goes between two looks is
//! not told, but for allocations: those that ended are in the history.

use super::names::{by, devices, gpu_name, holder};
use super::people;
use berth_api::EventKind;
use berth_core::admission::Standings;
use berth_core::keeper::Snapshot;
use berth_kernel::allocation::Allocation;
use berth_kernel::evict::{Outcome, Way};
use berth_kernel::ledger::{GpuState, Ledger};
use berth_kernel::names::{AllocationId, PartId};
use berth_kernel::words;
use std::sync::Arc;

/// Something to tell.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct News {
    pub(super) kind: EventKind,
    pub(super) gpu: Option<PartId>,
    pub(super) allocation: Option<AllocationId>,
    pub(super) policy: Option<String>,
    pub(super) words: String,
}

impl News {
    pub(super) fn new(kind: EventKind, words: String) -> Self {
        Self { kind, gpu: None, allocation: None, policy: None, words }
    }

    pub(super) fn of_gpu(kind: EventKind, gpu: &PartId, words: String) -> Self {
        Self { gpu: Some(gpu.clone()), ..Self::new(kind, words) }
    }

    fn of_policy(kind: EventKind, label: &str, words: String) -> Self {
        Self { policy: Some(label.to_owned()), ..Self::new(kind, words) }
    }
}

/// What was told so far.
pub(super) struct Told {
    ledger: Snapshot,
    standings: Arc<Standings>,
    bypasses: people::Bypasses,
}

impl Told {
    pub(super) fn new(ledger: Snapshot, standings: Arc<Standings>) -> Self {
        let bypasses = people::bypasses(&ledger);
        Self { ledger, standings, bypasses }
    }

    /// What is new, and told from now on.
    pub(super) fn step(&mut self, ledger: Snapshot, standings: Arc<Standings>) -> Vec<News> {
        let (old, new) = (&*self.ledger, &*ledger);
        let mut news = parts(old, new);
        news.extend(gpus(old, new));
        news.extend(allocations(old, new));
        news.extend(evictions(old, new));
        news.extend(hold(old, new));
        news.extend(policies(old, new));
        news.extend(fares(&self.standings, &standings));
        if people::may_differ(old, new) {
            let bypasses = people::bypasses(new);
            news.extend(people::news(new, &self.bypasses, &bypasses));
            self.bypasses = bypasses;
        }
        self.ledger = ledger;
        self.standings = standings;
        news
    }
}

/// Parts that came, and what parts are offered as.
fn parts(old: &Ledger, new: &Ledger) -> Vec<News> {
    let same = |id: &PartId, part| old.parts.get(id).is_some_and(|before| Arc::ptr_eq(before, part));
    let mut changed: Vec<_> = new.parts.iter().filter(|(id, part)| !same(id, part)).collect();
    changed.sort_by_key(|(_, part)| part.part.gpu_index);
    let mut news = Vec::new();
    for (id, part) in changed {
        let before = old.parts.get(id);
        let (gpu, name) = (part.part.gpu(), words::gpu(new, id));
        // One that comes back after it vanished is told by its health.
        if before.is_none() && part.present {
            let what = format!("{name} is there: {}, {} MiB", part.part.model, part.part.memory_mib);
            news.push(News::of_gpu(EventKind::GpuFound, gpu, what));
        }
        let (lines, by) = before.map_or((&[][..], ""), |before| (&before.lines[..], &before.offered_by[..]));
        if lines != part.lines || (by != part.offered_by && !part.lines.is_empty()) {
            let by = if part.offered_by.is_empty() { "nobody" } else { &part.offered_by };
            let what = format!("{name} is offered as {} by {by}", words::lines(&part.lines));
            news.push(News::of_gpu(EventKind::OffersChanged, gpu, what));
        }
    }
    news
}

fn gpus(old: &Ledger, new: &Ledger) -> Vec<News> {
    let mut news = Vec::new();
    for (gpu, state) in &new.gpus {
        let before = old.gpus.get(gpu);
        if before.is_some_and(|before| Arc::ptr_eq(before, state)) {
            continue;
        }
        // One that is new to the node has turned nowhere.
        let Some(before) = before else { continue };
        news.extend(health(new, gpu, before, state));
        news.extend(drain(new, gpu, before, state));
    }
    for gpu in old.gpus.keys().filter(|gpu| !new.gpus.contains_key(gpu)) {
        news.push(News::of_gpu(
            EventKind::GpuForgotten,
            gpu,
            format!("{} was removed from the list", gpu_name(old, gpu)),
        ));
    }
    news
}

fn health(ledger: &Ledger, gpu: &PartId, before: &GpuState, now: &GpuState) -> Option<News> {
    let (before, now) = (&before.health, &now.health);
    if before.state == now.state && before.reason == now.reason {
        return None;
    }
    let why = if now.reason.is_empty() { String::new() } else { format!(": {}", now.reason) };
    let what = format!("{} is {}{why}", gpu_name(ledger, gpu), now.state.as_str());
    Some(News::of_gpu(EventKind::GpuHealth, gpu, what))
}

fn drain(ledger: &Ledger, gpu: &PartId, before: &GpuState, now: &GpuState) -> Option<News> {
    use berth_kernel::drain::Drain;
    let (before, now) = (&before.drain, &now.drain);
    if before == now {
        return None;
    }
    let name = gpu_name(ledger, gpu);
    let by = now.mark().map(by).unwrap_or_default();
    let (kind, what) = match now {
        Drain::Active => (EventKind::GpuUncordoned, format!("{name} may be granted again")),
        Drain::Cordoned(_) if matches!(before, Drain::Draining(..) | Drain::Drained(_)) => {
            (EventKind::GpuCordoned, format!("{name} is no longer drained, but cordoned{by}"))
        }
        Drain::Cordoned(_) => (EventKind::GpuCordoned, format!("{name} is cordoned{by}")),
        Drain::Draining(_, order) => {
            let how = if order.evict { "; its pods are evicted" } else { "" };
            (EventKind::GpuDraining, format!("{name} is being drained{by}{how}"))
        }
        Drain::Drained(_) => (EventKind::GpuDrained, format!("{name} is drained{by}: nobody holds it")),
    };
    Some(News::of_gpu(kind, gpu, what))
}

/// In the order of their ids, which is that of the grants.
fn allocations(old: &Ledger, new: &Ledger) -> Vec<News> {
    if Arc::ptr_eq(&old.live, &new.live) {
        return Vec::new();
    }
    let mut news = Vec::new();
    for (id, allocation) in new.live.iter() {
        match old.live.get(id) {
            Some(before) if Arc::ptr_eq(before, allocation) => {}
            Some(before) if before.holder == allocation.holder => {}
            Some(_) => {
                let what = format!("{id} is held by {}", holder(allocation));
                news.push(told(new, EventKind::AllocationHolder, allocation, what));
            }
            None => news.push(granted(new, allocation)),
        }
    }
    // The history is in the order of the ends, so what is new in it comes after what was its newest.
    let newest = old.ended.back().map(|past| past.id);
    let mut fresh: Vec<_> = new.ended.iter().rev().take_while(|past| Some(past.id) != newest).collect();
    fresh.reverse();
    for past in fresh {
        let allocation = past.allocation();
        if !old.live.contains_key(&past.id) {
            news.push(granted(new, &allocation));
        }
        let why = allocation.ended.as_ref().map_or("ended", |end| end.reason.as_str());
        let what = format!("{} ended ({why}): {}", past.id, devices(&allocation));
        news.push(told(new, EventKind::AllocationEnded, &allocation, what));
    }
    news
}

fn granted(ledger: &Ledger, allocation: &Allocation) -> News {
    let by = allocation.decision.by.join(" ");
    let by = if by.is_empty() { String::new() } else { format!(" by {by}") };
    let what = format!("{} granted{by}: {}", allocation.id, devices(allocation));
    told(ledger, EventKind::AllocationGranted, allocation, what)
}

fn told(ledger: &Ledger, kind: EventKind, allocation: &Allocation, what: String) -> News {
    let part = allocation.devices.first().map(|device| &device.part);
    let gpu = part.map(|part| ledger.part(part).map_or(part, |known| known.part.gpu()).clone());
    News { gpu, allocation: Some(allocation.id), ..News::new(kind, what) }
}

fn evictions(old: &Ledger, new: &Ledger) -> Vec<News> {
    if Arc::ptr_eq(&old.evictions, &new.evictions) {
        return Vec::new();
    }
    let mut news = Vec::new();
    for (uid, asked) in new.evictions.iter() {
        let known = old.evictions.get(uid);
        if known.is_some_and(|known| known.outcome == asked.outcome && known.ask.way == asked.ask.way) {
            continue;
        }
        let pod = format!("{}/{}", asked.ask.pod.namespace, asked.ask.pod.name);
        let what = match (&asked.outcome, asked.ask.way) {
            (Outcome::Taken, Way::Evict) => "was asked to leave".to_owned(),
            (Outcome::Taken, Way::Delete) => "was deleted at the deadline".to_owned(),
            (Outcome::Gone, _) => "is gone already".to_owned(),
            (Outcome::Budget(message), _) => format!("waits for its disruption budget: {message}"),
            (Outcome::Failed(message), _) => format!("could not be asked to leave: {message}"),
        };
        let what = format!("{} is drained: pod {pod} {what}", gpu_name(new, &asked.ask.gpu));
        news.push(News::of_gpu(EventKind::Eviction, &asked.ask.gpu, what));
    }
    news
}

fn hold(old: &Ledger, new: &Ledger) -> Option<News> {
    let what = match (old.hold.as_deref(), new.hold.as_deref()) {
        (before, now) if before == now => return None,
        (_, Some(why)) => format!("no allocation ends at present: {why}"),
        (_, None) => "allocations end by themselves again".to_owned(),
    };
    Some(News::new(EventKind::Hold, what))
}

fn policies(old: &Ledger, new: &Ledger) -> Vec<News> {
    let mut news = Vec::new();
    if !Arc::ptr_eq(&old.policies, &new.policies) {
        for version in new.policies.values().filter(|version| !old.policies.contains_key(&version.digest)) {
            let by =
                if version.shipped { "came with the daemon".into() } else { uploaded(&version.origin.by) };
            let what = format!("{} {} {by} ({} bytes)", version.label(), version.version, version.bytes);
            news.push(News::of_policy(EventKind::PolicyUploaded, &version.label(), what));
        }
        for version in old.policies.values().filter(|version| !new.policies.contains_key(&version.digest)) {
            let what = format!("{} was deleted", version.label());
            news.push(News::of_policy(EventKind::PolicyDeleted, &version.label(), what));
        }
    }
    if old.stack.revision != new.stack.revision {
        let stack = &new.stack;
        let labels: Vec<_> = stack.entries.iter().map(berth_kernel::stack::StackEntry::label).collect();
        let entries = if labels.is_empty() { "the baseline alone".into() } else { labels.join(", ") };
        let why = if stack.why.is_empty() { String::new() } else { format!(" ({})", stack.why) };
        let what = format!("stack {} is active by {}{why}: {entries}", stack.revision, stack.by);
        news.push(News::new(EventKind::StackActivated, what));
    }
    news
}

fn uploaded(by: &str) -> String {
    if by.is_empty() { "was uploaded".into() } else { format!("was uploaded by {by}") }
}

/// Policies that failed since, were suspended, or are asked again.
fn fares(old: &Standings, new: &Standings) -> Vec<News> {
    let mut news = Vec::new();
    for (label, now) in new {
        let before = old.get(label).cloned().unwrap_or_default();
        // Another stack begins its counts anew, and so does the same one activated again.
        let same = before.revision == now.revision;
        let counted = if same { before.faults } else { 0 };
        let last = now.last.as_deref().unwrap_or("no words are kept of it");
        if now.faults > counted {
            let times = now.faults - counted;
            let what = match times {
                1 => format!("{label} failed: {last}"),
                _ => format!("{label} failed {times} times, the last time so: {last}"),
            };
            news.push(News::of_policy(EventKind::PolicyFault, label, what));
        }
        if now.suspended && !(same && before.suspended) {
            let what = format!("{label} is no longer asked, after several faults in a row: {last}");
            news.push(News::of_policy(EventKind::PolicySuspended, label, what));
        }
        if before.suspended && !now.suspended {
            let what = format!("{label} is asked again");
            news.push(News::of_policy(EventKind::PolicyAskedAgain, label, what));
        }
    }
    news
}

#[cfg(test)]
mod tests;
