//! Time as a value: the kernel is told what time it is and never asks.

/// One reading of both clocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Now {
    /// Milliseconds since 1970. May jump; only for records that people read.
    pub wall_ms: u64,
    /// Milliseconds since some fixed moment of this process. Never goes back; every interval is
    /// measured with it, and it starts anew with the process.
    pub mono_ms: u64,
}

impl Now {
    /// Whether at least `wait_ms` have passed since the monotonic moment `since_ms`.
    #[must_use]
    pub fn passed(self, since_ms: u64, wait_ms: u64) -> bool {
        self.mono_ms >= since_ms.saturating_add(wait_ms)
    }
}

/// The waits of the kernel's rules. The defaults are the product's; tests shorten them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Timing {
    /// How long an id that is no longer offered stays listed Unhealthy and unheld before it leaves
    /// the list (I10).
    pub retire_ms: u64,
    /// How long an Allocate that named an id keeps that id listed, and how long a device may be
    /// granted again on a GPU that grants nothing new (I4, I10).
    pub named_ms: u64,
    /// How far apart the two rounds that end an allocation are at least.
    pub rounds_apart_ms: u64,
    /// No allocation ends sooner than this after kubelet.sock was last created.
    pub kubelet_settle_ms: u64,
    /// No allocation ends sooner than this after our reply.
    pub reply_settle_ms: u64,
    /// How long an unhealthy reading keeps a GPU unhealthy after the last bad reading, where
    /// nobody said otherwise.
    pub quiet_ms: u64,
    /// How far two looks must lie apart that find a GPU empty, and all between them, before it counts
    /// as drained.
    pub drained_ms: u64,
    /// The same for a GPU that cannot be asked for its processes: longer than a pod is given to die.
    pub drained_unseen_ms: u64,
    /// How long a process must be on a GPU without an allocation before it is told as a bypass: a holder
    /// is learned up to seconds after its container starts, and a process may outlive its pod a little.
    pub bypass_ms: u64,
    /// How long after a pod was asked to leave it is asked again, if it still does not: as kubectl
    /// drain waits.
    pub evict_again_ms: u64,
    /// Denials of one resource in this window count together.
    pub breaker_window_ms: u64,
    /// The breaker's first pause; doubles up to `breaker_pause_max_ms`.
    pub breaker_pause_ms: u64,
    /// The breaker's longest pause.
    pub breaker_pause_max_ms: u64,
}

impl Default for Timing {
    fn default() -> Self {
        Self {
            retire_ms: 60_000,
            named_ms: 30_000,
            rounds_apart_ms: 5_000,
            kubelet_settle_ms: 30_000,
            reply_settle_ms: 30_000,
            quiet_ms: 300_000,
            drained_ms: 10_000,
            drained_unseen_ms: 60_000,
            bypass_ms: 10_000,
            evict_again_ms: 5_000,
            breaker_window_ms: 60_000,
            breaker_pause_ms: 10_000,
            breaker_pause_max_ms: 300_000,
        }
    }
}
