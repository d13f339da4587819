//! Waits between requests to the API server. All daemons of a cluster are one user there, and so one flow of API
//! Priority and Fairness: with waits of one length thousands of them would send requests at one moment, and most would
//! be answered 429. So every wait is drawn at random between two bounds.

use super::connection::Connection;
use parking_lot::Mutex;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;

/// The longest wait before a failed request to the API server is sent again.
pub const BACKOFF_MAX: Duration = Duration::from_secs(30);
/// The shortest `timeoutSeconds` of a watch: as in client-go's reflectors, 5 to 10 minutes (client-go,
/// `tools/cache/reflector.go`: `minWatchTimeout`).
const WATCH_MIN: Duration = Duration::from_secs(300);
/// The longest `timeoutSeconds` of a watch.
const WATCH_MAX: Duration = Duration::from_secs(600);
/// The mean time between two writes of an unchanged node condition, between two checks of the node's labels, and
/// between two attempts to watch the node without the right to. Each costs a request, and the API server sends the
/// write to every watcher of nodes.
pub const REFRESH_MEAN: Duration = Duration::from_secs(900);
/// Upper limit of the wait that a `Retry-After` of the API server, or of a proxy in front of it, causes.
const RETRY_AFTER_MAX: Duration = Duration::from_secs(120);

/// The mean wait after an answer that a kind or object is not known (404) or a right is missing (403): neither changes within
/// seconds.
const MISSING_WAIT: Duration = Duration::from_secs(60);

/// A uniformly distributed random number.
pub fn random() -> u32 {
    // Without the kernel's randomness: the middle of every range.
    getrandom::u32().unwrap_or(u32::MAX / 2)
}

/// Maps `random` uniformly to the range from `from` to `to`.
fn between(from: Duration, to: Duration, random: u32) -> Duration {
    from + to.saturating_sub(from).mul_f64(f64::from(random) / f64::from(u32::MAX))
}

/// The `timeoutSeconds` of this daemon's watches.
pub fn watch(random: u32) -> Duration {
    Duration::from_secs(between(WATCH_MIN, WATCH_MAX, random).as_secs())
}

/// `mean` plus or minus up to a fifth.
pub fn jittered(mean: Duration, random: u32) -> Duration {
    between(mean.mul_f64(0.8), mean.mul_f64(1.2), random)
}

/// The wait after an open watch was lost: from zero to `longest`. An API server that restarts ends all watches at one
/// moment.
pub fn after_loss(longest: Duration, random: u32) -> Duration {
    between(Duration::ZERO, longest, random)
}

/// Waits that double up to [`BACKOFF_MAX`], each drawn from its upper half.
#[derive(Clone, Copy, Debug)]
pub struct Backoff {
    first: Duration,
    next: Duration,
}

impl Backoff {
    /// Begins with `first`.
    pub fn new(first: Duration) -> Self {
        Self { first, next: first }
    }

    /// To be called after a success: the next wait is the first one again.
    pub fn reset(&mut self) {
        self.next = self.first;
    }

    /// How long to wait now.
    pub fn next(&mut self, random: u32) -> Duration {
        let wait = self.next;
        self.next = (wait * 2).min(BACKOFF_MAX);
        between(wait / 2, wait, random)
    }
}

/// When a request that was answered with this code, or with none (0), is sent again.
pub fn retry_at(connection: &Connection, backoff: &mut Backoff, code: u16) -> Instant {
    let wait = match code {
        403 | 404 => jittered(MISSING_WAIT, random()),
        _ => backoff.next(random()),
    };
    let now = Instant::now();
    now + connection.retry_after.delay(wait, now)
}

/// The end of the wait that the API server requested from its clients (`Retry-After`). Shared by all tasks that send
/// requests.
#[derive(Clone, Debug, Default)]
pub struct RetryAfter(Arc<Mutex<Option<Instant>>>);

impl RetryAfter {
    /// Records the `Retry-After` of a 429 or 503 with a number of seconds (RFC 9110, 10.2.3; the API server sends no
    /// dates). The later of two moments counts.
    pub fn record(&self, status: u16, retry_after: Option<&str>, now: Instant) {
        if !matches!(status, 429 | 503) {
            return;
        }
        let Some(seconds) = retry_after.and_then(|text| text.trim().parse().ok()) else { return };
        let until = now + Duration::from_secs(seconds).min(RETRY_AFTER_MAX);
        let mut known = self.0.lock();
        *known = (*known).max(Some(until));
    }

    /// The time until the recorded `Retry-After` has passed, plus `wait`.
    pub fn delay(&self, wait: Duration, now: Instant) -> Duration {
        let until = *self.0.lock();
        until.map_or(Duration::ZERO, |until| until.saturating_duration_since(now)) + wait
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RANDOM: [u32; 5] = [0, 1, u32::MAX / 3, u32::MAX - 1, u32::MAX];

    fn seconds(n: u64) -> Duration {
        Duration::from_secs(n)
    }

    /// The least and the greatest value of a wait.
    fn bounds(wait: impl Fn(u32) -> Duration) -> (Duration, Duration) {
        let all: Vec<_> = RANDOM.iter().map(|random| wait(*random)).collect();
        assert!(all.is_sorted(), "{all:?}");
        (all[0], all[4])
    }

    #[test]
    fn every_wait_is_drawn_between_its_bounds() {
        assert_eq!(bounds(watch), (seconds(300), seconds(600)));
        assert!(
            RANDOM.iter().all(|random| watch(*random).subsec_nanos() == 0),
            "timeoutSeconds is a whole number"
        );
        assert_eq!(bounds(|random| jittered(REFRESH_MEAN, random)), (seconds(720), seconds(1080)));
        assert_eq!(bounds(|random| after_loss(seconds(10), random)), (Duration::ZERO, seconds(10)));
    }

    #[test]
    fn waits_double_to_half_a_minute_and_are_drawn_from_their_upper_half() {
        let waits = |random| {
            let mut backoff = Backoff::new(seconds(1));
            std::array::from_fn::<_, 7, _>(|_| backoff.next(random).as_millis())
        };
        assert_eq!(waits(u32::MAX), [1_000, 2_000, 4_000, 8_000, 16_000, 30_000, 30_000]);
        assert_eq!(waits(0), [500, 1_000, 2_000, 4_000, 8_000, 15_000, 15_000]);
        let mut backoff = Backoff::new(seconds(1));
        for _ in 0..9 {
            backoff.next(0);
        }
        backoff.reset();
        assert_eq!(backoff.next(u32::MAX), seconds(1));
    }

    #[test]
    fn two_daemons_do_not_draw_the_same() {
        let drawn: std::collections::BTreeSet<u32> = (0..64).map(|_| random()).collect();
        assert!(drawn.len() > 60, "{drawn:?}");
    }

    #[test]
    fn a_retry_after_is_waited_before_the_wait_itself() {
        let (now, retry_after) = (Instant::now(), RetryAfter::default());
        assert_eq!(retry_after.delay(seconds(2), now), seconds(2));
        for (status, header) in
            [(200, Some("9")), (500, Some("9")), (429, None), (429, Some("soon")), (429, Some("-1"))]
        {
            retry_after.record(status, header, now);
        }
        assert_eq!(
            retry_after.delay(seconds(2), now),
            seconds(2),
            "only 429 and 503 with a number of seconds"
        );
        retry_after.record(429, Some("5"), now);
        retry_after.record(503, Some(" 3 "), now);
        assert_eq!(retry_after.delay(seconds(2), now), seconds(7), "the later moment counts");
        assert_eq!(retry_after.delay(seconds(2), now + seconds(4)), seconds(3));
        assert_eq!(retry_after.delay(seconds(2), now + seconds(60)), seconds(2));
        retry_after.record(429, Some("99999999"), now);
        assert_eq!(retry_after.delay(Duration::ZERO, now), RETRY_AFTER_MAX);
    }

    /// Requests of idle daemons, of the kinds that `tests/it/cluster/load.rs` counts: one for each watch that is opened
    /// again and one for each write of the condition; with node labels, one for each check; where a label chooses the
    /// configuration, one for each watch of the node, which lasts twice as long, or without the right to watch two for
    /// each attempt.
    #[test]
    fn five_thousand_idle_daemons_cost_seventeen_requests_a_second() {
        let nodes = 5_000.0;
        // Each daemon keeps the length that it drew: the mean rate is that of 1/t over [300, 600], ln(2)/300.
        let (least, most) = (WATCH_MIN.as_secs_f64(), WATCH_MAX.as_secs_f64());
        let watches = nodes * (most / least).ln() / (most - least);
        let refreshes = nodes / REFRESH_MEAN.as_secs_f64();
        assert!((11.5..11.6).contains(&watches), "{watches}");
        assert!((5.5..5.6).contains(&refreshes), "{refreshes}");
        let sum = watches + refreshes;
        assert!((17.0..17.2).contains(&sum), "{sum} requests a second; {} with labels", sum + refreshes);
        let (followed, without_right) = (sum + watches / 2.0, sum + 2.0 * refreshes);
        assert!((22.8..23.0).contains(&followed), "{followed} requests a second with a followed label");
        assert!((28.1..28.3).contains(&without_right), "{without_right} requests a second without the right");
    }
}
