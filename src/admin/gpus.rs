//! `/gpus`: what they are, how they fare, who holds them; cordon, uncordon, forget.

use super::auth::OPERATOR;
use super::body;
use super::dto::{Cordon, Gpu, GpuList};
use super::problem::{Kind, Problem};
use super::state::State;
use super::view::View;
use crate::kernel::names::PartId;
use crate::kernel::refusal::Refusal;
use actix_web::{HttpRequest, HttpResponse, web};

/// Longest reason of a cordon, bytes: it is shown in every list, and kept in a record of 16 KiB.
pub(super) const CORDON_REASON_BYTES_MAX: usize = 1024;

/// All GPUs at a glance
#[utoipa::path(get, path = "/api/v1/gpus", tag = "gpus", operation_id = "listGpus",
    responses((status = 200, description = "The GPUs, in the order of their index", body = GpuList)))]
pub(super) async fn list(state: web::Data<State>) -> HttpResponse {
    HttpResponse::Ok().json(GpuList { items: View::of(&state).summaries() })
}

/// One GPU with its parts, devices and links
#[utoipa::path(get, path = "/api/v1/gpus/{uuid}", tag = "gpus", operation_id = "getGpu",
    params(("uuid" = String, Path, description = "UUID of the GPU", example = "GPU-8a56a4bc-e184-a047-2620-be19fdf913d5")),
    responses(
        (status = 200, description = "The GPU", body = Gpu),
        (status = 400, description = "No UUID"),
        (status = 404, description = "No such GPU"),
    ))]
pub(super) async fn show(state: web::Data<State>, path: web::Path<String>) -> Result<HttpResponse, Problem> {
    answer(&state, &gpu_id(&path)?)
}

/// Let a vanished GPU go
///
/// Its ids leave the kubelet's list with it. Refused while the GPU is there, while an allocation
/// names it, and within a minute of its vanishing.
#[utoipa::path(delete, path = "/api/v1/gpus/{uuid}", tag = "gpus", operation_id = "forgetGpu",
    params(("uuid" = String, Path, description = "UUID of the GPU", example = "GPU-8a56a4bc-e184-a047-2620-be19fdf913d5")),
    responses(
        (status = 204, description = "Let go"),
        (status = 400, description = "No UUID"),
        (status = 404, description = "No such GPU"),
        (status = 409, description = "It is there, held, or vanished just now"),
    ))]
pub(super) async fn forget(
    state: web::Data<State>,
    path: web::Path<String>,
) -> Result<HttpResponse, Problem> {
    let gpu = gpu_id(&path)?;
    state.door.forget(gpu.clone()).await?;
    tracing::info!(%gpu, by = OPERATOR, "a GPU was let go");
    Ok(HttpResponse::NoContent().finish())
}

/// Grant nothing new on a GPU
///
/// Withdraws its free devices at once; what is held stays. Doing it twice changes nothing but
/// the reason, where another one is given.
#[utoipa::path(put, path = "/api/v1/gpus/{uuid}/cordon", tag = "gpus", operation_id = "cordonGpu",
    params(("uuid" = String, Path, description = "UUID of the GPU", example = "GPU-8a56a4bc-e184-a047-2620-be19fdf913d5")),
    request_body(content = Cordon, description = "Why; may be left out"),
    responses(
        (status = 200, description = "The GPU, cordoned", body = Gpu),
        (status = 400, description = "No UUID, or no JSON"),
        (status = 404, description = "No such GPU"),
        (status = 408, description = "The body came too slowly"),
        (status = 413, description = "The body is too large"),
        (status = 415, description = "The body is not application/json"),
        (status = 422, description = "An unknown key, or a reason that cannot be taken"),
    ))]
pub(super) async fn cordon(
    state: web::Data<State>,
    path: web::Path<String>,
    request: HttpRequest,
    payload: web::Payload,
) -> Result<HttpResponse, Problem> {
    let gpu = gpu_id(&path)?;
    let Cordon { reason } = body::json_or_default(&request, payload).await?;
    check_reason(&reason)?;
    let applied = state.door.cordon(gpu.clone(), OPERATOR.into(), reason.clone()).await?;
    if !applied.entry.changes.is_empty() {
        tracing::info!(%gpu, by = OPERATOR, reason, "a GPU was cordoned");
    }
    answer(&state, &gpu)
}

/// Let a GPU be granted again
///
/// Undoes a cordon or a drain at any point. Doing it twice changes nothing.
#[utoipa::path(delete, path = "/api/v1/gpus/{uuid}/cordon", tag = "gpus", operation_id = "uncordonGpu",
    params(("uuid" = String, Path, description = "UUID of the GPU", example = "GPU-8a56a4bc-e184-a047-2620-be19fdf913d5")),
    responses(
        (status = 200, description = "The GPU, active", body = Gpu),
        (status = 400, description = "No UUID"),
        (status = 404, description = "No such GPU"),
    ))]
pub(super) async fn uncordon(
    state: web::Data<State>,
    path: web::Path<String>,
) -> Result<HttpResponse, Problem> {
    let gpu = gpu_id(&path)?;
    let applied = state.door.uncordon(gpu.clone()).await?;
    if !applied.entry.changes.is_empty() {
        tracing::info!(%gpu, by = OPERATOR, "a GPU was uncordoned");
    }
    answer(&state, &gpu)
}

pub(super) fn check_reason(reason: &str) -> Result<(), Problem> {
    if reason.len() > CORDON_REASON_BYTES_MAX || reason.chars().any(char::is_control) {
        let rule = format!("reason: at most {CORDON_REASON_BYTES_MAX} bytes, no control characters");
        return Err(Problem::new(Kind::Invalid, rule));
    }
    Ok(())
}

pub(super) fn gpu_id(text: &str) -> Result<PartId, Problem> {
    PartId::parse(text).map_err(|error| Problem::new(Kind::Path, error))
}

pub(super) fn answer(state: &State, gpu: &PartId) -> Result<HttpResponse, Problem> {
    let shown = View::of(state).gpu(gpu);
    let shown = shown.ok_or_else(|| Refusal::UnknownGpu { gpu: gpu.clone() })?;
    Ok(HttpResponse::Ok().json(shown))
}
