//! The system's clocks.

use berth_kernel::ports::Clock;
use berth_kernel::time::Now;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Interval of checks whether the clock is set.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// Waits while the clock shows a time before 1970, as on a node without a battery until its time is set: the libraries of
/// the store and of the admin API panic at such times.
pub(super) async fn wait_until_set() {
    let mut is_logged = false;
    while SystemTime::now() < UNIX_EPOCH {
        if !std::mem::replace(&mut is_logged, true) {
            tracing::error!("the system's clock shows a time before 1970: waiting until it is set");
        }
        tokio::time::sleep(CHECK_INTERVAL).await;
    }
}

/// Wall time, and monotonic time since the clock's creation.
pub struct SystemClock {
    start: Instant,
}

impl Default for SystemClock {
    fn default() -> Self {
        Self { start: Instant::now() }
    }
}

impl Clock for SystemClock {
    fn now(&self) -> Now {
        let ms = |d: Duration| u64::try_from(d.as_millis()).unwrap_or(u64::MAX);
        let wall = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Now { wall_ms: ms(wall), mono_ms: ms(self.start.elapsed()) }
    }
}
