//! `/gpus/{uuid}/drain` and `/gpus/{uuid}/health`: draining a GPU, and marking one healthy.

use crate::failure::IntoFailure;
use crate::resources::gpu_view::View;
use crate::resources::gpus::{OwnerQuery, answer, check_reason, drain_tag, gpu_id, order, turned};
use crate::state::State;
use actix_web::http::header::ETAG;
use actix_web::{HttpRequest, HttpResponse, web};
use berth_api::Kind;
use berth_api::{AtDeadline, Drain, DrainOrder, Gpu, HealthState, MarkHealthy};
use berth_http::Failure;
use berth_http::body;
use berth_http::caller::Caller;
use berth_kernel::drain;
use berth_kernel::refusal::Refusal;

/// Longest deadline of a drain, seconds: a week.
pub(crate) const DEADLINE_S_MAX: u32 = 7 * 24 * 3600;

/// Drain a GPU
///
/// Cordons the GPU and waits until no allocation is left on it and, if processes are visible, none was seen on it for
/// ten seconds; then its state is `drained`. With `evict` its pods are evicted through the API server, and its held
/// devices are listed Unhealthy meanwhile; without it pods end by themselves or by `kubectl`. A new order replaces
/// the previous one; a GPU that is drained already stays so.
#[utoipa::path(put, path = "/api/v1/gpus/{uuid}/drain", tag = "gpus", operation_id = "drainGpu",
    params(
        ("uuid" = String, Path, description = "UUID of the GPU; an index is answered with 404 and a hint with its UUID", example = "GPU-8a56a4bc-e184-a047-2620-be19fdf913d5"),
        ("If-Match" = Option<String>, Header, description = "Only if its drain state still has this ETag, from GET /api/v1/gpus/{uuid}/drain", example = "\"active\""),
    ),
    request_body(content = DrainOrder, description = "The settings; optional"),
    responses(
        (status = 200, description = "The GPU, draining or drained", body = Gpu, headers(("ETag" = String, description = "The ETag of the new drain state, for If-Match"))),
        (status = 400, description = "A malformed UUID, body or If-Match"),
        (status = 404, description = "No such GPU"),
        (status = 408, description = "The body was not received in time"),
        (status = 409, description = "Evictions need an API server, and none is configured"),
        (status = 412, description = "Another client changed the drain state first"),
        (status = 413, description = "The body is too large"),
        (status = 415, description = "The body is not application/json"),
        (status = 422, description = "An unknown key, or a value that is not allowed"),
    ))]
pub(crate) async fn start(
    caller: Caller,
    state: web::Data<State>,
    path: web::Path<String>,
    request: HttpRequest,
    payload: web::Payload,
) -> Result<HttpResponse, Failure> {
    let gpu = gpu_id(&state, &path)?;
    let DrainOrder { reason, evict, deadline_seconds, at_deadline } =
        body::json_or_default(&request, payload).await?;
    check_reason(&caller, &reason)?;
    if deadline_seconds.is_some_and(|s| s == 0 || s > DEADLINE_S_MAX) {
        let rule = format!("deadlineSeconds: from 1 to {DEADLINE_S_MAX}");
        return Err(Failure::new(Kind::Invalid, rule));
    }
    if at_deadline != AtDeadline::Wait && deadline_seconds.is_none() {
        return Err(Failure::new(Kind::Invalid, "atDeadline: there is no deadlineSeconds"));
    }
    if at_deadline == AtDeadline::Delete && !evict {
        return Err(Failure::new(Kind::Invalid, "atDeadline: delete is allowed only with evict: true"));
    }
    if evict && (state.facts)().api_server.is_none() {
        return Err(Failure::new(
            Kind::NoApiServer,
            "pods are evicted through the API server, and none is configured",
        )
        .hint(
            "start the daemon with --kubeconfig FILE, or in a pod with a service account (and not with \
                   --api-server off); or drain without evict and end the pods yourself",
        ));
    }
    let _order = order(&state, &request, &gpu).await?;
    let now = state.kernel.now().wall_ms;
    let order = drain::Order {
        evict,
        deadline_wall_ms: deadline_seconds.map(|s| now.saturating_add(u64::from(s) * 1000)),
        at_deadline: at_deadline.into(),
    };
    let applied = state
        .kernel
        .drain(gpu.clone(), caller.name(), reason.clone(), order)
        .await
        .map_err(IntoFailure::into_failure)?;
    if !applied.entry.changes.is_empty() {
        tracing::info!(%gpu, by = caller.name(), reason, evict, "a GPU is being drained");
    }
    turned(&state, &gpu)
}

/// Get the progress of a drain
///
/// Returns the remaining holders and what blocks each, the number of remaining processes, and the remaining time. The
/// ETag depends on what operators set and does not change while holders leave, so that it can be sent as If-Match
/// with the next order.
#[utoipa::path(get, path = "/api/v1/gpus/{uuid}/drain", tag = "gpus", operation_id = "getDrainOfGpu",
    params(("uuid" = String, Path, description = "UUID of the GPU; an index is answered with 404 and a hint with its UUID", example = "GPU-8a56a4bc-e184-a047-2620-be19fdf913d5")),
    responses(
        (status = 200, description = "Its drain state, with the progress of a drain", body = Drain, headers(("ETag" = String, description = "The ETag of the drain state, for If-Match"))),
        (status = 400, description = "No UUID"),
        (status = 404, description = "No such GPU"),
    ))]
pub(crate) async fn show(state: web::Data<State>, path: web::Path<String>) -> Result<HttpResponse, Failure> {
    let gpu = gpu_id(&state, &path)?;
    let tag = drain_tag(&state, &gpu)?;
    let shown =
        View::of(&state).drain(&gpu).ok_or(Refusal::UnknownGpu { gpu }).map_err(IntoFailure::into_failure)?;
    Ok(HttpResponse::Ok().insert_header((ETAG, tag)).json(shown))
}

/// Stop a drain
///
/// Turns the caller's drain into a cordon; uncordon the GPU to have it granted again. With `owner`, does so to that
/// owner's drain instead. Idempotent.
#[utoipa::path(delete, path = "/api/v1/gpus/{uuid}/drain", tag = "gpus", operation_id = "stopDrainOfGpu",
    params(
        ("uuid" = String, Path, description = "UUID of the GPU; an index is answered with 404 and a hint with its UUID", example = "GPU-8a56a4bc-e184-a047-2620-be19fdf913d5"),
        OwnerQuery,
        ("If-Match" = Option<String>, Header, description = "Only if its drain state still has this ETag, from GET /api/v1/gpus/{uuid}/drain", example = "\"active\""),
    ),
    responses(
        (status = 200, description = "The GPU, cordoned or active, or draining by another owner", body = Gpu, headers(("ETag" = String, description = "The ETag of the new drain state, for If-Match"))),
        (status = 400, description = "A malformed UUID, query or If-Match"),
        (status = 404, description = "No such GPU"),
        (status = 412, description = "Another client changed the drain state first"),
    ))]
pub(crate) async fn stop(
    caller: Caller,
    state: web::Data<State>,
    path: web::Path<String>,
    query: web::Query<OwnerQuery>,
    request: HttpRequest,
) -> Result<HttpResponse, Failure> {
    let gpu = gpu_id(&state, &path)?;
    let owners = query.owners(&caller)?;
    let _order = order(&state, &request, &gpu).await?;
    let applied = state.kernel.stop_drain(gpu.clone(), owners).await.map_err(IntoFailure::into_failure)?;
    if !applied.entry.changes.is_empty() {
        tracing::info!(%gpu, by = caller.name(), "a drain was cancelled");
    }
    turned(&state, &gpu)
}

/// Mark a GPU healthy
///
/// For a GPU that is unhealthy or degraded until an operator marks it healthy, or before its quiet time is over. It
/// stays healthy until the next bad reading. A healthy GPU is not changed; one that does not respond cannot be
/// marked.
#[utoipa::path(put, path = "/api/v1/gpus/{uuid}/health", tag = "gpus", operation_id = "markGpuHealthy",
    params(("uuid" = String, Path, description = "UUID of the GPU; an index is answered with 404 and a hint with its UUID", example = "GPU-8a56a4bc-e184-a047-2620-be19fdf913d5")),
    request_body(content = MarkHealthy, description = "Why"),
    responses(
        (status = 200, description = "The GPU, healthy", body = Gpu),
        (status = 400, description = "No UUID, or no JSON"),
        (status = 404, description = "No such GPU"),
        (status = 408, description = "The body was not received in time"),
        (status = 409, description = "The GPU is not present, or does not answer"),
        (status = 413, description = "The body is too large"),
        (status = 415, description = "The body is not application/json"),
        (status = 422, description = "An unknown key, or a value that is not allowed"),
    ))]
pub(crate) async fn mark_healthy(
    caller: Caller,
    state: web::Data<State>,
    path: web::Path<String>,
    request: HttpRequest,
    payload: web::Payload,
) -> Result<HttpResponse, Failure> {
    let gpu = gpu_id(&state, &path)?;
    let MarkHealthy { state: wanted, reason } = body::json(&request, payload).await?;
    if wanted != HealthState::Healthy {
        return Err(Failure::new(
            Kind::Invalid,
            "state: only \"healthy\" can be set; cordon a GPU to take it out of use",
        ));
    }
    check_reason(&caller, &reason)?;
    let applied = state
        .kernel
        .mark_healthy(gpu.clone(), caller.name(), reason.clone())
        .await
        .map_err(IntoFailure::into_failure)?;
    if !applied.entry.changes.is_empty() {
        tracing::info!(%gpu, by = caller.name(), reason, "a GPU was marked healthy");
    }
    answer(&state, &gpu)
}
