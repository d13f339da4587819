//! Compresses responses of the usual size in the worker that made them.
//!
//! The HTTP library compresses everything over 1 KiB on another thread, with a new compressor of some 300 KiB for
//! each response, which costs several times as much as the response itself. So each worker keeps one compressor, and
//! the library compresses only what is large or streamed.

use crate::response_budget::Weight;
use crate::route::IDENTITY;
use actix_web::body::{BodySize, BoxBody, MessageBody};
use actix_web::dev::{ServiceRequest, ServiceResponse};
use actix_web::http::StatusCode;
use actix_web::http::header::{
    ACCEPT_ENCODING, AcceptEncoding, CACHE_CONTROL, CONTENT_ENCODING, CONTENT_TYPE, ETAG, Encoding,
    EntityTag, Header, HeaderMap, HeaderValue, IfNoneMatch, VARY,
};
use actix_web::middleware::Next;
use actix_web::web::Bytes;
use actix_web::{Error, HttpRequest, HttpResponse, HttpResponseBuilder};
use flate2::write::GzEncoder;
use flate2::{Compress, Compression, Crc, FlushCompress, Status};
use sha2::{Digest, Sha256};
use std::cell::RefCell;
use std::fmt::Write as _;
use std::io::Write as _;
use std::sync::OnceLock;

/// Largest response that is compressed here, bytes: it occupies its worker for at most a millisecond.
const INLINE_BYTES_MAX: usize = 64 * 1024;
/// A gzip header without name, time and system (RFC 1952, 2.3.1); 4: the fastest algorithm was used.
const HEAD: [u8; 10] = [0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 4, 255];
/// Bytes besides the input for incompressible data: header, trailer, and 5 for each 16 KiB.
const GZIP_OVERHEAD_BYTES: usize = 64;

thread_local! {
    static COMPRESSOR: RefCell<Compress> = RefCell::new(Compress::new(Compression::fast(), false));
}

/// The middleware around the routes, inside the library's own compression, which skips compressed responses.
pub(crate) async fn here(
    request: ServiceRequest,
    next: Next<impl MessageBody + 'static>,
) -> Result<ServiceResponse<BoxBody>, Error> {
    let Some(coding) = coding(&request) else {
        // The outer layer adds the problem.
        return Ok(request.into_response(HttpResponse::new(StatusCode::NOT_ACCEPTABLE)));
    };
    let mut response = next.call(request).await?.map_into_boxed_body();
    if response.headers().contains_key(CONTENT_ENCODING) {
        return Ok(response);
    }
    if coding == Encoding::identity() {
        // The library would also accept deflate, for which no text is compressed in advance.
        response.headers_mut().insert(CONTENT_ENCODING, HeaderValue::from_static(IDENTITY));
        return Ok(response);
    }
    match response.response().body().size() {
        BodySize::Sized(bytes) if bytes > INLINE_BYTES_MAX as u64 => {
            response.response_mut().extensions_mut().insert(Weight::compressed(bytes));
            return Ok(response);
        }
        _ if !is_text(response.headers()) => return Ok(response),
        _ => {}
    }
    Ok(response.map_body(|head, body| {
        let bytes = match body.try_into_bytes() {
            Ok(bytes) => bytes,
            Err(stream) => return stream,
        };
        if bytes.is_empty() {
            return BoxBody::new(bytes);
        }
        let Some(zipped) = zip(&bytes) else { return BoxBody::new(bytes) };
        head.headers_mut().insert(CONTENT_ENCODING, HeaderValue::from_static("gzip"));
        head.headers_mut().append(VARY, HeaderValue::from_static("accept-encoding"));
        BoxBody::new(Bytes::from(zipped))
    }))
}

/// The encoding of the response, gzip or none; `None` if the client accepts neither.
fn coding(request: &ServiceRequest) -> Option<Encoding> {
    if !request.headers().contains_key(ACCEPT_ENCODING) {
        return Some(Encoding::identity());
    }
    // An unreadable header excludes nothing.
    let Ok(accepted) = AcceptEncoding::parse(request) else { return Some(Encoding::identity()) };
    accepted.negotiate([Encoding::identity(), Encoding::gzip()].iter())
}

/// JSON, problems and metrics, which handlers write. Files of pages may have any type.
fn is_text(headers: &HeaderMap) -> bool {
    let kind = headers.get(CONTENT_TYPE).and_then(|kind| kind.to_str().ok()).unwrap_or_default();
    let known = ["application/json", "application/problem+json", "application/openmetrics-text"];
    known.iter().any(|known| kind.starts_with(known))
}

/// `None` if the result would not be smaller, or on an error.
fn zip(bytes: &[u8]) -> Option<Vec<u8>> {
    let mut zipped = Vec::with_capacity(bytes.len() + GZIP_OVERHEAD_BYTES);
    zipped.extend(HEAD);
    let ended = COMPRESSOR.with_borrow_mut(|compressor| {
        let ended = compressor.compress_vec(bytes, &mut zipped, FlushCompress::Finish);
        compressor.reset();
        ended
    });
    let mut sum = Crc::new();
    sum.update(bytes);
    zipped.extend(sum.sum().to_le_bytes());
    zipped.extend(sum.amount().to_le_bytes());
    (ended.ok()? == Status::StreamEnd && zipped.len() < bytes.len()).then_some(zipped)
}

/// A client keeps the text and revalidates it each time: it changes with a release.
const KEPT: &str = "no-cache";

/// A text that does not change while the daemon runs: compressed once a client accepts that, so that unauthenticated
/// requests for it cost little, and not sent again to clients that have it.
pub struct CompressedFile {
    kind: &'static str,
    text: &'static str,
    /// Weak: the same for all encodings.
    tag: EntityTag,
    gzip: OnceLock<Option<Bytes>>,
}

impl CompressedFile {
    /// `kind`: the media type.
    pub fn new(kind: &'static str, text: &'static str) -> Self {
        let mut tag = String::new();
        for byte in Sha256::digest(text).iter().take(8) {
            // Writing to a String cannot fail.
            let _ = write!(tag, "{byte:02x}");
        }
        Self { kind, text, tag: EntityTag::new_weak(tag), gzip: OnceLock::new() }
    }

    /// The text without an encoding.
    #[must_use]
    pub const fn text(&self) -> &'static str {
        self.text
    }

    /// The response with the text: 304 if the client has it, compressed if the client accepts that.
    pub fn answer(&self, request: &HttpRequest) -> HttpResponse {
        if self.is_current(request) {
            let mut response = HttpResponse::NotModified();
            self.head(&mut response);
            return response.finish();
        }
        let mut response = HttpResponse::Ok();
        self.head(&mut response);
        response.insert_header((CONTENT_TYPE, HeaderValue::from_static(self.kind)));
        let wanted = AcceptEncoding::parse(request).is_ok_and(|accepts| accepts_gzip(&accepts));
        let mut response = match wanted.then(|| self.gzip.get_or_init(|| pack(self.text)).clone()).flatten() {
            Some(packed) => response.insert_header((CONTENT_ENCODING, "gzip")).body(packed),
            None => response.insert_header((CONTENT_ENCODING, IDENTITY)).body(self.text),
        };
        response.extensions_mut().insert(Weight::NONE);
        response
    }

    fn head(&self, response: &mut HttpResponseBuilder) {
        response
            .insert_header((ETAG, self.tag.to_string()))
            .insert_header((CACHE_CONTROL, KEPT))
            .insert_header((VARY, "accept-encoding"));
    }

    fn is_current(&self, request: &HttpRequest) -> bool {
        match IfNoneMatch::parse(request) {
            Ok(IfNoneMatch::Any) => true,
            Ok(IfNoneMatch::Items(tags)) => tags.iter().any(|tag| tag.weak_eq(&self.tag)),
            // A malformed condition is ignored: the whole text is always right.
            Err(_) => false,
        }
    }
}

/// Whether a client prefers gzip to no encoding.
pub fn accepts_gzip(accepts: &AcceptEncoding) -> bool {
    let offered = [Encoding::identity(), Encoding::gzip()];
    accepts.negotiate(offered.iter()) == Some(Encoding::gzip())
}

/// `None` on an error of the compressor.
fn pack(text: &str) -> Option<Bytes> {
    let mut packer = GzEncoder::new(Vec::new(), Compression::best());
    packer.write_all(text.as_bytes()).ok()?;
    Some(packer.finish().ok()?.into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use flate2::read::GzDecoder;
    use std::io::Read;

    #[test]
    fn compressed_bodies_decompress_to_the_original() {
        let texts = ["a".repeat(200), "{\"gpu\":1},".repeat(6_000), "again".repeat(100)];
        for text in &texts {
            let zipped = zip(text.as_bytes()).unwrap();
            assert!(zipped.len() < text.len());
            let mut unzipped = String::new();
            GzDecoder::new(&*zipped).read_to_string(&mut unzipped).unwrap();
            assert_eq!(&unzipped, text);
        }
    }

    #[test]
    fn a_body_that_does_not_shrink_is_sent_uncompressed() {
        let mut state = 1_u64;
        let noise = std::iter::repeat_with(|| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            state.to_le_bytes()[7]
        });
        let noise: Vec<u8> = noise.take(INLINE_BYTES_MAX).collect();
        assert_eq!(zip(&noise), None);
        assert_eq!(zip(b"{}"), None);
        // The compressor still works after that.
        assert!(zip(&[b'x'; 1_000]).is_some());
    }
}
