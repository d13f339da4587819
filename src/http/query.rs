//! Query parameters, and the pages of lists: `limit` and `cursor` in the query and `next` in the response, everywhere
//! the same. A parameter that a route does not know is refused: a response must not seem to be filtered when it is not.

use crate::failure::{Failure, excerpt};
use crate::route_table::{QueryRule, RouteRow};
use actix_web::dev::ServiceRequest;
use actix_web::web;
use berth_api::Kind;
use std::fmt::Display;

/// The error of a request with a query to an operation without one.
pub(crate) fn refused(row: &RouteRow, request: &ServiceRequest) -> Option<Failure> {
    if request.query_string().is_empty() || row.query != QueryRule::None {
        return None;
    }
    let keys = web::Query::<Vec<(String, String)>>::from_query(request.query_string());
    let (key, _) = keys.ok()?.into_inner().into_iter().next()?;
    let (key, method, path) = (excerpt(&key), request.method(), row.path);
    Some(Failure::new(Kind::Query, format!("unknown key {key:?}: {method} {path} takes no query")))
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
