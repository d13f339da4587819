//! Bodies: read up to a limit and a deadline, then parsed. Nothing here trusts Content-Length.

use super::problem::{Kind, Problem};
use actix_web::HttpRequest;
use actix_web::error::PayloadError;
use actix_web::http::header::CONTENT_LENGTH;
use actix_web::web::Payload;
use futures_util::StreamExt;
use serde::de::DeserializeOwned;
use std::time::Duration;

/// Largest JSON body, bytes: a stack of 16 entries with parameters of 6 KiB, escaped twice over.
pub const JSON_BYTES_MAX: usize = 256 * 1024;
/// Largest policy, bytes. The interpreters of Python and JavaScript make components of 12 to 20 MB;
/// a component of a compiled language has well under one.
pub const MODULE_BYTES_MAX: usize = 32 * 1024 * 1024;
/// Longest time for a JSON body to come in.
const JSON_WAIT: Duration = Duration::from_secs(10);
/// Longest time for a policy to come in: the largest at half a megabyte a second.
const MODULE_WAIT: Duration = Duration::from_secs(60);
/// What a policy is sent as.
pub(super) const WASM: &str = "application/wasm";

/// A JSON body; an empty one is the default value, where `T` has one that makes sense.
pub(super) async fn json_or_default<T: DeserializeOwned + Default>(
    request: &HttpRequest,
    payload: Payload,
) -> Result<T, Problem> {
    let bytes = read(request, payload, JSON_BYTES_MAX, JSON_WAIT).await?;
    if bytes.is_empty() {
        return Ok(T::default());
    }
    media_type(request, "application/json")?;
    parse(&bytes)
}

/// A JSON body.
pub(super) async fn json<T: DeserializeOwned>(request: &HttpRequest, payload: Payload) -> Result<T, Problem> {
    media_type(request, "application/json")?;
    parse(&read(request, payload, JSON_BYTES_MAX, JSON_WAIT).await?)
}

/// A policy's bytes.
pub(super) async fn module(request: &HttpRequest, payload: Payload) -> Result<Vec<u8>, Problem> {
    media_type(request, WASM)?;
    read(request, payload, MODULE_BYTES_MAX, MODULE_WAIT).await
}

fn media_type(request: &HttpRequest, wanted: &str) -> Result<(), Problem> {
    use actix_web::HttpMessage;
    if request.content_type().eq_ignore_ascii_case(wanted) {
        return Ok(());
    }
    let given: String = request.content_type().chars().take(80).collect();
    Err(Problem::new(Kind::MediaType, format!("the body is taken as {wanted}, and came as {given:?}"))
        .hint(format!("send `Content-Type: {wanted}`")))
}

fn too_large(limit: usize) -> Problem {
    Problem::new(
        Kind::TooLarge,
        format!("the body is larger than {limit} bytes, which is what this route takes"),
    )
}

async fn read(
    request: &HttpRequest,
    payload: Payload,
    limit: usize,
    wait: Duration,
) -> Result<Vec<u8>, Problem> {
    // Refused before a byte of it is read.
    let declared = request.headers().get(CONTENT_LENGTH);
    let declared: Option<u64> = declared.and_then(|l| l.to_str().ok()?.parse().ok());
    if declared.is_some_and(|l| l > u64::try_from(limit).unwrap_or(u64::MAX)) {
        return Err(too_large(limit));
    }
    match tokio::time::timeout(wait, collect(payload, limit)).await {
        Ok(bytes) => bytes,
        Err(_) => Err(Problem::new(Kind::Slow, format!("the body did not come within {} s", wait.as_secs()))),
    }
}

async fn collect(mut payload: Payload, limit: usize) -> Result<Vec<u8>, Problem> {
    let mut bytes = Vec::new();
    while let Some(chunk) = payload.next().await {
        let chunk = chunk.map_err(|error| match error {
            PayloadError::Overflow => too_large(limit),
            other => Problem::new(Kind::Body, format!("the body could not be read: {other}")),
        })?;
        if bytes.len() + chunk.len() > limit {
            return Err(too_large(limit));
        }
        bytes.extend_from_slice(&chunk);
    }
    Ok(bytes)
}

fn parse<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, Problem> {
    // A list would be taken as the values of an object's keys, in their order in our source.
    let first = bytes.iter().find(|b| !b.is_ascii_whitespace());
    if first == Some(&b'[') {
        return Err(Problem::new(Kind::Invalid, "the body is a list; an object is taken"));
    }
    serde_json::from_slice(bytes).map_err(|error| {
        if error.is_data() {
            Problem::new(Kind::Invalid, error)
        } else {
            Problem::new(Kind::Json, format!("the body is not JSON: {error}"))
        }
    })
}
