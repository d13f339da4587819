//! The devices granted to one container, and what became of them.

use super::names::{AllocationId, DeviceId, DeviceKey, Resource};

/// Most devices of one allocation: every device of the largest node (16 GPUs x 128).
pub const DEVICES_PER_ALLOCATION_MAX: usize = 2048;
/// Most live allocations of a node. The kubelet runs at most a few hundred pods; 16 GPUs x 128
/// devices can be held by at most 2048 containers, twice over while overlaps are settled. Grants end
/// older records before it is reached ([`super::supersede::CROWDED_ALLOCATIONS`]).
pub const LIVE_ALLOCATIONS_MAX: usize = 4096;

/// Who decided what was taken over rather than granted.
pub const ADOPTED: &str = "adopted";

/// One grant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Allocation {
    /// Its name for ever.
    pub id: AllocationId,
    /// The resource asked for.
    pub resource: Resource,
    /// The devices, sorted, each once.
    pub devices: Vec<DeviceId>,
    /// When it was granted, milliseconds since 1970.
    pub granted_wall_ms: u64,
    /// Who holds it, as far as the sources have shown.
    pub holder: Holder,
    /// A later grant named some of its devices and no round has yet shown who still lives (I7).
    pub overlapped: bool,
    /// The decision behind it.
    pub decision: Decision,
    /// Set once it has ended.
    pub ended: Option<End>,
}

impl Allocation {
    /// The kernel's keys of its devices.
    pub fn keys(&self) -> impl Iterator<Item = DeviceKey> + '_ {
        self.devices.iter().map(|id| DeviceKey { resource: self.resource.clone(), id: id.clone() })
    }
}

/// Who holds an allocation. Every field is filled by the first source that shows it: the
/// checkpoint knows UIDs, the kubelet's `List` knows names.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Holder {
    /// The pod's namespace.
    pub namespace: Option<String>,
    /// The pod's name.
    pub pod: Option<String>,
    /// The pod's UID.
    pub pod_uid: Option<String>,
    /// The container's name.
    pub container: Option<String>,
}

impl Holder {
    /// Whether no source has shown anything yet.
    #[must_use]
    pub fn is_unknown(&self) -> bool {
        *self == Self::default()
    }

    /// Takes what `other` knows and this one does not. Answers whether anything was new.
    pub fn learn(&mut self, other: &Self) -> bool {
        let mut new = false;
        let mut fill = |mine: &mut Option<String>, theirs: &Option<String>| {
            if mine.is_none() && theirs.is_some() {
                mine.clone_from(theirs);
                new = true;
            }
        };
        fill(&mut self.namespace, &other.namespace);
        fill(&mut self.pod, &other.pod);
        fill(&mut self.pod_uid, &other.pod_uid);
        fill(&mut self.container, &other.container);
        new
    }
}

/// Why and on what terms an allocation was granted.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Decision {
    /// Stack entries that allowed it, as `name@digest12`, or `baseline`, or `adopted`.
    pub by: Vec<String>,
    /// In words, from the policies.
    pub reason: String,
    /// Environment that policies added.
    pub environment: Vec<(String, String)>,
    /// What the container is told it may use.
    pub limits: Limits,
}

/// What a container is told it may use of each part.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Limits {
    /// MiB of memory.
    pub memory_mib: Option<u64>,
    /// Percent of compute.
    pub compute_percent: Option<u32>,
}

impl Limits {
    /// The stricter of both, counter by counter.
    #[must_use]
    pub fn min(self, other: Self) -> Self {
        fn least<T: Ord>(a: Option<T>, b: Option<T>) -> Option<T> {
            match (a, b) {
                (Some(a), Some(b)) => Some(a.min(b)),
                (a, b) => a.or(b),
            }
        }
        Self {
            memory_mib: least(self.memory_mib, other.memory_mib),
            compute_percent: least(self.compute_percent, other.compute_percent),
        }
    }
}

/// How an allocation ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct End {
    /// By which rule.
    pub reason: EndReason,
    /// When, milliseconds since 1970.
    pub wall_ms: u64,
}

/// The rules by which an allocation ends. There is no other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EndReason {
    /// Two rounds agreed that its pod is gone.
    Released,
    /// Two rounds agreed that no pod ever took it: the kubelet dropped our answer.
    NeverStarted,
    /// Two rounds agreed that its pod is gone, by the word of who knows all pods: the kubelet's
    /// checkpoint could not be read, and may show it once more when it can.
    PodGone,
    /// A later allocation of the same devices lives, and this one is nowhere or older than the newest few
    /// records of a device ([`super::supersede`]).
    Superseded,
    /// An operator said so.
    Operator,
}

impl EndReason {
    /// As the API writes it.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Released => "released",
            Self::NeverStarted => "neverStarted",
            Self::PodGone => "podGone",
            Self::Superseded => "superseded",
            Self::Operator => "operator",
        }
    }
}
