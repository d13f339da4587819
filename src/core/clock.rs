//! The system's clock.

use berth_kernel::ids::time::Now;
use berth_kernel::node::ports::Clock;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Wall time, and monotonic time since the clock's creation.
#[derive(Debug)]
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
