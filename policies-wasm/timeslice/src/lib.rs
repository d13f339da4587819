//! `timeslice`: shares every GPU among a fixed number of holders.
//!
//! Each shared GPU is offered as N devices of `resource`, each with 1/N of the GPU's memory and compute.
//! Shares are placed on the least-held GPU first. GPUs in MIG mode and their instances are passed on, as
//! are GPUs that `only` does not select.
//!
//! With `resources` it shares the devices that the daemon would offer under these names instead,
//! including MIG instances, as NVIDIA's device plugin does.

mod devices;
mod overrides;
mod replicated;

use berth_policy_sdk::room::device;
use berth_policy_sdk::{
    AdmitRequest, Consumes, Description, Hooks, Node, OfferAnswer, OfferLine, Part, PartOffer, PlaceRequest,
    Placement, Policy, Selector, Slice, Verdict, check_gpu_resource, check_selectors, is_chosen, placement,
    warn, warn_if_all_mig, warn_if_any_unused, warn_if_unused,
};
use serde::Deserialize;

pub use devices::{DeviceRef, Devices};
pub use overrides::Override;
pub use replicated::Replicated;

/// Shares of one GPU at most. 16 GPUs x 128 shares are 2048 devices: a device list of about 200 kB, which
/// is sent to the kubelet at each change.
const REPLICAS_MAX: u32 = 128;

/// The parameters of `timeslice`.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Parameters {
    /// Shares of each GPU.
    pub replicas: u32,
    /// The resource of the shares.
    pub resource: String,
    /// The GPUs to share; all if it is missing.
    pub only: Option<Vec<Selector>>,
    /// Other numbers of shares for some GPUs; the first that matches counts.
    pub overrides: Vec<Override>,
    /// The devices to share, by the resource that they would have without this policy. Replaces the four
    /// parameters above.
    pub resources: Option<Vec<Replicated>>,
    /// Whether a container that requests more than one share is denied.
    pub fail_requests_greater_than_one: bool,
}

impl Default for Parameters {
    fn default() -> Self {
        Self {
            replicas: 4,
            resource: "nvidia.com/gpu.shared".to_owned(),
            only: None,
            overrides: Vec::new(),
            resources: None,
            fail_requests_greater_than_one: false,
        }
    }
}

/// The policy `timeslice`.
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
            summary: "Shares every GPU among a fixed number of holders.".into(),
            hooks: Hooks::OFFER | Hooks::PLACE | Hooks::ADMIT,
            parameters_schema: include_str!("../schema.json").into(),
        }
    }

    fn new(parameters: Parameters) -> Result<Self, String> {
        let instead = format!(
            "; write `resources: [{{name: {}, replicas: {}}}]` instead of it and `replicas`",
            parameters.resource, parameters.replicas
        );
        check_gpu_resource("resource", &parameters.resource, &instead)?;
        check_replicas("replicas", parameters.replicas)?;
        for (n, entry) in parameters.overrides.iter().enumerate() {
            check_replicas(&format!("overrides[{n}].replicas"), entry.replicas)?;
            entry.selector().check(&format!("overrides[{n}]"))?;
        }
        check_selectors("only", parameters.only.as_deref())?;
        if let Some(resources) = &parameters.resources {
            check_replicated(resources, &parameters)?;
        }
        Ok(Self { parameters })
    }

    fn offer(&self, node: &Node) -> Option<OfferAnswer> {
        let lines = match &self.parameters.resources {
            Some(resources) => {
                let entries = replicated::by_part(resources, node).into_iter().zip(&node.parts);
                let line = |entry: &Replicated, part| line(entry.resource(), entry.replicas, part);
                entries.map(|(entry, part)| Some(line(entry?, part))).collect()
            }
            None => self.lines(node),
        };
        let offers = (0..).zip(lines);
        let parts = offers.filter_map(|(part, line)| Some(PartOffer { part, lines: vec![line?] })).collect();
        Some(OfferAnswer { parts, again_after_seconds: None })
    }

    fn place(&self, node: &Node, request: &PlaceRequest) -> Option<Placement> {
        // Whole GPUs of the same name are left to the baseline, which places by links.
        let shares = self.is_shared(node, request.request.resource) && any_share(node, &request.available);
        if shares { placement::spread(node, request) } else { None }
    }

    fn admit(&self, node: &Node, request: &AdmitRequest) -> Option<Verdict> {
        let count = request.devices.len();
        let resource = request.request.resource;
        let refused = self.parameters.fail_requests_greater_than_one
            && count > 1
            && self.is_shared(node, resource)
            && any_share(node, &request.devices);
        refused.then(|| {
            let name = usize::try_from(resource).ok().and_then(|index| node.resources.get(index));
            let name = name.map_or("a shared resource", String::as_str);
            Verdict::Deny(format!(
                "a container may request at most 1 share of {name}, and this one requests {count} \
                 (failRequestsGreaterThanOne)"
            ))
        })
    }
}

impl Timeslice {
    /// The offer of each part; `None` for parts that are not shared.
    fn lines(&self, node: &Node) -> Vec<Option<OfferLine>> {
        let parameters = &self.parameters;
        let only = parameters.only.as_deref();
        let instances = node.parts.iter().filter(|part| part.parent.is_some());
        let example = instances.filter_map(replicated::baseline_resource).next();
        let instead = example.map(|name| {
            let replicas = parameters.replicas;
            format!("; `resources: [{{name: {name}, replicas: {replicas}}}]` shares their instances")
        });
        warn_if_all_mig(node, &instead.unwrap_or_default());
        warn_if_any_unused("only", only, node);
        for (n, entry) in parameters.overrides.iter().enumerate() {
            let (key, selector) = (format!("overrides[{n}]"), entry.selector());
            let is_used = |part: &&Part| self.first_override(part) == Some(n) && is_chosen(only, part);
            let mut fitting =
                node.parts.iter().filter(|part| selector.fits(part) && is_chosen(None, part)).peekable();
            if fitting.peek().is_none() {
                warn_if_unused(&key, &selector, node);
            } else if !fitting.any(|part| is_used(&part)) {
                warn(&format!(
                    "{key}: `only` or an earlier override decides on all GPUs that match {{{selector}}}"
                ));
            }
        }
        let shared = |part: &Part| {
            let first_match = self.first_override(part);
            let count = first_match.map_or(parameters.replicas, |n| parameters.overrides[n].replicas);
            is_chosen(only, part).then(|| line(&parameters.resource, count, part))
        };
        node.parts.iter().map(shared).collect()
    }

    /// The index of the override that counts for a GPU.
    fn first_override(&self, part: &Part) -> Option<usize> {
        self.parameters.overrides.iter().position(|entry| entry.selector().fits(part))
    }

    /// Whether this is a resource of shares.
    fn is_shared(&self, node: &Node, resource: u32) -> bool {
        let name = usize::try_from(resource).ok().and_then(|index| node.resources.get(index));
        name.is_some_and(|name| match &self.parameters.resources {
            Some(resources) => resources.iter().any(|entry| entry.resource() == name),
            None => *name == self.parameters.resource,
        })
    }
}

fn any_share(node: &Node, devices: &[u32]) -> bool {
    devices.iter().filter_map(|index| device(node, *index)).any(|d| matches!(d.consumes, Consumes::Slice(_)))
}

fn line(resource: &str, count: u32, part: &Part) -> OfferLine {
    OfferLine { resource: resource.to_owned(), count, consumes: share(part, count) }
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

fn check_replicated(resources: &[Replicated], parameters: &Parameters) -> Result<(), String> {
    if resources.is_empty() {
        return Err(
            "resources: the list is empty, so nothing would be shared; omit it to share all GPUs".to_owned()
        );
    }
    let defaults = Parameters::default();
    let is_only_key = parameters.replicas == defaults.replicas
        && parameters.resource == defaults.resource
        && parameters.only.is_none()
        && parameters.overrides.is_empty();
    if !is_only_key {
        return Err(
            "resources: replaces `replicas`, `resource`, `only` and `overrides`; remove either it or those"
                .to_owned(),
        );
    }
    resources.iter().enumerate().try_for_each(|(n, entry)| entry.check(&format!("resources[{n}]")))
}

berth_policy_sdk::export!(Timeslice);

#[cfg(test)]
mod tests;
