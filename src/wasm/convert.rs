//! Converts questions to WIT types and answers back to kernel types. An index out of range is a fault here; whether
//! an answer is allowed is decided by the kernel.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use super::bindings::berth::policy::types as wit;
use super::fault;
use super::view::{Indices, View};
use berth_kernel::grants::allocation::Limits;
use berth_kernel::grants::claim::ClaimRequest;
use berth_kernel::hardware::gpu::Reading;
use berth_kernel::hardware::triage::{Severity, TriageAnswer};
use berth_kernel::ids::names::{DeviceId, PartId, Resource};
use berth_kernel::policy::hooks::{
    AdmitRequest, Answer, Fault, Hook, OfferAnswer, PlaceRequest, Placement, Question, Terms,
};
use berth_kernel::sharing::offer::{Consumes, OfferLine, PartOffer};

/// The hooks that a policy may implement, with their WIT flags.
pub(super) const HOOKS: [(Hook, wit::Hooks); 4] = [
    (Hook::Offer, wit::Hooks::OFFER),
    (Hook::Place, wit::Hooks::PLACE),
    (Hook::Admit, wit::Hooks::ADMIT),
    (Hook::Triage, wit::Hooks::TRIAGE),
];

/// A question in WIT types.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum WitQuestion {
    Offer,
    Place(wit::PlaceRequest),
    Admit(wit::AdmitRequest),
    Triage(wit::Reading),
}

/// An answer in WIT types; `None` is `pass`.
pub(super) enum WitAnswer {
    Offer(Option<wit::OfferAnswer>),
    Place(Option<wit::Placement>),
    Admit(Option<wit::Verdict>),
    Triage(Option<wit::TriageAnswer>),
}

impl View {
    /// # Errors
    /// If the question has a part, resource or device that is not in this snapshot, and so has no index.
    pub(super) fn question(&self, question: Question<'_>) -> Result<WitQuestion, Fault> {
        Ok(match question {
            Question::Offer => WitQuestion::Offer,
            Question::Place(request) => WitQuestion::Place(self.place_request(request)?),
            Question::Admit(request) => WitQuestion::Admit(self.admit_request(request)?),
            Question::Triage(reading) => WitQuestion::Triage(self.reading(reading)?),
        })
    }

    fn place_request(&self, request: &PlaceRequest) -> Result<wit::PlaceRequest, Fault> {
        let devices = |ids: &[DeviceId]| self.device_indices(&request.resource, ids);
        Ok(wit::PlaceRequest {
            request: self.request(
                &request.resource,
                self.candidates(&request.resource, request.size),
                None,
            )?,
            available: devices(&request.available)?,
            required: devices(&request.required)?,
            size: u32::try_from(request.size).unwrap_or(u32::MAX),
        })
    }

    fn admit_request(&self, request: &AdmitRequest) -> Result<wit::AdmitRequest, Fault> {
        Ok(wit::AdmitRequest {
            request: self.request(
                &request.resource,
                self.candidates_of(request),
                request.claim.as_deref(),
            )?,
            devices: self.device_indices(&request.resource, &request.devices)?,
        })
    }

    fn reading(&self, reading: &Reading) -> Result<wit::Reading, Fault> {
        let part = self.part_index(&reading.part).ok_or_else(|| unknown("part", &reading.part))?;
        Ok(wit::Reading {
            part,
            source: reading.source.clone(),
            code: reading.code,
            detail: reading.detail.clone(),
        })
    }

    fn request(
        &self,
        resource: &Resource,
        candidates: Vec<wit::Candidate>,
        claim: Option<&ClaimRequest>,
    ) -> Result<wit::Request, Fault> {
        let index = self.resource_index(resource);
        Ok(wit::Request {
            front_end: if claim.is_some() { wit::FrontEnd::Dra } else { wit::FrontEnd::DevicePlugin },
            resource: index.ok_or_else(|| unknown("resource", resource))?,
            candidates,
            config: None,
            claim: claim.map(|ClaimRequest { claim, request, .. }| wit::Claim {
                namespace: claim.namespace.clone(),
                name: claim.name.clone(),
                uid: claim.uid.clone(),
                request: request.clone(),
                share_id: None,
                consumed_capacity: Vec::new(),
            }),
        })
    }

    fn device_indices(&self, resource: &Resource, ids: &[DeviceId]) -> Result<Vec<u32>, Fault> {
        let resource = self.resource_index(resource).ok_or_else(|| unknown("resource", resource))?;
        // The devices are sorted by part, so that each part is looked up once.
        let mut last: Option<(&PartId, u32)> = None;
        let mut indices = Vec::with_capacity(ids.len());
        for id in ids {
            let known = last.filter(|(known, _)| **known == id.part);
            let part = known.map(|(_, part)| part).or_else(|| self.part_index(&id.part));
            let index = part.and_then(|part| self.device_index(part, resource, id.share));
            indices.push(index.ok_or_else(|| unknown("device", id))?);
            last = part.map(|part| (&id.part, part));
        }
        Ok(indices)
    }
}

/// An answer in kernel types.
///
/// # Errors
/// If an index or a name in it is invalid.
pub(super) fn answer(
    of: &Indices,
    answer: WitAnswer,
    question: &WitQuestion,
) -> Result<Option<Answer>, Fault> {
    match answer {
        WitAnswer::Offer(answer) => answer.map(|answer| offer_answer(of, answer)).transpose(),
        WitAnswer::Place(answer) => answer.map(|answer| placement(of, question, answer)).transpose(),
        WitAnswer::Admit(answer) => Ok(answer.map(verdict)),
        WitAnswer::Triage(answer) => Ok(answer.map(triage)),
    }
}

/// # Errors
/// If a part is out of range or named twice, or a resource name is invalid.
fn offer_answer(of: &Indices, answer: wit::OfferAnswer) -> Result<Answer, Fault> {
    let mut named = BTreeSet::new();
    let mut parts = Vec::with_capacity(answer.parts.len());
    for offer in answer.parts {
        let Some(part) = of.part(offer.part) else {
            return Err(out_of_range("part", offer.part, of.parts.len()));
        };
        if !named.insert(offer.part) {
            return Err(fault::answer(format!("named part {} twice", offer.part)));
        }
        let lines = offer.lines.iter().map(line).collect::<Result<_, _>>()?;
        parts.push(PartOffer { part, lines });
    }
    Ok(Answer::Offer(OfferAnswer { parts, again_after_s: answer.again_after_seconds }))
}

/// # Errors
/// If a device is out of range, named twice, or of another resource than requested.
fn placement(of: &Indices, question: &WitQuestion, placement: wit::Placement) -> Result<Answer, Fault> {
    let requested = match question {
        WitQuestion::Place(place) => Some(place.request.resource),
        WitQuestion::Offer | WitQuestion::Admit(_) | WitQuestion::Triage(_) => None,
    };
    let mut named = BTreeSet::new();
    let mut devices = Vec::with_capacity(placement.devices.len());
    for index in placement.devices {
        let Some((id, resource)) = of.device(index) else {
            return Err(out_of_range("device", index, of.devices.len()));
        };
        if !named.insert(index) {
            return Err(fault::answer(format!("chose device {index} twice")));
        }
        if requested != Some(resource) {
            let detail = format!("chose device {index}, which is of another resource");
            return Err(fault::answer(detail));
        }
        devices.push(id);
    }
    Ok(Answer::Place(Placement { devices, reason: placement.reason }))
}

fn verdict(verdict: wit::Verdict) -> Answer {
    match verdict {
        wit::Verdict::Deny(reason) => Answer::Deny(reason),
        wit::Verdict::Allow(terms) => Answer::Allow(Terms {
            environment: terms.environment.into_iter().map(|a| (a.key, a.value)).collect(),
            limits: Limits {
                memory_mib: terms.limits.memory_mib,
                compute_percent: terms.limits.compute_percent,
            },
            reason: terms.reason,
        }),
    }
}

fn triage(answer: wit::TriageAnswer) -> Answer {
    let severity = match answer.severity {
        wit::Severity::Ignore => Severity::Ignore,
        wit::Severity::Degraded => Severity::Degraded,
        wit::Severity::Unhealthy => Severity::Unhealthy,
    };
    Answer::Triage(TriageAnswer {
        severity,
        reason: answer.reason,
        again_after_s: answer.again_after_seconds,
    })
}

fn line(line: &wit::OfferLine) -> Result<OfferLine, Fault> {
    let resource = Resource::parse(&line.resource).map_err(|error| fault::answer(error.to_string()))?;
    let consumes = match line.consumes {
        wit::Consumes::Whole => Consumes::Whole,
        wit::Consumes::Slice(slice) => {
            Consumes::Slice { memory_mib: slice.memory_mib, compute_percent: slice.compute_percent }
        }
    };
    Ok(OfferLine { resource, count: line.count, consumes })
}

fn out_of_range(noun: &str, index: u32, count: usize) -> Fault {
    fault::answer(format!("named {noun} {index}, but there are {count}"))
}

fn unknown(noun: &str, name: &dyn std::fmt::Display) -> Fault {
    fault::missing(format!("the {noun} {name} is not in this snapshot"))
}
