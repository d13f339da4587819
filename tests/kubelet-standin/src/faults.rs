//! Faults that tests can switch on while the stand-in runs.

use crate::checkpoint::CheckpointMode;
use std::time::Duration;

/// Faults of the kubelet. All are off by default.
#[derive(Clone, Debug, Default)]
pub struct Faults {
    /// The delay of each Register.
    pub register_delay: Duration,
    /// How many of the next Registers are refused with UNAVAILABLE, before any other
    /// check.
    pub refuse_registrations: u32,
    /// Register succeeds, but ListAndWatch is not called.
    pub never_watch: bool,
    /// The delay of ListAndWatch.
    pub watch_delay: Duration,
    /// `List` does not answer while this is set.
    pub list_hangs: bool,
    /// `List` fails with INTERNAL.
    pub list_fails: bool,
    /// Each increment ends every WatchPods stream with RESOURCE_EXHAUSTED.
    pub pods_watches_dropped: u32,
    /// Events of WatchPods are lost silently, except those of the first list.
    pub pods_events_lost: bool,
    /// How the checkpoint file is written.
    pub checkpoint: CheckpointMode,
}
