//! `spread`: shares on the least-held GPUs, and several shares of one container on as many GPUs.
//!
//! With `distinct: required` a container never gets two devices of one GPU: `admit` denies them,
//! since the kubelet does not always ask `place`. MIG instances count as shares of their GPU. Whole
//! GPUs are passed on, since they are distinct by nature.

mod choose;
mod distinct;

use berth_policy_sdk::placement::{Kind, Resources};
use berth_policy_sdk::{AdmitRequest, Description, Hooks, Node, PlaceRequest, Placement, Policy, Verdict};
use serde::Deserialize;

/// Whether the devices of a container are on as many GPUs.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub enum Distinct {
    /// Where it can be had.
    #[default]
    Preferred,
    /// Or the container is refused.
    Required,
}

/// What an operator may set.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Parameters {
    /// Whether the devices of a container are on as many GPUs.
    pub distinct: Distinct,
    /// The resources to place and to rule; all shares and MIG instances if it is missing.
    pub resources: Resources,
}

/// The policy with its parameters.
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
            summary: "Shares on the least-held GPUs, and several of a container on distinct ones.".into(),
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
        let ruled = self.parameters.distinct == Distinct::Required;
        if !ruled || !self.includes(node, request.request.resource) {
            return None;
        }
        // It looks at nothing but the devices asked for: what was granted to an init container is
        // granted to its app container, too.
        distinct::broken(node, request).map(Verdict::Deny)
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
