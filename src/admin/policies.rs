//! `/policies`: upload, list, fetch and delete versions of policies.

use super::auth::OPERATOR;
use super::body;
use super::dto::{Policy, PolicyDetail, PolicyList};
use super::problem::{Kind, Problem};
use super::state::State;
use crate::kernel::names::Digest;
use crate::kernel::refusal::Refusal;
use actix_web::http::header::{CONTENT_DISPOSITION, LOCATION};
use actix_web::{HttpRequest, HttpResponse, web};

/// When to retry while other uploads are at work: compiling takes seconds, as a rule.
const UPLOAD_RETRY_S: u64 = 5;

/// All versions of policies that this node knows
#[utoipa::path(get, path = "/api/v1/policies", tag = "policies", operation_id = "listPolicies",
    responses((status = 200, description = "By name, newest first", body = PolicyList)))]
pub(super) async fn list(state: web::Data<State>) -> HttpResponse {
    let ledger = state.door.snapshot();
    let mut versions: Vec<_> = ledger.policies.values().collect();
    versions.sort_by(|a, b| a.name.cmp(&b.name).then(b.since_wall_ms.cmp(&a.since_wall_ms)));
    HttpResponse::Ok()
        .json(PolicyList { items: versions.into_iter().map(|v| Policy::of(&ledger, v)).collect() })
}

/// Upload a policy
///
/// A WebAssembly component of the world `berth:policy`, or a core module that becomes one. It is
/// checked, compiled in a limited child process, asked what it is, and kept under its digest. It is
/// asked nothing else until a stack names it. The same bytes again change nothing.
#[utoipa::path(post, path = "/api/v1/policies", tag = "policies", operation_id = "uploadPolicy",
    request_body(content = Vec<u8>, content_type = "application/wasm", description = "The component, at most 32 MiB"),
    responses(
        (status = 200, description = "Known already", body = PolicyDetail),
        (status = 201, description = "Taken", body = PolicyDetail, headers(("Location" = String, description = "Where it is"))),
        (status = 400, description = "The body ended early"),
        (status = 408, description = "The body came too slowly"),
        (status = 409, description = "The node keeps as many versions as it may"),
        (status = 413, description = "Over 32 MiB"),
        (status = 415, description = "The body is not application/wasm"),
        (status = 422, description = "Not a policy, or too costly to compile"),
    ))]
pub(super) async fn upload(
    state: web::Data<State>,
    request: HttpRequest,
    payload: web::Payload,
) -> Result<HttpResponse, Problem> {
    let _permit = state
        .uploads
        .try_acquire()
        .map_err(|_| Problem::new(Kind::Busy, "other uploads are at work").retry_after(UPLOAD_RETRY_S))?;
    let module = body::module(&request, payload).await?;
    let before = state.door.snapshot();
    let version = state.door.upload(module).await?;
    let shown = PolicyDetail::of(&state.door.snapshot(), &version);
    if before.policies.contains_key(&version.digest) {
        return Ok(HttpResponse::Ok().json(shown));
    }
    tracing::info!(
        policy = version.label(),
        version = version.version,
        by = OPERATOR,
        "a policy was uploaded"
    );
    let location = format!("/api/v1/policies/{}", version.digest);
    Ok(HttpResponse::Created().insert_header((LOCATION, location)).json(shown))
}

/// One version of a policy
#[utoipa::path(get, path = "/api/v1/policies/{digest}", tag = "policies", operation_id = "getPolicy",
    params(("digest" = String, Path, description = "sha256 of its bytes", example = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08")),
    responses(
        (status = 200, description = "The version", body = PolicyDetail),
        (status = 400, description = "No digest"),
        (status = 404, description = "No such version"),
    ))]
pub(super) async fn show(state: web::Data<State>, path: web::Path<String>) -> Result<HttpResponse, Problem> {
    let digest = digest(&path)?;
    let ledger = state.door.snapshot();
    let version = ledger.policies.get(&digest).ok_or(Refusal::UnknownPolicy { digest })?;
    Ok(HttpResponse::Ok().json(PolicyDetail::of(&ledger, version)))
}

/// The bytes of a policy
#[utoipa::path(get, path = "/api/v1/policies/{digest}/module", tag = "policies", operation_id = "getPolicyModule",
    params(("digest" = String, Path, description = "sha256 of its bytes", example = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08")),
    responses(
        (status = 200, description = "The component as it was uploaded", body = Vec<u8>, content_type = "application/wasm"),
        (status = 400, description = "No digest"),
        (status = 404, description = "No such version"),
        (status = 410, description = "Its files are gone or changed: upload it again"),
    ))]
pub(super) async fn module(
    state: web::Data<State>,
    path: web::Path<String>,
) -> Result<HttpResponse, Problem> {
    let digest = digest(&path)?;
    let ledger = state.door.snapshot();
    let version =
        ledger.policies.get(&digest).ok_or_else(|| Refusal::UnknownPolicy { digest: digest.clone() })?;
    // The name is a DNS label, so it needs no quoting.
    let file = format!("attachment; filename=\"{}-{}.wasm\"", version.name, digest.short());
    let bytes = state.door.module(digest).await?;
    Ok(HttpResponse::Ok().content_type(body::WASM).insert_header((CONTENT_DISPOSITION, file)).body(bytes))
}

/// Delete a version of a policy
#[utoipa::path(delete, path = "/api/v1/policies/{digest}", tag = "policies", operation_id = "deletePolicy",
    params(("digest" = String, Path, description = "sha256 of its bytes", example = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08")),
    responses(
        (status = 204, description = "Deleted"),
        (status = 400, description = "No digest"),
        (status = 404, description = "No such version"),
        (status = 409, description = "It is in the active stack, or came with the daemon"),
    ))]
pub(super) async fn delete(
    state: web::Data<State>,
    path: web::Path<String>,
) -> Result<HttpResponse, Problem> {
    let digest = digest(&path)?;
    state.door.delete_policy(digest.clone()).await?;
    tracing::info!(policy = digest.short(), by = OPERATOR, "a policy was deleted");
    Ok(HttpResponse::NoContent().finish())
}

fn digest(text: &str) -> Result<Digest, Problem> {
    Digest::parse(text).map_err(|error| Problem::new(Kind::Path, error))
}
