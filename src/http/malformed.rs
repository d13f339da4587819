//! Logs connections that sent no HTTP. Every client can open them, so they are counted and not logged one by one.

use std::time::{Duration, Instant};

/// Least time between two lines.
const EVERY: Duration = Duration::from_secs(60);

/// The number that was logged so far.
#[derive(Debug, Default)]
pub(super) struct Malformed {
    logged: u64,
    at: Option<Instant>,
}

impl Malformed {
    /// Logs how many came since the last line; `all` is their total.
    pub(super) fn log(&mut self, all: u64) {
        if let Some(came) = self.due(all, Instant::now()) {
            tracing::warn!(connections = came, "closed connections to the admin API that did not send HTTP");
        }
    }

    fn due(&mut self, all: u64, now: Instant) -> Option<u64> {
        let came = all.saturating_sub(self.logged);
        if came == 0 || self.at.is_some_and(|at| now.duration_since(at) < EVERY) {
            return None;
        }
        (self.logged, self.at) = (all, Some(now));
        Some(came)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_is_one_line_a_minute_and_all_are_counted() {
        let (mut malformed, now) = (Malformed::default(), Instant::now());
        assert_eq!(malformed.due(0, now), None);
        assert_eq!(malformed.due(1, now), Some(1));
        assert_eq!(malformed.due(5_000, now + EVERY / 2), None);
        assert_eq!(malformed.due(5_001, now + EVERY), Some(5_000));
        assert_eq!(malformed.due(5_001, now + EVERY * 3), None);
    }
}
