//! `/openapi.json`: half a megabyte of the same words, compressed once and not for each who asks.

use super::openapi::openapi_json;
use super::problem::{Kind, Problem};
use actix_web::http::header::{
    AcceptEncoding, CACHE_CONTROL, CONTENT_ENCODING, ETAG, Encoding, EntityTag, Header, IfNoneMatch, VARY,
};
use actix_web::web::Bytes;
use actix_web::{HttpRequest, HttpResponse};
use flate2::Compression;
use flate2::write::GzEncoder;
use sha2::{Digest, Sha256};
use std::fmt::Write as _;
use std::io::Write as _;
use std::sync::LazyLock;

/// A client keeps it and asks each time whether it is still the same: it changes with the release.
const KEPT: &str = "no-cache";

/// What goes out, made when somebody first asks: some 50 KB.
static PACKED: LazyLock<Option<Bytes>> = LazyLock::new(|| {
    let mut packed = GzEncoder::new(Vec::new(), Compression::best());
    packed.write_all(openapi_json().as_bytes()).ok()?;
    Some(packed.finish().ok()?.into())
});

/// Weak: the same for all codings.
static TAG: LazyLock<EntityTag> = LazyLock::new(|| {
    let mut tag = String::new();
    for byte in Sha256::digest(openapi_json()).iter().take(8) {
        // Writing to a String cannot fail.
        let _ = write!(tag, "{byte:02x}");
    }
    EntityTag::new_weak(tag)
});

pub(super) async fn show(request: HttpRequest) -> Result<HttpResponse, Problem> {
    let known = match IfNoneMatch::parse(&request) {
        Ok(IfNoneMatch::Any) => true,
        Ok(IfNoneMatch::Items(tags)) => tags.iter().any(|tag| tag.weak_eq(&TAG)),
        // A malformed condition is none: the whole document is never wrong.
        Err(_) => false,
    };
    let mut response = if known { HttpResponse::NotModified() } else { HttpResponse::Ok() };
    response
        .insert_header((ETAG, TAG.to_string()))
        .insert_header((CACHE_CONTROL, KEPT))
        .insert_header((VARY, "accept-encoding"));
    if known {
        return Ok(response.finish());
    }
    response.content_type("application/json");
    // Other codings are left to the layer around, which has refused what none of them fits.
    if !takes_gzip(&request) {
        return Ok(response.body(openapi_json()));
    }
    let packed = PACKED.clone();
    let packed = packed.ok_or_else(|| Problem::new(Kind::Internal, "the document cannot be compressed"))?;
    response.insert_header((CONTENT_ENCODING, "gzip"));
    Ok(response.body(packed))
}

fn takes_gzip(request: &HttpRequest) -> bool {
    let Ok(codings) = AcceptEncoding::parse(request) else { return false };
    // The same order as that of the layer around.
    let offered = [Encoding::identity(), Encoding::gzip(), Encoding::deflate()];
    codings.negotiate(offered.iter()) == Some(Encoding::gzip())
}
