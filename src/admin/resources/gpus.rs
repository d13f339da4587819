//! `/gpus`: the GPUs, their health and their holders; cordon, uncordon, forget.

use crate::failure::IntoFailure;
use crate::resources::drain_tag;
use crate::resources::gpu_view::View;
use crate::state::State;
use actix_web::http::header::ETAG;
use actix_web::{HttpRequest, HttpResponse, web};
use berth_api::{Cordon, DrainState, Gpu, GpuList, HealthState};
use berth_api::{Kind, Operation};
use berth_http::Failure;
use berth_http::body;
use berth_http::caller::Caller;
use berth_http::etag;
use berth_kernel::drain::{Owner, Owners};
use berth_kernel::ledger::Ledger;
use berth_kernel::names::PartId;
use berth_kernel::refusal::Refusal;
use serde::Deserialize;
use utoipa::IntoParams;

/// Longest reason of a cordon, bytes: every list shows it, and a record has at most 16 KiB.
pub(crate) const CORDON_REASON_BYTES_MAX: usize = 1024;

/// Filters of GPUs. All given ones must match.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct Filter {
    /// Only those with this health.
    #[param(example = "healthy")]
    health: Option<HealthState>,
    /// Only those in this drain state.
    #[param(example = "active")]
    drain: Option<DrainState>,
}

impl Filter {
    fn check(&self) -> Result<(), Failure> {
        let (key, word, known) = match (&self.health, &self.drain) {
            (Some(HealthState::Other(word)), _) => ("health", word, HealthState::NAMES),
            (_, Some(DrainState::Other(word))) => ("drain", word, DrainState::NAMES),
            _ => return Ok(()),
        };
        let rule = format!("{key}: one of {}, not {word:?}", known.join(", "));
        Err(Failure::new(Kind::Query, rule))
    }
}

/// List GPUs
///
/// Lists each GPU with its health, its drain state, and its devices and held devices by resource, all in one
/// response.
#[utoipa::path(get, path = "/api/v1/gpus", tag = "gpus", operation_id = "listGpus", params(Filter),
    responses(
        (status = 200, description = "The GPUs, in the order of their index", body = GpuList),
        (status = 400, description = "A malformed query, or an unknown key in it"),
    ))]
pub(crate) async fn list(
    state: web::Data<State>,
    request: HttpRequest,
    filter: web::Query<Filter>,
) -> Result<HttpResponse, Failure> {
    filter.check()?;
    let mut items = View::of(&state).summaries();
    items.retain(|gpu| filter.health.as_ref().is_none_or(|health| *health == gpu.health.state));
    items.retain(|gpu| filter.drain.as_ref().is_none_or(|drain| *drain == gpu.drain.state));
    etag::fresh(&request, &GpuList { items })
}

/// Get a GPU
///
/// Returns its facts, its health with the history, its drain state with the progress, each device with its holder,
/// and its distance to the other GPUs.
#[utoipa::path(get, path = "/api/v1/gpus/{uuid}", tag = "gpus", operation_id = "getGpu",
    params(("uuid" = String, Path, description = "UUID of the GPU; an index is answered with 404 and a hint with its UUID", example = "GPU-8a56a4bc-e184-a047-2620-be19fdf913d5")),
    responses(
        (status = 200, description = "The GPU", body = Gpu),
        (status = 400, description = "No UUID"),
        (status = 404, description = "No such GPU"),
    ))]
pub(crate) async fn show(
    state: web::Data<State>,
    request: HttpRequest,
    path: web::Path<String>,
) -> Result<HttpResponse, Failure> {
    etag::fresh(&request, &shown(&state, &gpu_id(&state, &path)?)?)
}

/// Forget a vanished GPU
///
/// Removes it and its ids from the kubelet's list. Refused while the GPU is present, while an allocation names it,
/// and within a minute after it vanished.
#[utoipa::path(delete, path = "/api/v1/gpus/{uuid}", tag = "gpus", operation_id = "forgetGpu",
    params(("uuid" = String, Path, description = "UUID of the GPU; an index is answered with 404 and a hint with its UUID", example = "GPU-8a56a4bc-e184-a047-2620-be19fdf913d5")),
    responses(
        (status = 204, description = "The GPU was removed"),
        (status = 400, description = "No UUID"),
        (status = 404, description = "No such GPU"),
        (status = 409, description = "The GPU is present, is held, or vanished a moment ago"),
    ))]
pub(crate) async fn forget(
    caller: Caller,
    state: web::Data<State>,
    path: web::Path<String>,
) -> Result<HttpResponse, Failure> {
    let gpu = gpu_id(&state, &path)?;
    state.kernel.forget(gpu.clone()).await.map_err(IntoFailure::into_failure)?;
    tracing::info!(%gpu, by = caller.name(), "a vanished GPU was removed from the list");
    Ok(HttpResponse::NoContent().finish())
}

/// Cordon a GPU
///
/// Nothing new is granted on it, and its free devices are withdrawn at once; existing allocations stay. Idempotent,
/// except that another reason replaces the previous one.
#[utoipa::path(put, path = "/api/v1/gpus/{uuid}/cordon", tag = "gpus", operation_id = "cordonGpu",
    params(
        ("uuid" = String, Path, description = "UUID of the GPU; an index is answered with 404 and a hint with its UUID", example = "GPU-8a56a4bc-e184-a047-2620-be19fdf913d5"),
        ("If-Match" = Option<String>, Header, description = "Only if its drain state still has this ETag, from GET /api/v1/gpus/{uuid}/drain", example = "\"active\""),
    ),
    request_body(content = Cordon, description = "The reason; optional"),
    responses(
        (status = 200, description = "The GPU, cordoned", body = Gpu, headers(("ETag" = String, description = "The ETag of the new drain state, for If-Match"))),
        (status = 400, description = "A malformed UUID, body or If-Match"),
        (status = 404, description = "No such GPU"),
        (status = 408, description = "The body was not received in time"),
        (status = 412, description = "Another client changed the drain state first"),
        (status = 413, description = "The body is too large"),
        (status = 415, description = "The body is not application/json"),
        (status = 422, description = "An unknown key, or a reason that is not allowed"),
    ))]
pub(crate) async fn cordon(
    caller: Caller,
    state: web::Data<State>,
    path: web::Path<String>,
    request: HttpRequest,
    payload: web::Payload,
) -> Result<HttpResponse, Failure> {
    let gpu = gpu_id(&state, &path)?;
    let Cordon { reason } = body::json_or_default(&request, payload).await?;
    check_reason(&caller, &reason)?;
    let _order = order(&state, &request, &gpu).await?;
    let applied = state
        .kernel
        .cordon(gpu.clone(), caller.name(), reason.clone())
        .await
        .map_err(IntoFailure::into_failure)?;
    if !applied.entry.changes.is_empty() {
        tracing::info!(%gpu, by = caller.name(), reason, "a GPU was cordoned");
    }
    turned(&state, &gpu)
}

/// Uncordon a GPU
///
/// Removes the caller's cordon or drain, in any state. The GPU is granted again once no other owner's mark is left;
/// `drain.marks` of the answer names those. With `owner`, removes that owner's mark instead. Idempotent.
#[utoipa::path(delete, path = "/api/v1/gpus/{uuid}/cordon", tag = "gpus", operation_id = "uncordonGpu",
    params(
        ("uuid" = String, Path, description = "UUID of the GPU; an index is answered with 404 and a hint with its UUID", example = "GPU-8a56a4bc-e184-a047-2620-be19fdf913d5"),
        OwnerQuery,
        ("If-Match" = Option<String>, Header, description = "Only if its drain state still has this ETag, from GET /api/v1/gpus/{uuid}/drain", example = "\"active\""),
    ),
    responses(
        (status = 200, description = "The GPU, active unless another owner's mark is left", body = Gpu, headers(("ETag" = String, description = "The ETag of the new drain state, for If-Match"))),
        (status = 400, description = "A malformed UUID, query or If-Match"),
        (status = 404, description = "No such GPU"),
        (status = 412, description = "Another client changed the drain state first"),
    ))]
pub(crate) async fn uncordon(
    caller: Caller,
    state: web::Data<State>,
    path: web::Path<String>,
    query: web::Query<OwnerQuery>,
    request: HttpRequest,
) -> Result<HttpResponse, Failure> {
    let gpu = gpu_id(&state, &path)?;
    let owners = query.owners(&caller)?;
    let _order = order(&state, &request, &gpu).await?;
    let applied = state.kernel.uncordon(gpu.clone(), owners).await.map_err(IntoFailure::into_failure)?;
    if !applied.entry.changes.is_empty() {
        tracing::info!(%gpu, by = caller.name(), "marks of a GPU were removed");
    }
    turned(&state, &gpu)
}

/// Whose mark a request removes.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct OwnerQuery {
    /// The owner as `drain.marks` of the GPU names it, or `all` for every owner; without it the caller.
    #[param(example = "api:admin")]
    owner: Option<String>,
}

impl OwnerQuery {
    pub(crate) fn owners(&self, caller: &Caller) -> Result<Owners, Failure> {
        let owner = match self.owner.as_deref() {
            Some("all") => return Ok(Owners::All),
            Some(owner) => {
                Owner::parse(owner).map_err(|error| Failure::new(Kind::Query, format!("owner: {error}")))?
            }
            None => Owner::api(&caller.name()),
        };
        Ok(Owners::One(owner))
    }
}

/// Checks a reason, and notes it for the audit line.
pub(crate) fn check_reason(caller: &Caller, reason: &str) -> Result<(), Failure> {
    if reason.len() > CORDON_REASON_BYTES_MAX || reason.chars().any(char::is_control) {
        let rule = format!("reason: at most {CORDON_REASON_BYTES_MAX} bytes, no control characters");
        return Err(Failure::new(Kind::Invalid, rule));
    }
    caller.note_reason(reason);
    Ok(())
}

/// The GPU of a path. An index is not accepted, since it may be another GPU's after a boot; the error names the GPU
/// that has it now.
pub(crate) fn gpu_id(state: &State, text: &str) -> Result<PartId, Failure> {
    let gpu = PartId::parse(text).map_err(|error| Failure::new(Kind::Path, error))?;
    no_index(&state.kernel.snapshot(), &gpu, |words| Failure::new(Kind::UnknownGpu, words))?;
    Ok(gpu)
}

/// The GPU of the key `gpu` of a query; an index is not accepted either. An unknown GPU has no items, or only past
/// ones.
pub(crate) fn gpu_of_query(ledger: &Ledger, text: &str) -> Result<PartId, Failure> {
    let bad = |words: String| Failure::new(Kind::Query, format!("gpu: {words}"));
    let gpu = PartId::parse(text).map_err(|error| bad(error.to_string()))?;
    no_index(ledger, &gpu, bad)?;
    Ok(gpu)
}

fn no_index(ledger: &Ledger, gpu: &PartId, problem: impl Fn(String) -> Failure) -> Result<(), Failure> {
    let index: u32 = match gpu.as_str().parse() {
        Ok(index) if !ledger.gpus.contains_key(gpu) => index,
        _ => return Ok(()),
    };
    let has_it = ledger.parts.values().filter(|p| p.part.gpu_index == index);
    // A vanished GPU keeps its index until it is forgotten; the present one is meant.
    Err(match has_it.max_by_key(|p| p.present).map(|p| p.part.gpu()) {
        Some(uuid) => problem(format!("{index} is an index; this route needs the UUID of a GPU"))
            .hint(format!("index {index} is {uuid} now; after a reboot it may be another GPU")),
        None => problem(format!("no GPU has the UUID or the index {index} on this node"))
            .hint("list the GPUs with their UUIDs")
            .action(Operation::ListGpus),
    })
}

/// Checks the request's condition, and returns a guard under which the drain state does not change. All changes of
/// drain states hold the guard, so none comes between the check and the command.
pub(crate) async fn order<'s>(
    state: &'s State,
    request: &HttpRequest,
    gpu: &PartId,
) -> Result<tokio::sync::MutexGuard<'s, ()>, Failure> {
    let turn = state.orders.lock().await;
    etag::check(request, &drain_tag(state, gpu)?)?;
    Ok(turn)
}

pub(crate) fn drain_tag(state: &State, gpu: &PartId) -> Result<String, Failure> {
    let ledger = state.kernel.snapshot();
    let known = ledger
        .gpus
        .get(gpu)
        .ok_or_else(|| Refusal::UnknownGpu { gpu: gpu.clone() })
        .map_err(IntoFailure::into_failure)?;
    Ok(drain_tag::of(&known.marks))
}

fn shown(state: &State, gpu: &PartId) -> Result<Gpu, Failure> {
    let shown = View::of(state).gpu(gpu);
    shown.ok_or_else(|| Refusal::UnknownGpu { gpu: gpu.clone() }.into_failure())
}

/// The GPU after its drain state has changed.
pub(crate) fn turned(state: &State, gpu: &PartId) -> Result<HttpResponse, Failure> {
    let tag = drain_tag(state, gpu)?;
    Ok(HttpResponse::Ok().insert_header((ETAG, tag)).json(shown(state, gpu)?))
}

pub(crate) fn answer(state: &State, gpu: &PartId) -> Result<HttpResponse, Failure> {
    Ok(HttpResponse::Ok().json(shown(state, gpu)?))
}
