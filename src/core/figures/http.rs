//! What the admin API counts: answers by route, method and status.

use super::times::{Spread, Times};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

/// Routes that are counted each: there are some fifty. Templates come from the route table and not from
/// requests, so this bounds a mistake of ours.
pub const ROUTES_COUNTED_MAX: usize = 128;

/// From an answer out of a snapshot to an upload that is compiled.
const REQUEST_US: &[u64] =
    &[250, 500, 1_000, 2_500, 5_000, 10_000, 25_000, 100_000, 500_000, 2_500_000, 10_000_000, 60_000_000];

/// Connections of the admin API that ended because what came was no HTTP. Counted for the whole
/// process, since the HTTP library shows them in its log alone.
pub static MALFORMED: AtomicU64 = AtomicU64::new(0);

/// A method, of those that routes have; any other word is one.
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
    /// By its word, in capitals.
    #[must_use]
    pub fn of(word: &str) -> Self {
        match word {
            "GET" => Self::Get,
            "HEAD" => Self::Head,
            "PUT" => Self::Put,
            "POST" => Self::Post,
            "PATCH" => Self::Patch,
            "DELETE" => Self::Delete,
            _ => Self::Other,
        }
    }

    /// Its word.
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

/// Answers of one route to one method.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Served {
    /// By the first digit of the status, 1 to 5.
    pub by_class: [u64; 5],
    /// How long they took.
    pub times: Spread,
}

#[derive(Debug)]
struct Kept {
    by_class: [u64; 5],
    times: Times,
}

/// See the module.
#[derive(Debug, Default)]
pub struct HttpFigures(Mutex<BTreeMap<(String, Method), Kept>>);

impl HttpFigures {
    /// A request of this route (its template) was answered.
    pub fn answered(&self, route: &str, method: Method, status: u16, took: Duration) {
        let mut all = self.0.lock();
        let key = (route.to_owned(), method);
        let room = all.contains_key(&key) || all.len() < ROUTES_COUNTED_MAX;
        let key = if room { key } else { ("other".to_owned(), Method::Other) };
        let kept = all.entry(key).or_insert_with(|| Kept { by_class: [0; 5], times: Times::new(REQUEST_US) });
        let class = usize::from(status / 100).clamp(1, 5);
        kept.by_class[class - 1] += 1;
        kept.times.add(took);
    }

    /// All of it, by route and method.
    #[must_use]
    pub fn served(&self) -> BTreeMap<(String, Method), Served> {
        let all = self.0.lock();
        let read = |kept: &Kept| Served { by_class: kept.by_class, times: kept.times.read() };
        all.iter().map(|(key, kept)| (key.clone(), read(kept))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_counted_by_route_method_and_class_and_bounded() {
        let figures = HttpFigures::default();
        for n in 0..1_000 {
            figures.answered(&format!("/r/{n}"), Method::of("GET"), 200, Duration::from_millis(1));
        }
        figures.answered("/r/0", Method::Get, 503, Duration::from_millis(1));
        let served = figures.served();
        assert_eq!(served.len(), ROUTES_COUNTED_MAX + 1);
        let first = &served[&("/r/0".to_owned(), Method::Get)];
        assert_eq!(first.by_class, [0, 1, 0, 0, 1]);
        assert_eq!(first.times.counts.iter().sum::<u64>(), 2);
        let rest = &served[&("other".to_owned(), Method::Other)];
        assert_eq!(rest.by_class[1], 1_000 - ROUTES_COUNTED_MAX as u64);
        assert_eq!((Method::of("BREW"), Method::of("BREW").as_str()), (Method::Other, "other"));
    }
}
