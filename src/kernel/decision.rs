//! Decisions on the record: what was asked, what each policy said to it, and what came of it.

use super::allocation::Limits;
use super::gpu::Reading;
use super::ledger::Ledger;
use super::names::{AllocationId, DeviceId, Digest, PartId, Resource};
use super::offer::PartOffer;
use super::pods;
use super::policy::{AdmitRequest, Answer, Fault, Hook, PlaceRequest, Placement, Question, TriageAnswer};
use super::time::Now;
use std::collections::BTreeSet;
use std::sync::Arc;

/// What one call took.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cost {
    /// Units of fuel, the same on every machine; 0 where the caller cannot tell.
    pub fuel: u64,
    /// Wall time from the instance's making to the answer, microseconds.
    pub wall_us: u64,
}

/// A question that outlives its caller.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Asked {
    /// As [`Question::Offer`].
    Offer,
    /// As [`Question::Place`].
    Place(PlaceRequest),
    /// As [`Question::Admit`].
    Admit(AdmitRequest),
    /// As [`Question::Triage`].
    Triage(Reading),
}

impl Asked {
    /// The same, borrowed.
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

/// What one policy said.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Said {
    /// The next one is to be asked.
    Pass,
    /// This.
    Answer(Answer),
    /// Nothing that could be used.
    Fault(Fault),
    /// It was not asked: it failed too often.
    Suspended,
}

impl Said {
    /// Which it is, in a word.
    #[must_use]
    pub fn word(&self) -> &'static str {
        match self {
            Self::Pass => "pass",
            Self::Answer(_) => "answer",
            Self::Fault(_) => "fault",
            Self::Suspended => "suspended",
        }
    }
}

/// One policy's part in a decision.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CallNote {
    /// `name@` and the beginning of the digest.
    pub policy: String,
    /// Which version.
    pub digest: Digest,
    /// The entry's parameters, JSON.
    pub parameters: String,
    /// What it said.
    pub said: Said,
    /// What that took.
    pub cost: Cost,
}

/// What came of a question, by the whole stack and the kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// What each part is offered as, and who says so.
    Offered(Vec<(PartOffer, String)>),
    /// Which devices, and who says so.
    Placed(Placement, String),
    /// Granted, with what the container was told.
    Granted(Grant),
    /// A policy said no, or failed where its failing denies.
    Denied {
        /// Its label.
        by: String,
        /// Why.
        reason: String,
    },
    /// The policies allowed it, and the kernel did not, or could not.
    Refused {
        /// Why.
        reason: String,
    },
    /// What a reading means, and who says so.
    Triaged(TriageAnswer, String),
}

/// What was granted, as far as policies have a word in it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Grant {
    /// Under which id.
    pub allocation: Option<AllocationId>,
    /// Who allowed it.
    pub by: Vec<String>,
    /// Why.
    pub reason: String,
    /// What the container may use.
    pub limits: Limits,
    /// The policies' environment for it.
    pub environment: Vec<(String, String)>,
}

impl Outcome {
    /// In one word, as lists are filtered by it.
    #[must_use]
    pub fn word(&self) -> &'static str {
        match self {
            Self::Offered(_) => "offered",
            Self::Placed(..) => "placed",
            Self::Granted(_) => "granted",
            Self::Denied { .. } => "denied",
            Self::Refused { .. } => "refused",
            Self::Triaged(..) => "triaged",
        }
    }

    /// Who is behind it, by label.
    #[must_use]
    pub fn by(&self) -> Vec<&str> {
        match self {
            Self::Offered(offers) => {
                let mut by: Vec<&str> = offers.iter().map(|(_, by)| by.as_str()).collect();
                by.sort_unstable();
                by.dedup();
                by
            }
            Self::Placed(_, by) | Self::Triaged(_, by) | Self::Denied { by, .. } => vec![by],
            Self::Granted(grant) => grant.by.iter().map(String::as_str).collect(),
            Self::Refused { .. } => Vec::new(),
        }
    }

    /// Why, in a sentence; empty where nobody gave one.
    #[must_use]
    pub fn reason(&self) -> &str {
        match self {
            Self::Offered(_) => "",
            Self::Placed(placement, _) => &placement.reason,
            Self::Granted(grant) => &grant.reason,
            Self::Denied { reason, .. } | Self::Refused { reason } => reason,
            Self::Triaged(answer, _) => &answer.reason,
        }
    }
}

/// A decision as it is handed to the journal. The node is shared, so this is cheap.
#[derive(Clone, Debug)]
pub struct Note {
    /// What the policies saw.
    pub node: Arc<Ledger>,
    /// When.
    pub now: Now,
    /// What was asked.
    pub asked: Asked,
    /// What each policy of the stack said, in order.
    pub calls: Vec<CallNote>,
    /// What came of it.
    pub outcome: Outcome,
    /// Whether it says what the one before it said, and need not be put down.
    pub again: bool,
}

/// How much of the past is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct JournalLimit {
    /// Bytes of all files together.
    pub bytes: u64,
    /// Age, milliseconds.
    pub age_ms: u64,
}

impl Default for JournalLimit {
    fn default() -> Self {
        Self { bytes: 64 * 1024 * 1024, age_ms: 7 * 24 * 3_600_000 }
    }
}

/// A decision as the journal keeps it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Decision {
    /// Counts from 1, without gaps but those of what was dropped.
    pub seq: u64,
    /// When, milliseconds since 1970.
    pub at_wall_ms: u64,
    /// Which hook was asked.
    pub hook: Hook,
    /// The snapshot's generation.
    pub generation: u64,
    /// What was asked for, where something was.
    pub request: Option<Request>,
    /// The reading that was asked about.
    pub reading: Option<Reading>,
    /// GPUs that the question or the outcome names.
    pub gpus: Vec<PartId>,
    /// Pods that may have asked, as `namespace/pod`.
    pub candidates: Vec<String>,
    /// What each policy said.
    pub calls: Vec<CallNote>,
    /// What came of it.
    pub outcome: Outcome,
    /// sha256 of what the policies were shown; `None` where that could not be put down.
    pub input: Option<Digest>,
}

/// What was asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// The resource.
    pub resource: String,
    /// How many devices.
    pub count: usize,
    /// The devices that an Allocate named, or that a placement had to hold.
    pub devices: Vec<String>,
}

impl Note {
    /// As it is put down, without a number.
    #[must_use]
    pub fn decision(&self) -> Decision {
        let node = &*self.node;
        let ids = |devices: &[DeviceId]| devices.iter().map(ToString::to_string).collect();
        let (request, reading) = match &self.asked {
            Asked::Offer => (None, None),
            Asked::Place(place) => {
                (Some(Request::new(&place.resource, place.size, ids(&place.required))), None)
            }
            Asked::Admit(admit) => {
                (Some(Request::new(&admit.resource, admit.devices.len(), ids(&admit.devices))), None)
            }
            Asked::Triage(reading) => (None, Some(reading.clone())),
        };
        Decision {
            seq: 0,
            at_wall_ms: self.now.wall_ms,
            hook: self.asked.hook(),
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

    /// Each once, in order.
    fn gpus(&self) -> Vec<PartId> {
        let mut parts = BTreeSet::new();
        match &self.asked {
            Asked::Admit(admit) => parts.extend(admit.devices.iter().map(|id| &id.part)),
            Asked::Triage(reading) => {
                parts.insert(&reading.part);
            }
            Asked::Offer | Asked::Place(_) => {}
        }
        match &self.outcome {
            Outcome::Offered(offers) => parts.extend(offers.iter().map(|(offer, _)| &offer.part)),
            Outcome::Placed(placement, _) => parts.extend(placement.devices.iter().map(|id| &id.part)),
            _ => {}
        }
        let gpu = |id: &PartId| self.node.part(id).map_or(id, |state| state.part.gpu()).clone();
        parts.into_iter().map(gpu).collect::<BTreeSet<_>>().into_iter().collect()
    }

    fn candidates(&self) -> Vec<String> {
        let found = match &self.asked {
            Asked::Place(place) => pods::candidates(&self.node, &place.resource, place.size),
            Asked::Admit(admit) => pods::candidates(&self.node, &admit.resource, admit.devices.len()),
            Asked::Offer | Asked::Triage(_) => Vec::new(),
        };
        let mut names: Vec<_> =
            found.iter().map(|found| format!("{}/{}", found.pod.namespace, found.pod.name)).collect();
        names.sort_unstable();
        names.dedup();
        names
    }
}

impl Request {
    fn new(resource: &Resource, count: usize, devices: Vec<String>) -> Self {
        Self { resource: resource.to_string(), count, devices }
    }
}

/// Which decisions are wanted. All that is given must hold.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Filter {
    /// That name this GPU.
    pub gpu: Option<PartId>,
    /// That led to one of these allocations, or that one of these pods (`namespace/pod`) may have
    /// asked for.
    pub whose: Option<Whose>,
    /// In which a policy had a part whose label begins so.
    pub policy: Option<String>,
    /// With this outcome ([`Outcome::word`]), or `fault` for those in which a policy failed.
    pub outcome: Option<String>,
    /// Of this hook.
    pub hook: Option<Hook>,
    /// Not earlier, milliseconds since 1970.
    pub since_wall_ms: Option<u64>,
    /// Earlier, milliseconds since 1970.
    pub until_wall_ms: Option<u64>,
    /// With a smaller number.
    pub before: Option<u64>,
}

/// Of whom.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Whose {
    /// By allocation.
    pub allocations: Vec<AllocationId>,
    /// By name, `namespace/pod` or `/pod` for any namespace or `namespace/` for any pod.
    pub pod: Option<String>,
}

impl Filter {
    /// Whether a decision is wanted.
    #[must_use]
    pub fn wants(&self, decision: &Decision) -> bool {
        let gpu = |gpu: &PartId| decision.gpus.contains(gpu);
        let policy = |label: &String| {
            let begins = |by: &str| by.starts_with(label.as_str());
            decision.calls.iter().any(|call| begins(&call.policy))
                || decision.outcome.by().into_iter().any(begins)
        };
        let outcome = |word: &String| match word.as_str() {
            "fault" => decision.calls.iter().any(|call| matches!(call.said, Said::Fault(_))),
            word => decision.outcome.word() == word,
        };
        self.gpu.as_ref().is_none_or(gpu)
            && self.whose.as_ref().is_none_or(|whose| whose.is(decision))
            && self.policy.as_ref().is_none_or(policy)
            && self.outcome.as_ref().is_none_or(outcome)
            && self.hook.is_none_or(|hook| hook == decision.hook)
            && self.since_wall_ms.is_none_or(|since| decision.at_wall_ms >= since)
            && self.until_wall_ms.is_none_or(|until| decision.at_wall_ms < until)
            && self.before.is_none_or(|before| decision.seq < before)
    }
}

impl Whose {
    fn is(&self, decision: &Decision) -> bool {
        if let Outcome::Granted(Grant { allocation: Some(id), .. }) = &decision.outcome
            && self.allocations.contains(id)
        {
            return true;
        }
        let Some(wanted) = &self.pod else { return false };
        let named = |candidate: &String| match wanted.split_once('/') {
            Some(("", pod)) => candidate.split_once('/').is_some_and(|(_, name)| name == pod),
            Some((namespace, "")) => candidate.split_once('/').is_some_and(|(of, _)| of == namespace),
            _ => candidate == wanted,
        };
        decision.candidates.iter().any(named)
    }
}
