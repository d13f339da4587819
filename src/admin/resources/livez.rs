//! Liveness: whether everything that has to make progress does.
//!
//! The kubelet restarts a daemon that is not alive. So each check is of something that should have ended and did not,
//! and not of something that fails: a full disk, an NVML that returns errors (it is opened again at each scan) or an
//! absent kubelet is reported by `/readyz`, and a restart would only withdraw the node's resources from its
//! containers.

use crate::state::State;
use actix_web::{HttpRequest, HttpResponse, web};
use berth_api::Kind;
use berth_api::{Alive, Check};
use berth_core::admission::KernelHandle;
use berth_core::counters::RegistrationState;
use berth_http::Failure;
use berth_http::probe_details;
use berth_http::query::Probe;
use std::time::Duration;

/// Check liveness
///
/// The daemon is alive if the ledger's writer makes progress, policy calls return, GPU scans start and end, the
/// runtime that serves the kubelet runs, and the kubelet has a stream of every registered resource. Failures that
/// are retried belong to `/readyz`. Over TLS from another machine the details need the right to read.
#[utoipa::path(get, path = "/livez", tag = "health", operation_id = "livez", security(()), params(Probe),
    responses(
        (status = 200, description = "The daemon is live", body = Alive),
        (status = 400, description = "A malformed query, or an unknown key in it"),
        (status = 503, description = "A part of the daemon makes no progress; the body has the reason: restart it"),
    ))]
pub(crate) async fn livez(
    state: web::Data<State>,
    request: HttpRequest,
    _probe: web::Query<Probe>,
) -> Result<HttpResponse, Failure> {
    let checks = probe_details::visible_checks(&request, checks(&state.kernel));
    if checks.iter().all(|check| check.ok) {
        return Ok(HttpResponse::Ok().json(Alive { alive: true, checks }));
    }
    Err(Failure::new(Kind::NotAlive, probe_details::describe_failed(&checks)).checks(checks))
}

/// The checks of liveness.
pub(crate) fn checks(kernel: &KernelHandle) -> Vec<Check> {
    let figures = kernel.counters();
    let limits = figures.limits();
    let check = |name: &str, trouble: Option<String>, note: Option<String>| Check {
        name: name.into(),
        ok: trouble.is_none(),
        detail: trouble.or(note),
    };
    // The keeper owns the sender, so an error means that its thread has ended.
    let ended = kernel.watch().has_changed().is_err();
    let ended = ended.then(|| "the thread that owns the ledger has ended".to_owned());
    let silent = figures.keeper.heartbeat.silent_for().filter(|silent| *silent > limits.keeper);
    let silent = silent.map(|silent| {
        format!("the thread that owns the ledger has processed nothing for {}", seconds(silent))
    });
    let stuck = figures.policies.busy_for().filter(|busy| *busy > limits.policies);
    let stuck =
        stuck.map(|busy| format!("the policy thread has been busy with one call for {}", seconds(busy)));
    let hangs = figures.gpus.heartbeat.busy_for().filter(|busy| *busy > limits.scan);
    let hangs = hangs
        .map(|busy| format!("a scan of the GPUs has not ended for {}: NVML does not answer", seconds(busy)));
    let unbegun = figures.gpus.scan_interval().and_then(|every| {
        let silent = figures.gpus.heartbeat.silent_for().filter(|silent| *silent > every + limits.scan)?;
        Some(format!(
            "no scan of the GPUs has begun for {}: the thread of the scans has ended",
            seconds(silent)
        ))
    });
    let quiet = figures.front.silent_for().filter(|silent| *silent > limits.front);
    let quiet = quiet.map(|silent| {
        format!("the runtime that serves the kubelet has had no heartbeat for {}", seconds(silent))
    });
    let fails = figures.gpus.last_error().map(|why| format!("the last scan of the GPUs failed: {why}"));
    vec![
        check("keeper", ended.or(silent), None),
        check("policies", stuck, None),
        check("looks", hangs.or(unbegun), fails),
        check("kubelet", quiet, None),
        check("streams", unwatched(kernel, limits.stream), None),
    ]
}

/// Registered resources that the kubelet does not watch.
fn unwatched(kernel: &KernelHandle, limit: Duration) -> Option<String> {
    let standings = kernel.counters().kubelet.registrations();
    let unwatched: Vec<&str> = standings
        .iter()
        .filter(|(_, standing)| standing.at == Some(RegistrationState::Registered) && standing.streams == 0)
        .filter(|(_, standing)| standing.since.elapsed() > limit)
        .map(|(resource, _)| resource.as_str())
        .collect();
    let words = || format!("registered, but without a stream of the kubelet: {}", unwatched.join(", "));
    (!unwatched.is_empty()).then(words)
}

fn seconds(time: Duration) -> String {
    format!("{:.0} s", time.as_secs_f64())
}
