//! Questions as JSON of the contract's own words, so that a policy can be asked them again. The world's
//! version is part of it: a later release that changes a word still knows which words these are.

use serde::{Deserialize, Serialize};

use super::bindings::berth::policy::types as wit;
use super::convert::{self, Indices};
use super::fault;
use super::view::View;
use berth_kernel::decision;
use berth_kernel::gpu::Reading;
use berth_kernel::names::{DeviceId, PartId, Resource};
use berth_kernel::policy::{AdmitRequest, Fault, PlaceRequest};
use berth_kernel::ports::Input;

/// Whose words they are.
const WORLD: &str = "berth:policy@0.1.0";

/// The words of the hooks, as the contract orders them.
const HOOKS: [(&str, wit::Hooks); 4] = [
    ("offer", wit::Hooks::OFFER),
    ("place", wit::Hooks::PLACE),
    ("admit", wit::Hooks::ADMIT),
    ("triage", wit::Hooks::TRIAGE),
];

/// Flags are the one kind of type that cannot be told to derive it.
impl Serialize for wit::Hooks {
    fn serialize<S: serde::Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_seq(HOOKS.iter().filter(|(_, hook)| self.contains(*hook)).map(|(word, _)| word))
    }
}

impl<'de> Deserialize<'de> for wit::Hooks {
    fn deserialize<D: serde::Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let mut hooks = Self::empty();
        for word in Vec::<String>::deserialize(from)? {
            let known = HOOKS.iter().find(|(known, _)| *known == word);
            let (_, hook) =
                known.ok_or_else(|| serde::de::Error::custom(format!("no hook is called {word:?}")))?;
            hooks |= *hook;
        }
        Ok(hooks)
    }
}

#[derive(Serialize)]
struct NodeRef<'a> {
    world: &'a str,
    node: &'a wit::Node,
    /// By device, its number on its part; none for a device that is the whole part. The contract
    /// does not show it, and people want to read it.
    shares: Vec<Option<u32>>,
}

#[derive(Deserialize)]
struct NodeRead {
    world: String,
    node: wit::Node,
    shares: Vec<Option<u32>>,
}

/// Puts a question down.
///
/// # Errors
/// If it cannot be written, which its types forbid.
pub(super) fn write(view: &View, question: &convert::Asked) -> Result<Input, Fault> {
    let shares = view.devices.iter().map(|(_, _, share)| *share).collect();
    let node = NodeRef { world: WORLD, node: &view.context.node, shares };
    let failed = |error: serde_json::Error| fault::missing(format!("cannot be put down: {error}"));
    Ok(Input {
        node: serde_json::to_vec(&node).map_err(failed)?,
        question: serde_json::to_vec(question).map_err(failed)?,
    })
}

/// A question of the past.
pub(super) struct Recorded {
    pub(super) context: wit::Context,
    pub(super) question: convert::Asked,
    parts: Vec<PartId>,
    shares: Vec<Option<u32>>,
}

impl Recorded {
    /// Reads one, to be asked with these parameters.
    ///
    /// # Errors
    /// In words: of another release, or damaged.
    pub(super) fn read(input: &Input, parameters: &str) -> Result<Self, String> {
        let wrong = |error: serde_json::Error| format!("the input is damaged: {error}");
        let node: NodeRead = serde_json::from_slice(&input.node).map_err(wrong)?;
        if node.world != WORLD {
            return Err(format!("the input is of the world {}; this release asks {WORLD}", node.world));
        }
        let parts = node.node.parts.iter().map(|part| PartId::parse(&part.id));
        let parts = parts.collect::<Result<Vec<_>, _>>().map_err(|e| format!("the input is damaged: {e}"))?;
        if node.shares.len() != node.node.devices.len() {
            return Err("the input is damaged: not a number for each device".into());
        }
        Ok(Self {
            context: wit::Context { node: node.node, parameters: parameters.to_owned() },
            question: serde_json::from_slice(&input.question).map_err(wrong)?,
            parts,
            shares: node.shares,
        })
    }

    /// The question in the kernel's words.
    ///
    /// # Errors
    /// In words, if it names what its node has not.
    pub(super) fn asked(&self) -> Result<decision::OwnedQuestion, String> {
        Ok(match &self.question {
            convert::Asked::Offer => decision::OwnedQuestion::Offer,
            convert::Asked::Place(asked) => decision::OwnedQuestion::Place(PlaceRequest {
                resource: self.resource(asked.request.resource)?,
                available: self.ids(&asked.available)?,
                required: self.ids(&asked.required)?,
                size: usize::try_from(asked.size).unwrap_or(usize::MAX),
            }),
            convert::Asked::Admit(asked) => decision::OwnedQuestion::Admit(AdmitRequest {
                resource: self.resource(asked.request.resource)?,
                devices: self.ids(&asked.devices)?,
            }),
            convert::Asked::Triage(asked) => decision::OwnedQuestion::Triage(Reading {
                part: self.part(asked.part).ok_or_else(|| unknown("part", asked.part))?,
                source: asked.source.clone(),
                code: asked.code,
                detail: asked.detail.clone(),
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
