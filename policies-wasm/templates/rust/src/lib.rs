//! `my-policy`: offers every GPU as `shares` equal shares, and fills one GPU before the next one is used.
//!
//! A starting point for a policy: change `offer`, `place` and `admit`, and then README.md.

use berth_policy_sdk::{
    AdmitRequest, Consumes, Description, GrantTerms, Hooks, Limits, Node, OfferAnswer, OfferLine, PartOffer,
    PlaceRequest, Placement, Policy, Slice, Verdict,
};
use serde::Deserialize;

/// The resource that pods request.
const RESOURCE: &str = "nvidia.com/gpu.shared";

/// The parameters; `schema.json` must describe the same ones.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Parameters {
    /// Shares of each GPU.
    pub shares: u32,
}

impl Default for Parameters {
    fn default() -> Self {
        Self { shares: 2 }
    }
}

/// The policy.
#[derive(Clone, Debug)]
pub struct MyPolicy {
    shares: u32,
}

impl Policy for MyPolicy {
    type Parameters = Parameters;

    fn describe() -> Description {
        Description {
            name: "my-policy".into(),
            version: env!("CARGO_PKG_VERSION").into(),
            summary: "Offers every GPU as shares, and fills one GPU before the next one.".into(),
            hooks: Hooks::OFFER | Hooks::PLACE | Hooks::ADMIT,
            parameters_schema: include_str!("../schema.json").into(),
        }
    }

    /// The error is shown to the operator who activates a stack with these parameters.
    fn new(parameters: Parameters) -> Result<Self, String> {
        match parameters.shares {
            shares @ 1..=64 => Ok(Self { shares }),
            shares => Err(format!("shares: {shares} is out of range; write 1 to 64")),
        }
    }

    /// What each GPU is advertised as. GPUs that are not named are left to the next policy.
    fn offer(&self, node: &Node) -> Option<OfferAnswer> {
        let whole = (0..).zip(&node.parts).filter(|(_, part)| part.parent.is_none() && !part.mig_enabled);
        let parts = whole.map(|(index, part)| {
            let memory_mib = part.memory_mib / u64::from(self.shares);
            let share = Slice { memory_mib, compute_percent: 100 / self.shares };
            let line = OfferLine {
                resource: RESOURCE.into(),
                count: self.shares,
                consumes: Consumes::Slice(share),
            };
            PartOffer { part: index, lines: vec![line] }
        });
        Some(OfferAnswer { parts: parts.collect(), again_after_seconds: None })
    }

    /// Which devices to choose: those on the GPU with the fewest available ones. Devices are indices into
    /// `node.devices`.
    fn place(&self, node: &Node, request: &PlaceRequest) -> Option<Placement> {
        let part = |device: &u32| node.devices[*device as usize].part;
        let left = |device: &u32| request.available.iter().filter(|other| part(other) == part(device)).count();
        let mut devices = request.required.clone();
        let mut others: Vec<u32> =
            request.available.iter().copied().filter(|device| !devices.contains(device)).collect();
        others.sort_by_key(|device| (left(device), part(device), *device));
        devices.extend(others);
        devices.truncate(request.size as usize);
        Some(Placement { devices, reason: "fills one GPU before the next one".into() })
    }

    /// Allows every request, and sets the memory limit of the container to that of its smallest share.
    fn admit(&self, node: &Node, request: &AdmitRequest) -> Option<Verdict> {
        if node.resources[request.request.resource as usize] != RESOURCE {
            return None;
        }
        let share = |device: &u32| match node.devices[*device as usize].consumes {
            Consumes::Slice(slice) => Some(slice.memory_mib),
            Consumes::Whole => None,
        };
        let limits = Limits { memory_mib: request.devices.iter().filter_map(share).min(), compute_percent: None };
        Some(Verdict::Allow(GrantTerms { environment: Vec::new(), limits, reason: "a share".into() }))
    }
}

berth_policy_sdk::export!(MyPolicy);

#[cfg(test)]
mod tests {
    use super::*;
    use berth_policy_sdk::testing::{NodeBuilder, assert_schema_matches};

    fn policy() -> MyPolicy {
        MyPolicy::new(Parameters::default()).unwrap()
    }

    #[test]
    fn every_gpu_is_offered_as_two_shares() {
        let built = NodeBuilder::new().gpus(2, "L4", 24_000).build();
        let answer = policy().offer(&built.node).unwrap();
        assert_eq!(answer.parts.len(), 2);
        let line = &answer.parts[0].lines[0];
        assert_eq!((line.resource.as_str(), line.count), (RESOURCE, 2));
        assert_eq!(line.consumes, Consumes::Slice(Slice { memory_mib: 12_000, compute_percent: 50 }));
    }

    #[test]
    fn the_gpu_with_a_held_share_is_filled_first() {
        let share = Consumes::Slice(Slice { memory_mib: 12_000, compute_percent: 50 });
        let node = NodeBuilder::new().gpus(2, "L4", 24_000);
        let node = node.devices(0, RESOURCE, 2, share).devices(1, RESOURCE, 2, share);
        // Device 2 is the first one of GPU 1.
        let built = node.hold(&[2]).build();
        let placement = policy().place(&built.node, &built.place_request(RESOURCE, 1)).unwrap();
        assert_eq!(placement.devices, [3]);
    }

    #[test]
    fn parameters_are_checked_and_described() {
        assert!(MyPolicy::new(Parameters { shares: 0 }).unwrap_err().contains("1 to 64"));
        assert_schema_matches(include_str!("../schema.json"), r#"{"shares": 2}"#);
    }
}
