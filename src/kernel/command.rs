//! The kernel's public interface: everything that can be asked of the truth, as one enum.

use super::drain::{Mark, Order};
use super::evict::{Ask, Outcome};
use super::gpu::{Inventory, Reading};
use super::names::{AllocationId, Digest, PartId};
use super::offer::PartOffer;
use super::pods::PodsView;
use super::policy::{AdmitRequest, PolicyVersion, Terms, TriageAnswer};
use super::reconcile::RoundView;
use super::stack::{Stack, StackEntry};

/// One request to the single writer.
#[derive(Clone, Debug, PartialEq)]
pub enum Command {
    /// The kubelet's Allocate, with what the stack made of it.
    Allocate {
        /// What is asked.
        request: AdmitRequest,
        /// What the stack said.
        answer: StackAnswer,
        /// The generation of the snapshot that the stack saw.
        seen: u64,
        /// Whether this is the second try after [`super::refusal::Refusal::Moved`].
        again: bool,
        /// Whether a round could still cure a refusal.
        attempt: Attempt,
    },
    /// A look at the GPUs.
    Look(Inventory),
    /// What a reading means.
    Triaged {
        /// The reading.
        reading: Reading,
        /// What it means.
        answer: TriageAnswer,
    },
    /// What the parts are offered as, by the stack or the baseline; with who says so.
    Offer(Vec<(PartOffer, String)>),
    /// What the sources of truth show.
    Observe(RoundView),
    /// What a source shows of all pods of this node.
    Pods(PodsView),
    /// An operator cordons a GPU. Legal in any state; cordoning twice keeps since when, and takes
    /// another reason down.
    Cordon {
        /// The GPU.
        gpu: PartId,
        /// Who and why.
        mark: Mark,
    },
    /// An operator has a GPU emptied. Legal in any state; a new order takes the place of the old.
    Drain {
        /// The GPU.
        gpu: PartId,
        /// Who and why.
        mark: Mark,
        /// How.
        order: Order,
    },
    /// An operator calls a drain off; the GPU stays cordoned. Legal in any state.
    StopDrain {
        /// The GPU.
        gpu: PartId,
    },
    /// What came of asking a pod to leave a GPU that is emptied. Forgotten where nobody wants it away.
    Asked {
        /// What was asked.
        ask: Ask,
        /// What came of it.
        outcome: Outcome,
    },
    /// An operator lets a GPU be granted again. Legal in any state.
    Uncordon {
        /// The GPU.
        gpu: PartId,
    },
    /// An operator says that a GPU works again. It is believed until the next bad sign.
    Heal {
        /// The GPU.
        gpu: PartId,
        /// Who.
        by: String,
        /// Why, in the operator's words; may be empty.
        why: String,
    },
    /// An operator lets go of a GPU that vanished. Refused while it is there or held.
    Forget {
        /// The GPU.
        gpu: PartId,
    },
    /// An operator ends an allocation that no source can judge. Refused while a source shows its pod running.
    End {
        /// Which.
        id: AllocationId,
        /// Whether it ends all the same while its pod runs.
        force: bool,
    },
    /// Keep a policy version, or a recompiled one.
    KeepPolicy(PolicyVersion),
    /// A version that is known was compiled on this machine.
    Compiled {
        /// Which.
        digest: Digest,
        /// sha256 of what came of it.
        artifact: Digest,
    },
    /// Delete a policy version. Refused while it is in the active stack.
    DeletePolicy {
        /// Which.
        digest: Digest,
    },
    /// Activate a stack whose policies were already asked and whose offers were already checked.
    Activate {
        /// The stack; its revision is set here.
        stack: NewStack,
        /// Only if the active stack is still at this revision.
        expected: Option<u64>,
        /// Its offers on this node.
        offers: Vec<(PartOffer, String)>,
    },
    /// Time passed: ids leave, breakers move.
    Tick,
}

impl Command {
    /// Which it is, in a word.
    #[must_use]
    pub fn word(&self) -> &'static str {
        match self {
            Self::Allocate { .. } => "allocate",
            Self::Look(_) => "look",
            Self::Triaged { .. } => "triaged",
            Self::Offer(_) => "offer",
            Self::Observe(_) => "observe",
            Self::Pods(_) => "pods",
            Self::Cordon { .. } => "cordon",
            Self::Drain { .. } => "drain",
            Self::StopDrain { .. } => "stopDrain",
            Self::Asked { .. } => "asked",
            Self::Uncordon { .. } => "uncordon",
            Self::Heal { .. } => "heal",
            Self::Forget { .. } => "forget",
            Self::End { .. } => "end",
            Self::KeepPolicy(_) => "keepPolicy",
            Self::Compiled { .. } => "compiled",
            Self::DeletePolicy { .. } => "deletePolicy",
            Self::Activate { .. } => "activate",
            Self::Tick => "tick",
        }
    }
}

/// The front end submits once, and once more after a round where that may cure the refusal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Attempt {
    /// A refusal that a round may cure is not yet one: it does not count for the breaker.
    First,
    /// What is refused now is refused.
    Last,
}

/// A stack to activate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewStack {
    /// Whether it comes through the API.
    pub from_api: bool,
    /// Who activates it.
    pub by: String,
    /// Why, in their words; may be empty.
    pub why: String,
    /// Its policies, first asked first.
    pub entries: Vec<StackEntry>,
}

impl NewStack {
    /// As the ledger keeps it.
    #[must_use]
    pub fn at(self, revision: u64, since_wall_ms: u64) -> Stack {
        let Self { from_api, by, why, entries } = self;
        Stack { revision, from_api, by, why, since_wall_ms, entries }
    }
}

/// What the whole stack made of an Allocate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StackAnswer {
    /// All allow, on these terms.
    Allow {
        /// Entries that allowed, by label; `baseline` where all passed.
        by: Vec<String>,
        /// The terms, merged.
        terms: Terms,
    },
    /// One denies.
    Deny {
        /// Its label.
        policy: String,
        /// Why.
        reason: String,
    },
    /// One failed, and its `onFault` is deny.
    Faulted {
        /// Its label.
        policy: String,
        /// How.
        kind: super::policy::FaultKind,
        /// In words.
        detail: String,
    },
}

/// Settings of the rules.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rules {
    /// Waits.
    pub timing: super::time::Timing,
    /// How much memory may be granted of each part, percent of what it has.
    pub overcommit_percent: u32,
    /// How much is kept of what has ended.
    pub history: super::history::HistoryLimit,
    /// Whose signatures are taken; none: a policy needs no signature.
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
