//! The condition of the node that says whether all of its GPUs can be had. `kubectl describe node`
//! shows it, and whatever watches nodes can act on it.

use super::Settings;
use super::client::{ANSWER_MAX, words};
use super::news::{by, moment, name_of};
use super::wait::{self, Backoff, REFRESH_MEAN, RetryAfter, jittered};
use berth_core::admission::Door;
use berth_kernel::drain::Drain;
use berth_kernel::health::HealthState;
use berth_kernel::ledger::{GpuState, Ledger};
use berth_kernel::names::PartId;
use k8s_openapi::api::core::v1::Node;
use kube::api::{Patch, PatchParams};
use kube::{Api, Client};
use serde_json::json;
use std::time::Duration;
use tokio::time::{Instant, sleep, sleep_until, timeout};

/// The condition's type. True: some GPU cannot be had.
pub(super) const CONDITION: &str = "GPUUnavailable";
/// Longest message, bytes; what does not fit is counted.
const MESSAGE_BYTES_MAX: usize = 1024;

/// What the condition says.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Condition {
    /// Whether some GPU cannot be had.
    unavailable: bool,
    reason: &'static str,
    message: String,
}

/// The condition of a node with these GPUs. Pure.
fn condition(ledger: &Ledger) -> Condition {
    let all = ledger.gpus.iter();
    let mut found: Vec<(u32, &'static str, String)> = all
        .filter_map(|(gpu, state)| {
            let (reason, words) = trouble(ledger, gpu, state)?;
            let index = ledger.part(gpu).map_or(u32::MAX, |p| p.part.gpu_index);
            Some((index, reason, format!("{} {words}", name_of(ledger, gpu))))
        })
        .collect();
    if let Some(stuck) = ledger.stuck.as_deref() {
        // Without its count, which changes with each grant and would be a write each time.
        let words = format!(
            "GPUs of finished pods stay allocated since {}: {}",
            moment(stuck.since_wall_ms),
            stuck.cause
        );
        found.push((u32::MAX, "AllocationsStuck", words));
    }
    found.sort();
    let Some((_, first, _)) = found.first() else {
        let message = match ledger.gpus.len() {
            0 => "no GPU is known".to_owned(),
            1 => "its GPU can be had".to_owned(),
            gpus => format!("all {gpus} GPUs can be had"),
        };
        return Condition { unavailable: false, reason: "GPUsAvailable", message };
    };
    let alike = found.iter().all(|(_, reason, _)| reason == first);
    let reason = if alike { *first } else { "GPUsUnavailable" };
    Condition { unavailable: true, reason, message: listed(found.iter().map(|(_, _, words)| words.as_str())) }
}

/// Why a GPU cannot be had, if it cannot.
fn trouble(ledger: &Ledger, gpu: &PartId, state: &GpuState) -> Option<(&'static str, String)> {
    let health = &state.health;
    let reason = if health.reason.is_empty() { String::new() } else { format!(": {}", health.reason) };
    let present = ledger.parts.values().any(|p| p.present && p.part.gpu() == gpu);
    let sick = match health.state {
        HealthState::Vanished => {
            Some(("GPUVanished", format!("is gone since {}{reason}", moment(health.since_wall_ms))))
        }
        _ if !present => Some(("GPUVanished", "was not found since the daemon started".to_owned())),
        HealthState::Unhealthy => {
            Some(("GPUUnhealthy", format!("is unhealthy since {}{reason}", moment(health.since_wall_ms))))
        }
        HealthState::Healthy | HealthState::Degraded => None,
    };
    let out = state.drain.mark().map(|mark| {
        let (reason, word) = match &state.drain {
            Drain::Draining(..) => ("GPUDraining", "being drained"),
            Drain::Drained(_) => ("GPUDrained", "drained"),
            Drain::Active | Drain::Cordoned(_) => ("GPUCordoned", "cordoned"),
        };
        (reason, format!("is {word} since {} {}", moment(mark.since_wall_ms), by(&mark.by, &mark.why)))
    });
    match (sick, out) {
        (Some((reason, sick)), Some((_, out))) => Some((reason, format!("{sick}, and {out}"))),
        (sick, out) => sick.or(out),
    }
}

/// As many as fit, and how many there are besides.
fn listed<'w>(words: impl ExactSizeIterator<Item = &'w str>) -> String {
    let mut message = String::new();
    let count = words.len();
    for (told, words) in words.enumerate() {
        let separator = if told == 0 { "" } else { "; " };
        let rest = format!("; and {} more", count - told);
        if message.len() + separator.len() + words.len() + rest.len() > MESSAGE_BYTES_MAX {
            if told == 0 {
                // One GPU with a reason of up to 1 KiB.
                return words[..words.floor_char_boundary(MESSAGE_BYTES_MAX)].to_owned();
            }
            return message + &rest;
        }
        message += separator;
        message += words;
    }
    message
}

/// Keeps the condition up to date for ever.
pub(super) async fn keep(settings: &Settings, client: Client, door: &Door) {
    let mut snapshots = door.watch();
    let mut told = Told {
        nodes: Api::all(client),
        node: &settings.node,
        turned: None,
        read: false,
        written: None,
        not_before: Instant::now(),
        again: settings.again,
        backoff: Backoff::new(settings.again),
        retry_after: settings.retry_after.clone(),
        said: false,
    };
    loop {
        let wanted = condition(&snapshots.borrow_and_update());
        let next = told.step(wanted, door.now().wall_ms).await;
        tokio::select! {
            changed = snapshots.changed() => {
                if changed.is_err() {
                    return std::future::pending().await;
                }
                sleep(settings.gather).await;
            }
            () = sleep_until(next) => {}
        }
    }
}

/// What the node was told, and when it is told again.
struct Told<'s> {
    nodes: Api<Node>,
    node: &'s str,
    /// The status that the condition should have, and since when, milliseconds since 1970.
    turned: Option<(bool, u64)>,
    /// Whether it is known what the node object said before: a restart of the daemon is no turn.
    read: bool,
    /// What the node object says, and when it is written again if it stays so.
    written: Option<(Condition, Instant)>,
    /// The node object is not written before this: after a failure, or so soon after a change.
    not_before: Instant,
    again: Duration,
    backoff: Backoff,
    retry_after: RetryAfter,
    /// Whether it was said that it cannot be written.
    said: bool,
}

impl Told<'_> {
    /// Writes the condition if it is due. Answers when to look again, if nothing changes.
    async fn step(&mut self, wanted: Condition, now_wall_ms: u64) -> Instant {
        self.turn(wanted.unavailable, now_wall_ms);
        let now = Instant::now();
        if let Some((condition, due)) = &self.written
            && *condition == wanted
            && now < *due
        {
            return *due;
        }
        if now < self.not_before {
            return self.not_before;
        }
        match self.tell(&wanted, now_wall_ms).await {
            Ok(()) => {
                let due = now + jittered(REFRESH_MEAN, wait::random());
                self.written = Some((wanted, due));
                self.said = false;
                self.backoff.reset();
                self.not_before = now + self.again;
                due
            }
            Err(Refused { why, forbidden }) => {
                if !std::mem::replace(&mut self.said, true) {
                    tracing::warn!(why, "the node's condition {CONDITION} cannot be kept up to date");
                }
                self.written = None;
                // Rights are not given every second.
                let wait = match forbidden {
                    true => jittered(REFRESH_MEAN, wait::random()),
                    false => self.backoff.next(wait::random()),
                };
                let now = Instant::now();
                self.not_before = now + self.retry_after.delay(wait, now);
                self.not_before
            }
        }
    }

    /// Takes down since when the condition should have this status, as far as we saw it.
    fn turn(&mut self, unavailable: bool, now_wall_ms: u64) {
        if self.turned.is_none_or(|(status, _)| status != unavailable) {
            self.turned = Some((unavailable, now_wall_ms));
        }
    }

    /// Writes the condition, once it is known since when it stands: a moment that is written is what
    /// everybody goes by, so none is guessed.
    async fn tell(&mut self, wanted: &Condition, now_wall_ms: u64) -> Result<(), Refused> {
        if !self.read {
            let known = known_since(&self.nodes, self.node, wanted.unavailable).await?;
            self.turned = known.map(|since| (wanted.unavailable, since)).or(self.turned);
            self.read = true;
        }
        let since_wall_ms = self.turned.map_or(now_wall_ms, |(_, since)| since);
        write(&self.nodes, self.node, wanted, since_wall_ms, now_wall_ms).await
    }
}

/// Since when the node object has this status of the condition, if it has.
async fn known_since(nodes: &Api<Node>, node: &str, unavailable: bool) -> Result<Option<u64>, Refused> {
    let node = answered(nodes.get(node), "get nodes (ClusterRole berth)").await?;
    let known = node.status.and_then(|status| status.conditions).into_iter().flatten();
    let mut known = known.filter(|c| c.type_ == CONDITION && c.status == status(unavailable));
    let since = known.next().and_then(|c| c.last_transition_time);
    Ok(since.and_then(|since| u64::try_from(since.0.as_millisecond()).ok()))
}

fn status(unavailable: bool) -> &'static str {
    if unavailable { "True" } else { "False" }
}

/// A node that was not read, or a condition that was not written.
struct Refused {
    why: String,
    forbidden: bool,
}

/// Writes our condition and no other: conditions are merged by type.
async fn write(
    nodes: &Api<Node>,
    node: &str,
    condition: &Condition,
    since_wall_ms: u64,
    now_wall_ms: u64,
) -> Result<(), Refused> {
    let patch = json!({"status": {"conditions": [{
        "type": CONDITION,
        "status": status(condition.unavailable),
        "reason": condition.reason,
        "message": condition.message,
        "lastTransitionTime": moment(since_wall_ms),
        "lastHeartbeatTime": moment(now_wall_ms),
    }]}});
    let (how, patch) = (PatchParams::default(), Patch::Strategic(&patch));
    let sent = nodes.patch_status(node, &how, &patch);
    answered(sent, "patch nodes/status (ClusterRole berth-tell)").await.map(drop)
}

/// An answer in time, or why there is none. `right`: what is needed for it.
async fn answered<T>(sent: impl Future<Output = kube::Result<T>>, right: &str) -> Result<T, Refused> {
    match timeout(ANSWER_MAX, sent).await {
        Ok(Ok(answer)) => Ok(answer),
        Ok(Err(kube::Error::Api(status))) if status.code == 403 => {
            let why = format!("{} (the daemon needs: {right}; see deploy/cluster-role.yaml)", status.message);
            Err(Refused { why, forbidden: true })
        }
        Ok(Err(error)) => Err(Refused { why: words(&error), forbidden: false }),
        Err(_) => {
            Err(Refused { why: format!("no answer within {} s", ANSWER_MAX.as_secs()), forbidden: false })
        }
    }
}

#[cfg(test)]
mod tests;
