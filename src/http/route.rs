//! Paths and methods of routes.

use super::failure::Failure;
use actix_web::dev::ServiceRequest;
use actix_web::{HttpRequest, HttpResponse, Resource, Route, guard, web};
use berth_api::Kind;

/// Where everything is that needs a token.
pub const API: &str = "/api/v1";
/// Said by a handler so that nothing compresses its answer; it is no coding to be named, and leaves none.
pub const IDENTITY: &str = "identity";

/// The path by which a request is routed: its escapes are undone, but for those of `%`, `/` and `+`.
pub(super) fn path(request: &ServiceRequest) -> &str {
    request.match_info().as_str()
}

/// A resource that names its methods to whoever uses another one.
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
    Failure::new(Kind::NoRoute, format!("nothing is at {path}")).hint("/swagger-ui/ shows what there is")
}
