//! The serialized form of decisions.

use berth_kernel::grants::allocation::Limits;
use berth_kernel::hardware::gpu::Reading;
use berth_kernel::hardware::triage::{Severity, TriageAnswer};
use berth_kernel::ids::names::{AllocationId, BadName, DeviceId, Digest, GpuId, PartId, Resource};
use berth_kernel::policy::decision::{CallOutcome, CallRecord, Cost, Decision, Grant, Outcome, Request};
use berth_kernel::policy::hooks::{Answer, Fault, FaultKind, Hook, OfferAnswer, Placement, Terms};
use berth_kernel::sharing::offer::{Consumes, OfferLine, PartOffer};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

/// Why a decision could not be decoded.
#[derive(Debug, thiserror::Error)]
pub(super) enum BadEntry {
    #[error("{0}")]
    Name(#[from] BadName),
    #[error("unknown {noun} {name:?}")]
    UnknownName { noun: &'static str, name: String },
}

/// See [`Decision`]; with the question of the call as JSON in the names of the WIT world.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Entry {
    seq: u64,
    at_ms: u64,
    hook: String,
    generation: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    request: Option<RequestEntry>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    reading: Option<ReadingEntry>,
    gpus: Vec<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    candidates: Vec<String>,
    calls: Vec<CallEntry>,
    outcome: OutcomeEntry,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    input: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) question: Option<Box<RawValue>>,
}

#[derive(Serialize, Deserialize)]
struct RequestEntry(#[serde(with = "RequestFields")] Request);

#[derive(Serialize, Deserialize)]
#[serde(remote = "Request")]
struct RequestFields {
    resource: String,
    count: usize,
    devices: Vec<String>,
}

#[derive(Serialize, Deserialize)]
struct ReadingEntry {
    part: String,
    source: String,
    code: u64,
    detail: String,
}

#[derive(Serialize, Deserialize)]
struct CallEntry {
    policy: String,
    digest: String,
    parameters: String,
    #[serde(rename = "said")]
    outcome: CallOutcomeEntry,
    fuel: u64,
    us: u64,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
enum CallOutcomeEntry {
    Pass,
    Suspended,
    Fault { kind: String, detail: String },
    Offer { parts: Vec<OfferEntry>, again_s: Option<u32> },
    Place { devices: Vec<String>, reason: String },
    Allow(TermsEntry),
    Deny(String),
    Triage(TriageEntry),
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
enum OutcomeEntry {
    Offered(Vec<(OfferEntry, String)>),
    Placed { devices: Vec<String>, reason: String, by: String },
    Granted { allocation: Option<String>, by: Vec<String>, terms: TermsEntry },
    Denied { by: String, reason: String },
    Refused { reason: String },
    Triaged { answer: TriageEntry, by: String },
}

#[derive(Serialize, Deserialize)]
struct OfferEntry {
    part: String,
    lines: Vec<LineEntry>,
}

/// A line without a slice offers the whole part. A slice is MiB of memory and percent of compute.
#[derive(Serialize, Deserialize)]
struct LineEntry {
    resource: String,
    count: u32,
    slice: Option<(u64, u32)>,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct TermsEntry {
    reason: String,
    memory_mib: Option<u64>,
    compute_percent: Option<u32>,
    environment: Vec<(String, String)>,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct TriageEntry {
    severity: String,
    reason: String,
    again_s: Option<u32>,
}

impl Entry {
    pub(super) fn new(decision: &Decision, question: Option<Box<RawValue>>) -> Self {
        let reading = decision.reading.as_ref();
        Self {
            seq: decision.seq,
            at_ms: decision.at_wall_ms,
            hook: decision.hook.to_string(),
            generation: decision.generation,
            request: decision.request.clone().map(RequestEntry),
            reading: reading.map(|r| ReadingEntry {
                part: r.part.to_string(),
                source: r.source.clone(),
                code: r.code,
                detail: r.detail.clone(),
            }),
            gpus: to_strings(&decision.gpus),
            candidates: decision.candidates.clone(),
            calls: decision.calls.iter().map(CallEntry::new).collect(),
            outcome: OutcomeEntry::new(&decision.outcome),
            input: decision.input.as_ref().map(ToString::to_string),
            question,
        }
    }

    pub(super) fn into_decision(self) -> Result<Decision, BadEntry> {
        let reading = self.reading.map(|r| -> Result<_, BadEntry> {
            Ok(Reading { part: PartId::parse(&r.part)?, source: r.source, code: r.code, detail: r.detail })
        });
        Ok(Decision {
            seq: self.seq,
            at_wall_ms: self.at_ms,
            hook: parse_name("hook", &self.hook, Hook::parse)?,
            generation: self.generation,
            request: self.request.map(|request| request.0),
            reading: reading.transpose()?,
            gpus: self.gpus.iter().map(|gpu| GpuId::parse(gpu)).collect::<Result<_, _>>()?,
            candidates: self.candidates,
            calls: self.calls.into_iter().map(CallEntry::into_record).collect::<Result<_, _>>()?,
            outcome: self.outcome.into_outcome()?,
            input: self.input.as_deref().map(Digest::parse).transpose()?,
        })
    }
}

impl CallEntry {
    fn new(call: &CallRecord) -> Self {
        Self {
            policy: call.policy.clone(),
            digest: call.digest.to_string(),
            parameters: call.parameters.clone(),
            outcome: CallOutcomeEntry::new(&call.outcome),
            fuel: call.cost.fuel,
            us: call.cost.wall_us,
        }
    }

    fn into_record(self) -> Result<CallRecord, BadEntry> {
        Ok(CallRecord {
            policy: self.policy,
            digest: Digest::parse(&self.digest)?,
            parameters: self.parameters,
            outcome: self.outcome.into_outcome()?,
            cost: Cost { fuel: self.fuel, wall_us: self.us },
        })
    }
}

impl CallOutcomeEntry {
    fn new(outcome: &CallOutcome) -> Self {
        match outcome {
            CallOutcome::Pass => Self::Pass,
            CallOutcome::Suspended => Self::Suspended,
            CallOutcome::Fault(Fault { kind, detail }) => {
                Self::Fault { kind: kind.as_str().to_owned(), detail: detail.clone() }
            }
            CallOutcome::Answer(Answer::Offer(answer)) => Self::Offer {
                parts: answer.parts.iter().map(OfferEntry::new).collect(),
                again_s: answer.again_after_s,
            },
            CallOutcome::Answer(Answer::Place(p)) => {
                Self::Place { devices: to_strings(&p.devices), reason: p.reason.clone() }
            }
            CallOutcome::Answer(Answer::Allow(terms)) => Self::Allow(TermsEntry::new(terms)),
            CallOutcome::Answer(Answer::Deny(why)) => Self::Deny(why.clone()),
            CallOutcome::Answer(Answer::Triage(answer)) => Self::Triage(TriageEntry::new(answer)),
        }
    }

    fn into_outcome(self) -> Result<CallOutcome, BadEntry> {
        Ok(CallOutcome::Answer(match self {
            Self::Pass => return Ok(CallOutcome::Pass),
            Self::Suspended => return Ok(CallOutcome::Suspended),
            Self::Fault { kind, detail } => {
                return Ok(CallOutcome::Fault(Fault {
                    kind: parse_name("fault", &kind, FaultKind::parse)?,
                    detail,
                }));
            }
            Self::Offer { parts, again_s } => Answer::Offer(OfferAnswer {
                parts: parts.into_iter().map(OfferEntry::into_offer).collect::<Result<_, _>>()?,
                again_after_s: again_s,
            }),
            Self::Place { devices, reason } => {
                Answer::Place(Placement { devices: parse_device_ids(&devices)?, reason })
            }
            Self::Allow(terms) => Answer::Allow(terms.into_terms()),
            Self::Deny(why) => Answer::Deny(why),
            Self::Triage(answer) => Answer::Triage(answer.into_answer()?),
        }))
    }
}

impl OutcomeEntry {
    fn new(outcome: &Outcome) -> Self {
        match outcome {
            Outcome::Offered(offers) => Self::Offered(
                offers.iter().map(|(offer, by)| (OfferEntry::new(offer), by.to_string())).collect(),
            ),
            Outcome::Placed(p, by) => {
                Self::Placed { devices: to_strings(&p.devices), reason: p.reason.clone(), by: by.to_string() }
            }
            Outcome::Granted(grant) => Self::Granted {
                allocation: grant.allocation.map(|id| id.to_string()),
                by: to_strings(&grant.by),
                terms: TermsEntry::new(&grant.terms),
            },
            Outcome::Denied { by, reason } => Self::Denied { by: by.clone(), reason: reason.clone() },
            Outcome::Refused { reason } => Self::Refused { reason: reason.clone() },
            Outcome::Triaged(answer, by) => {
                Self::Triaged { answer: TriageEntry::new(answer), by: by.to_string() }
            }
        }
    }

    fn into_outcome(self) -> Result<Outcome, BadEntry> {
        Ok(match self {
            Self::Offered(offers) => Outcome::Offered(
                offers
                    .into_iter()
                    .map(|(o, by)| Ok((o.into_offer()?, by.into())))
                    .collect::<Result<_, BadEntry>>()?,
            ),
            Self::Placed { devices, reason, by } => {
                Outcome::Placed(Placement { devices: parse_device_ids(&devices)?, reason }, by.into())
            }
            Self::Granted { allocation, by, terms } => {
                let allocation = allocation.as_deref().map(AllocationId::parse).transpose()?;
                let by = by.into_iter().map(Into::into).collect();
                Outcome::Granted(Grant { allocation, by, terms: terms.into_terms() })
            }
            Self::Denied { by, reason } => Outcome::Denied { by, reason },
            Self::Refused { reason } => Outcome::Refused { reason },
            Self::Triaged { answer, by } => Outcome::Triaged(answer.into_answer()?, by.into()),
        })
    }
}

impl OfferEntry {
    fn new(offer: &PartOffer) -> Self {
        let line = |line: &OfferLine| LineEntry {
            resource: line.resource.to_string(),
            count: line.count,
            slice: match line.consumes {
                Consumes::Whole => None,
                Consumes::Slice { memory_mib, compute_percent } => Some((memory_mib, compute_percent)),
            },
        };
        Self { part: offer.part.to_string(), lines: offer.lines.iter().map(line).collect() }
    }

    fn into_offer(self) -> Result<PartOffer, BadEntry> {
        let line = |line: LineEntry| -> Result<OfferLine, BadEntry> {
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

impl TermsEntry {
    fn new(terms: &Terms) -> Self {
        Self {
            reason: terms.reason.clone(),
            memory_mib: terms.limits.memory_mib,
            compute_percent: terms.limits.compute_percent,
            environment: terms.environment.clone(),
        }
    }

    fn into_terms(self) -> Terms {
        let limits = Limits { memory_mib: self.memory_mib, compute_percent: self.compute_percent };
        Terms { environment: self.environment, limits, reason: self.reason }
    }
}

impl TriageEntry {
    fn new(answer: &TriageAnswer) -> Self {
        let severity = answer.severity.as_str().to_owned();
        Self { severity, reason: answer.reason.clone(), again_s: answer.again_after_s }
    }

    fn into_answer(self) -> Result<TriageAnswer, BadEntry> {
        let severity = parse_name("severity", &self.severity, Severity::parse)?;
        Ok(TriageAnswer { severity, reason: self.reason, again_after_s: self.again_s })
    }
}

fn to_strings<T: ToString>(items: &[T]) -> Vec<String> {
    items.iter().map(ToString::to_string).collect()
}

fn parse_device_ids(ids: &[String]) -> Result<Vec<DeviceId>, BadEntry> {
    Ok(ids.iter().map(|id| DeviceId::parse(id)).collect::<Result<_, _>>()?)
}

fn parse_name<T>(noun: &'static str, name: &str, parse: impl Fn(&str) -> Option<T>) -> Result<T, BadEntry> {
    parse(name).ok_or_else(|| BadEntry::UnknownName { noun, name: name.to_owned() })
}
