//! `/gpus/{uuid}/history` and `/events/history`: the last 24 hours, from memory.

use crate::past_events::PAST_EVENTS_MAX;
use crate::resources::gpus::{gpu_id, gpu_state};
use crate::state::State;
use actix_web::HttpRequest;
use actix_web::web::{Data, Path, Query};
use berth_api::{EventHistory, GpuHistory, GpuSample, Kind, PodHistory, PodSample, rfc3339};
use berth_http::{Failure, HandlerResult, etag, excerpt, query};
use berth_observe::gpu_history::{GpuPoint, LAST_MAX, POINTS_MAX, PodPoint};
use serde::Deserialize;
use std::time::Duration;
use utoipa::IntoParams;

/// `last` of a GPU's history if it is not given.
const GPU_LAST_DEFAULT: Duration = Duration::from_secs(3600);
/// `points` if it is not given.
const POINTS_DEFAULT: u64 = 240;
/// The shortest `last`.
const LAST_MIN: Duration = Duration::from_secs(60);

/// The part of a GPU's past, and its resolution.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct GpuQuery {
    /// How far back: `1m` to `24h`; `1h` if not given.
    #[param(example = "1h")]
    last: Option<String>,
    /// Most points, 1 to 720; 240 if not given. Steps are at least 15 seconds long, and beyond an hour two minutes.
    #[param(example = 240, minimum = 1, maximum = 720)]
    points: Option<u64>,
}

/// The part of the past of events.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct EventQuery {
    /// How far back: `1m` to `24h`; `24h` if not given.
    #[param(example = "24h")]
    last: Option<String>,
    /// Most events, 1 to 500; 500 if not given.
    #[param(example = 500, minimum = 1, maximum = 500)]
    limit: Option<usize>,
}

/// Get the history of a GPU
///
/// Returns memory in use and granted, utilisation, temperature and power of the GPU, and memory and utilisation by pod, each
/// as averages of equal steps, oldest first. They are samples of the inventory scans, kept in memory for 24 hours: a restart
/// of the daemon drops them. A value that NVML does not report is absent. At most 256 pairs of a GPU and a pod are kept;
/// pods that were seen longest ago leave first.
#[utoipa::path(get, path = "", responses((status = 200, description = "The history", body = GpuHistory)))]
pub(crate) async fn of_gpu(
    state: Data<State>,
    request: HttpRequest,
    path: Path<String>,
    query: Query<GpuQuery>,
) -> HandlerResult {
    let gpu = gpu_id(&state, &path)?;
    gpu_state(&state.kernel.snapshot(), &gpu)?;
    let last = last(query.last.as_deref(), GPU_LAST_DEFAULT)?;
    let points = query.points.unwrap_or(POINTS_DEFAULT);
    if !(1..=POINTS_MAX).contains(&points) {
        return Err(Failure::new(Kind::Query, format!("points: 1 to {POINTS_MAX}, not {points}")));
    }
    let past = state.kernel.gpu_history().past(&gpu, last, points, state.kernel.now());
    let pods = past.pods.into_iter().map(|(name, points)| PodHistory {
        namespace: name.namespace,
        pod: name.pod,
        items: points.iter().map(pod_sample).collect(),
    });
    let history = GpuHistory {
        step_seconds: past.step_s,
        items: past.gpu.iter().map(gpu_sample).collect(),
        pods: pods.collect(),
    };
    etag::fresh(&request, &history)
}

/// List past events
///
/// Returns the events of the last 24 hours that concern operators, newest first: health, cordons and drains, evictions,
/// refused requests, activations and policies, bypasses, and what the daemon lacks. Grants and ends of allocations are left
/// out. At most 500 are kept, in memory: a restart of the daemon drops them. If there are more, the oldest events of the
/// most frequent kind leave first.
#[utoipa::path(get, path = "",
    responses((status = 200, description = "The events, newest first", body = EventHistory)))]
pub(crate) async fn of_events(
    state: Data<State>,
    request: HttpRequest,
    query: Query<EventQuery>,
) -> HandlerResult {
    let last = last(query.last.as_deref(), LAST_MAX)?;
    let limit = query::limit(query.limit, PAST_EVENTS_MAX, PAST_EVENTS_MAX)?;
    let last_ms = u64::try_from(last.as_millis()).unwrap_or(u64::MAX);
    let items = state.feed.past.newest(last_ms, limit, state.kernel.now());
    etag::fresh(&request, &EventHistory { items })
}

/// The key `last` of a query.
fn last(given: Option<&str>, default: Duration) -> Result<Duration, Failure> {
    let Some(text) = given else { return Ok(default) };
    let parsed = humantime::parse_duration(text).ok();
    parsed.filter(|last| (LAST_MIN..=LAST_MAX).contains(last)).ok_or_else(|| {
        let rule = format!("last: a duration of 1m to 24h, such as 15m, not {:?}", excerpt(text));
        Failure::new(Kind::Query, rule)
    })
}

fn gpu_sample(point: &GpuPoint) -> GpuSample {
    GpuSample {
        at: rfc3339(point.at_wall_ms),
        memory_used_mib: point.memory_used_mib,
        memory_granted_mib: point.memory_granted_mib,
        utilization_percent: point.utilization_percent.and_then(to_u32),
        temperature_celsius: point.temperature_celsius.and_then(to_u32),
        power_watts: point.power_watts.and_then(to_u32),
    }
}

fn pod_sample(point: &PodPoint) -> PodSample {
    PodSample {
        at: rfc3339(point.at_wall_ms),
        memory_used_mib: point.memory_used_mib,
        utilization_percent: point.utilization_percent.and_then(to_u32),
    }
}

fn to_u32(value: u64) -> Option<u32> {
    u32::try_from(value).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_outside_of_a_day_are_refused() {
        let hours = |h: u64| Duration::from_secs(h * 3600);
        assert_eq!(last(None, GPU_LAST_DEFAULT).unwrap(), hours(1));
        for (text, expected) in
            [("1h", hours(1)), ("24h", hours(24)), ("1day", hours(24)), ("90m", hours(1) * 3 / 2)]
        {
            assert_eq!(last(Some(text), GPU_LAST_DEFAULT).unwrap(), expected, "{text}");
        }
        for bad in ["", "0", "1", "-1h", "59s", "25h", "1h\n2", "99999999999999999999h", "2026-01-01"] {
            let failure = last(Some(bad), GPU_LAST_DEFAULT).unwrap_err();
            assert_eq!(failure.problem.status, 400, "{bad}");
        }
    }
}
