//! `binpack`: places shares on the fullest GPU with enough shares, so that whole GPUs stay empty.
//!
//! MIG instances are packed as shares of their GPU, and shares of MIG instances by instance. Requests for
//! whole GPUs are left to `topology` or the daemon's baseline, which choose well connected ones.

mod pack;

use berth_policy_sdk::placement::{Kind, Resources, loads, loads_of_parts};
use berth_policy_sdk::{Description, Hooks, Node, PlaceRequest, Placement, Policy};
use serde::Deserialize;

/// The parameters of `binpack`.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Parameters {
    /// The resources to place; all shares and MIG instances if it is missing.
    pub resources: Resources,
}

/// The policy `binpack`.
#[derive(Clone, Debug)]
pub struct Binpack {
    resources: Resources,
}

impl Policy for Binpack {
    type Parameters = Parameters;

    fn describe() -> Description {
        Description {
            name: "binpack".into(),
            version: env!("CARGO_PKG_VERSION").into(),
            summary: "Shares on the fullest GPU that still fits.".into(),
            hooks: Hooks::PLACE,
            parameters_schema: include_str!("../schema.json").into(),
        }
    }

    fn new(parameters: Parameters) -> Result<Self, String> {
        parameters.resources.check()?;
        Ok(Self { resources: parameters.resources })
    }

    fn place(&self, node: &Node, request: &PlaceRequest) -> Option<Placement> {
        if !self.resources.include(node, request.request.resource, |kind| kind != Kind::Whole) {
            return None;
        }
        // Shares fill one instance after the other; whole instances fill one GPU after the other.
        let loads = match Kind::of(node, request.request.resource)? {
            Kind::Share => loads_of_parts(node, request)?,
            Kind::Instance | Kind::Whole => loads(node, request)?,
        };
        pack::pack(loads, request)
    }
}

berth_policy_sdk::export!(Binpack);

#[cfg(test)]
mod brute;
#[cfg(test)]
mod tests;
