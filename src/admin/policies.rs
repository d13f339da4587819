//! `/policies`: upload, list, fetch and delete versions of policies.

use super::auth::OPERATOR;
use super::body;
use super::dto::{Policy, PolicyDetail, PolicyList, Word};
use super::problem::{Kind, Problem};
use super::state::State;
use super::word;
use crate::admission::Upload;
use crate::kernel::names::Digest;
use crate::kernel::refusal::Refusal;
use crate::kernel::trust::Signature;
use actix_web::http::header::{CONTENT_DISPOSITION, LOCATION};
use actix_web::{HttpRequest, HttpResponse, web};
use base64::Engine;
use base64::engine::general_purpose::STANDARD as BASE64;

/// The header that a signature comes in.
const SIGNATURE: &str = "berth-signature";

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
/// asked nothing else until a stack names it. The same bytes again change nothing, except that they
/// may bring a signature. Where the configuration has `trustedKeys`, one of them must have signed the
/// body, byte by byte; 403 says otherwise, and nothing of it is compiled.
#[utoipa::path(post, path = "/api/v1/policies", tag = "policies", operation_id = "uploadPolicy",
    params(Word, ("Berth-Signature" = Option<String>, Header, description = "Ed25519 signature over the body, 64 bytes in base64")),
    request_body(content = Vec<u8>, content_type = "application/wasm", description = "The component, at most 32 MiB"),
    responses(
        (status = 200, description = "Known already", body = PolicyDetail),
        (status = 201, description = "Taken", body = PolicyDetail, headers(("Location" = String, description = "Where it is"))),
        (status = 400, description = "The body ended early, a malformed signature, or an unknown key in the query"),
        (status = 403, description = "Keys are trusted and none of them signed it, or a core module is signed"),
        (status = 408, description = "The body came too slowly"),
        (status = 409, description = "The node keeps as many versions as it may"),
        (status = 413, description = "Over 32 MiB"),
        (status = 415, description = "The body is not application/wasm"),
        (status = 422, description = "Not a policy, or too costly to compile"),
    ))]
pub(super) async fn upload(
    state: web::Data<State>,
    request: HttpRequest,
    said: web::Query<Word>,
    payload: web::Payload,
) -> Result<HttpResponse, Problem> {
    let Word { by, reason } = said.into_inner();
    let by = word::checked(by, &reason)?;
    let signature = signature(&request)?;
    let _permit = state
        .uploads
        .try_acquire()
        .map_err(|_| Problem::new(Kind::Busy, "other uploads are at work").retry_after(UPLOAD_RETRY_S))?;
    let module = body::module(&request, payload).await?;
    let before = state.door.snapshot();
    let upload = Upload { module, signature, by, why: reason };
    let version = state.door.upload(upload).await?;
    let shown = PolicyDetail::of(&state.door.snapshot(), &version);
    if before.policies.contains_key(&version.digest) {
        return Ok(HttpResponse::Ok().json(shown));
    }
    tracing::info!(
        policy = version.label(),
        version = version.version,
        by = version.origin.by,
        why = version.origin.why,
        signed_by = version.origin.signed_by,
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
        (status = 409, description = "It is in the active stack, is asked as a shadow, or came with the daemon"),
        (status = 503, description = "Policies are being uploaded, compiled or tried, perhaps this one"),
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

fn signature(request: &HttpRequest) -> Result<Option<Signature>, Problem> {
    let mut given = request.headers().get_all(SIGNATURE);
    let (Some(first), second) = (given.next(), given.next()) else {
        return Ok(None);
    };
    let bytes = first.to_str().ok().and_then(|text| BASE64.decode(text.trim()).ok());
    match bytes.and_then(|bytes| <[u8; 64]>::try_from(bytes).ok()).filter(|_| second.is_none()) {
        Some(bytes) => Ok(Some(Signature(bytes))),
        None => Err(Problem::new(
            Kind::Header,
            "Berth-Signature: one Ed25519 signature, which is 64 bytes, in base64",
        )),
    }
}
