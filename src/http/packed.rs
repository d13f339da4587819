//! Texts that do not change while the daemon runs: compressed once, so that unauthenticated requests for them cost
//! little, and not sent again to clients that have them.

use super::response_budget::Weight;
use super::route::IDENTITY;
use actix_web::http::header::{
    AcceptEncoding, CACHE_CONTROL, CONTENT_ENCODING, CONTENT_TYPE, ETAG, Encoding, EntityTag, Header,
    HeaderValue, IfNoneMatch, VARY,
};
use actix_web::web::Bytes;
use actix_web::{HttpRequest, HttpResponse, HttpResponseBuilder};
use flate2::Compression;
use flate2::write::GzEncoder;
use sha2::{Digest, Sha256};
use std::fmt::Write as _;
use std::io::Write as _;
use std::sync::OnceLock;

/// A client keeps the text and revalidates it each time: it changes with a release.
const KEPT: &str = "no-cache";

/// A text, and its gzip form once a client accepts that.
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
