//! The two clocks of the daemon, and the true time behind both.

use berth_kernel::ids::time::Now;
use berth_kernel::node::ports::Clock;
use std::sync::atomic::{AtomicU64, Ordering};

/// A clock that a test moves.
#[derive(Debug)]
pub(crate) struct Hands {
    true_ms: AtomicU64,
    wall_ms: AtomicU64,
    /// The true time at which this process began; its monotonic clock begins with 0.
    began_ms: AtomicU64,
}

impl Hands {
    pub(crate) fn new() -> Self {
        Self {
            true_ms: AtomicU64::new(1_000_000),
            wall_ms: AtomicU64::new(1_700_000_000_000),
            began_ms: AtomicU64::new(1_000_000),
        }
    }

    /// Milliseconds since the world began; nothing makes it jump.
    pub(crate) fn true_ms(&self) -> u64 {
        self.true_ms.load(Ordering::Relaxed)
    }

    /// The true time of a monotonic moment of this process.
    pub(crate) fn true_of(&self, mono_ms: u64) -> u64 {
        self.began_ms.load(Ordering::Relaxed) + mono_ms
    }

    pub(crate) fn pass(&self, ms: u64) {
        self.true_ms.fetch_add(ms, Ordering::Relaxed);
        self.wall_ms.fetch_add(ms, Ordering::Relaxed);
    }

    pub(crate) fn jump(&self, ms: i64) {
        let wall = self.wall_ms.load(Ordering::Relaxed).saturating_add_signed(ms);
        self.wall_ms.store(wall, Ordering::Relaxed);
    }

    /// A new process: its monotonic clock starts again.
    pub(crate) fn begin(&self) {
        self.began_ms.store(self.true_ms(), Ordering::Relaxed);
    }
}

impl Clock for Hands {
    fn now(&self) -> Now {
        Now {
            wall_ms: self.wall_ms.load(Ordering::Relaxed),
            mono_ms: self.true_ms() - self.began_ms.load(Ordering::Relaxed),
        }
    }
}
