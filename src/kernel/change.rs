//! What can change in a ledger. An entry is applied as a whole or not at all.

use super::allocation::{Allocation, EndReason, Holder};
use super::breaker::Breaker;
use super::drain::{Drain, Empty};
use super::evict::Asked;
use super::gpu::{Links, Part, Usage};
use super::health::Health;
use super::names::{AllocationId, DeviceKey, Digest, PartId, Resource};
use super::offer::{OfferLine, ShareRange};
use super::part_state::Device;
use super::pods::PodsView;
use super::policy::PolicyVersion;
use super::process::ProcessTable;
use super::reconcile::Sighting;
use super::stack::Stack;
use super::stuck::Stuck;
use super::time::Now;
use std::collections::BTreeMap;
use std::sync::Arc;

/// One step of the ledger.
#[derive(Clone, Debug, PartialEq)]
pub struct Entry {
    /// When it was decided.
    pub at: Now,
    /// What changes, in order.
    pub changes: Vec<Change>,
}

impl Entry {
    /// Whether any of it must be in the store before anyone hears of it.
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
    /// A part is no longer there. Its devices stay listed (I10).
    PartGone(PartId),
    /// A part that is gone for good while its GPU is there leaves the list (I10).
    PartForgotten(PartId),
    /// An operator let go of a vanished GPU.
    GpuForgotten(PartId),
    /// What a look showed beside the parts.
    Looked {
        /// How near the GPUs sit.
        links: Arc<Links>,
        /// What the parts do.
        usage: Arc<BTreeMap<PartId, Usage>>,
        /// GPUs that do not answer, and why.
        troubles: Arc<BTreeMap<PartId, String>>,
    },
    /// Other processes are on the GPUs, or the same with other memory.
    ProcessesSeen(Arc<ProcessTable>),
    /// A GPU's health is another.
    HealthTurned {
        /// The GPU.
        gpu: PartId,
        /// Its health from now on.
        health: Health,
    },
    /// An operator turned a GPU's drain state.
    DrainTurned {
        /// The GPU.
        gpu: PartId,
        /// Its state from now on.
        drain: Drain,
    },
    /// Since when a GPU that is drained is empty, as far as can be seen; `None`: it is not.
    Emptied {
        /// The GPU.
        gpu: PartId,
        /// Since when.
        empty: Option<Empty>,
    },
    /// A part is offered anew.
    Offered {
        /// The part.
        part: PartId,
        /// By whom.
        by: String,
        /// As what.
        lines: Vec<OfferLine>,
        /// Who owns which share numbers from now on.
        ranges: Vec<ShareRange>,
        /// All of its devices from now on, those on their way out among them.
        devices: BTreeMap<(Resource, Option<u32>), Device>,
    },
    /// A device leaves the list (I10).
    Delisted(DeviceKey),
    /// An allocation was granted, or adopted.
    Granted(Allocation),
    /// A source showed more of a holder.
    Learned {
        /// The allocation.
        id: AllocationId,
        /// What was shown.
        holder: Holder,
    },
    /// An overlap turned out to be of one pod (I7).
    Settled(AllocationId),
    /// An allocation ended.
    Ended {
        /// Which.
        id: AllocationId,
        /// By which rule.
        reason: EndReason,
    },
    /// An ended allocation is no longer kept.
    Pruned(AllocationId),
    /// What a round saw.
    Sighted {
        /// Of the live allocations.
        sightings: Arc<BTreeMap<AllocationId, Sighting>>,
        /// Why ends are withheld, if they are.
        hold: Option<Arc<str>>,
    },
    /// What keeps allocations from ending is something else, or nothing.
    EvidenceStuck(Option<Arc<Stuck>>),
    /// The pods of this node are others.
    PodsSeen(Arc<PodsView>),
    /// What came of asking pods to leave, by UID.
    Evicting(Arc<BTreeMap<String, Asked>>),
    /// A live allocation was seen under a kubelet.sock of this age; see
    /// [`super::ledger::Ledger::kubelet_seen_wall_ms`].
    KubeletSeen(u64),
    /// A breaker moved; `None` is at rest.
    BreakerTurned {
        /// Whose.
        resource: Resource,
        /// Its state from now on.
        breaker: Option<Breaker>,
    },
    /// A policy version is known from now on, or recompiled.
    PolicyKept(PolicyVersion),
    /// A policy version was deleted.
    PolicyDeleted(Digest),
    /// Another stack is active.
    StackActivated(Stack),
}

impl Change {
    /// Whether it is written to the store with its entry. What is not can be seen again after a
    /// restart, but for health, which is shown before it is written: see
    /// [`super::record::health_writes`].
    #[must_use]
    pub fn is_durable(&self) -> bool {
        match self {
            Self::PartFound(_)
            | Self::PartForgotten(_)
            | Self::GpuForgotten(_)
            | Self::DrainTurned { .. }
            | Self::Offered { .. }
            | Self::Delisted(_)
            | Self::Granted(_)
            | Self::Learned { .. }
            | Self::Settled(_)
            | Self::Ended { .. }
            | Self::Pruned(_)
            | Self::KubeletSeen(_)
            | Self::PolicyKept(_)
            | Self::PolicyDeleted(_)
            | Self::StackActivated(_) => true,
            Self::PartGone(_)
            | Self::Looked { .. }
            | Self::ProcessesSeen(_)
            | Self::HealthTurned { .. }
            | Self::Emptied { .. }
            | Self::Sighted { .. }
            | Self::EvidenceStuck(_)
            | Self::PodsSeen(_)
            | Self::Evicting(_)
            | Self::BreakerTurned { .. } => false,
        }
    }
}
