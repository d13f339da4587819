//! Counters of the admin API: responses by route, method and status.

use super::histogram::{Histogram, HistogramSnapshot};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

/// Pairs of route and method with counters of their own; there are some fifty routes. Templates come from the route
/// table and not from requests, so the bound only guards against a bug.
pub const ROUTES_COUNTED_MAX: usize = 128;

/// From a response read from a snapshot to an upload that is compiled.
const REQUEST_US: &[u64] =
    &[250, 500, 1_000, 2_500, 5_000, 10_000, 25_000, 100_000, 500_000, 2_500_000, 10_000_000, 60_000_000];

/// Connections of the admin API that ended because the client did not send valid HTTP. Counted for the whole
/// process, since the HTTP library reports them in its log only.
pub static MALFORMED: AtomicU64 = AtomicU64::new(0);

/// An HTTP method that routes use, or [`Method::Other`].
#[allow(missing_docs)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Method {
    Get,
    Head,
    Put,
    Post,
    Patch,
    Delete,
    Other,
}

impl Method {
    /// The method with this name, in capitals.
    #[must_use]
    pub fn of(name: &str) -> Self {
        match name {
            "GET" => Self::Get,
            "HEAD" => Self::Head,
            "PUT" => Self::Put,
            "POST" => Self::Post,
            "PATCH" => Self::Patch,
            "DELETE" => Self::Delete,
            _ => Self::Other,
        }
    }

    /// The method as a metric label.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Get => "GET",
            Self::Head => "HEAD",
            Self::Put => "PUT",
            Self::Post => "POST",
            Self::Patch => "PATCH",
            Self::Delete => "DELETE",
            Self::Other => "other",
        }
    }
}

/// Responses of one route to one method.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Served {
    /// Number of responses by the first digit of the status, 1 to 5.
    pub by_class: [u64; 5],
    /// Durations until the response head was ready.
    pub times: HistogramSnapshot,
}

#[derive(Debug)]
struct RouteCounters {
    by_class: [u64; 5],
    times: Histogram,
}

/// Counters of the admin API.
#[derive(Debug, Default)]
pub struct HttpCounters(Mutex<BTreeMap<(String, Method), RouteCounters>>);

impl HttpCounters {
    /// Counts a response of this route, given by its template.
    pub fn answered(&self, route: &str, method: Method, status: u16, took: Duration) {
        let mut requests = self.0.lock();
        let key = (route.to_owned(), method);
        let has_counters = requests.contains_key(&key) || requests.len() < ROUTES_COUNTED_MAX;
        let key = if has_counters { key } else { ("other".to_owned(), Method::Other) };
        let counters = requests
            .entry(key)
            .or_insert_with(|| RouteCounters { by_class: [0; 5], times: Histogram::new(REQUEST_US) });
        let class = usize::from(status / 100).clamp(1, 5);
        counters.by_class[class - 1] += 1;
        counters.times.add(took);
    }

    /// All counters, by route and method.
    #[must_use]
    pub fn served(&self) -> BTreeMap<(String, Method), Served> {
        let requests = self.0.lock();
        let read =
            |counters: &RouteCounters| Served { by_class: counters.by_class, times: counters.times.read() };
        requests.iter().map(|(key, counters)| (key.clone(), read(counters))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn responses_are_counted_by_route_method_and_class_and_bounded() {
        let counters = HttpCounters::default();
        for n in 0..1_000 {
            counters.answered(&format!("/r/{n}"), Method::of("GET"), 200, Duration::from_millis(1));
        }
        counters.answered("/r/0", Method::Get, 503, Duration::from_millis(1));
        let served = counters.served();
        assert_eq!(served.len(), ROUTES_COUNTED_MAX + 1);
        let first = &served[&("/r/0".to_owned(), Method::Get)];
        assert_eq!(first.by_class, [0, 1, 0, 0, 1]);
        assert_eq!(first.times.counts.iter().sum::<u64>(), 2);
        let other = &served[&("other".to_owned(), Method::Other)];
        assert_eq!(other.by_class[1], 1_000 - ROUTES_COUNTED_MAX as u64);
        assert_eq!((Method::of("BREW"), Method::of("BREW").as_str()), (Method::Other, "other"));
    }
}
