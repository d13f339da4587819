//! Questions into the words of the contract, and answers back into the kernel's: an index that
//! stands for nothing is a fault here. Whether an answer is allowed is the kernel's to judge.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};
use wasmtime::Store;

use super::bindings::berth::policy::types as wit;
use super::exports::Hooks;
use super::fault;
use super::guest::Guest;
use super::view::View;
use berth_kernel::allocation::Limits;
use berth_kernel::gpu::Reading;
use berth_kernel::names::{DeviceId, PartId, Resource};
use berth_kernel::offer::{Consumes, OfferLine, PartOffer};
use berth_kernel::policy::{
    AdmitRequest, Answer, Fault, OfferAnswer, PlaceRequest, Placement, Question, Severity, Terms,
    TriageAnswer,
};

/// What the indices of a node stand for.
pub(super) trait Indices {
    /// The part of an index.
    fn part(&self, index: u32) -> Option<PartId>;
    /// How many parts there are.
    fn parts(&self) -> usize;
    /// The device of an index, and the index of its resource.
    fn device(&self, index: u32) -> Option<(DeviceId, u32)>;
    /// How many devices there are.
    fn devices(&self) -> usize;
}

/// A question in the words of the contract.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Asked {
    Offer,
    Place(wit::PlaceRequest),
    Admit(wit::AdmitRequest),
    Triage(wit::Reading),
}

/// What the policy said to it; `None` is `pass`.
pub(super) enum Told {
    Offer(Option<wit::OfferAnswer>),
    Place(Option<wit::Placement>),
    Admit(Option<wit::Verdict>),
    Triage(Option<wit::TriageAnswer>),
}

impl Asked {
    /// Calls the hook.
    ///
    /// # Errors
    /// If the policy traps, or what it hands over is malformed.
    pub(super) fn put(
        &self,
        hooks: &Hooks<'_>,
        store: &mut Store<Guest>,
        context: &wit::Context,
    ) -> wasmtime::Result<Told> {
        Ok(match self {
            Self::Offer => Told::Offer(hooks.offer(store, context)?),
            Self::Place(request) => Told::Place(hooks.place(store, context, request)?),
            Self::Admit(request) => Told::Admit(hooks.admit(store, context, request)?),
            Self::Triage(reading) => Told::Triage(hooks.triage(store, context, reading)?),
        })
    }
}

impl View {
    /// # Errors
    /// If the question names what this snapshot has not: it cannot be asked in indices.
    pub(super) fn question(&self, question: Question<'_>) -> Result<Asked, Fault> {
        Ok(match question {
            Question::Offer => Asked::Offer,
            Question::Place(request) => Asked::Place(self.place_request(request)?),
            Question::Admit(request) => Asked::Admit(self.admit_request(request)?),
            Question::Triage(reading) => Asked::Triage(self.reading(reading)?),
        })
    }

    fn place_request(&self, request: &PlaceRequest) -> Result<wit::PlaceRequest, Fault> {
        let devices = |ids: &[DeviceId]| self.device_indices(&request.resource, ids);
        Ok(wit::PlaceRequest {
            request: self.request(&request.resource, request.size)?,
            available: devices(&request.available)?,
            required: devices(&request.required)?,
            size: u32::try_from(request.size).unwrap_or(u32::MAX),
        })
    }

    fn admit_request(&self, request: &AdmitRequest) -> Result<wit::AdmitRequest, Fault> {
        Ok(wit::AdmitRequest {
            request: self.request(&request.resource, request.devices.len())?,
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

    fn request(&self, resource: &Resource, count: usize) -> Result<wit::Request, Fault> {
        let index = self.resource_index(resource);
        Ok(wit::Request {
            front_end: wit::FrontEnd::DevicePlugin,
            resource: index.ok_or_else(|| unknown("resource", resource))?,
            candidates: self.candidates(resource, count),
            config: None,
            claim: None,
        })
    }

    fn device_indices(&self, resource: &Resource, ids: &[DeviceId]) -> Result<Vec<u32>, Fault> {
        let resource = self.resource_index(resource).ok_or_else(|| unknown("resource", resource))?;
        // They come part by part, so each part is looked up once.
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

/// What was told, in the kernel's words.
///
/// # Errors
/// If it makes no sense.
pub(super) fn answer(of: &impl Indices, told: Told, asked: &Asked) -> Result<Option<Answer>, Fault> {
    match told {
        Told::Offer(told) => told.map(|told| offer_answer(of, told)).transpose(),
        Told::Place(told) => told.map(|told| placement(of, asked, told)).transpose(),
        Told::Admit(told) => Ok(told.map(verdict)),
        Told::Triage(told) => Ok(told.map(triage)),
    }
}

/// A part or a resource name may make no sense, or a part be named twice.
fn offer_answer(of: &impl Indices, answer: wit::OfferAnswer) -> Result<Answer, Fault> {
    let mut named = BTreeSet::new();
    let mut parts = Vec::with_capacity(answer.parts.len());
    for offer in answer.parts {
        let Some(part) = of.part(offer.part) else {
            return Err(out_of_range("part", offer.part, of.parts()));
        };
        if !named.insert(offer.part) {
            return Err(fault::answer(format!("named part {} twice", offer.part)));
        }
        let lines = offer.lines.iter().map(line).collect::<Result<_, _>>()?;
        parts.push(PartOffer { part, lines });
    }
    Ok(Answer::Offer(OfferAnswer { parts, again_after_s: answer.again_after_seconds }))
}

/// A device may make no sense, be named twice, or be of another resource than was asked for.
fn placement(of: &impl Indices, asked: &Asked, placement: wit::Placement) -> Result<Answer, Fault> {
    let resource_asked = match asked {
        Asked::Place(asked) => Some(asked.request.resource),
        Asked::Offer | Asked::Admit(_) | Asked::Triage(_) => None,
    };
    let mut named = BTreeSet::new();
    let mut devices = Vec::with_capacity(placement.devices.len());
    for index in placement.devices {
        let Some((id, resource)) = of.device(index) else {
            return Err(out_of_range("device", index, of.devices()));
        };
        if !named.insert(index) {
            return Err(fault::answer(format!("chose device {index} twice")));
        }
        if resource_asked != Some(resource) {
            let words = format!("chose device {index}, which is of another resource");
            return Err(fault::answer(words));
        }
        devices.push(id);
    }
    Ok(Answer::Place(Placement { devices, reason: placement.reason }))
}

/// Takes a verdict as it is.
fn verdict(verdict: wit::Verdict) -> Answer {
    match verdict {
        wit::Verdict::Deny(why) => Answer::Deny(why),
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

/// Takes a triage answer as it is.
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
    let resource = Resource::parse(&line.resource).map_err(|bad| fault::answer(bad.to_string()))?;
    let consumes = match line.consumes {
        wit::Consumes::Whole => Consumes::Whole,
        wit::Consumes::Slice(slice) => {
            Consumes::Slice { memory_mib: slice.memory_mib, compute_percent: slice.compute_percent }
        }
    };
    Ok(OfferLine { resource, count: line.count, consumes })
}

fn out_of_range(noun: &str, index: u32, count: usize) -> Fault {
    fault::answer(format!("named {noun} {index}, and there are {count}"))
}

fn unknown(noun: &str, name: &dyn std::fmt::Display) -> Fault {
    fault::missing(format!("the {noun} {name} is not in this snapshot"))
}
