//! Questions recorded as JSON of their WIT types, for replays. The record includes the world's version, from which
//! a later release recognizes older types.

use serde::{Deserialize, Serialize};

use super::bindings::berth::policy::types as wit;
use super::convert::{Indices, WitQuestion};
use super::fault;
use super::view::View;
use berth_kernel::decision;
use berth_kernel::gpu::Reading;
use berth_kernel::names::{DeviceId, PartId, Resource};
use berth_kernel::policy::{AdmitRequest, Fault, PlaceRequest};
use berth_kernel::ports::Input;

/// The WIT package of the recorded types.
const WORLD: &str = "berth:policy@0.1.0";

/// The names of the hooks, in the order of the WIT flags.
const HOOKS: [(&str, wit::Hooks); 4] = [
    ("offer", wit::Hooks::OFFER),
    ("place", wit::Hooks::PLACE),
    ("admit", wit::Hooks::ADMIT),
    ("triage", wit::Hooks::TRIAGE),
];

/// `bindgen!` derives traits for all types except flags.
impl Serialize for wit::Hooks {
    fn serialize<S: serde::Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_seq(HOOKS.iter().filter(|(_, hook)| self.contains(*hook)).map(|(name, _)| name))
    }
}

impl<'de> Deserialize<'de> for wit::Hooks {
    fn deserialize<D: serde::Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let mut hooks = Self::empty();
        for name in Vec::<String>::deserialize(from)? {
            let known = HOOKS.iter().find(|(known, _)| *known == name);
            let (_, hook) =
                known.ok_or_else(|| serde::de::Error::custom(format!("unknown hook {name:?}")))?;
            hooks |= *hook;
        }
        Ok(hooks)
    }
}

#[derive(Serialize)]
struct NodeRef<'a> {
    world: &'a str,
    node: &'a wit::Node,
    /// The share number of each device; none for a device that is the whole part. The WIT types do not include it.
    shares: Vec<Option<u32>>,
}

#[derive(Deserialize)]
struct NodeRead {
    world: String,
    node: wit::Node,
    shares: Vec<Option<u32>>,
}

/// Records a question.
///
/// # Errors
/// If it cannot be serialized, which its types exclude.
pub(super) fn write(view: &View, question: &WitQuestion) -> Result<Input, Fault> {
    let shares = view.devices.iter().map(|(_, _, share)| *share).collect();
    let node = NodeRef { world: WORLD, node: &view.context.node, shares };
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
    parts: Vec<PartId>,
    shares: Vec<Option<u32>>,
}

impl Recorded {
    /// Reads a recorded question, for a call with these parameters.
    ///
    /// # Errors
    /// If the record is of another world version or damaged.
    pub(super) fn read(input: &Input, parameters: &str) -> Result<Self, String> {
        let damaged = |error: serde_json::Error| format!("the input is damaged: {error}");
        let node: NodeRead = serde_json::from_slice(&input.node).map_err(damaged)?;
        if node.world != WORLD {
            return Err(format!("the input is of the world {}; this release supports {WORLD}", node.world));
        }
        let parts = node.node.parts.iter().map(|part| PartId::parse(&part.id));
        let parts = parts.collect::<Result<Vec<_>, _>>().map_err(|e| format!("the input is damaged: {e}"))?;
        if node.shares.len() != node.node.devices.len() {
            return Err("the input is damaged: not one share number per device".into());
        }
        Ok(Self {
            context: wit::Context { node: node.node, parameters: parameters.to_owned() },
            question: serde_json::from_slice(&input.question).map_err(damaged)?,
            parts,
            shares: node.shares,
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
            }),
            WitQuestion::Triage(reading) => decision::OwnedQuestion::Triage(Reading {
                part: self.part(reading.part).ok_or_else(|| unknown("part", reading.part))?,
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
        let id = |&index: &u32| self.device(index).map(|(id, _)| id).ok_or_else(|| unknown("device", index));
        indices.iter().map(id).collect()
    }
}

fn unknown(noun: &str, index: u32) -> String {
    format!("the input is damaged: it has no {noun} {index}")
}

impl Indices for Recorded {
    fn part(&self, index: u32) -> Option<PartId> {
        self.parts.get(usize::try_from(index).ok()?).cloned()
    }

    fn parts(&self) -> usize {
        self.parts.len()
    }

    fn device(&self, index: u32) -> Option<(DeviceId, u32)> {
        let at = usize::try_from(index).ok()?;
        let device = self.context.node.devices.get(at)?;
        Some((DeviceId { part: self.part(device.part)?, share: *self.shares.get(at)? }, device.resource))
    }

    fn devices(&self) -> usize {
        self.shares.len()
    }
}
