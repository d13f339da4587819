//! `/gpus/{uuid}/via`: the API of the kubelet through which a GPU is granted.

use crate::failure::OrFailure;
use crate::resources::gpus::{gpu_id, gpu_state, shown};
use crate::state::State;
use actix_web::http::header::ETAG;
use actix_web::web::{Data, Path, Payload};
use actix_web::{HttpRequest, HttpResponse};
use berth_api::{Gpu, Kind, Via, ViaOrder};
use berth_http::{Caller, Failure, HandlerResult, body, etag};
use berth_kernel::drain::marks::Author;
use berth_kernel::ids::names::GpuId;
use berth_kernel::node::command::Command;
use berth_kernel::node::revision::Revision;
use berth_kernel::sharing::publish::why_no_claims;
use berth_kernel::sharing::via::{self, KubeletApi};
use std::hash::{DefaultHasher, Hash, Hasher};

/// Get the API of the kubelet through which a GPU is granted
///
/// Each GPU, with its MIG instances, is granted either through the device plugin API or through DRA. The ETag depends on
/// the orders and on the move, and can be sent as If-Match with the next order.
#[utoipa::path(get, path = "",
    responses((status = 200, description = "Its API, and what it waits for", body = Via, headers(("ETag" = String, description = "The ETag of its API, for If-Match")))))]
pub(crate) async fn show(state: Data<State>, path: Path<String>) -> HandlerResult {
    let gpu = gpu_id(&state, &path)?;
    let ledger = state.kernel.snapshot();
    let found = gpu_state(&ledger, &gpu)?;
    let via = Via::of(&ledger, &gpu, found, state.kernel.now());
    Ok(HttpResponse::Ok().insert_header((ETAG, tag(&found.via))).json(via))
}

/// Move a GPU to another API of the kubelet
///
/// What the GPU holds stays. Nothing new is allocated through its former API, and once nothing holds the GPU through that,
/// it is moved: at least 30 s after the order, so that the scheduler has seen it. Until then, an order for the former API
/// cancels the move. Idempotent.
#[utoipa::path(put, path = "",
    request_body(content = ViaOrder, description = "The API"),
    responses(
        (status = 200, description = "The GPU, which is to be moved, or is granted through the API already", body = Gpu, headers(("ETag" = String, description = "The new ETag of its API, for If-Match"))),
        (status = 400, description = "A malformed UUID, body or If-Match"),
        (status = 409, description = "The DRA driver is not enabled, or there is no API server, which shows when a GPU can be moved"),
        (status = 422, description = "An unknown key, or a value that is not allowed"),
    ))]
pub(crate) async fn order(
    caller: Caller,
    state: Data<State>,
    path: Path<String>,
    request: HttpRequest,
    payload: Payload,
) -> HandlerResult {
    let gpu = gpu_id(&state, &path)?;
    let ViaOrder { api, reason } = body::json(&request, payload).await?;
    caller.check_reason(&reason)?;
    let api = match api {
        berth_api::KubeletApi::DevicePlugin => KubeletApi::DevicePlugin,
        berth_api::KubeletApi::Dra => KubeletApi::Dra,
        berth_api::KubeletApi::Other(text) => {
            let rule = format!("api: {text:?} is not one of {}", berth_api::KubeletApi::NAMES.join(", "));
            return Err(Failure::new(Kind::Invalid, rule));
        }
    };
    set(&caller, &state, &request, gpu, api, reason).await
}

/// Cancel the move of a GPU
///
/// The GPU is granted through its present API again, at once. Idempotent.
#[utoipa::path(delete, path = "",
    responses(
        (status = 200, description = "The GPU, which keeps its API", body = Gpu, headers(("ETag" = String, description = "The new ETag of its API, for If-Match"))),
        (status = 400, description = "A malformed UUID or If-Match"),
    ))]
pub(crate) async fn cancel(
    caller: Caller,
    state: Data<State>,
    path: Path<String>,
    request: HttpRequest,
) -> HandlerResult {
    let gpu = gpu_id(&state, &path)?;
    let via = gpu_state(&state.kernel.snapshot(), &gpu)?.via.clone();
    etag::check(&request, &tag(&via))?;
    let author = Author::api(caller.name(), String::new());
    let command = Command::SetVia { gpu: gpu.clone(), api: via.api, author };
    // A GPU that was moved meanwhile must not be moved back.
    let expected = Some(Revision::Via { gpu: gpu.clone(), via });
    execute(&caller, &state, gpu, command.expecting(expected), "").await
}

async fn set(
    caller: &Caller,
    state: &State,
    request: &HttpRequest,
    gpu: GpuId,
    api: KubeletApi,
    reason: String,
) -> HandlerResult {
    let ledger = state.kernel.snapshot();
    let via = &gpu_state(&ledger, &gpu)?.via;
    let read = || Revision::Via { gpu: gpu.clone(), via: via.clone() };
    let expected = etag::expected(request, &tag(via), read)?;
    if via.api != api {
        check_movable(state)?;
        let no_shares = (state.facts)().dra.and_then(|dra| dra.no_shares);
        let why_no_claims = || why_no_claims(&ledger, &gpu, no_shares.as_deref());
        if let Some(why) = (api == KubeletApi::Dra).then(why_no_claims).flatten() {
            let what = format!("GPU {gpu} cannot be granted to claims: {why}");
            return Err(Failure::new(Kind::State, what)
                .hint("have the policies offer it whole (`berth policy list`), and repeat the order"));
        }
    }
    let command =
        Command::SetVia { gpu: gpu.clone(), api, author: Author::api(caller.name(), reason.clone()) };
    execute(caller, state, gpu, command.expecting(expected), &reason).await
}

async fn execute(
    caller: &Caller,
    state: &State,
    gpu: GpuId,
    command: Command,
    reason: &str,
) -> HandlerResult {
    let applied = state.kernel.execute(command).await.or_failure()?;
    if !applied.entry.changes.is_empty() {
        let via = state.kernel.snapshot().gpus.get(&gpu).map(|state| state.via.as_str());
        tracing::info!(%gpu, by = caller.name(), reason, via, "a caller ordered through which API of the kubelet a GPU is granted");
    }
    let tag = tag(&gpu_state(&state.kernel.snapshot(), &gpu)?.via);
    Ok(HttpResponse::Ok().insert_header((ETAG, tag)).json(shown(state, &gpu)?))
}

/// Only the API server shows what the scheduler has allocated, and claims are prepared only by the driver.
fn check_movable(state: &State) -> Result<(), Failure> {
    let facts = (state.facts)();
    if facts.api_server.is_none() {
        let what = "only the API server shows when a GPU can be moved, and none is configured";
        return Err(Failure::new(Kind::NoApiServer, what).hint(
            "start the daemon with --kubeconfig FILE, or in a pod with a service account (and not with --api-server off)",
        ));
    }
    if facts.dra.is_none() {
        return Err(Failure::new(Kind::State, "the DRA driver is not enabled on this node")
            .hint("set `dra.enabled: true` in the configuration, and restart the daemon"));
    }
    Ok(())
}

/// The strong tag of a GPU's API, for `If-Match`.
fn tag(via: &via::Via) -> String {
    let mut hasher = DefaultHasher::new();
    (&via.by, &via.why, via.since_wall_ms).hash(&mut hasher);
    format!("\"{}-{:016x}\"", via.as_str(), hasher.finish())
}
