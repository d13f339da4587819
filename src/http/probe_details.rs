//! Which parts of `/metrics`, `/livez` and `/readyz` a client gets. On the health listener and from this node:
//! everything. From the network, over TLS: metrics and details name resources, GPUs, policies and addresses, so they
//! need the right to read; other clients get the result and the names of the checks.

use super::context::Context;
use super::failure::Failure;
use super::peer::Peer;
use super::route;
use actix_web::dev::ServiceRequest;
use actix_web::http::header::AUTHORIZATION;
use actix_web::{HttpMessage, HttpRequest};
use berth_api::Check;

/// Marks a request whose response has no details.
struct WithoutDetails;

/// Checks a request of the admin listener before it is handled.
///
/// # Errors
/// If the client may not have the metrics.
pub(super) async fn check_daemon_routes(context: &Context, request: &ServiceRequest) -> Result<(), Failure> {
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
            // A probe without credentials does not count as a failed authentication.
            let shows = certified || request.headers().contains_key(AUTHORIZATION);
            if !shows || context.access.may_read(request).await.is_err() {
                request.extensions_mut().insert(WithoutDetails);
            }
            Ok(())
        }
        _ => Ok(()),
    }
}

/// The checks, with details only if the client may have them.
pub fn visible_checks(request: &HttpRequest, mut checks: Vec<Check>) -> Vec<Check> {
    if request.extensions().get::<WithoutDetails>().is_some() {
        checks.iter_mut().for_each(|check| check.detail = None);
    }
    checks
}

/// The failed checks in one line: their names, with details if the client may have them.
pub fn describe_failed(checks: &[Check]) -> String {
    let failed = checks.iter().filter(|check| !check.ok);
    let words = failed.map(|check| match &check.detail {
        Some(detail) => format!("{}: {detail}", check.name),
        None => check.name.clone(),
    });
    words.collect::<Vec<_>>().join("; ")
}
