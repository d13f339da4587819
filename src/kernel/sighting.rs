//! What the sources have shown of a live allocation.

use super::allocation::Holder;
use super::reconcile::KubeletAge;
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
    /// Whether this process granted it.
    pub is_granted_here: bool,
    /// The first pass that missed it since it was last seen, monotonic milliseconds.
    pub missed_mono_ms: Option<u64>,
    /// What the kubelet's sources showed when each was last read; `None` if neither has been read since then.
    pub shown: Option<KubeletReading>,
    /// Whether the kubelet named it, by its id or by its pod, when a source that can do so was last read. Devices
    /// alone do not count: they may be another allocation's.
    pub named: bool,
    /// The creation time, milliseconds since 1970, of the kubelet.sock under which the checkpoint last contained its
    /// entry, or of a later kubelet.sock whose kubelet restored a checkpoint that contained it.
    pub recorded_under_wall_ms: Option<u64>,
    /// When the newest pass began, monotonic milliseconds, whose fresh checkpoint contained its entry while `List`
    /// showed its devices in no container: it is of an init container, whose devices the kubelet requests again for the
    /// next container of the same pod.
    pub init_container_mono_ms: Option<u64>,
    /// Whether the newest fresh checkpoint contained one of its devices under another pod as well.
    pub contested: bool,
}

impl Sighting {
    /// The sighting of an allocation that is granted now.
    #[must_use]
    pub fn granted(now: Now) -> Self {
        Self { since_mono_ms: now.mono_ms, is_granted_here: true, ..Self::default() }
    }

    /// The sighting of an allocation that was read from the store. A known holder means that a source showed it
    /// before.
    #[must_use]
    pub fn restored(holder: &Holder, now: Now) -> Self {
        Self { since_mono_ms: now.mono_ms, named: !holder.is_unknown(), ..Self::default() }
    }

    /// Whether this run of the kubelet requested it.
    #[must_use]
    pub fn is_requested_by(&self, kubelet: KubeletAge) -> bool {
        self.is_granted_here && self.since_mono_ms > kubelet.created_mono_ms
    }

    /// Whether this run of the kubelet requested it or has had its entry, so that a missing entry means that its pod has
    /// ended: nothing else removes one from the kubelet's memory.
    #[must_use]
    pub fn is_of_kubelet(&self, granted_wall_ms: u64, kubelet: KubeletAge) -> bool {
        self.is_requested_by(kubelet)
            || self.recorded_under_wall_ms == Some(kubelet.created_wall_ms)
            // For an allocation that an earlier process of the daemon granted, the stored time of the grant decides.
            || granted_wall_ms > kubelet.created_wall_ms
    }
}
