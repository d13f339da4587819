//! `/policies`: upload, list, fetch and delete versions of policies.

use crate::failure::{IntoFailure, OrFailure};
use crate::state::State;
use actix_web::body::SizedStream;
use actix_web::http::header::{CONTENT_DISPOSITION, CONTENT_ENCODING, LOCATION};
use actix_web::http::{Method, StatusCode};
use actix_web::web::{self, Data, Path, Payload, Query};
use actix_web::{HttpRequest, HttpResponse};
use base64::Engine;
use base64::engine::general_purpose::STANDARD as BASE64;
use berth_api::{ChangeNote, Kind, Policy, PolicyDetail, PolicyList};
use berth_core::policies::{Upload, Uploaded};
use berth_http::{Caller, Failure, HandlerResult, IDENTITY, Weight, body, etag, query};
use berth_kernel::ids::names::Digest;
use berth_kernel::node::ledger::Ledger;
use berth_kernel::node::ports::InstallError;
use berth_kernel::node::refusal::Refusal;
use berth_kernel::node::revision::Revision;
use berth_kernel::policy::hooks::VERSIONS_MAX;
use berth_kernel::policy::version::{PolicyVersion, Signature};
use futures_util::stream;
use serde::Deserialize;
use std::cmp::Reverse;
use std::convert::Infallible;
use utoipa::IntoParams;

/// The header with a signature.
const SIGNATURE: &str = "berth-signature";

/// The memory of a response with a module, KiB: a piece of 64 that is being sent, and the buffers of the HTTP library
/// and the allocator.
const MODULE_WEIGHT: Weight = Weight::kib(128);

/// Most versions in a response, and the default: all uploads that a node keeps, and as many that came with the
/// daemon; some 0.5 KiB each.
const VERSIONS_LISTED_MAX: usize = 2 * VERSIONS_MAX;

/// Filters of versions. All given ones must match.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct Filter {
    /// Only those of the policy with this name.
    #[param(example = "timeslice")]
    name: Option<String>,
    /// Whether the version came with the daemon.
    #[param(example = true)]
    shipped: Option<bool>,
    /// Whether the version is in the active stack.
    #[param(example = true)]
    active: Option<bool>,
    /// Maximum number of items; 512 by default, which is the most.
    #[param(minimum = 1, maximum = 512, example = 100)]
    limit: Option<usize>,
    /// Only items after this: `next` of the previous response, with the same filters.
    #[param(
        example = "timeslice.1770092645000.9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"
    )]
    cursor: Option<String>,
}

/// The sort key of the list. The digest distinguishes versions of the same moment.
type Key = (String, Reverse<u64>, Digest);

fn key(version: &PolicyVersion) -> Key {
    (version.name.clone(), Reverse(version.since_wall_ms), version.digest.clone())
}

fn parse_cursor(text: &str) -> Result<Key, Failure> {
    let mut words = text.split('.');
    let key = (|| {
        let (name, since, digest) = (words.next()?, words.next()?, words.next()?);
        Some((name.to_owned(), Reverse(since.parse().ok()?), Digest::parse(digest).ok()?))
    })();
    key.filter(|_| words.next().is_none()).ok_or_else(|| query::malformed(text))
}

/// List policies
///
/// Lists the versions that came with the daemon and the uploaded ones, each with its hooks. One page: `next` of a
/// response is the `cursor` of the following request.
#[utoipa::path(get, path = "",
    responses((status = 200, description = "By name, newest first", body = PolicyList)))]
pub(crate) async fn list(state: Data<State>, request: HttpRequest, filter: Query<Filter>) -> HandlerResult {
    let limit = query::limit(filter.limit, VERSIONS_LISTED_MAX, VERSIONS_LISTED_MAX)?;
    let after = filter.cursor.as_deref().map(parse_cursor).transpose()?;
    let ledger = state.kernel.snapshot();
    let mut versions: Vec<_> = ledger.policies.values().map(AsRef::as_ref).collect();
    versions.sort_by_cached_key(|version| key(version));
    let (versions, next) = query::page(
        versions
            .into_iter()
            .filter(|version: &&PolicyVersion| {
                let active = || ledger.stack.has(&version.digest);
                filter.name.as_ref().is_none_or(|name| *name == version.name)
                    && filter.shipped.is_none_or(|shipped| shipped == version.shipped)
                    && filter.active.is_none_or(|wanted| wanted == active())
            })
            .collect(),
        after.as_ref(),
        limit,
        |version| key(version),
    );
    let items = versions.into_iter().map(|version| Policy::of(&ledger, version)).collect();
    let next = next.map(|(name, Reverse(since), digest)| format!("{name}.{since}.{digest}"));
    etag::fresh(&request, &PolicyList { items, next })
}

/// Upload a policy
///
/// Accepts a WebAssembly component of the world `berth:policy`, or a core module that can be made one. It is checked,
/// compiled in a limited child process, called for its description, and stored under its digest. It has no effect
/// until a stack names it. Uploading is idempotent: the same bytes change nothing (200 instead of 201), except that
/// they may add a signature. Two callers may upload at the same time, one policy each. If the configuration has
/// `trustedKeys`, one of them must have signed the exact body; otherwise the response is 403, and nothing is
/// compiled.
#[utoipa::path(post, path = "",
    params(("Berth-Signature" = Option<String>, Header, description = "Ed25519 signature over the body, 64 bytes in base64", example = "O7Eu2jwpjbXeJVl/VNkk8uF+eKJq2JU+2CGO5oLwu76QIeLzAJ0VLJEb8fJexoOpAnFBZnZ6+9jlvQ+wEk7Lig==")),
    request_body(content((Vec<u8> = "application/wasm"), (Vec<u8> = "application/octet-stream")), description = "The component, at most 32 MiB"),
    responses(
        (status = 200, description = "The version, which was uploaded before", body = PolicyDetail),
        (status = 201, description = "The new version", body = PolicyDetail, headers(("Location" = String, description = "Its path"))),
        (status = 400, description = "The body ended early, a malformed header, or an unknown key in the query"),
        (status = 403, description = "There are trusted keys and none of them signed it, or the signature is of a core module"),
        (status = 409, description = "The node has the maximum number of versions"),
        (status = 413, description = "Over 32 MiB"),
        (status = 415, description = "The body is neither application/wasm nor application/octet-stream"),
        (status = 422, description = "Not a policy, or too costly to compile"),
    ))]
pub(crate) async fn upload(
    caller: Caller,
    state: Data<State>,
    request: HttpRequest,
    query: Query<ChangeNote>,
    payload: Payload,
) -> HandlerResult {
    let ChangeNote { by, reason } = query.into_inner();
    let by = caller.author(by, &reason)?;
    let signature = signature(&request)?;
    let _permit = state.upload_permits.take(caller.key())?;
    let module = body::module(&request, payload).await?;
    let upload = Upload { module, signature, by, why: reason };
    let Uploaded { version, is_new } = state.policies.upload(upload).await.or_failure()?;
    if is_new {
        tracing::info!(
            policy = version.label(),
            version = version.version,
            by = version.origin.by,
            why = version.origin.why,
            signed_by = version.origin.signed_by,
            "a policy was uploaded"
        );
    }
    let shown = PolicyDetail::of(&state.kernel.snapshot(), &version);
    let mut response = HttpResponse::build(if is_new { StatusCode::CREATED } else { StatusCode::OK });
    if is_new {
        response.insert_header((LOCATION, format!("/api/v1/policies/{}", version.digest)));
    }
    Ok(response.json(shown))
}

/// Get a version of a policy
///
/// Returns its description, who uploaded it and why, and the schema of its parameters. Its ETag changes when it is
/// signed, or joins or leaves the active stack.
#[utoipa::path(get, path = "",
    responses((status = 200, description = "The version", body = PolicyDetail, headers(("ETag" = String, description = "For If-None-Match, and for If-Match when it is deleted")))))]
pub(crate) async fn show(state: Data<State>, request: HttpRequest, path: Path<String>) -> HandlerResult {
    let ledger = state.kernel.snapshot();
    etag::revised(&request, &PolicyDetail::of(&ledger, version(&ledger, &path)?))
}

/// Get the module of a policy
///
/// Returns the uploaded bytes; their sha256 is the digest. They are never compressed. If the connection ends before
/// `Content-Length` bytes, the file was changed on the disk meanwhile, or the daemon stopped.
#[utoipa::path(get, path = "",
    responses(
        (status = 200, description = "The component as it was uploaded", body = Vec<u8>, content_type = "application/wasm"),
        (status = 410, description = "Its files are missing or changed: upload it again"),
    ))]
pub(crate) async fn module(state: Data<State>, request: HttpRequest, path: Path<String>) -> HandlerResult {
    let ledger = state.kernel.snapshot();
    let version = version(&ledger, &path)?;
    // The name is a DNS label, so it needs no quoting.
    let file = format!("attachment; filename=\"{}-{}.wasm\"", version.name, version.digest.short());
    let pieces = state.policies.module(version.digest.clone()).await.or_failure()?;
    let bytes = pieces.bytes();
    let mut response = HttpResponse::Ok();
    // Compression would need a compressor for each request, and remove Content-Length.
    response.insert_header((CONTENT_ENCODING, IDENTITY));
    response.content_type(body::WASM).insert_header((CONTENT_DISPOSITION, file));
    if request.method() == Method::HEAD {
        let none = stream::empty::<Result<web::Bytes, Infallible>>();
        let mut response = response.body(SizedStream::new(bytes, none));
        response.extensions_mut().insert(Weight::NONE);
        return Ok(response);
    }
    // A piece is read once the previous one was sent.
    let pieces = stream::try_unfold(pieces, |pieces| async move {
        Ok::<_, InstallError>(pieces.next().await?.map(|(piece, left)| (web::Bytes::from(piece), left)))
    });
    let mut response = response.body(SizedStream::new(bytes, Box::pin(pieces)));
    response.extensions_mut().insert(MODULE_WEIGHT);
    Ok(response)
}

/// Delete a version of a policy
///
/// Removes its module and its compiled artifact. Versions in the active stack, in shadows and those that came with
/// the daemon cannot be deleted; an earlier stack with a deleted version can no longer be rolled back to.
#[utoipa::path(delete, path = "",
    responses(
        (status = 204, description = "Deleted"),
        (status = 400, description = "A malformed digest or If-Match"),
        (status = 409, description = "It is in the active stack, is called as a shadow, or is shipped with the daemon"),
        (status = 503, description = "Policies are being uploaded, compiled or tried, possibly this one"),
    ))]
pub(crate) async fn delete(
    caller: Caller,
    state: Data<State>,
    path: Path<String>,
    request: HttpRequest,
) -> HandlerResult {
    let digest = digest(&path)?;
    let expected = if_match(&request, &state.kernel.snapshot(), &path)?;
    state.policies.delete_policy(digest.clone(), expected).await.or_failure()?;
    tracing::info!(policy = digest.short(), by = caller.name(), "a policy was deleted");
    Ok(HttpResponse::NoContent().finish())
}

/// The version that the request's `If-Match` names, which the keeper checks again in the turn of the command; `None`
/// without a condition.
fn if_match(request: &HttpRequest, ledger: &Ledger, path: &str) -> Result<Option<Revision>, Failure> {
    let condition = etag::if_match(request)?;
    if condition.is_any() {
        return Ok(None);
    }
    let known = version(ledger, path)?;
    if condition.names(&etag::of(&PolicyDetail::of(ledger, known))?) {
        let is_active = ledger.stack.has(&known.digest);
        Ok(Some(Revision::Policy { version: Box::new(known.clone()), is_active }))
    } else {
        Err(Refusal::PolicyChanged { digest: known.digest.clone() }.into_failure())
    }
}

fn digest(text: &str) -> Result<Digest, Failure> {
    Digest::parse(text).map_err(|error| Failure::new(Kind::Path, error))
}

/// The version whose digest a path has.
fn version<'l>(ledger: &'l Ledger, path: &str) -> Result<&'l PolicyVersion, Failure> {
    let digest = digest(path)?;
    let version = ledger.policies.get(&digest).map(AsRef::as_ref);
    version.ok_or(Refusal::UnknownPolicy { digest }).or_failure()
}

fn signature(request: &HttpRequest) -> Result<Option<Signature>, Failure> {
    let mut given = request.headers().get_all(SIGNATURE);
    let (Some(first), second) = (given.next(), given.next()) else {
        return Ok(None);
    };
    let bytes = first.to_str().ok().and_then(|text| BASE64.decode(text.trim()).ok());
    match bytes.and_then(|bytes| <[u8; 64]>::try_from(bytes).ok()).filter(|_| second.is_none()) {
        Some(bytes) => Ok(Some(Signature(bytes))),
        None => Err(Failure::new(
            Kind::Header,
            "Berth-Signature: one Ed25519 signature, which is 64 bytes, in base64",
        )),
    }
}
