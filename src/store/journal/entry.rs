//! A decision as written: the kernel's words as JSON.

use berth_kernel::allocation::Limits;
use berth_kernel::decision::{CallNote, Cost, Decision, Grant, Outcome, Request, Said};
use berth_kernel::gpu::Reading;
use berth_kernel::names::{AllocationId, BadName, DeviceId, Digest, PartId, Resource};
use berth_kernel::offer::{Consumes, OfferLine, PartOffer};
use berth_kernel::policy::{
    Answer, Fault, FaultKind, Hook, OfferAnswer, Placement, Severity, Terms, TriageAnswer,
};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

/// A decision that cannot be read back.
#[derive(Debug, thiserror::Error)]
pub(super) enum BadEntry {
    #[error("{0}")]
    Json(#[from] serde_json::Error),
    #[error("{0}")]
    Name(#[from] BadName),
    #[error("no {noun} is called {name:?}")]
    Word { noun: &'static str, name: String },
}

/// See [`Decision`]; with the question that was asked, in the words of the contract.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Entry {
    seq: u64,
    at_ms: u64,
    hook: String,
    generation: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    request: Option<Asked>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    reading: Option<Told>,
    gpus: Vec<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    candidates: Vec<String>,
    calls: Vec<Call>,
    outcome: End,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    input: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) question: Option<Box<RawValue>>,
}

#[derive(Serialize, Deserialize)]
struct Asked {
    resource: String,
    count: usize,
    devices: Vec<String>,
}

#[derive(Serialize, Deserialize)]
struct Told {
    part: String,
    source: String,
    code: u64,
    detail: String,
}

#[derive(Serialize, Deserialize)]
struct Call {
    policy: String,
    digest: String,
    parameters: String,
    said: Word,
    fuel: u64,
    us: u64,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
enum Word {
    Pass,
    Suspended,
    Fault { kind: String, detail: String },
    Offer { parts: Vec<Offer>, again_s: Option<u32> },
    Place { devices: Vec<String>, reason: String },
    Allow(OnTerms),
    Deny(String),
    Triage(Judged),
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
enum End {
    Offered(Vec<(Offer, String)>),
    Placed { devices: Vec<String>, reason: String, by: String },
    Granted { allocation: Option<String>, by: Vec<String>, terms: OnTerms },
    Denied { by: String, reason: String },
    Refused { reason: String },
    Triaged { answer: Judged, by: String },
}

#[derive(Serialize, Deserialize)]
struct Offer {
    part: String,
    lines: Vec<Line>,
}

/// Neither memory nor compute: the whole part.
#[derive(Serialize, Deserialize)]
struct Line {
    resource: String,
    count: u32,
    slice: Option<(u64, u32)>,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct OnTerms {
    reason: String,
    memory_mib: Option<u64>,
    compute_percent: Option<u32>,
    environment: Vec<(String, String)>,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Judged {
    severity: String,
    reason: String,
    again_s: Option<u32>,
}

impl Entry {
    pub(super) fn new(decision: &Decision, question: Option<Box<RawValue>>) -> Self {
        let request = decision.request.as_ref();
        let reading = decision.reading.as_ref();
        Self {
            seq: decision.seq,
            at_ms: decision.at_wall_ms,
            hook: decision.hook.to_string(),
            generation: decision.generation,
            request: request.map(|r| Asked {
                resource: r.resource.clone(),
                count: r.count,
                devices: r.devices.clone(),
            }),
            reading: reading.map(|r| Told {
                part: r.part.to_string(),
                source: r.source.clone(),
                code: r.code,
                detail: r.detail.clone(),
            }),
            gpus: texts(&decision.gpus),
            candidates: decision.candidates.clone(),
            calls: decision.calls.iter().map(Call::new).collect(),
            outcome: End::new(&decision.outcome),
            input: decision.input.as_ref().map(ToString::to_string),
            question,
        }
    }

    pub(super) fn decision(self) -> Result<Decision, BadEntry> {
        let reading = self.reading.map(|r| -> Result<_, BadEntry> {
            Ok(Reading { part: PartId::parse(&r.part)?, source: r.source, code: r.code, detail: r.detail })
        });
        Ok(Decision {
            seq: self.seq,
            at_wall_ms: self.at_ms,
            hook: word("hook", &self.hook, Hook::parse)?,
            generation: self.generation,
            request: self.request.map(|r| Request {
                resource: r.resource,
                count: r.count,
                devices: r.devices,
            }),
            reading: reading.transpose()?,
            gpus: self.gpus.iter().map(|gpu| PartId::parse(gpu)).collect::<Result<_, _>>()?,
            candidates: self.candidates,
            calls: self.calls.into_iter().map(Call::note).collect::<Result<_, _>>()?,
            outcome: self.outcome.outcome()?,
            input: self.input.as_deref().map(Digest::parse).transpose()?,
        })
    }
}

impl Call {
    fn new(call: &CallNote) -> Self {
        Self {
            policy: call.policy.clone(),
            digest: call.digest.to_string(),
            parameters: call.parameters.clone(),
            said: Word::new(&call.said),
            fuel: call.cost.fuel,
            us: call.cost.wall_us,
        }
    }

    fn note(self) -> Result<CallNote, BadEntry> {
        Ok(CallNote {
            policy: self.policy,
            digest: Digest::parse(&self.digest)?,
            parameters: self.parameters,
            said: self.said.said()?,
            cost: Cost { fuel: self.fuel, wall_us: self.us },
        })
    }
}

impl Word {
    fn new(said: &Said) -> Self {
        match said {
            Said::Pass => Self::Pass,
            Said::Suspended => Self::Suspended,
            Said::Fault(Fault { kind, detail }) => {
                Self::Fault { kind: kind.as_str().to_owned(), detail: detail.clone() }
            }
            Said::Answer(Answer::Offer(answer)) => Self::Offer {
                parts: answer.parts.iter().map(Offer::new).collect(),
                again_s: answer.again_after_s,
            },
            Said::Answer(Answer::Place(p)) => {
                Self::Place { devices: texts(&p.devices), reason: p.reason.clone() }
            }
            Said::Answer(Answer::Allow(terms)) => Self::Allow(OnTerms::new(terms)),
            Said::Answer(Answer::Deny(why)) => Self::Deny(why.clone()),
            Said::Answer(Answer::Triage(answer)) => Self::Triage(Judged::new(answer)),
        }
    }

    fn said(self) -> Result<Said, BadEntry> {
        Ok(Said::Answer(match self {
            Self::Pass => return Ok(Said::Pass),
            Self::Suspended => return Ok(Said::Suspended),
            Self::Fault { kind, detail } => {
                return Ok(Said::Fault(Fault { kind: word("fault", &kind, FaultKind::parse)?, detail }));
            }
            Self::Offer { parts, again_s } => Answer::Offer(OfferAnswer {
                parts: parts.into_iter().map(Offer::offer).collect::<Result<_, _>>()?,
                again_after_s: again_s,
            }),
            Self::Place { devices, reason } => Answer::Place(Placement { devices: ids(&devices)?, reason }),
            Self::Allow(terms) => Answer::Allow(terms.terms()),
            Self::Deny(why) => Answer::Deny(why),
            Self::Triage(answer) => Answer::Triage(answer.answer()?),
        }))
    }
}

impl End {
    fn new(outcome: &Outcome) -> Self {
        match outcome {
            Outcome::Offered(offers) => {
                Self::Offered(offers.iter().map(|(offer, by)| (Offer::new(offer), by.clone())).collect())
            }
            Outcome::Placed(p, by) => {
                Self::Placed { devices: texts(&p.devices), reason: p.reason.clone(), by: by.clone() }
            }
            Outcome::Granted(grant) => Self::Granted {
                allocation: grant.allocation.map(|id| id.to_string()),
                by: grant.by.clone(),
                terms: OnTerms {
                    reason: grant.reason.clone(),
                    memory_mib: grant.limits.memory_mib,
                    compute_percent: grant.limits.compute_percent,
                    environment: grant.environment.clone(),
                },
            },
            Outcome::Denied { by, reason } => Self::Denied { by: by.clone(), reason: reason.clone() },
            Outcome::Refused { reason } => Self::Refused { reason: reason.clone() },
            Outcome::Triaged(answer, by) => Self::Triaged { answer: Judged::new(answer), by: by.clone() },
        }
    }

    fn outcome(self) -> Result<Outcome, BadEntry> {
        Ok(match self {
            Self::Offered(offers) => Outcome::Offered(
                offers.into_iter().map(|(o, by)| Ok((o.offer()?, by))).collect::<Result<_, BadEntry>>()?,
            ),
            Self::Placed { devices, reason, by } => {
                Outcome::Placed(Placement { devices: ids(&devices)?, reason }, by)
            }
            Self::Granted { allocation, by, terms } => {
                let Terms { environment, limits, reason } = terms.terms();
                let allocation = allocation.as_deref().map(AllocationId::parse).transpose()?;
                Outcome::Granted(Grant { allocation, by, reason, limits, environment })
            }
            Self::Denied { by, reason } => Outcome::Denied { by, reason },
            Self::Refused { reason } => Outcome::Refused { reason },
            Self::Triaged { answer, by } => Outcome::Triaged(answer.answer()?, by),
        })
    }
}

impl Offer {
    fn new(offer: &PartOffer) -> Self {
        let line = |line: &OfferLine| Line {
            resource: line.resource.to_string(),
            count: line.count,
            slice: match line.consumes {
                Consumes::Whole => None,
                Consumes::Slice { memory_mib, compute_percent } => Some((memory_mib, compute_percent)),
            },
        };
        Self { part: offer.part.to_string(), lines: offer.lines.iter().map(line).collect() }
    }

    fn offer(self) -> Result<PartOffer, BadEntry> {
        let line = |line: Line| -> Result<OfferLine, BadEntry> {
            let consumes = line.slice.map_or(Consumes::Whole, |(memory_mib, compute_percent)| {
                Consumes::Slice { memory_mib, compute_percent }
            });
            Ok(OfferLine { resource: Resource::parse(&line.resource)?, count: line.count, consumes })
        };
        Ok(PartOffer {
            part: PartId::parse(&self.part)?,
            lines: self.lines.into_iter().map(line).collect::<Result<_, _>>()?,
        })
    }
}

impl OnTerms {
    fn new(terms: &Terms) -> Self {
        Self {
            reason: terms.reason.clone(),
            memory_mib: terms.limits.memory_mib,
            compute_percent: terms.limits.compute_percent,
            environment: terms.environment.clone(),
        }
    }

    fn terms(self) -> Terms {
        let limits = Limits { memory_mib: self.memory_mib, compute_percent: self.compute_percent };
        Terms { environment: self.environment, limits, reason: self.reason }
    }
}

impl Judged {
    fn new(answer: &TriageAnswer) -> Self {
        let severity = answer.severity.as_str().to_owned();
        Self { severity, reason: answer.reason.clone(), again_s: answer.again_after_s }
    }

    fn answer(self) -> Result<TriageAnswer, BadEntry> {
        let severity = word("severity", &self.severity, Severity::parse)?;
        Ok(TriageAnswer { severity, reason: self.reason, again_after_s: self.again_s })
    }
}

fn texts<T: ToString>(all: &[T]) -> Vec<String> {
    all.iter().map(ToString::to_string).collect()
}

fn ids(all: &[String]) -> Result<Vec<DeviceId>, BadEntry> {
    Ok(all.iter().map(|id| DeviceId::parse(id)).collect::<Result<_, _>>()?)
}

fn word<T>(noun: &'static str, name: &str, parse: impl Fn(&str) -> Option<T>) -> Result<T, BadEntry> {
    parse(name).ok_or_else(|| BadEntry::Word { noun, name: name.to_owned() })
}
