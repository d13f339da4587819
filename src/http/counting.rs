//! Counts responses, for `/metrics`.

use super::context::Context;
use actix_web::HttpRequest;
use berth_core::counters::Method;
use std::time::Instant;

/// The route of requests without one, or refused before routing.
const NO_ROUTE: &str = "unmatched";

/// Counts a response with this status. The route is the template of the route table, never the path, which the client
/// chooses.
pub(super) fn count(context: &Context, request: &HttpRequest, status: u16, began: Instant) {
    let route = request.match_pattern().map(|pattern| pattern.replace(":.*}", "}"));
    let route = route.as_deref().unwrap_or(NO_ROUTE);
    let method = Method::of(request.method().as_str());
    context.figures.http.answered(route, method, status, began.elapsed());
}
