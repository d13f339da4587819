//! `topology`: chooses GPUs that are connected well by NVLink, PCIe and NUMA node, and keeps good sets for
//! later requests.
//!
//! MIG instances have the connections of their GPU. Several shares are placed on several well connected
//! GPUs; a single share is passed on, since connections do not matter to it.

mod grow;
mod pairs;
mod search;
mod shares;
mod wholes;

use berth_policy_sdk::placement::{Kind, Resources};
use berth_policy_sdk::{Description, Hooks, Node, PlaceRequest, Placement, Policy};
use serde::Deserialize;

/// Maximum weight of the remaining devices, percent: with it, the chosen set itself hardly counts.
const LEAVE_WEIGHT_MAX: u32 = 1_000;

/// The parameters of `topology`.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Parameters {
    /// The weight of a point of score that later requests lose, percent.
    pub leave_weight: u32,
    /// The resources to place; all if it is missing.
    pub resources: Resources,
}

impl Default for Parameters {
    fn default() -> Self {
        Self { leave_weight: 50, resources: Resources::default() }
    }
}

/// The policy `topology`.
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
            summary: "The best connected GPUs, chosen so that good sets remain for later requests.".into(),
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
