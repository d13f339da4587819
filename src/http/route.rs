//! Paths and methods of routes.

use super::failure::Failure;
use actix_web::dev::ServiceRequest;
use actix_web::{HttpRequest, HttpResponse, Resource, Route, guard, web};
use berth_api::Kind;

/// The prefix of all routes that need a token.
pub const API: &str = "/api/v1";
/// Set by a handler whose response must not be compressed; it is removed before the response is sent.
pub const IDENTITY: &str = "identity";

/// The path by which a request is routed: without escapes, except those of `%`, `/` and `+`.
pub(super) fn path(request: &ServiceRequest) -> &str {
    request.match_info().as_str()
}

/// A resource that answers other methods with the allowed ones.
pub fn resource(path: &str, allow: &'static str) -> Resource {
    web::resource(path).default_service(web::to(move |request: HttpRequest| async move {
        let detail = format!("{} is not a method of {}; it has {allow}", request.method(), request.path());
        Failure::new(Kind::Method, detail).allow(allow).response()
    }))
}

/// GET, and HEAD with it.
#[must_use]
pub fn read() -> Route {
    web::route().guard(guard::Any(guard::Get()).or(guard::Head()))
}

/// Answers a path without a route.
pub async fn no_route(request: HttpRequest) -> HttpResponse {
    nothing_at(request.path()).response()
}

/// The problem of a path without a route.
#[must_use]
pub fn nothing_at(path: &str) -> Failure {
    let path: String = path.chars().take(200).collect();
    Failure::new(Kind::NoRoute, format!("there is no route {path}")).hint("/swagger-ui/ shows all routes")
}
