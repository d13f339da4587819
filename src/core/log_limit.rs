//! Limits log lines that others can cause as often as they like: the first of a kind is logged at once, and then one a
//! minute with the number of those that were not.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// Least time between two lines of the same kind.
pub const LOG_INTERVAL: Duration = Duration::from_secs(60);
/// Most kinds that are kept: the faults of 16 policies with four hooks that fail in four ways, or 32 kinds of event of
/// each of eight GPUs. When there are more, all are dropped, and logged again.
const KINDS_MAX: usize = 256;

/// When each kind of line was logged last.
#[derive(Debug)]
pub struct LogLimit<K>(BTreeMap<K, Logged>);

#[derive(Debug)]
struct Logged {
    at: Instant,
    /// How many were not logged since.
    omitted: u64,
}

impl<K> Default for LogLimit<K> {
    fn default() -> Self {
        Self(BTreeMap::new())
    }
}

impl<K: Ord> LogLimit<K> {
    /// The number of omitted lines of this kind, if this one is to be logged; else it is counted.
    pub fn admit(&mut self, kind: K, now: Instant) -> Option<u64> {
        if let Some(logged) = self.0.get_mut(&kind) {
            if now.duration_since(logged.at) < LOG_INTERVAL {
                logged.omitted += 1;
                return None;
            }
            logged.at = now;
            return Some(std::mem::take(&mut logged.omitted));
        }
        if self.0.len() >= KINDS_MAX {
            self.0.clear();
        }
        self.0.insert(kind, Logged { at: now, omitted: 0 });
        Some(0)
    }

    /// The time of the next [`Self::take_omitted`] that has something to return; `None` if nothing was omitted.
    #[must_use]
    pub fn next_omitted(&self) -> Option<Instant> {
        self.0.values().filter(|logged| logged.omitted > 0).map(|logged| logged.at + LOG_INTERVAL).min()
    }

    /// The kinds whose minute is over with the number of their omitted lines, if there are any, so that the end of a
    /// flood is logged as well. Each begins another minute.
    pub fn take_omitted(&mut self, now: Instant) -> Vec<(K, u64)>
    where
        K: Clone,
    {
        self.0.retain(|_, logged| logged.omitted > 0 || now.duration_since(logged.at) < LOG_INTERVAL);
        let due = self.0.iter_mut().filter(|(_, logged)| now.duration_since(logged.at) >= LOG_INTERVAL);
        due.map(|(kind, logged)| {
            logged.at = now;
            (kind.clone(), std::mem::take(&mut logged.omitted))
        })
        .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_logged_at_once_and_then_once_a_minute_with_the_number_of_omitted_ones() {
        let (mut log, begin) = (LogLimit::default(), Instant::now());
        let mut at = |seconds: u64, kind| log.admit(kind, begin + Duration::from_secs(seconds));
        assert_eq!(at(0, ("a", 1)), Some(0));
        assert_eq!(at(1, ("a", 1)), None);
        assert_eq!(at(1, ("a", 2)), Some(0), "another kind");
        assert_eq!(at(59, ("a", 1)), None);
        assert_eq!(at(60, ("a", 1)), Some(2));
        assert_eq!(at(61, ("a", 1)), None);
    }

    #[test]
    fn the_end_of_a_flood_is_logged_once() {
        let (mut log, begin) = (LogLimit::default(), Instant::now());
        let at = |seconds: u64| begin + Duration::from_secs(seconds);
        assert_eq!(log.next_omitted(), None);
        assert_eq!((0..100).filter_map(|_| log.admit("flood", begin)).count(), 1);
        log.admit("once", begin);
        assert_eq!(log.next_omitted(), Some(at(60)));
        assert_eq!(log.take_omitted(at(59)), []);
        assert_eq!(log.take_omitted(at(60)), [("flood", 99)]);
        assert_eq!(log.next_omitted(), None);
        assert_eq!(log.admit("flood", at(61)), None, "another minute has begun");
        assert_eq!(log.take_omitted(at(120)), [("flood", 1)]);
        assert_eq!(log.take_omitted(at(180)), []);
        assert!(log.0.is_empty(), "what no longer comes is not kept");
    }

    #[test]
    fn the_number_of_kept_kinds_is_limited() {
        let (mut log, now) = (LogLimit::default(), Instant::now());
        for n in 0..10_000 {
            log.admit(n, now);
            assert!(log.0.len() <= KINDS_MAX);
        }
    }
}
