//! `timeslice`: every GPU shared by a fixed number of holders.
//!
//! Each GPU that it shares is offered as N devices of `resource`; a share is told to use a Nth of
//! the GPU's memory and compute. Shares are handed out from the least-held GPU first. GPUs in MIG
//! mode and their instances are passed on, as are GPUs that `only` does not name.

mod overrides;

use berth_policy_sdk::{
    Consumes, Description, Hooks, Node, OfferAnswer, OfferLine, Part, PartOffer, PlaceRequest, Placement,
    Policy, Selector, Slice, check_resource, check_selectors, is_chosen, placement,
};
use serde::Deserialize;

pub use overrides::Override;

/// Shares of one GPU at most. 16 GPUs x 128 shares are 2048 devices, some 200 kB of device list
/// for the kubelet at each change.
const REPLICAS_MAX: u32 = 128;

/// What an operator may set.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Parameters {
    /// Shares of each GPU.
    pub replicas: u32,
    /// The resource of the shares.
    pub resource: String,
    /// The GPUs to share; all if it is missing.
    pub only: Option<Vec<Selector>>,
    /// Other numbers of shares for some GPUs; the first that fits counts.
    pub overrides: Vec<Override>,
}

impl Default for Parameters {
    fn default() -> Self {
        Self { replicas: 4, resource: "nvidia.com/gpu.shared".to_owned(), only: None, overrides: Vec::new() }
    }
}

/// The policy with its parameters.
#[derive(Clone, Debug)]
pub struct Timeslice {
    parameters: Parameters,
}

impl Policy for Timeslice {
    type Parameters = Parameters;

    fn describe() -> Description {
        Description {
            name: "timeslice".into(),
            version: env!("CARGO_PKG_VERSION").into(),
            summary: "Every GPU shared by a fixed number of holders.".into(),
            hooks: Hooks::OFFER | Hooks::PLACE,
            parameters_schema: include_str!("../schema.json").into(),
        }
    }

    fn new(parameters: Parameters) -> Result<Self, String> {
        check_resource("resource", &parameters.resource)?;
        check_replicas("replicas", parameters.replicas)?;
        for (n, entry) in parameters.overrides.iter().enumerate() {
            check_replicas(&format!("overrides[{n}].replicas"), entry.replicas)?;
            entry.selector().check(&format!("overrides[{n}]"))?;
        }
        check_selectors("only", parameters.only.as_deref())?;
        Ok(Self { parameters })
    }

    fn offer(&self, node: &Node) -> Option<OfferAnswer> {
        let parts = (0..)
            .zip(&node.parts)
            .filter_map(|(index, part)| {
                let line = self.shares_of(part)?;
                Some(PartOffer { part: index, lines: vec![line] })
            })
            .collect();
        Some(OfferAnswer { parts, again_after_seconds: None })
    }

    fn place(&self, node: &Node, request: &PlaceRequest) -> Option<Placement> {
        let asked = usize::try_from(request.request.resource).ok()?;
        if node.resources.get(asked)? != &self.parameters.resource {
            return None;
        }
        placement::spread(node, request)
    }
}

impl Timeslice {
    /// `None` for what is not shared.
    fn shares_of(&self, part: &Part) -> Option<OfferLine> {
        let parameters = &self.parameters;
        if !is_chosen(parameters.only.as_deref(), part) {
            return None;
        }
        let named = parameters.overrides.iter().find(|entry| entry.selector().fits(part));
        let count = named.map_or(parameters.replicas, |entry| entry.replicas);
        Some(OfferLine { resource: parameters.resource.clone(), count, consumes: share(part, count) })
    }
}

/// One of `count` equal shares. Rounded down, so that all of them fit.
fn share(part: &Part, count: u32) -> Consumes {
    Consumes::Slice(Slice { memory_mib: part.memory_mib / u64::from(count), compute_percent: 100 / count })
}

fn check_replicas(key: &str, replicas: u32) -> Result<(), String> {
    if (1..=REPLICAS_MAX).contains(&replicas) {
        Ok(())
    } else {
        Err(format!("{key}: {replicas} is out of range; write 1 to {REPLICAS_MAX}"))
    }
}

berth_policy_sdk::export!(Timeslice);

#[cfg(test)]
mod tests;
