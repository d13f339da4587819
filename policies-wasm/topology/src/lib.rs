//! `topology`: the GPUs that sit best together by NVLink, PCIe and NUMA node, chosen so that the
//! best ones are left for those who come later.
//!
//! MIG instances sit where their GPU sits. Several shares are put on several GPUs that sit well
//! together; a single share is passed on, since it has nothing to sit beside.

mod grow;
mod pairs;
mod search;
mod shares;
mod wholes;

use berth_policy_sdk::placement::{Kind, Resources};
use berth_policy_sdk::{Description, Hooks, Node, PlaceRequest, Placement, Policy};
use serde::Deserialize;

/// Heaviest weight of what is left, percent: from here on the set itself hardly counts.
const LEAVE_WEIGHT_MAX: u32 = 1_000;

/// What an operator may set.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Parameters {
    /// How much a point of score counts that is lost to those who come later, percent.
    pub leave_weight: u32,
    /// The resources to place; all if it is missing.
    pub resources: Resources,
}

impl Default for Parameters {
    fn default() -> Self {
        Self { leave_weight: 50, resources: Resources::default() }
    }
}

/// The policy with its parameters.
#[derive(Clone, Debug)]
pub struct Topology {
    parameters: Parameters,
}

impl Policy for Topology {
    type Parameters = Parameters;

    fn describe() -> Description {
        Description {
            name: "topology".into(),
            version: env!("CARGO_PKG_VERSION").into(),
            summary: "The GPUs that sit best together, and leave the best for later.".into(),
            hooks: Hooks::PLACE,
            parameters_schema: include_str!("../schema.json").into(),
        }
    }

    fn new(parameters: Parameters) -> Result<Self, String> {
        if parameters.leave_weight > LEAVE_WEIGHT_MAX {
            let weight = parameters.leave_weight;
            return Err(format!("leaveWeight: {weight} is out of range; write 0 to {LEAVE_WEIGHT_MAX}"));
        }
        parameters.resources.check()?;
        Ok(Self { parameters })
    }

    fn place(&self, node: &Node, request: &PlaceRequest) -> Option<Placement> {
        let resource = request.request.resource;
        if !self.parameters.resources.include(node, resource, |_| true) {
            return None;
        }
        match Kind::of(node, resource)? {
            Kind::Share => shares::place(node, request),
            Kind::Whole | Kind::Instance => wholes::place(node, request, self.parameters.leave_weight),
        }
    }
}

berth_policy_sdk::export!(Topology);

#[cfg(test)]
mod brute;
#[cfg(test)]
mod tests;
