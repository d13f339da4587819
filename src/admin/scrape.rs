//! `/metrics`: the daemon in numbers, for Prometheus.

use super::dto::Check;
use super::problem::{Kind, Problem};
use super::state::State;
use super::{live, node};
use crate::metrics::{About, CONTENT_TYPE};
use actix_web::{HttpResponse, web};

/// The daemon in numbers
///
/// OpenMetrics text; `deploy/METRICS.md` is the table of all families. Reads snapshots and counters
/// only, and never waits for an Allocate.
#[utoipa::path(get, path = "/metrics", tag = "health", operation_id = "metrics", security(()),
    responses((status = 200, description = "The numbers", body = String, content_type = "application/openmetrics-text")))]
pub(super) async fn metrics(state: web::Data<State>) -> Result<HttpResponse, Problem> {
    let facts = (state.facts)();
    let ready = node::checks(&facts, &state);
    let noted = ready.iter().map(|check| (check.name.clone(), check.detail.is_some())).collect();
    let plain = |checks: Vec<Check>| checks.into_iter().map(|check| (check.name, check.ok)).collect();
    let about = About { ready: plain(ready), live: plain(live::checks(&state.door)), noted };
    let text = state.metrics.text(about).await;
    let text = text.map_err(|_| Problem::new(Kind::Internal, "a number could not be written as text"))?;
    Ok(HttpResponse::Ok().content_type(CONTENT_TYPE).body(text))
}
