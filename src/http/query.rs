//! Keys of queries. A key that a route does not know is refused: a response must not seem to be filtered when it is
//! not.

use super::failure::Failure;
use actix_web::dev::ServiceRequest;
use actix_web::http::Method;
use actix_web::web;
use berth_api::Kind;
use serde::Deserialize;
use utoipa::IntoParams;

/// Longest part of a key in a problem, characters.
const KEY_SHOWN_MAX: usize = 80;

/// The operations with a query. Their own types (`deny_unknown_fields`) refuse unknown keys and list the known ones;
/// every other operation has none. A test against the API's description keeps this list complete.
const TAKING: [(&str, &str); 14] = [
    ("GET", "/api/v1/allocations"),
    ("DELETE", "/api/v1/allocations/{id}"),
    ("GET", "/api/v1/bypass"),
    ("GET", "/api/v1/decisions"),
    ("GET", "/api/v1/events"),
    ("GET", "/api/v1/gpus"),
    ("GET", "/api/v1/policies"),
    ("POST", "/api/v1/policies"),
    ("POST", "/api/v1/replays"),
    ("DELETE", "/api/v1/gpus/{uuid}/cordon"),
    ("DELETE", "/api/v1/gpus/{uuid}/drain"),
    ("DELETE", "/api/v1/stack/override"),
    ("GET", "/livez"),
    ("GET", "/readyz"),
];

/// The query of a probe.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct Probe {
    /// Accepted as by the probes of Kubernetes; the response lists every check in any case.
    #[allow(dead_code)]
    #[param(example = "")]
    verbose: Option<String>,
}

/// The error of a request with a query to a route without one.
pub(super) fn refused(request: &ServiceRequest) -> Option<Failure> {
    let pattern = request.match_pattern()?;
    let method = match request.method() {
        &Method::HEAD => "GET",
        method => method.as_str(),
    };
    if request.query_string().is_empty() || TAKING.contains(&(method, pattern.as_str())) {
        return None;
    }
    let keys = web::Query::<Vec<(String, String)>>::from_query(request.query_string());
    let (key, _) = keys.ok()?.into_inner().into_iter().next()?;
    let key: String = key.chars().take(KEY_SHOWN_MAX).collect();
    let words = format!("unknown key {key:?}: {} {pattern} takes no query", request.method());
    Some(Failure::new(Kind::Query, words))
}
