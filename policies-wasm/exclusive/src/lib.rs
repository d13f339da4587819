//! `exclusive`: offers whole GPUs and MIG instances, each with one holder at most.
//!
//! Every whole GPU is one device of `resource`; every MIG instance is one of
//! `nvidia.com/mig-<profile>`, as with NVIDIA's device plugin. The choice of a container's GPUs is left
//! to the daemon's baseline, which places by links and NUMA nodes.

use berth_policy_sdk::{Consumes, Description, Hooks, Node, OfferAnswer, OfferLine, Part, PartOffer, Policy};
use serde::Deserialize;

/// Attribute of a MIG instance, such as `1g.10gb`.
const MIG_PROFILE: &str = "mig.profile";

/// The parameters of `exclusive`.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Parameters {
    /// The resource of whole GPUs.
    pub resource: String,
}

impl Default for Parameters {
    fn default() -> Self {
        let resource = "nvidia.com/gpu".to_owned();
        Self { resource }
    }
}

/// The policy `exclusive`.
#[derive(Clone, Debug)]
pub struct Exclusive {
    resource: String,
}

impl Policy for Exclusive {
    type Parameters = Parameters;

    fn describe() -> Description {
        Description {
            name: "exclusive".into(),
            version: env!("CARGO_PKG_VERSION").into(),
            summary: "Whole GPUs and MIG instances, one holder each.".into(),
            hooks: Hooks::OFFER,
            parameters_schema: include_str!("../schema.json").into(),
        }
    }

    fn new(parameters: Parameters) -> Result<Self, String> {
        let resource = parameters.resource;
        let instead = "; instances get their own names";
        berth_policy_sdk::check_gpu_resource("resource", &resource, instead)?;
        Ok(Self { resource })
    }

    fn offer(&self, node: &Node) -> Option<OfferAnswer> {
        let parts = (0..)
            .zip(&node.parts)
            .filter_map(|(index, part)| {
                let resource = self.resource_of(part)?;
                let line = OfferLine { resource, count: 1, consumes: Consumes::Whole };
                Some(PartOffer { part: index, lines: vec![line] })
            })
            .collect();
        Some(OfferAnswer { parts, again_after_seconds: None })
    }
}

impl Exclusive {
    /// `None` for a GPU in MIG mode, whose instances are offered instead, and for an instance whose
    /// profile is not known.
    fn resource_of(&self, part: &Part) -> Option<String> {
        if part.parent.is_none() {
            return (!part.mig_enabled).then(|| self.resource.clone());
        }
        let profile = part.attributes.iter().find(|a| a.key == MIG_PROFILE)?;
        // A resource name must not contain `+` (`1g.10gb+me`); NVIDIA's plugin replaces it by a dot.
        Some(format!("nvidia.com/mig-{}", profile.value.replace('+', ".")))
    }
}

berth_policy_sdk::export!(Exclusive);

#[cfg(test)]
mod tests;
