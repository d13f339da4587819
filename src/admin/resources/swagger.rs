//! Swagger UI from files inside the binary: nothing is loaded from other servers.

use actix_web::http::header::{
    AcceptEncoding, CONTENT_ENCODING, CONTENT_SECURITY_POLICY, Header as _, LOCATION, VARY,
};
use actix_web::web::{self, Bytes};
use actix_web::{HttpRequest, HttpResponse};
use berth_api::Kind;
use berth_http::Failure;
use berth_http::packed::accepts_gzip;
use berth_http::response_budget::Weight;
use berth_http::route::IDENTITY;
use flate2::read::GzDecoder;
use parking_lot::Mutex;
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::io::Read as _;
use std::sync::{Arc, LazyLock};
use utoipa_swagger_ui::Config;

/// Only its own scripts, and requests to this server. The pages set inline styles and have icons as data URLs.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; connect-src 'self'; font-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// The token is entered into the page and not stored; no other site validates the description.
static CONFIG: LazyLock<Arc<Config<'static>>> = LazyLock::new(|| {
    let config = Config::from("/openapi.json").validator_url("none").try_it_out_enabled(true);
    Arc::new(config.persist_authorization(false).display_request_duration(true))
});

/// Redirects to the pages.
pub(crate) async fn start() -> HttpResponse {
    HttpResponse::Found().insert_header((LOCATION, "/swagger-ui/")).finish()
}

pub(crate) async fn file(request: HttpRequest, path: web::Path<String>) -> Result<HttpResponse, Failure> {
    let path: String = path.into_inner();
    let found = utoipa_swagger_ui::serve(&path, Arc::clone(&CONFIG))
        .map_err(|error| Failure::new(Kind::Internal, error))?;
    let Some(file) = found else {
        return Err(
            Failure::new(Kind::NoRoute, "Swagger UI has no such file").hint("its first page is /swagger-ui/")
        );
    };
    let mut response = HttpResponse::Ok();
    response.content_type(file.content_type).insert_header((CONTENT_SECURITY_POLICY, POLICY));
    response.insert_header((VARY, "accept-encoding"));
    if file.gzpipped && !AcceptEncoding::parse(&request).is_ok_and(|accepts| accepts_gzip(&accepts)) {
        let bytes = unpacked(path, &file.bytes).map_err(|error| Failure::new(Kind::Internal, error))?;
        let mut response = response.insert_header((CONTENT_ENCODING, IDENTITY)).body(bytes);
        response.extensions_mut().insert(Weight::NONE);
        return Ok(response);
    }
    response.insert_header((CONTENT_ENCODING, if file.gzpipped { "gzip" } else { IDENTITY }));
    Ok(match file.bytes {
        Cow::Borrowed(bytes) => {
            let mut response = response.body(Bytes::from_static(bytes));
            response.extensions_mut().insert(Weight::NONE);
            response
        }
        Cow::Owned(bytes) => response.body(bytes),
    })
}

/// A file in its uncompressed form. Each is decompressed once, at its first request: that needs no token, and
/// decompressing 1.5 MB for every request would keep the processors busy. There are some ten files, 4 MiB in all.
fn unpacked(path: String, packed: &[u8]) -> std::io::Result<Bytes> {
    static FILES: Mutex<BTreeMap<String, Bytes>> = Mutex::new(BTreeMap::new());
    let mut files = FILES.lock();
    if let Some(bytes) = files.get(&path) {
        return Ok(bytes.clone());
    }
    let mut bytes = Vec::new();
    GzDecoder::new(packed).read_to_end(&mut bytes)?;
    let bytes = Bytes::from(bytes);
    files.insert(path, bytes.clone());
    Ok(bytes)
}
