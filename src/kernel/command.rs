//! The kernel's commands: every operation on the ledger, as one enum.

use super::decider::Decider;
use super::device_access::DeviceAccess;
use super::drain::{Author, Marks, Order, Owners};
use super::eviction::{EvictionOutcome, EvictionRequest};
use super::gpu::Inventory;
use super::judgement::TriagedReading;
use super::names::{AllocationId, Digest, PartId};
use super::offer::PartOffer;
use super::pods::PodsView;
use super::policy::{AdmitRequest, PolicyVersion, Terms};
use super::reconcile::ReconcileView;
use super::stack::{Stack, StackEntry};

/// One request to the keeper, the ledger's only writer.
#[derive(Clone, Debug, PartialEq)]
pub enum Command {
    /// The kubelet's Allocate, with the stack's answer.
    Allocate {
        /// The request.
        request: AdmitRequest,
        /// The stack's answer.
        answer: StackAnswer,
        /// The generation of the snapshot that the stack evaluated.
        generation: u64,
        /// Whether this is the second try after [`super::refusal::Refusal::Moved`].
        is_retry: bool,
        /// Whether a reconcile pass may still clear a refusal.
        attempt: Attempt,
    },
    /// The result of an inventory scan.
    RecordScan(Inventory),
    /// The triage of a reading.
    ApplyTriage(TriagedReading),
    /// New offers of parts, each with its source.
    Offer(Vec<(PartOffer, Decider)>),
    /// The sources' state for a reconcile pass.
    Reconcile(ReconcileView),
    /// A source's view of all pods of this node.
    Pods(PodsView),
    /// Whether devices can be passed to containers.
    SetDeviceAccess(DeviceAccess),
    /// An operator cordons a GPU. Legal in any state; a second cordon of the same owner keeps the start time and
    /// records a new reason.
    Cordon {
        /// The GPU.
        gpu: PartId,
        /// The operator and the reason.
        author: Author,
    },
    /// An operator drains a GPU. Legal in any state; a new order of the same owner replaces the old one.
    Drain {
        /// The GPU.
        gpu: PartId,
        /// The operator and the reason.
        author: Author,
        /// How to drain it.
        order: Order,
    },
    /// An operator cancels a drain; the GPU stays cordoned. Legal in any state.
    StopDrain {
        /// The GPU.
        gpu: PartId,
        /// The owners whose drains are cancelled.
        owners: Owners,
    },
    /// The outcome of an eviction request. Discarded if the pod no longer needs to be evicted.
    RecordEviction {
        /// The request.
        ask: EvictionRequest,
        /// Its outcome.
        outcome: EvictionOutcome,
    },
    /// An operator uncordons a GPU. Legal in any state; the GPU is granted again once no mark is left.
    Uncordon {
        /// The GPU.
        gpu: PartId,
        /// The owners whose marks are removed.
        owners: Owners,
    },
    /// A change of a GPU's marks under the condition that they are still those that the caller has read. What happens to
    /// them by themselves, such as a drain that is given up at its deadline, is decided by the same thread, so that nothing
    /// comes between the check and the change.
    IfMarks {
        /// The GPU.
        gpu: PartId,
        /// Its marks as the caller has read them.
        marks: Marks,
        /// The change.
        then: Box<Command>,
    },
    /// An operator marks a GPU healthy, until the next bad reading.
    MarkHealthy {
        /// The GPU.
        gpu: PartId,
        /// The operator.
        by: String,
        /// The operator's reason; may be empty.
        why: String,
    },
    /// An operator removes a vanished GPU. Refused while it is present or held.
    Forget {
        /// The GPU.
        gpu: PartId,
    },
    /// An operator ends an allocation that reconciling cannot end. Refused while a source shows its pod
    /// running.
    End {
        /// The allocation.
        id: AllocationId,
        /// Whether it ends even while its pod runs.
        force: bool,
    },
    /// Store a new or recompiled policy version.
    StorePolicy(PolicyVersion),
    /// A stored version was compiled on this machine.
    RecordArtifact {
        /// The version.
        digest: Digest,
        /// sha256 of the artifact.
        artifact: Digest,
    },
    /// Delete a policy version. Refused while it is in the active stack.
    DeletePolicy {
        /// The version.
        digest: Digest,
    },
    /// Activate a stack whose policies have already computed its offers and whose offers are checked.
    Activate {
        /// The stack; the kernel sets its revision.
        stack: NewStack,
        /// Refuse unless the active stack is at this revision.
        expected: Option<u64>,
        /// Its offers on this node.
        offers: Vec<(PartOffer, Decider)>,
        /// Its triage of [`super::judgement::to_judge_again`].
        triage: Vec<TriagedReading>,
    },
    /// Time passed: devices are delisted, breakers change phase, deadlines expire.
    Tick,
}

impl Command {
    /// Its name in traces.
    #[must_use]
    pub fn as_str(&self) -> &'static str {
        match self {
            Self::Allocate { .. } => "allocate",
            Self::RecordScan(_) => "look",
            Self::ApplyTriage(_) => "triaged",
            Self::Offer(_) => "offer",
            Self::Reconcile(_) => "observe",
            Self::Pods(_) => "pods",
            Self::SetDeviceAccess(_) => "deviceAccess",
            Self::Cordon { .. } => "cordon",
            Self::Drain { .. } => "drain",
            Self::StopDrain { .. } => "stopDrain",
            Self::RecordEviction { .. } => "asked",
            Self::Uncordon { .. } => "uncordon",
            Self::IfMarks { then, .. } => then.as_str(),
            Self::MarkHealthy { .. } => "heal",
            Self::Forget { .. } => "forget",
            Self::End { .. } => "end",
            Self::StorePolicy(_) => "keepPolicy",
            Self::RecordArtifact { .. } => "compiled",
            Self::DeletePolicy { .. } => "deletePolicy",
            Self::Activate { .. } => "activate",
            Self::Tick => "tick",
        }
    }
}

/// The front end submits an Allocate, and submits it again after a reconcile pass that may clear the refusal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Attempt {
    /// A refusal that a reconcile pass may clear does not count for the breaker.
    First,
    /// Any refusal is final.
    Last {
        /// When the request came, monotonic milliseconds: an older reconcile pass proves nothing about it.
        asked_mono_ms: u64,
    },
}

/// A stack to activate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewStack {
    /// Whether it was activated through the API.
    pub from_api: bool,
    /// Name of the caller that activates it.
    pub by: String,
    /// The caller's reason; may be empty.
    pub why: String,
    /// Its policies, in evaluation order.
    pub entries: Vec<StackEntry>,
}

impl NewStack {
    /// The stack with its revision and activation time.
    #[must_use]
    pub fn into_stack(self, revision: u64, since_wall_ms: u64) -> Stack {
        let Self { from_api, by, why, entries } = self;
        Stack { revision, from_api, by, why, since_wall_ms, entries }
    }
}

/// The whole stack's answer to an Allocate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StackAnswer {
    /// No policy of the stack has the hook `admit`, so none was called.
    NotCalled,
    /// No policy denied.
    Allow {
        /// The policies that allowed, or the baseline if all passed.
        by: Vec<Decider>,
        /// The merged terms.
        terms: Terms,
    },
    /// A policy denied.
    Deny {
        /// Its label.
        policy: String,
        /// Its reason.
        reason: String,
    },
    /// A policy failed, and its `onFault` is deny.
    Faulted {
        /// Its label.
        policy: String,
        /// The kind of fault.
        kind: super::policy::FaultKind,
        /// The error message.
        detail: String,
    },
}

/// Settings of the rules.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rules {
    /// Timeouts and intervals.
    pub timing: super::time::Timing,
    /// How much of each part's memory may be granted, percent.
    pub overcommit_percent: u32,
    /// Limits of the history of ended allocations.
    pub history: super::history::HistoryLimit,
    /// Keys that policies may be signed with; if empty, a policy needs no signature.
    pub trusted_keys: Vec<super::trust::TrustedKey>,
}

impl Default for Rules {
    fn default() -> Self {
        Self {
            timing: super::time::Timing::default(),
            overcommit_percent: 100,
            history: super::history::HistoryLimit::default(),
            trusted_keys: Vec::new(),
        }
    }
}
