//! `/metrics`: the daemon in numbers, for Prometheus.

use super::problem::{Kind, Problem};
use super::state::State;
use crate::metrics::CONTENT_TYPE;
use actix_web::{HttpResponse, web};

/// The daemon in numbers
///
/// OpenMetrics text: calls, faults and times of policies by hook, what came of decisions, the record of
/// decisions. Reads snapshots only.
#[utoipa::path(get, path = "/metrics", tag = "health", operation_id = "metrics", security(()),
    responses((status = 200, description = "The numbers", body = String, content_type = "application/openmetrics-text")))]
pub(super) async fn metrics(state: web::Data<State>) -> Result<HttpResponse, Problem> {
    let text = state.metrics.text().await;
    let text = text.map_err(|_| Problem::new(Kind::Internal, "a number could not be written as text"))?;
    Ok(HttpResponse::Ok().content_type(CONTENT_TYPE).body(text))
}
