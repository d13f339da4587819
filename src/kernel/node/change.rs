//! The changes of a ledger. An entry is applied as a whole or not at all.

use crate::drain::eviction::EvictionRecord;
use crate::drain::marks::{Empty, Marks};
use crate::evidence::pods::PodsView;
use crate::evidence::runtime::RuntimeView;
use crate::evidence::sighting::{BlockedEnds, Sighting};
use crate::grants::allocation::{Allocation, EndReason, Holder};
use crate::grants::claim::ClaimPod;
use crate::hardware::device_access::DeviceAccess;
use crate::hardware::gpu::{Links, Part, ScanError, UnidentifiedGpu, Usage};
use crate::hardware::health::Health;
use crate::hardware::process::ProcessTable;
use crate::ids::names::{AllocationId, DeviceKey, Digest, GpuId, PartId, Resource};
use crate::ids::time::Now;
use crate::node::rules::Rules;
use crate::policy::decider::Decider;
use crate::policy::stack::{Stack, StackOrigin};
use crate::policy::version::PolicyVersion;
use crate::sharing::breaker::Breaker;
use crate::sharing::offer::{OfferLine, ShareRange};
use crate::sharing::part_state::Device;
use crate::sharing::via::Via;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// One step of the ledger.
#[derive(Clone, Debug, PartialEq)]
pub struct Entry {
    /// When it was decided.
    pub at: Now,
    /// The changes, in order.
    pub changes: Vec<Change>,
}

impl Entry {
    /// Whether any change must be in the store before it is published.
    #[must_use]
    pub fn is_durable(&self) -> bool {
        self.changes.iter().any(Change::is_durable)
    }
}

/// One change.
#[derive(Clone, Debug, PartialEq)]
pub enum Change {
    /// A part appeared, came back, or changed.
    PartFound(Part),
    /// A part is no longer present. Its devices stay listed (I10).
    PartGone(PartId),
    /// A part that is permanently gone while its GPU is present leaves the list (I10).
    PartForgotten(PartId),
    /// An operator removed a vanished GPU.
    GpuForgotten(GpuId),
    /// The newest inventory scan's results other than the parts.
    InventoryScanned {
        /// Links between the GPUs.
        links: Arc<Links>,
        /// Memory in use and process counts of the parts.
        usage: Arc<BTreeMap<PartId, Usage>>,
        /// Errors of GPUs that could not be read.
        scan_errors: Arc<BTreeMap<GpuId, ScanError>>,
    },
    /// The newest inventory scan found other GPUs whose UUID is not known.
    UnidentifiedChanged(Arc<Vec<UnidentifiedGpu>>),
    /// The configuration excludes other GPUs.
    ExcludedChanged(Arc<BTreeSet<GpuId>>),
    /// The processes on the GPUs, or their memory, changed.
    ProcessesSeen(Arc<ProcessTable>),
    /// A GPU's health changed.
    HealthChanged {
        /// The GPU.
        gpu: GpuId,
        /// The new health.
        health: Health,
    },
    /// A GPU's marks changed.
    MarksChanged {
        /// The GPU.
        gpu: GpuId,
        /// The new marks.
        marks: Marks,
    },
    /// The API of the kubelet through which a GPU is granted, or an order to move it.
    ViaChanged {
        /// The GPU.
        gpu: GpuId,
        /// The new state.
        via: Via,
    },
    /// A draining GPU became empty as far as scans show, or no longer is.
    EmptyChanged {
        /// The GPU.
        gpu: GpuId,
        /// Since when it is empty; `None` if it is not.
        empty: Option<Empty>,
    },
    /// A part's offer changed.
    Offered {
        /// The part.
        part: PartId,
        /// The source of the offer; `None` before the first.
        by: Option<Decider>,
        /// The offer.
        lines: Vec<OfferLine>,
        /// The new assignment of share numbers to resources.
        ranges: Vec<ShareRange>,
        /// The new devices, including those that are being withdrawn.
        devices: BTreeMap<(Resource, Option<u32>), Device>,
    },
    /// A device leaves the list (I10).
    Delisted(DeviceKey),
    /// The devices of a GPU that is granted through DRA left the device lists.
    Unlisted(GpuId),
    /// An allocation was granted or adopted.
    Granted(Allocation),
    /// A source showed more fields of a holder.
    HolderLearned {
        /// The allocation.
        id: AllocationId,
        /// The fields that the source showed.
        holder: Holder,
    },
    /// A claim of an allocation is reserved for other pods.
    ClaimPodsChanged {
        /// The allocation.
        id: AllocationId,
        /// The pods.
        pods: Vec<ClaimPod>,
    },
    /// An overlap is resolved: both allocations are of one pod (I7).
    OverlapResolved(AllocationId),
    /// An allocation ended.
    Ended {
        /// The allocation.
        id: AllocationId,
        /// The rule that ended it.
        reason: EndReason,
    },
    /// An ended allocation was removed from the history.
    Pruned(AllocationId),
    /// The results of a reconcile pass.
    SightingsUpdated {
        /// Sightings of the live allocations.
        sightings: Arc<BTreeMap<AllocationId, Sighting>>,
        /// Why ends are withheld; `None` if they are not.
        ends_withheld: Option<Arc<str>>,
    },
    /// The reason that keeps allocations from ending changed; `None` if there is none.
    BlockedEndsChanged(Option<Arc<BlockedEnds>>),
    /// The view of the node's pods changed.
    PodsSeen(Arc<PodsView>),
    /// The container runtime showed other containers or sandboxes.
    RuntimeSeen(Arc<RuntimeView>),
    /// The newest eviction attempts, by pod UID.
    EvictionsUpdated(Arc<BTreeMap<String, EvictionRecord>>),
    /// A live allocation was seen under a kubelet.sock created at this time, milliseconds since 1970; see
    /// [`crate::node::ledger::Ledger::kubelet_seen_wall_ms`].
    KubeletSeen(u64),
    /// A breaker changed.
    BreakerChanged {
        /// The resource.
        resource: Resource,
        /// The new state; `None` removes the breaker.
        breaker: Option<Breaker>,
    },
    /// Whether devices can be passed to containers changed.
    DeviceAccessChanged(Arc<DeviceAccess>),
    /// A policy version was recorded that was not known.
    PolicyAdded(PolicyVersion),
    /// The record of a known policy version changed.
    PolicyUpdated(PolicyVersion),
    /// A policy version was deleted.
    PolicyDeleted(Digest),
    /// A stack was activated.
    StackActivated(Stack),
    /// The origin of the active stack has changed: the stack of a GPUNode has settled, or a break-glass has ended.
    StackOriginChanged(StackOrigin),
    /// The configuration set other rules.
    RulesChanged(Arc<Rules>),
}

impl Change {
    /// Whether it is written to the store with its entry. Other changes are observed again after a restart,
    /// except health, which is published before it is written: see [`crate::node::record::health_writes`].
    #[must_use]
    pub fn is_durable(&self) -> bool {
        match self {
            Self::PartFound(_)
            | Self::PartForgotten(_)
            | Self::GpuForgotten(_)
            | Self::MarksChanged { .. }
            | Self::ViaChanged { .. }
            | Self::Offered { .. }
            | Self::Delisted(_)
            | Self::Granted(_)
            | Self::HolderLearned { .. }
            | Self::ClaimPodsChanged { .. }
            | Self::OverlapResolved(_)
            | Self::Ended { .. }
            | Self::Pruned(_)
            | Self::KubeletSeen(_)
            | Self::PolicyAdded(_)
            | Self::PolicyUpdated(_)
            | Self::PolicyDeleted(_)
            | Self::StackActivated(_)
            | Self::StackOriginChanged(_) => true,
            Self::PartGone(_)
            | Self::InventoryScanned { .. }
            | Self::UnidentifiedChanged(_)
            | Self::ExcludedChanged(_)
            | Self::ProcessesSeen(_)
            | Self::HealthChanged { .. }
            | Self::EmptyChanged { .. }
            | Self::Unlisted(_)
            | Self::SightingsUpdated { .. }
            | Self::BlockedEndsChanged(_)
            | Self::PodsSeen(_)
            | Self::RuntimeSeen(_)
            | Self::EvictionsUpdated(_)
            | Self::DeviceAccessChanged(_)
            | Self::RulesChanged(_)
            | Self::BreakerChanged { .. } => false,
        }
    }
}
