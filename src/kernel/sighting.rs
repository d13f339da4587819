//! What the sources have shown of a live allocation.

use super::allocation::Holder;
use super::time::Now;

/// What the kubelet's sources showed of an allocation when each was last read since the grant.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KubeletReading {
    /// `List` named its pod.
    pub by_list: bool,
    /// The checkpoint named it, or its devices without the id of another allocation.
    pub by_checkpoint: bool,
}

/// What earlier reconcile passes observed of one live allocation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sighting {
    /// When it was granted or read from the store, monotonic milliseconds.
    pub since_mono_ms: u64,
    /// The first pass that missed it since it was last seen, monotonic milliseconds.
    pub missed_mono_ms: Option<u64>,
    /// What the kubelet's sources showed when each was last read; `None` if neither has been read since then.
    pub shown: Option<KubeletReading>,
    /// Whether the kubelet named it, by its id or by its pod, when a source that can do so was last read. Devices
    /// alone do not count: they may be another allocation's.
    pub named: bool,
}

impl Sighting {
    /// The sighting of an allocation that is granted now.
    #[must_use]
    pub fn granted(now: Now) -> Self {
        Self { since_mono_ms: now.mono_ms, ..Self::default() }
    }

    /// The sighting of an allocation that was read from the store. A known holder means that a source showed it
    /// before.
    #[must_use]
    pub fn restored(holder: &Holder, now: Now) -> Self {
        Self { named: !holder.is_unknown(), ..Self::granted(now) }
    }
}
