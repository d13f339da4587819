//! What can be made to go wrong, while the stand-in runs.

use crate::checkpoint::CheckpointMode;
use std::time::Duration;

/// Switches of misbehaviour. All off is a kubelet on a good day.
#[derive(Clone, Debug, Default)]
pub struct Faults {
    /// Each Register is answered this much later.
    pub register_delay: Duration,
    /// How many of the next Registers are refused, with UNAVAILABLE, before
    /// anything else is looked at.
    pub refuse_registrations: u32,
    /// Register succeeds, but ListAndWatch is not opened.
    pub never_watch: bool,
    /// ListAndWatch is opened this much later.
    pub watch_delay: Duration,
    /// `List` does not answer until this is switched off again.
    pub list_hangs: bool,
    /// `List` answers INTERNAL.
    pub list_fails: bool,
    /// Whenever this grows, every WatchPods stream ends with RESOURCE_EXHAUSTED.
    pub pods_watches_dropped: u32,
    /// Events of WatchPods are lost without a word, those of the first list excepted.
    pub pods_events_lost: bool,
    /// How the checkpoint file is written.
    pub checkpoint: CheckpointMode,
}
