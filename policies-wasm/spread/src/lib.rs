//! `spread`: places shares on the least-held GPUs, and several shares of one container on several GPUs.
//!
//! With `distinct: required` a container never gets two devices of one GPU: `admit` denies them,
//! since the kubelet does not always ask for a placement. MIG instances count as shares of their GPU.
//! Requests for whole GPUs are passed on, since those are always distinct.

mod choose;
mod distinct;

use berth_policy_sdk::placement::{Kind, Resources};
use berth_policy_sdk::{AdmitRequest, Description, Hooks, Node, PlaceRequest, Placement, Policy, Verdict};
use serde::Deserialize;

/// Whether each device of a container is on a GPU of its own.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub enum Distinct {
    /// If possible.
    #[default]
    Preferred,
    /// Otherwise the container is denied.
    Required,
}

/// The parameters of `spread`.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Parameters {
    /// Whether each device of a container is on a GPU of its own.
    pub distinct: Distinct,
    /// The resources to place and check; all shares and MIG instances if it is missing.
    pub resources: Resources,
}

/// The policy `spread`.
#[derive(Clone, Debug)]
pub struct Spread {
    parameters: Parameters,
}

impl Policy for Spread {
    type Parameters = Parameters;

    fn describe() -> Description {
        Description {
            name: "spread".into(),
            version: env!("CARGO_PKG_VERSION").into(),
            summary: "Shares on the least-held GPUs, several shares of a container on distinct ones.".into(),
            hooks: Hooks::PLACE | Hooks::ADMIT,
            parameters_schema: include_str!("../schema.json").into(),
        }
    }

    fn new(parameters: Parameters) -> Result<Self, String> {
        parameters.resources.check()?;
        Ok(Self { parameters })
    }

    fn place(&self, node: &Node, request: &PlaceRequest) -> Option<Placement> {
        if !self.includes(node, request.request.resource) {
            return None;
        }
        choose::choose(node, request)
    }

    fn admit(&self, node: &Node, request: &AdmitRequest) -> Option<Verdict> {
        let required = self.parameters.distinct == Distinct::Required;
        if !required || !self.includes(node, request.request.resource) {
            return None;
        }
        // The rule depends only on the requested devices: those granted to an init container are granted
        // to its app container as well.
        distinct::violation(node, request).map(Verdict::Deny)
    }
}

impl Spread {
    fn includes(&self, node: &Node, resource: u32) -> bool {
        self.parameters.resources.include(node, resource, |kind| kind != Kind::Whole)
    }
}

berth_policy_sdk::export!(Spread);

#[cfg(test)]
mod brute;
#[cfg(test)]
mod tests;
