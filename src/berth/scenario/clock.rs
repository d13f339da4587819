//! A clock that only scenario steps advance.

use berth_kernel::ports::Clock;
use berth_kernel::time::Now;
use std::sync::atomic::{AtomicU64, Ordering};

/// Wall time at the start: 2027-01-15, later than any default value.
const BEGIN_WALL_MS: u64 = 1_800_000_000_000;
/// Monotonic time at the start: one hour, so that times before the start can be expressed.
const BEGIN_MONO_MS: u64 = 3_600_000;

/// The start of every scenario.
pub(super) const BEGIN: Now = Now { wall_ms: BEGIN_WALL_MS, mono_ms: BEGIN_MONO_MS };

/// A clock that changes only by [`StepClock::advance`].
#[derive(Debug, Default)]
pub(super) struct StepClock {
    passed_ms: AtomicU64,
}

impl StepClock {
    /// Advances the clock.
    pub(super) fn advance(&self, ms: u64) {
        self.passed_ms.fetch_add(ms, Ordering::Relaxed);
    }
}

impl Clock for StepClock {
    fn now(&self) -> Now {
        let passed = self.passed_ms.load(Ordering::Relaxed);
        Now { wall_ms: BEGIN_WALL_MS + passed, mono_ms: BEGIN_MONO_MS + passed }
    }
}
