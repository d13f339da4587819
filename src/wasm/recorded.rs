//! Questions recorded as JSON of their WIT types, for replays. The record includes the world's version, from which
//! a later release recognizes older types.

use std::borrow::Cow;

use serde::{Deserialize, Serialize};

use super::bindings::berth::policy::types as wit;
use super::convert::{HOOKS, WitQuestion};
use super::fault;
use super::view::Indices;
use super::view::View;
use berth_kernel::hardware::gpu::Reading;
use berth_kernel::ids::names::{DeviceId, PartId, Resource};
use berth_kernel::node::ports::Input;
use berth_kernel::policy::decision;
use berth_kernel::policy::hooks::{AdmitRequest, Fault, PlaceRequest};

/// The WIT package of the recorded types.
const WORLD: &str = "berth:policy@0.1.0";

/// `bindgen!` derives traits for all types except flags.
impl Serialize for wit::Hooks {
    fn serialize<S: serde::Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_seq(HOOKS.iter().filter(|(_, flag)| self.contains(*flag)).map(|(hook, _)| hook.as_str()))
    }
}

impl<'de> Deserialize<'de> for wit::Hooks {
    fn deserialize<D: serde::Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let mut hooks = Self::empty();
        for name in Vec::<String>::deserialize(from)? {
            let known = HOOKS.iter().find(|(known, _)| known.as_str() == name);
            let unknown = || serde::de::Error::custom(format!("unknown hook {name:?}"));
            hooks |= known.ok_or_else(unknown)?.1;
        }
        Ok(hooks)
    }
}

#[derive(Serialize, Deserialize)]
struct RecordedNode<'a> {
    world: Cow<'a, str>,
    node: Cow<'a, wit::Node>,
    /// The share number of each device; none for a device that is the whole part. The WIT types do not include it.
    shares: Vec<Option<u32>>,
}

/// Records a question.
///
/// # Errors
/// If it cannot be serialized, which its types exclude.
pub(super) fn write(view: &View, question: &WitQuestion) -> Result<Input, Fault> {
    let shares = view.indices.devices.iter().map(|(_, _, share)| *share).collect();
    let node = RecordedNode { world: WORLD.into(), node: Cow::Borrowed(&view.context.node), shares };
    let failed = |error: serde_json::Error| fault::missing(format!("cannot record the input: {error}"));
    Ok(Input {
        node: serde_json::to_vec(&node).map_err(failed)?,
        question: serde_json::to_vec(question).map_err(failed)?,
    })
}

/// A recorded question.
pub(super) struct Recorded {
    pub(super) context: wit::Context,
    pub(super) question: WitQuestion,
    pub(super) indices: Indices,
}

impl Recorded {
    /// Reads a recorded question, for a call with these parameters.
    ///
    /// # Errors
    /// If the record is of another world version or damaged.
    pub(super) fn read(input: &Input, parameters: &str) -> Result<Self, String> {
        let damaged = |error: serde_json::Error| format!("the input is damaged: {error}");
        let RecordedNode { world, node, shares } = serde_json::from_slice(&input.node).map_err(damaged)?;
        if world != WORLD {
            return Err(format!("the input is of the world {world}; this release supports {WORLD}"));
        }
        let parts = node.parts.iter().map(|part| PartId::parse(&part.id));
        let parts = parts.collect::<Result<_, _>>().map_err(|e| format!("the input is damaged: {e}"))?;
        if shares.len() != node.devices.len() {
            return Err("the input is damaged: not one share number per device".into());
        }
        let devices = node.devices.iter().zip(shares);
        let devices = devices.map(|(device, share)| (device.part, device.resource, share)).collect();
        Ok(Self {
            context: wit::Context { node: node.into_owned(), parameters: parameters.to_owned() },
            question: serde_json::from_slice(&input.question).map_err(damaged)?,
            indices: Indices { parts, devices },
        })
    }

    /// The question in kernel types.
    ///
    /// # Errors
    /// If an index in it is out of range.
    pub(super) fn kernel_question(&self) -> Result<decision::OwnedQuestion, String> {
        Ok(match &self.question {
            WitQuestion::Offer => decision::OwnedQuestion::Offer,
            WitQuestion::Place(place) => decision::OwnedQuestion::Place(PlaceRequest {
                resource: self.resource(place.request.resource)?,
                available: self.ids(&place.available)?,
                required: self.ids(&place.required)?,
                size: usize::try_from(place.size).unwrap_or(usize::MAX),
            }),
            WitQuestion::Admit(admit) => decision::OwnedQuestion::Admit(AdmitRequest {
                resource: self.resource(admit.request.resource)?,
                devices: self.ids(&admit.devices)?,
                // Recorded calls have the candidates themselves.
                claim: None,
            }),
            WitQuestion::Triage(reading) => decision::OwnedQuestion::Triage(Reading {
                part: self.indices.part(reading.part).ok_or_else(|| unknown("part", reading.part))?,
                source: reading.source.clone(),
                code: reading.code,
                detail: reading.detail.clone(),
            }),
        })
    }

    fn resource(&self, index: u32) -> Result<Resource, String> {
        let name = usize::try_from(index).ok().and_then(|n| self.context.node.resources.get(n));
        let name = name.ok_or_else(|| unknown("resource", index))?;
        Resource::parse(name).map_err(|e| format!("the input is damaged: {e}"))
    }

    fn ids(&self, indices: &[u32]) -> Result<Vec<DeviceId>, String> {
        let id = |&index: &u32| match self.indices.device(index) {
            Some((id, _)) => Ok(id),
            None => Err(unknown("device", index)),
        };
        indices.iter().map(id).collect()
    }
}

fn unknown(noun: &str, index: u32) -> String {
    format!("the input is damaged: it has no {noun} {index}")
}
