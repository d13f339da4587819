//! Time that passes when it is told to.

use berth_kernel::ports::Clock;
use berth_kernel::time::Now;
use std::sync::atomic::{AtomicU64, Ordering};

/// Wall time of the first moment: 2027-01-15, so that nothing is as old as a default.
const BEGIN_WALL_MS: u64 = 1_800_000_000_000;
/// Monotonic time of the first moment: an hour, so that waits can lie in the past.
const BEGIN_MONO_MS: u64 = 3_600_000;

/// The first moment of every scenario.
pub(super) const BEGIN: Now = Now { wall_ms: BEGIN_WALL_MS, mono_ms: BEGIN_MONO_MS };

/// A clock that stands still between steps.
#[derive(Debug, Default)]
pub(super) struct StepClock {
    passed_ms: AtomicU64,
}

impl StepClock {
    /// Lets time pass.
    pub(super) fn pass(&self, ms: u64) {
        self.passed_ms.fetch_add(ms, Ordering::Relaxed);
    }
}

impl Clock for StepClock {
    fn now(&self) -> Now {
        let passed = self.passed_ms.load(Ordering::Relaxed);
        Now { wall_ms: BEGIN_WALL_MS + passed, mono_ms: BEGIN_MONO_MS + passed }
    }
}
