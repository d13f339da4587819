//! `/metrics`: metrics for Prometheus.

use crate::resources::livez;
use crate::resources::node;
use crate::state::State;
use actix_web::{HttpResponse, web};
use berth_api::Check;
use berth_api::Kind;
use berth_core::metrics::{CONTENT_TYPE, CheckResults};
use berth_http::Failure;

/// Get metrics
///
/// OpenMetrics text; `deploy/METRICS.md` describes all families. The response is made from snapshots and counters,
/// and never waits for an Allocate. Open on this node and on the health listener; over TLS from another machine it
/// needs the right to read.
#[utoipa::path(get, path = "/metrics", tag = "health", operation_id = "metrics",
    security((), ("token" = [])),
    responses(
        (status = 200, description = "The metrics", body = String, content_type = "application/openmetrics-text"),
        (status = 401, description = "From another machine: no credentials, or a wrong token"),
        (status = 403, description = "The caller is not allowed to do this"),
    ))]
pub(crate) async fn metrics(state: web::Data<State>) -> Result<HttpResponse, Failure> {
    let facts = (state.facts)();
    let ready = node::checks(&facts, &state);
    let messages = ready.iter().map(|check| (check.name.clone(), check.detail.is_some())).collect();
    let plain = |checks: Vec<Check>| checks.into_iter().map(|check| (check.name, check.ok)).collect();
    let about = CheckResults { ready: plain(ready), live: plain(livez::checks(&state.kernel)), messages };
    let text = state.metrics.text(about);
    let text = text.map_err(|_| Failure::new(Kind::Internal, "a number could not be written as text"))?;
    Ok(HttpResponse::Ok().content_type(CONTENT_TYPE).body(text))
}
