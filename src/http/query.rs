//! Query parameters, and the pages of lists: `limit` and `cursor` in the query and `next` in the response, everywhere
//! the same. A parameter that a route does not know is refused: a response must not seem to be filtered when it is not.

use crate::failure::{Failure, excerpt};
use actix_web::dev::ServiceRequest;
use actix_web::http::Method;
use actix_web::web;
use berth_api::Kind;
use serde::Deserialize;
use std::fmt::Display;
use utoipa::IntoParams;

/// The operations without a query. The others have types of their own (`deny_unknown_fields`), which refuse unknown keys and
/// list the known ones; a method that is not an operation is answered by its route. A test with each operation of the API's
/// description keeps this list complete.
const OPERATIONS_WITHOUT_QUERY: [(&str, &str); 27] = [
    ("GET", "/api/v1/access"),
    ("GET", "/api/v1/allocations/{id}"),
    ("GET", "/api/v1/allocations/{id}/explanation"),
    ("GET", "/api/v1/decisions/{seq}"),
    ("GET", "/api/v1/decisions/{seq}/input"),
    ("GET", "/api/v1/gpus/{uuid}"),
    ("DELETE", "/api/v1/gpus/{uuid}"),
    ("PUT", "/api/v1/gpus/{uuid}/cordon"),
    ("GET", "/api/v1/gpus/{uuid}/drain"),
    ("PUT", "/api/v1/gpus/{uuid}/drain"),
    ("PUT", "/api/v1/gpus/{uuid}/health"),
    ("GET", "/api/v1/gpus/{uuid}/processes"),
    ("GET", "/api/v1/node"),
    ("POST", "/api/v1/node/nvml/release"),
    ("POST", "/api/v1/node/nvml/resume"),
    ("GET", "/api/v1/policies/{digest}"),
    ("DELETE", "/api/v1/policies/{digest}"),
    ("GET", "/api/v1/policies/{digest}/module"),
    ("GET", "/api/v1/shadows"),
    ("POST", "/api/v1/shadows"),
    ("GET", "/api/v1/shadows/{id}"),
    ("DELETE", "/api/v1/shadows/{id}"),
    ("GET", "/api/v1/stack"),
    ("DELETE", "/api/v1/stack/entries/{place}/suspension"),
    ("GET", "/api/v1/stack/history"),
    ("POST", "/api/v1/trials"),
    ("GET", "/metrics"),
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

/// The error of a request with a query to an operation without one.
pub(crate) fn refused(request: &ServiceRequest) -> Option<Failure> {
    if request.query_string().is_empty() {
        return None;
    }
    let pattern = request.match_pattern()?;
    let method = match request.method() {
        &Method::HEAD => "GET",
        method => method.as_str(),
    };
    if !OPERATIONS_WITHOUT_QUERY.contains(&(method, pattern.as_str())) {
        return None;
    }
    let keys = web::Query::<Vec<(String, String)>>::from_query(request.query_string());
    let (key, _) = keys.ok()?.into_inner().into_iter().next()?;
    let (key, method) = (excerpt(&key), request.method());
    Some(Failure::new(Kind::Query, format!("unknown key {key:?}: {method} {pattern} takes no query")))
}

/// The requested number of items.
///
/// # Errors
/// [`Kind::Query`] if it is 0 or more than `max`.
pub fn limit<N: Copy + Display + PartialOrd + From<u8>>(
    given: Option<N>,
    default: N,
    max: N,
) -> Result<N, Failure> {
    let limit = given.unwrap_or(default);
    if limit >= N::from(1) && limit <= max {
        return Ok(limit);
    }
    Err(Failure::new(Kind::Query, format!("limit: 1 to {max}, not {limit}")))
}

/// A cursor that is a number.
///
/// # Errors
/// [`Kind::Query`] if it is not.
pub fn number(cursor: Option<&str>) -> Result<Option<u64>, Failure> {
    cursor.map(|text| text.parse().map_err(|_| malformed(text))).transpose()
}

/// The error of a cursor that no response had as its `next`.
pub fn malformed(text: &str) -> Failure {
    Failure::new(Kind::Query, format!("cursor: the `next` of a response, not {:?}", excerpt(text)))
        .hint("omit it for the first page")
}

/// One page of a list that is sorted by `key`: the items after the cursor, at most `limit`, and the cursor of the
/// next page. Keys are unique and do not change, so a page starts where the previous one ended, whatever was added or
/// removed meanwhile.
pub fn page<T, K: Ord>(
    mut sorted: Vec<T>,
    after: Option<&K>,
    limit: usize,
    key: impl Fn(&T) -> K,
) -> (Vec<T>, Option<K>) {
    sorted.retain(|item| after.is_none_or(|after| key(item) > *after));
    let more = sorted.len() > limit;
    sorted.truncate(limit);
    let next = sorted.last().filter(|_| more).map(key);
    (sorted, next)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_follow_each_other_without_a_gap_or_an_overlap() {
        for size in 0..8u32 {
            for limit in 1..5 {
                let (mut found, mut after) = (Vec::new(), None);
                loop {
                    let (items, next) = page((0..size).collect(), after.as_ref(), limit, |n| *n);
                    assert!(items.len() <= limit);
                    found.extend(items);
                    let Some(next) = next else { break };
                    after = Some(next);
                }
                assert_eq!(found, (0..size).collect::<Vec<_>>(), "{size} by {limit}");
            }
        }
    }

    #[test]
    fn limits_and_cursors_that_mean_nothing_are_refused() {
        assert_eq!(limit(None, 5, 9).unwrap(), 5);
        for bad in [0, 10] {
            assert_eq!(limit(Some(bad), 5, 9).unwrap_err().problem.status, 400);
        }
        assert_eq!(number(Some("17")).unwrap(), Some(17));
        for bad in ["", "x", "-1", "1e3", "18446744073709551616"] {
            assert_eq!(number(Some(bad)).unwrap_err().problem.status, 400, "{bad}");
        }
    }
}
