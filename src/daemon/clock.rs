//! The system's clocks behind the port.

use crate::kernel::time::Now;
use crate::ports::Clock;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

/// Wall time and a monotonic time that begins with the process.
pub struct SystemClock {
    began: Instant,
}

impl Default for SystemClock {
    fn default() -> Self {
        Self { began: Instant::now() }
    }
}

impl Clock for SystemClock {
    fn now(&self) -> Now {
        let ms = |d: std::time::Duration| u64::try_from(d.as_millis()).unwrap_or(u64::MAX);
        let wall = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Now { wall_ms: ms(wall), mono_ms: ms(self.began.elapsed()) }
    }
}
