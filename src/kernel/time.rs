//! Time as a value: callers pass the time, and the kernel reads no clock.

/// One reading of both clocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Now {
    /// Milliseconds since 1970. May jump; only for times that people read.
    pub wall_ms: u64,
    /// Milliseconds since a fixed time of this process, monotonic. All intervals are measured with it; it
    /// restarts with the process.
    pub mono_ms: u64,
}

impl Now {
    /// Whether at least `wait_ms` have passed since the monotonic time `since_ms`.
    #[must_use]
    pub fn passed(self, since_ms: u64, wait_ms: u64) -> bool {
        self.mono_ms >= since_ms.saturating_add(wait_ms)
    }
}

/// The intervals of the kernel's rules. The program uses the defaults; tests shorten them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Timing {
    /// How long an id that is neither offered nor held stays listed as Unhealthy before it leaves the list
    /// (I10).
    pub retire_ms: u64,
    /// How long an id stays listed after an Allocate named it (I10).
    pub named_ms: u64,
    /// Least time between the two reconcile passes that end an allocation.
    pub rounds_apart_ms: u64,
    /// Least time between the creation of kubelet.sock and the end of an allocation.
    pub kubelet_settle_ms: u64,
    /// Least time between our reply and the end of an allocation.
    pub reply_settle_ms: u64,
    /// How long a GPU stays unhealthy after its last bad reading, unless the triage gives another time.
    pub quiet_ms: u64,
    /// How long all scans must find a GPU empty before it counts as drained.
    pub drained_ms: u64,
    /// The same for a GPU whose processes are not visible: longer than a pod's grace period.
    pub drained_unseen_ms: u64,
    /// How long a process must be on a GPU without an allocation before it is reported as a bypass: a
    /// holder is learned up to seconds after its container starts, and a process may outlive its pod.
    pub bypass_ms: u64,
    /// Time after which the eviction of a pod that still runs is requested again: that of `kubectl drain`.
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
