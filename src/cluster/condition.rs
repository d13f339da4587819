//! Keeps the node condition `GPUUnavailable` up to date: whether a GPU of the node cannot be granted, and why. `kubectl
//! describe node` shows it, and controllers that watch nodes can act on it.

use super::settings::Settings;
use berth_core::KernelHandle;
use berth_kernel::drain::marks::Drain;
use berth_kernel::hardware::health::HealthState;
use berth_kernel::ids::names::GpuId;
use berth_kernel::ids::time::rfc3339_seconds;
use berth_kernel::node::ledger::{GpuState, Ledger};
use berth_kernel::node::transitions::GpuName;
use berth_kube::{Backoff, REFRESH_MEAN, RequestError, jittered, random, request};
use k8s_openapi::api::core::v1::Node;
use kube::api::{Patch, PatchParams};
use kube::{Api, Client};
use serde_json::json;
use tokio::time::{Instant, sleep, sleep_until};

/// The condition's type. True: a GPU is unavailable.
pub(super) const CONDITION: &str = "GPUUnavailable";
/// Longest message, bytes; GPUs that do not fit are counted.
const MESSAGE_BYTES_MAX: usize = 1024;

/// Whether all GPUs of a node are available.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Availability {
    pub(super) is_available: bool,
    /// In CamelCase, as conditions have it.
    pub(super) reason: &'static str,
    /// Which GPUs, and why.
    pub(super) message: String,
}

/// Whether all GPUs of this node are available. Pure.
pub(super) fn availability(ledger: &Ledger) -> Availability {
    // An operator left the excluded ones out on purpose.
    let all = ledger.gpus.iter().filter(|(gpu, _)| !ledger.excluded.contains(*gpu));
    let mut found: Vec<(u32, &'static str, String)> = all
        .filter_map(|(gpu, state)| {
            let (reason, text) = unavailability(ledger, gpu, state)?;
            let index = ledger.part(gpu.as_part()).map_or(u32::MAX, |p| p.part.gpu_index);
            Some((index, reason, format!("{} {text}", GpuName::IndexAndUuid.of(ledger, gpu))))
        })
        .collect();
    found.extend(ledger.unidentified.iter().map(|gpu| {
        let text = format!("{gpu} is not identified: {}", gpu.reason);
        (gpu.index.unwrap_or(u32::MAX), "GPUUnidentified", text)
    }));
    if let Some(blocked_ends) = ledger.blocked_ends.as_deref() {
        // Without the number of allocations, which changes with each grant: each change is a write to the node.
        let text = format!(
            "GPUs of finished pods stay allocated since {}: {}",
            rfc3339_seconds(blocked_ends.since_wall_ms),
            blocked_ends.cause
        );
        found.push((u32::MAX, "AllocationsStuck", text));
    }
    found.sort();
    let Some((_, first, _)) = found.first() else {
        let message = match ledger.gpus.len() {
            0 => "no GPUs found".to_owned(),
            1 => "the GPU is available".to_owned(),
            gpus => format!("all {gpus} GPUs are available"),
        };
        return Availability { is_available: true, reason: "GPUsAvailable", message };
    };
    let same_reason = found.iter().all(|(_, reason, _)| reason == first);
    let reason = if same_reason { *first } else { "GPUsUnavailable" };
    Availability {
        is_available: false,
        reason,
        message: join(found.iter().map(|(_, _, text)| text.as_str())),
    }
}

/// The reason and text of an unavailable GPU; `None` for an available one.
fn unavailability(ledger: &Ledger, gpu: &GpuId, state: &GpuState) -> Option<(&'static str, String)> {
    let health = &state.health;
    let reason = if health.reason.is_empty() { String::new() } else { format!(": {}", health.reason) };
    let present = ledger.parts.values().any(|p| p.present && &p.part.gpu == gpu);
    let unhealthy = match health.state {
        HealthState::Vanished => {
            Some(("GPUVanished", format!("is gone since {}{reason}", rfc3339_seconds(health.since_wall_ms))))
        }
        _ if !present => Some(("GPUVanished", "was not found since the daemon started".to_owned())),
        HealthState::Unhealthy => Some((
            "GPUUnhealthy",
            format!("is unhealthy since {}{reason}", rfc3339_seconds(health.since_wall_ms)),
        )),
        HealthState::Healthy | HealthState::Degraded => None,
    };
    let drain = state.drain();
    let drained = drain.mark().map(|mark| {
        let (reason, phrase) = match &drain {
            Drain::Draining(..) => ("GPUDraining", "being drained"),
            Drain::Drained(_) => ("GPUDrained", "drained"),
            Drain::Active | Drain::Cordoned(_) => ("GPUCordoned", "cordoned"),
        };
        (
            reason,
            format!("is {phrase} since {} {}", rfc3339_seconds(mark.since_wall_ms), mark.by_and_reason()),
        )
    });
    match (unhealthy, drained) {
        (Some((reason, unhealthy)), Some((_, drained))) => {
            Some((reason, format!("{unhealthy}, and {drained}")))
        }
        (unhealthy, drained) => unhealthy.or(drained),
    }
}

/// Joins as many texts as fit, and adds how many do not.
fn join<'t>(texts: impl ExactSizeIterator<Item = &'t str>) -> String {
    let mut message = String::new();
    let count = texts.len();
    for (joined, text) in texts.enumerate() {
        let separator = if joined == 0 { "" } else { "; " };
        let rest = format!("; and {} more", count - joined);
        if message.len() + separator.len() + text.len() + rest.len() > MESSAGE_BYTES_MAX {
            if joined == 0 {
                // One GPU with a reason of up to 1 KiB.
                return text[..text.floor_char_boundary(MESSAGE_BYTES_MAX)].to_owned();
            }
            return message + &rest;
        }
        message += separator;
        message += text;
    }
    message
}

/// Keeps the condition up to date; never returns.
pub(super) async fn keep(settings: &Settings, client: Client, kernel: &KernelHandle) {
    let mut snapshots = kernel.watch();
    let mut node_condition = NodeConditionWriter {
        nodes: Api::all(client),
        settings,
        status_since: None,
        is_read: false,
        written: None,
        not_before: Instant::now(),
        backoff: Backoff::new(settings.connection.retry_interval),
        logged: false,
    };
    loop {
        let wanted = availability(&snapshots.borrow_and_update());
        let next = node_condition.step(wanted, kernel.now().wall_ms).await;
        tokio::select! {
            changed = snapshots.changed() => {
                if changed.is_err() {
                    return std::future::pending().await;
                }
                sleep(settings.batch_window).await;
            }
            () = sleep_until(next) => {}
        }
    }
}

/// Writes the condition to the node object.
struct NodeConditionWriter<'s> {
    nodes: Api<Node>,
    settings: &'s Settings,
    /// The status that the condition should have, and since when, milliseconds since 1970.
    status_since: Option<(bool, u64)>,
    /// Whether the condition of the node object was read: a restart of the daemon is not a transition.
    is_read: bool,
    /// The condition as last written, and when an unchanged one is written again.
    written: Option<(Availability, Instant)>,
    /// The earliest time of the next write, set after a failure and after a write.
    not_before: Instant,
    backoff: Backoff,
    /// Whether the present failure was logged.
    logged: bool,
}

impl NodeConditionWriter<'_> {
    /// Writes the condition if it is due. Returns when the next step is due if nothing changes.
    async fn step(&mut self, wanted: Availability, now_wall_ms: u64) -> Instant {
        // Since when the condition should have this status, as far as this process observed it.
        if self.status_since.is_none_or(|(status, _)| status != wanted.is_available) {
            self.status_since = Some((wanted.is_available, now_wall_ms));
        }
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
        match self.write(&wanted, now_wall_ms).await {
            Ok(()) => {
                let due = now + jittered(REFRESH_MEAN, random());
                self.written = Some((wanted, due));
                self.logged = false;
                self.backoff.reset();
                self.not_before = now + self.settings.connection.retry_interval;
                due
            }
            Err(error) => {
                let (why, forbidden) = (&error.why, error.code() == 403);
                if !std::mem::replace(&mut self.logged, true) {
                    tracing::warn!(why, "cannot update the node's condition {CONDITION}");
                }
                self.written = None;
                // A missing right is not granted within seconds.
                let wait = match forbidden {
                    true => jittered(REFRESH_MEAN, random()),
                    false => self.backoff.next(random()),
                };
                let now = Instant::now();
                self.not_before = now + self.settings.connection.retry_after.delay(wait, now);
                self.not_before
            }
        }
    }

    /// Writes the condition. Before the first write it reads the `lastTransitionTime` of the node object, so that a
    /// restart does not change it; if that cannot be read, nothing is written.
    async fn write(&mut self, wanted: &Availability, now_wall_ms: u64) -> Result<(), RequestError> {
        let status = if wanted.is_available { "False" } else { "True" };
        let node = &self.settings.node;
        if !self.is_read {
            let read = request(self.nodes.get(node), "get nodes (ClusterRole berth)").await?;
            let known = read.status.and_then(|status| status.conditions).into_iter().flatten();
            let mut known = known.filter(|known| known.type_ == CONDITION && known.status == status);
            let since = known.next().and_then(|known| known.last_transition_time);
            let since = since.and_then(|since| u64::try_from(since.0.as_millisecond()).ok());
            self.status_since = since.map(|since| (wanted.is_available, since)).or(self.status_since);
            self.is_read = true;
        }
        let since_wall_ms = self.status_since.map_or(now_wall_ms, |(_, since)| since);
        // Changes our condition and no other: conditions are merged by type.
        let patch = json!({"status": {"conditions": [{
            "type": CONDITION,
            "status": status,
            "reason": wanted.reason,
            "message": wanted.message,
            "lastTransitionTime": rfc3339_seconds(since_wall_ms),
            "lastHeartbeatTime": rfc3339_seconds(now_wall_ms),
        }]}});
        let (params, patch) = (PatchParams::default(), Patch::Strategic(&patch));
        let patched = self.nodes.patch_status(node, &params, &patch);
        request(patched, "patch nodes/status (ClusterRole berth-events)").await.map(drop)
    }
}

#[cfg(test)]
mod tests;
