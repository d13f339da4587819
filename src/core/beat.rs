//! The common times of periodic tasks. Tasks of one interval run at the same moments, so that the processor wakes up
//! once for all of them.

use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// The next of the moments that are a multiple of `interval` after the first call of this process. Moments of an
/// interval are also moments of each interval that divides it.
#[must_use]
pub fn next_beat(interval: Duration) -> tokio::time::Instant {
    static ORIGIN: OnceLock<Instant> = OnceLock::new();
    let (origin, now) = (*ORIGIN.get_or_init(Instant::now), Instant::now());
    tokio::time::Instant::from_std(origin + next_multiple(now.saturating_duration_since(origin), interval))
}

/// The smallest multiple of `interval` above `elapsed`.
fn next_multiple(elapsed: Duration, interval: Duration) -> Duration {
    let interval = interval.max(Duration::from_millis(1));
    let nanos = elapsed.as_nanos() / interval.as_nanos() * interval.as_nanos();
    let before = Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX));
    before.saturating_add(interval)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn intervals_that_divide_each_other_share_moments() {
        let ms = Duration::from_millis;
        assert_eq!(next_multiple(ms(0), ms(2_000)), ms(2_000));
        assert_eq!(next_multiple(ms(1_999), ms(2_000)), ms(2_000));
        assert_eq!(next_multiple(ms(2_000), ms(2_000)), ms(4_000));
        assert_eq!(next_multiple(ms(8_001), ms(10_000)), ms(10_000));
        assert_eq!(next_multiple(ms(8_001), ms(2_000)), ms(10_000));
        assert_eq!(next_multiple(ms(7), Duration::ZERO), ms(8));
        let (soon, later) = (next_beat(ms(2_000)), next_beat(ms(10_000)));
        assert!(soon <= later);
        assert!(soon > tokio::time::Instant::now());
    }
}
