//! The kernel's commands: every operation on the ledger, as one enum.

use crate::drain::eviction::{EvictionOutcome, EvictionRequest};
use crate::drain::marks::{Author, Order, Owners};
use crate::evidence::kubelet_view::ReconcileView;
use crate::evidence::pods::PodsView;
use crate::evidence::runtime::RuntimeView;
use crate::grants::allocation::Allocation;
use crate::grants::claim::ClaimPod;
use crate::grants::prepare::ClaimToPrepare;
use crate::hardware::device_access::DeviceAccess;
use crate::hardware::gpu::Inventory;
use crate::hardware::judgement::TriagedReading;
use crate::ids::names::{AllocationId, Digest, GpuId};
use crate::node::change::Entry;
use crate::node::refusal::Refusal;
use crate::node::revision::Revision;
use crate::node::rules::Rules;
use crate::policy::decider::Decider;
use crate::policy::hooks::{AdmitRequest, Terms};
use crate::policy::stack::{FailedRevision, Stack, StackEntry, StackOrigin};
use crate::policy::version::PolicyVersion;
use crate::sharing::offer::PartOffer;
use crate::sharing::via::KubeletApi;
use std::sync::Arc;

/// One request to the keeper, the ledger's only writer.
#[derive(Clone, Debug, PartialEq)]
pub enum Command {
    /// The kubelet's Allocate, with the stack's answer.
    Allocate {
        /// The request.
        request: AdmitRequest,
        /// The stack's answer.
        answer: StackAnswer,
        /// The generation of the snapshot that the stack evaluated; `None` on the second try, after
        /// [`crate::node::refusal::Refusal::Moved`], whose answer counts even if the ledger has changed again.
        evaluated: Option<u64>,
        /// Whether a reconcile pass may still clear a refusal.
        attempt: Attempt,
    },
    /// The kubelet's NodePrepareResources for one claim, with the stack's answers.
    Prepare {
        /// The claim.
        claim: ClaimToPrepare,
        /// As for [`Self::Allocate`].
        evaluated: Option<u64>,
    },
    /// The kubelet's NodeUnprepareResources for one claim.
    Unprepare {
        /// The claim's UID.
        claim: String,
    },
    /// The pods that a claim is reserved for, as the API server shows them. Without effect if the claim has no allocation.
    RecordClaimPods {
        /// The claim's UID.
        claim: String,
        /// See [`ClaimToPrepare::pods`].
        pods: Vec<ClaimPod>,
    },
    /// Allocations of claims that an earlier store granted, as their records show them.
    AdoptClaims(Vec<Allocation>),
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
    /// What the container runtime shows of the containers that hold allocations.
    SeeContainers(RuntimeView),
    /// Whether devices can be passed to containers.
    SetDeviceAccess(DeviceAccess),
    /// An operator cordons a GPU. Legal in any state; a second cordon of the same owner keeps the start time and
    /// records a new reason.
    Cordon {
        /// The GPU.
        gpu: GpuId,
        /// The operator and the reason.
        author: Author,
    },
    /// An operator drains a GPU. Legal in any state; a new order of the same owner replaces the old one.
    Drain {
        /// The GPU.
        gpu: GpuId,
        /// The operator and the reason.
        author: Author,
        /// How to drain it.
        order: Order,
    },
    /// An operator stops a drain; the GPU stays cordoned. Legal in any state.
    StopDrain {
        /// The GPU.
        gpu: GpuId,
        /// The owners whose drains are stopped.
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
        gpu: GpuId,
        /// The owners whose marks are removed.
        owners: Owners,
    },
    /// An operator orders that a GPU is granted through this API of the kubelet. Legal in any state; an order for the API
    /// that the GPU has cancels a move to the other.
    SetVia {
        /// The GPU.
        gpu: GpuId,
        /// The API.
        api: KubeletApi,
        /// The operator and the reason.
        author: Author,
    },
    /// A GPU is moved to the other API. The API server has shown that nothing is allocated through the former one any more;
    /// refused while the ledger shows otherwise.
    FinishMove {
        /// The GPU.
        gpu: GpuId,
    },
    /// A command under the condition that what its caller has read is still so; refused otherwise.
    If {
        /// What the caller has read.
        expected: Revision,
        /// The command.
        then: Box<Command>,
    },
    /// An operator marks a GPU healthy, until the next bad reading.
    MarkHealthy {
        /// The GPU.
        gpu: GpuId,
        /// The operator.
        by: String,
        /// The operator's reason; may be empty.
        why: String,
    },
    /// An operator removes a vanished GPU. Refused while it is present or held.
    Forget {
        /// The GPU.
        gpu: GpuId,
    },
    /// An operator ends an allocation that reconciling cannot end. Refused while a source shows its pod
    /// running.
    End {
        /// The allocation.
        id: AllocationId,
        /// Whether it ends even while its pod runs.
        force: bool,
    },
    /// A policy module was uploaded and compiled. The record of a version that is known stays, with the new artifact
    /// and, as a rule, the new signature.
    RecordUpload(PolicyVersion),
    /// A stored version was compiled on this machine.
    RecordArtifact {
        /// The version.
        digest: Digest,
        /// sha256 of the artifact.
        artifact: Digest,
    },
    /// A stored version was made callable at a start: its artifact, and the trusted key that made its signature.
    RecordLoaded(PolicyVersion),
    /// The versions that are built into this release of the daemon.
    RecordShipped(Vec<PolicyVersion>),
    /// Delete a policy version. Refused while it is in the active stack.
    DeletePolicy {
        /// The version.
        digest: Digest,
    },
    /// Activate a stack.
    Activate(Activation),
    /// The soak of the active stack has ended. Refused if another one is active.
    SettleStack {
        /// The revision of the stack.
        revision: u64,
    },
    /// End the break-glass that is active. Refused if another stack is active.
    EndBreakGlass {
        /// The revision of the stack.
        revision: u64,
    },
    /// The configuration changed: new rules, with the offers that follow from them, in one turn. No reader sees the
    /// rules with the offers of the former ones.
    SetRules {
        /// The rules.
        rules: Arc<Rules>,
        /// The offers, which were evaluated by these rules.
        offers: NewOffers,
    },
    /// Time passed: devices are delisted, breakers change phase, deadlines expire.
    Tick,
}

impl Command {
    /// This command under a condition; without one, as it is.
    #[must_use]
    pub fn expecting(self, expected: Option<Revision>) -> Self {
        match expected {
            Some(expected) => Self::If { expected, then: Box::new(self) },
            None => self,
        }
    }

    /// The command itself, without its conditions.
    #[must_use]
    pub fn unconditional(&self) -> &Self {
        match self {
            Self::If { then, .. } => then.unconditional(),
            command => command,
        }
    }

    /// Its name in traces.
    #[must_use]
    pub fn as_str(&self) -> &'static str {
        match self {
            Self::Allocate { .. } => "allocate",
            Self::Prepare { .. } => "prepare",
            Self::Unprepare { .. } => "unprepare",
            Self::RecordClaimPods { .. } => "recordClaimPods",
            Self::AdoptClaims(_) => "adoptClaims",
            Self::RecordScan(_) => "recordScan",
            Self::ApplyTriage(_) => "applyTriage",
            Self::Offer(_) => "offer",
            Self::Reconcile(_) => "reconcile",
            Self::Pods(_) => "pods",
            Self::SeeContainers(_) => "seeContainers",
            Self::SetDeviceAccess(_) => "setDeviceAccess",
            Self::Cordon { .. } => "cordon",
            Self::Drain { .. } => "drain",
            Self::StopDrain { .. } => "stopDrain",
            Self::RecordEviction { .. } => "recordEviction",
            Self::Uncordon { .. } => "uncordon",
            Self::SetVia { .. } => "setVia",
            Self::FinishMove { .. } => "finishMove",
            Self::If { then, .. } => then.as_str(),
            Self::MarkHealthy { .. } => "markHealthy",
            Self::Forget { .. } => "forget",
            Self::End { .. } => "end",
            Self::RecordUpload(_) => "recordUpload",
            Self::RecordArtifact { .. } => "recordArtifact",
            Self::RecordLoaded(_) => "recordLoaded",
            Self::RecordShipped(_) => "recordShipped",
            Self::DeletePolicy { .. } => "deletePolicy",
            Self::Activate(_) => "activate",
            Self::SettleStack { .. } => "settleStack",
            Self::EndBreakGlass { .. } => "endBreakGlass",
            Self::SetRules { .. } => "setRules",
            Self::Tick => "tick",
        }
    }
}

/// The decision on a command.
#[derive(Clone, Debug, PartialEq)]
pub struct Verdict {
    /// The changes, also of a refused command: a denial changes its breaker. An entry without changes is
    /// not applied.
    pub entry: Entry,
    /// Why the caller is refused; `None` if it is not.
    pub refusal: Option<Refusal>,
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

/// A stack whose policies have computed its offers on this node.
#[derive(Clone, Debug, PartialEq)]
pub struct Activation {
    /// The stack; the kernel sets its revision.
    pub stack: NewStack,
    /// Its offers.
    pub offers: Vec<(PartOffer, Decider)>,
    /// Its triage of [`crate::policy::judge_again::to_judge_again`].
    pub triage: Vec<TriagedReading>,
}

/// The offers that follow from new rules.
#[derive(Clone, Debug, PartialEq)]
pub enum NewOffers {
    /// Those of the active stack.
    OfActiveStack(Vec<(PartOffer, Decider)>),
    /// Those of another stack, which is activated.
    OfStack(Activation),
}

/// A stack to activate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewStack {
    /// Who decided that it is active.
    pub origin: StackOrigin,
    /// The revision of the GPUNode that the stack replaces because it has failed; `None` otherwise.
    pub failed: Option<Box<FailedRevision>>,
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
        let Self { origin, failed, by, why, entries } = self;
        Stack { revision, origin, failed, by, why, since_wall_ms, entries }
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
        kind: crate::policy::hooks::FaultKind,
        /// The error message.
        detail: String,
    },
}
