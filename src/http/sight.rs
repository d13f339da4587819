//! What of `/metrics`, `/livez` and `/readyz` is for whom. On the health listener and on this node: all of it,
//! for everybody. From the network, over TLS: the numbers and the details name resources, GPUs, policies and
//! addresses, so they are for whoever may read; anybody else hears yes or no and the names of the checks.

use super::context::Context;
use super::failure::Failure;
use super::peer::Peer;
use super::route;
use actix_web::dev::ServiceRequest;
use actix_web::http::header::AUTHORIZATION;
use actix_web::{HttpMessage, HttpRequest};
use berth_api::Check;

/// Beside a request whose answer is without details.
struct Bare;

/// Asked before a request of the admin listener is answered.
///
/// # Errors
/// Why the numbers are not for whoever asks.
pub(super) async fn of_the_daemon(context: &Context, request: &ServiceRequest) -> Result<(), Failure> {
    let path = route::path(request);
    let from_afar = match request.conn_data::<Peer>() {
        // Without TLS the listener is on loopback.
        Some(Peer::Tls { from, certificate }) if !from.ip().to_canonical().is_loopback() => {
            Some(certificate.is_some())
        }
        _ => None,
    };
    let Some(certified) = from_afar else { return Ok(()) };
    match path {
        "/metrics" => context.access.may_read(request).await,
        "/livez" | "/readyz" => {
            // A probe shows nothing, and is not counted among those that try to get in.
            let shows = certified || request.headers().contains_key(AUTHORIZATION);
            if !shows || context.access.may_read(request).await.is_err() {
                request.extensions_mut().insert(Bare);
            }
            Ok(())
        }
        _ => Ok(()),
    }
}

/// Those checks that whoever asks may see, as far as they may.
pub fn shown(request: &HttpRequest, mut checks: Vec<Check>) -> Vec<Check> {
    if request.extensions().get::<Bare>().is_some() {
        checks.iter_mut().for_each(|check| check.detail = None);
    }
    checks
}

/// Why it is not well, in one line: the names of the checks, with their details where those are shown.
pub fn why(checks: &[Check]) -> String {
    let failed = checks.iter().filter(|check| !check.ok);
    let words = failed.map(|check| match &check.detail {
        Some(detail) => format!("{}: {detail}", check.name),
        None => check.name.clone(),
    });
    words.collect::<Vec<_>>().join("; ")
}
