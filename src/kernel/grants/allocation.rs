//! The devices granted to one container, and how the grant ended.

use crate::grants::claim::{ClaimPod, ClaimRequest};
use crate::ids::names::{AllocationId, DeviceId, PartId, Resource};
use crate::policy::decider::Decider;
use crate::sharing::via::KubeletApi;
use std::collections::BTreeSet;
use std::sync::Arc;

/// Most devices of one allocation: every device of the largest node (16 GPUs x 128).
pub const DEVICES_PER_ALLOCATION_MAX: usize = 2048;
/// Most live allocations of a node. The kubelet runs at most a few hundred pods; 16 GPUs x 128
/// devices can be held by at most 2048 containers, and twice that while overlaps are unresolved. Grants
/// end older records before the limit is reached ([`crate::grants::allocate::CROWDED_ALLOCATIONS`]).
pub const LIVE_ALLOCATIONS_MAX: usize = 4096;

/// One grant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Allocation {
    /// Its id, which is never used again.
    pub id: AllocationId,
    /// The requested resource.
    pub resource: Resource,
    /// The devices, sorted, each once.
    pub devices: Vec<DeviceId>,
    /// When it was granted, milliseconds since 1970.
    pub granted_wall_ms: u64,
    /// The API of the kubelet through which it was granted.
    pub origin: GrantOrigin,
    /// The pod and container that hold it, as far as the sources have shown; of a claim, the first pod that it is reserved
    /// for.
    pub holder: Holder,
    /// A later grant includes some of its devices, and no reconcile pass has yet shown which of the two
    /// is still in use (I7).
    pub overlapped: bool,
    /// The decision behind it.
    pub decision: Decision,
    /// How and when it ended; `None` while it is live.
    pub ended: Option<End>,
}

impl Allocation {
    /// The parts that its devices are on, sorted, each once.
    #[must_use]
    pub fn parts(&self) -> BTreeSet<&PartId> {
        self.devices.iter().map(|id| &id.part).collect()
    }

    /// The UIDs of the pods that hold it: those of its claim that are recorded, or else the one that the sources have shown.
    pub fn pod_uids(&self) -> impl Iterator<Item = &str> {
        let of_claim = self.origin.claim().into_iter().flat_map(|request| &request.pods);
        let shown = self.holder.pod_uid.as_deref().filter(|_| self.origin.claim().is_none());
        of_claim.map(|pod| pod.uid.as_str()).chain(shown)
    }

    /// The pods of its claim that are recorded; without such pods, the one holder that the sources have shown.
    pub fn holders(&self) -> impl Iterator<Item = Holder> {
        let of_claim = self.origin.holders();
        let shown = of_claim.is_empty().then(|| self.holder.clone());
        of_claim.into_iter().chain(shown)
    }

    /// Whether it is of this claim.
    #[must_use]
    pub fn is_of_claim(&self, uid: &str) -> bool {
        self.origin.claim().is_some_and(|request| request.claim.uid == uid)
    }
}

/// The API of the kubelet through which an allocation was granted. Each has its own evidence of when the allocation ends.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum GrantOrigin {
    /// The device plugin API: Allocate, for one container.
    #[default]
    DevicePlugin,
    /// The DRA API: NodePrepareResources, for the containers that use a request of a claim.
    Claim(Arc<ClaimRequest>),
}

impl GrantOrigin {
    /// The claim's request; `None` for a grant of the device plugin.
    #[must_use]
    pub fn claim(&self) -> Option<&ClaimRequest> {
        match self {
            Self::DevicePlugin => None,
            Self::Claim(request) => Some(request),
        }
    }

    /// The API.
    #[must_use]
    pub fn api(&self) -> KubeletApi {
        match self {
            Self::DevicePlugin => KubeletApi::DevicePlugin,
            Self::Claim(_) => KubeletApi::Dra,
        }
    }

    /// The holder that it names: the first pod of a claim. That of a grant of the device plugin is learned later.
    #[must_use]
    pub fn holder(&self) -> Holder {
        self.holders().into_iter().next().unwrap_or_default()
    }

    /// The pods of a claim that are recorded.
    fn holders(&self) -> Vec<Holder> {
        let Some(ClaimRequest { claim, pods, .. }) = self.claim() else { return Vec::new() };
        let holder = |pod: &ClaimPod| Holder {
            namespace: Some(claim.namespace.clone()),
            pod: Some(pod.name.clone()),
            pod_uid: Some(pod.uid.clone()),
            container: None,
        };
        pods.iter().map(holder).collect()
    }
}

/// The container that holds an allocation. Each field is set by the first source that shows it: the
/// checkpoint has UIDs, the kubelet's `List` has names.
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
    /// Whether no source has shown any field yet.
    #[must_use]
    pub fn is_unknown(&self) -> bool {
        *self == Self::default()
    }

    /// Takes over the fields that `other` has, in place of those that it corrects. Returns whether anything changed.
    pub fn update_from(&mut self, other: &Self) -> bool {
        let before = self.clone();
        let take = |mine: &mut Option<String>, theirs: &Option<String>| {
            if theirs.is_some() {
                mine.clone_from(theirs);
            }
        };
        take(&mut self.namespace, &other.namespace);
        take(&mut self.pod, &other.pod);
        take(&mut self.pod_uid, &other.pod_uid);
        take(&mut self.container, &other.container);
        *self != before
    }
}

/// Who granted an allocation, why, and on which terms.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Decision {
    /// The policies that allowed it, or the baseline, or that it was adopted.
    pub by: Vec<Decider>,
    /// The policies' reason.
    pub reason: String,
    /// Environment variables that policies added.
    pub environment: Vec<(String, String)>,
    /// The limits announced to the container.
    pub limits: Limits,
}

impl Decision {
    /// Whether the allocation was found in the kubelet's checkpoint or in a claim's record rather than granted.
    #[must_use]
    pub fn is_adoption(&self) -> bool {
        self.by.contains(&Decider::Adopted)
    }
}

/// What a container may use of each part, as announced to it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Limits {
    /// MiB of memory.
    pub memory_mib: Option<u64>,
    /// Percent of compute.
    pub compute_percent: Option<u32>,
}

impl Limits {
    /// The stricter value of each limit.
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
    /// The rule that ended it.
    pub reason: EndReason,
    /// When, milliseconds since 1970.
    pub wall_ms: u64,
}

/// The rules by which an allocation ends. There are no others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EndReason {
    /// Two reconcile passes found that its pod is gone; or, of a claim, the kubelet has unprepared it.
    Released,
    /// Two reconcile passes found that no pod ever held it: the kubelet dropped Berth's answer.
    NeverStarted,
    /// Two reconcile passes found that its pod is gone, according to the source of all pods, while the
    /// kubelet's checkpoint could not be read. The checkpoint may show it again once it is readable.
    PodGone,
    /// A later allocation of the same devices is live, and this one is shown by no source or is older
    /// than a device's newest few records ([`crate::grants::allocate`]).
    Superseded,
    /// An operator ended it.
    Operator,
}

impl EndReason {
    /// Its value in the API.
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
