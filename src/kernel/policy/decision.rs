//! Recorded decisions: the question, each policy's result, and the outcome.

use crate::grants::pod_candidates;
use crate::hardware::gpu::Reading;
use crate::hardware::triage::TriageAnswer;
use crate::ids::names::{AllocationId, DeviceId, Digest, GpuId, Resource};
use crate::ids::time::Now;
use crate::node::ledger::Ledger;
use crate::policy::decider::Decider;
use crate::policy::hooks::{AdmitRequest, Answer, Fault, Hook, PlaceRequest, Placement, Question, Terms};
use crate::sharing::offer::PartOffer;
use std::collections::BTreeSet;
use std::sync::Arc;

/// The cost of one policy call.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cost {
    /// Units of fuel, the same on every machine; 0 where it is not known.
    pub fuel: u64,
    /// Wall time from the creation of the instance to the answer, microseconds.
    pub wall_us: u64,
}

/// An owned [`Question`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OwnedQuestion {
    /// See [`Question::Offer`].
    Offer,
    /// See [`Question::Place`].
    Place(PlaceRequest),
    /// See [`Question::Admit`].
    Admit(AdmitRequest),
    /// See [`Question::Triage`].
    Triage(Reading),
}

impl OwnedQuestion {
    /// The question, borrowed.
    #[must_use]
    pub fn question(&self) -> Question<'_> {
        match self {
            Self::Offer => Question::Offer,
            Self::Place(request) => Question::Place(request),
            Self::Admit(request) => Question::Admit(request),
            Self::Triage(reading) => Question::Triage(reading),
        }
    }

    /// The hook that answers it.
    #[must_use]
    pub fn hook(&self) -> Hook {
        self.question().hook()
    }
}

/// The result of one policy call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CallOutcome {
    /// The next policy is called.
    Pass,
    /// An answer.
    Answer(Answer),
    /// The call failed, or its answer was invalid.
    Fault(Fault),
    /// It was not called, because it failed too often.
    Suspended,
}

impl CallOutcome {
    /// Its name in traces.
    #[must_use]
    pub fn as_str(&self) -> &'static str {
        match self {
            Self::Pass => "pass",
            Self::Answer(_) => "answer",
            Self::Fault(_) => "fault",
            Self::Suspended => "suspended",
        }
    }
}

/// One policy call of a decision.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CallRecord {
    /// The policy's label: `name@` and the beginning of the digest.
    pub policy: String,
    /// Digest of the version.
    pub digest: Digest,
    /// The stack entry's parameters, JSON.
    pub parameters: String,
    /// The call's result.
    pub outcome: CallOutcome,
    /// The call's cost.
    pub cost: Cost,
}

/// The outcome of a question, decided by the whole stack and the kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The offer of each part, with its source.
    Offered(Vec<(PartOffer, Decider)>),
    /// The chosen devices, with what chose them.
    Placed(Placement, Decider),
    /// The devices were granted.
    Granted(Grant),
    /// A policy denied, or failed and its `onFault` is deny.
    Denied {
        /// Its label.
        by: String,
        /// Its reason.
        reason: String,
    },
    /// The policies allowed it, and the kernel refused it.
    Refused {
        /// The kernel's reason.
        reason: String,
    },
    /// The triage of a reading, with its source.
    Triaged(TriageAnswer, Decider),
}

/// A grant, with what the policies decided of it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Grant {
    /// Its allocation id.
    pub allocation: Option<AllocationId>,
    /// The policies that allowed it, or the baseline.
    pub by: Vec<Decider>,
    /// The terms that they set.
    pub terms: Terms,
}

impl Outcome {
    /// Its value in the API, which lists are filtered by.
    #[must_use]
    pub fn as_str(&self) -> &'static str {
        match self {
            Self::Offered(_) => "offered",
            Self::Placed(..) => "placed",
            Self::Granted(_) => "granted",
            Self::Denied { .. } => "denied",
            Self::Refused { .. } => "refused",
            Self::Triaged(..) => "triaged",
        }
    }

    /// Labels of the policies that decided it.
    #[must_use]
    pub fn by(&self) -> Vec<&str> {
        match self {
            Self::Offered(offers) => {
                let by: BTreeSet<&str> = offers.iter().map(|(_, by)| by.as_str()).collect();
                by.into_iter().collect()
            }
            Self::Placed(_, by) | Self::Triaged(_, by) => vec![by.as_str()],
            Self::Denied { by, .. } => vec![by],
            Self::Granted(grant) => grant.by.iter().map(Decider::as_str).collect(),
            Self::Refused { .. } => Vec::new(),
        }
    }

    /// The reason; empty where none was given.
    #[must_use]
    pub fn reason(&self) -> &str {
        match self {
            Self::Offered(_) => "",
            Self::Placed(placement, _) => &placement.reason,
            Self::Granted(grant) => &grant.terms.reason,
            Self::Denied { reason, .. } | Self::Refused { reason } => reason,
            Self::Triaged(answer, _) => &answer.reason,
        }
    }
}

/// A decision as it is sent to the journal. It is cheap to create because the node is shared.
#[derive(Clone, Debug)]
pub struct NewDecision {
    /// The snapshot that the policies evaluated.
    pub node: Arc<Ledger>,
    /// The time of the decision.
    pub now: Now,
    /// The question.
    pub question: OwnedQuestion,
    /// The calls of the stack's policies, in order.
    pub calls: Vec<CallRecord>,
    /// The outcome.
    pub outcome: Outcome,
    /// Whether it repeats the previous decision, so that it need not be recorded.
    pub is_repeat: bool,
}

/// Limits of the journal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct JournalLimit {
    /// Total size of all files, bytes.
    pub bytes: u64,
    /// Age of the oldest decision, milliseconds.
    pub age_ms: u64,
}

impl Default for JournalLimit {
    fn default() -> Self {
        Self { bytes: 64 * 1024 * 1024, age_ms: 7 * 24 * 3_600_000 }
    }
}

/// A decision as the journal stores it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Decision {
    /// Sequence number from 1; gaps are decisions that were dropped.
    pub seq: u64,
    /// The time of the decision, milliseconds since 1970.
    pub at_wall_ms: u64,
    /// The hook that was called.
    pub hook: Hook,
    /// The snapshot's generation.
    pub generation: u64,
    /// The requested devices, for a placement or an admission.
    pub request: Option<Request>,
    /// The reading, for a triage.
    pub reading: Option<Reading>,
    /// GPUs in the question or the outcome.
    pub gpus: Vec<GpuId>,
    /// Pods that the request may be for, as `namespace/pod`.
    pub candidates: Vec<String>,
    /// The calls of the stack's policies, in order.
    pub calls: Vec<CallRecord>,
    /// The outcome.
    pub outcome: Outcome,
    /// sha256 of the policies' input; `None` where the input could not be stored.
    pub input: Option<Digest>,
}

/// The requested devices.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// The resource.
    pub resource: String,
    /// The number of devices.
    pub count: usize,
    /// The devices of an Allocate, or those that a placement must include.
    pub devices: Vec<String>,
}

impl NewDecision {
    /// The decision as the journal stores it, without a sequence number.
    #[must_use]
    pub fn decision(&self) -> Decision {
        let node = &*self.node;
        let request = |resource: &Resource, count, devices: &[DeviceId]| {
            let devices = devices.iter().map(ToString::to_string).collect();
            Some(Request { resource: resource.to_string(), count, devices })
        };
        let (request, reading) = match &self.question {
            OwnedQuestion::Offer => (None, None),
            OwnedQuestion::Place(place) => (request(&place.resource, place.size, &place.required), None),
            OwnedQuestion::Admit(admit) => {
                (request(&admit.resource, admit.devices.len(), &admit.devices), None)
            }
            OwnedQuestion::Triage(reading) => (None, Some(reading.clone())),
        };
        Decision {
            seq: 0,
            at_wall_ms: self.now.wall_ms,
            hook: self.question.hook(),
            generation: node.generation,
            request,
            reading,
            gpus: self.gpus(),
            candidates: self.candidates(),
            calls: self.calls.clone(),
            outcome: self.outcome.clone(),
            input: None,
        }
    }

    /// Sorted, without duplicates.
    fn gpus(&self) -> Vec<GpuId> {
        let mut parts = BTreeSet::new();
        match &self.question {
            OwnedQuestion::Admit(admit) => parts.extend(admit.devices.iter().map(|id| &id.part)),
            OwnedQuestion::Triage(reading) => {
                parts.insert(&reading.part);
            }
            OwnedQuestion::Offer | OwnedQuestion::Place(_) => {}
        }
        match &self.outcome {
            Outcome::Offered(offers) => parts.extend(offers.iter().map(|(offer, _)| &offer.part)),
            Outcome::Placed(placement, _) => parts.extend(placement.devices.iter().map(|id| &id.part)),
            _ => {}
        }
        let gpus: BTreeSet<GpuId> = parts.into_iter().map(|id| self.node.gpu_id_of(id)).collect();
        gpus.into_iter().collect()
    }

    /// The pods that the request may be for, as `namespace/pod`.
    #[must_use]
    pub fn candidates(&self) -> Vec<String> {
        let candidates = match &self.question {
            OwnedQuestion::Place(place) => {
                pod_candidates::candidates(&self.node, &place.resource, place.size)
            }
            OwnedQuestion::Admit(admit) => pod_candidates::candidates_of(&self.node, admit),
            OwnedQuestion::Offer | OwnedQuestion::Triage(_) => return Vec::new(),
        };
        let names: BTreeSet<String> = candidates
            .into_iter()
            .map(|found| format!("{}/{}", found.pod.namespace, found.pod.name))
            .collect();
        names.into_iter().collect()
    }
}

/// Selects decisions. All fields that are set must match.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Filter {
    /// Decisions on this GPU.
    pub gpu: Option<GpuId>,
    /// Decisions that led to one of these allocations, or whose request may be for this pod.
    pub requester: Option<Requester>,
    /// Decisions in which a policy took part whose label begins with this text.
    pub policy: Option<String>,
    /// Decisions with this outcome ([`Outcome::as_str`]), or `fault` for those in which a policy failed.
    pub outcome: Option<String>,
    /// Decisions of this hook.
    pub hook: Option<Hook>,
    /// Decisions at or after this time, milliseconds since 1970.
    pub since_wall_ms: Option<u64>,
    /// Decisions before this time, milliseconds since 1970.
    pub until_wall_ms: Option<u64>,
    /// Decisions with a smaller sequence number.
    pub before: Option<u64>,
}

/// The requester of a decision; matches by either field.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Requester {
    /// Ids of the resulting allocations.
    pub allocations: Vec<AllocationId>,
    /// The pod, as `namespace/pod`, `/pod` for any namespace or `namespace/` for any pod.
    pub pod: Option<String>,
}

impl Filter {
    /// Whether a decision matches the filter.
    #[must_use]
    pub fn matches(&self, decision: &Decision) -> bool {
        let gpu = |gpu: &GpuId| decision.gpus.contains(gpu);
        let policy = |label: &String| {
            let begins = |by: &str| by.starts_with(label.as_str());
            decision.calls.iter().any(|call| begins(&call.policy))
                || decision.outcome.by().into_iter().any(begins)
        };
        let outcome = |name: &String| match name.as_str() {
            "fault" => decision.calls.iter().any(|call| matches!(call.outcome, CallOutcome::Fault(_))),
            name => decision.outcome.as_str() == name,
        };
        self.gpu.as_ref().is_none_or(gpu)
            && self.requester.as_ref().is_none_or(|requester| requester.matches(decision))
            && self.policy.as_ref().is_none_or(policy)
            && self.outcome.as_ref().is_none_or(outcome)
            && self.hook.is_none_or(|hook| hook == decision.hook)
            && self.since_wall_ms.is_none_or(|since| decision.at_wall_ms >= since)
            && self.until_wall_ms.is_none_or(|until| decision.at_wall_ms < until)
            && self.before.is_none_or(|before| decision.seq < before)
    }
}

impl Requester {
    fn matches(&self, decision: &Decision) -> bool {
        if let Outcome::Granted(Grant { allocation: Some(id), .. }) = &decision.outcome
            && self.allocations.contains(id)
        {
            return true;
        }
        let Some(wanted) = &self.pod else { return false };
        let named = |candidate: &String| match (wanted.split_once('/'), candidate.split_once('/')) {
            (Some(("", wanted)), Some((_, pod))) => pod == wanted,
            (Some((wanted, "")), Some((namespace, _))) => namespace == wanted,
            _ => candidate == wanted,
        };
        decision.candidates.iter().any(named)
    }
}
