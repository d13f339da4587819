//! What the sources have shown of a live allocation, and why allocations cannot end at present.

use crate::evidence::kubelet_view::KubeletAge;
use crate::evidence::pods::PodsSource;
use crate::grants::allocation::Holder;
use crate::ids::time::Now;
use std::fmt;
use std::sync::Arc;

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
    /// The run of the guard that last saw its container, with its cgroup if it runs.
    pub seen_by_guard_run: Option<u64>,
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

    /// Whether this run of the kubelet requested it or has had its entry, so that a missing entry means that its pod
    /// has ended: nothing else removes one from the kubelet's memory.
    #[must_use]
    pub fn is_of_kubelet(&self, granted_wall_ms: u64, kubelet: KubeletAge) -> bool {
        self.is_requested_by(kubelet)
            || self.recorded_under_wall_ms == Some(kubelet.created_wall_ms)
            // For an allocation that an earlier process of the daemon granted, the stored time of the grant decides.
            || granted_wall_ms > kubelet.created_wall_ms
    }
}

/// Most process ids in one message; further ones are counted.
const PIDS_SHOWN_MAX: usize = 8;

/// A source that shows the pod running, or the reason why no source can rule it out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RunningSource {
    /// No reconcile pass has read the kubelet's List and checkpoint since the grant, or since the daemon started.
    NotRead,
    /// It was granted, or read from the store, so recently that a container may be starting that no source shows yet.
    JustGranted {
        /// Time since then, milliseconds.
        age_ms: u64,
    },
    /// The kubelet's `List`.
    List,
    /// The kubelet's checkpoint.
    Checkpoint,
    /// The API server or the kubelet's Pods API shows the pod alive.
    Pods(PodsSource),
    /// The guard shows its container: the container runtime has it, or its cgroup has processes.
    Runtime,
    /// Its pod has processes with these ids on its GPUs.
    Processes(Vec<u32>),
}

impl fmt::Display for RunningSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotRead => write!(
                f,
                "the kubelet's checkpoint, or List where its pod is known, has not been read since it was granted or read from the store"
            ),
            Self::JustGranted { age_ms } => write!(
                f,
                "it was granted or read from the store {} s ago, and its container may be starting",
                age_ms / 1000
            ),
            Self::List => write!(f, "the kubelet's pod resources API (List) shows its pod"),
            Self::Checkpoint => write!(f, "the kubelet's checkpoint shows it"),
            Self::Pods(PodsSource::ApiServer) => write!(f, "the API server shows its pod"),
            Self::Pods(PodsSource::Kubelet) => write!(f, "the kubelet's Pods API shows its pod"),
            Self::Runtime => write!(f, "the guard shows that its container exists"),
            Self::Processes(pids) => {
                let shown: Vec<_> = pids.iter().take(PIDS_SHOWN_MAX).map(ToString::to_string).collect();
                write!(f, "processes of its pod are on the GPU: {}", shown.join(" "))?;
                match pids.len().saturating_sub(shown.len()) {
                    0 => Ok(()),
                    more => write!(f, " and {more} more"),
                }
            }
        }
    }
}

/// Why allocations of finished pods cannot end at present: a required source cannot be read, or the sources contradict
/// each other. An operator is warned of it, since the GPUs of such pods stay allocated.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockedEnds {
    /// Since when, milliseconds since 1970.
    pub since_wall_ms: u64,
    /// The missing evidence, and why it is missing.
    pub cause: Arc<str>,
    /// Number of live allocations that would not end if their pods did.
    pub allocations: usize,
}

impl BlockedEnds {
    /// One sentence for people; `since` is the formatted time.
    #[must_use]
    pub fn describe(&self, since: &str) -> String {
        let Self { cause, allocations, .. } = self;
        let count = if *allocations == 1 { "1 allocation" } else { &format!("{allocations} allocations") };
        format!("since {since}: {cause}; {count} cannot end, so the GPUs of finished pods stay allocated")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_names_eight_processes_and_counts_the_others() {
        let message = RunningSource::Processes((1..=20).collect()).to_string();
        assert!(message.ends_with(": 1 2 3 4 5 6 7 8 and 12 more"), "{message}");
    }
}
