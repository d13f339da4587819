//! `quota`: limits the devices and the memory that a namespace may hold on this node.
//!
//! It denies only if all candidates are of one namespace, since a denied pod fails permanently. Otherwise
//! it allows the request, with a note in the grant's reason and in the log that the quota was not checked.

mod limit;
mod usage;

use berth_policy_sdk::{
    AdmitRequest, Description, GrantTerms, Hooks, Limits, Node, Policy, Request, Verdict, log,
};
use serde::Deserialize;

pub use limit::{Limit, Others};
use usage::Usage;

/// Length of a reason after which no further entry is added: the daemon accepts 1024 bytes, and an entry
/// adds 150 at most.
const REASON_BYTES: usize = 512;
/// Entries at most: more than there are namespaces on a node, and few enough to count 256 x 1000 devices
/// quickly.
const ENTRIES_MAX: usize = 256;
/// The daemon lists at most this many candidates; with so many, the requesting pod may not be listed.
const CANDIDATES_SHOWN_MAX: usize = 64;

/// The parameters of `quota`.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Parameters {
    /// Limits of namespaces; all entries that match a namespace apply.
    pub namespaces: Vec<Limit>,
    /// The limits of each other namespace; none if it is missing.
    #[serde(rename = "default")]
    pub others: Option<Others>,
    /// Whether devices whose holder is not known yet count for the requesting namespace.
    pub count_unknown: bool,
}

/// The policy `quota`.
#[derive(Clone, Debug)]
pub struct Quota {
    parameters: Parameters,
}

impl Policy for Quota {
    type Parameters = Parameters;

    fn describe() -> Description {
        Description {
            name: "quota".into(),
            version: env!("CARGO_PKG_VERSION").into(),
            summary: "Limits the devices and memory of each namespace on this node.".into(),
            hooks: Hooks::ADMIT,
            parameters_schema: include_str!("../schema.json").into(),
        }
    }

    fn new(parameters: Parameters) -> Result<Self, String> {
        if parameters.namespaces.len() > ENTRIES_MAX {
            let count = parameters.namespaces.len();
            return Err(format!("namespaces: {count} entries; at most {ENTRIES_MAX} are allowed"));
        }
        for (n, limit) in parameters.namespaces.iter().enumerate() {
            limit.check(&format!("namespaces[{n}]"))?;
        }
        if let Some(others) = &parameters.others {
            others.check("default")?;
        }
        Ok(Self { parameters })
    }

    fn admit(&self, node: &Node, request: &AdmitRequest) -> Option<Verdict> {
        let resource = node.resources.get(usize::try_from(request.request.resource).ok()?)?;
        let namespace = match requesting_namespace(&request.request) {
            Ok(namespace) => namespace,
            Err(why) => return self.limits_resource(resource).then(|| unchecked(resource, &why)),
        };
        let usage = Usage::of(node, namespace, self.parameters.count_unknown);
        let mut reason = String::new();
        for limit in self.limits_of(namespace).iter().filter(|limit| limit.counts(resource)) {
            let before = usage.count(limit, &[]);
            let after = usage.count(limit, &request.devices);
            if let Some(denial) = limit.denial(namespace, before, after) {
                return Some(Verdict::Deny(denial));
            }
            if reason.len() < REASON_BYTES {
                reason += if reason.is_empty() { "" } else { "; " };
                reason += &limit.state(namespace, after);
            }
        }
        (!reason.is_empty()).then(|| allow(reason))
    }
}

impl Quota {
    /// The limits of a namespace: its own entries, or the default if it has none.
    fn limits_of(&self, namespace: &str) -> Vec<Limit> {
        let own = self.parameters.namespaces.iter().filter(|limit| limit.fits(namespace));
        let own: Vec<Limit> = own.cloned().collect();
        let others = self.parameters.others.iter().map(Others::limit);
        if own.is_empty() { others.collect() } else { own }
    }

    /// Whether any limit counts devices of this resource.
    fn limits_resource(&self, resource: &str) -> bool {
        let own = self.parameters.namespaces.iter().cloned();
        own.chain(self.parameters.others.iter().map(Others::limit)).any(|limit| limit.counts(resource))
    }
}

/// The namespace of the requesting pod.
///
/// # Errors
/// Why it is not known for certain, as a clause.
fn requesting_namespace(request: &Request) -> Result<&str, String> {
    if let Some(claim) = &request.claim {
        return Ok(&claim.namespace);
    }
    let candidates = &request.candidates;
    let Some(first) = candidates.first() else {
        return Err("no source shows the requesting pod".into());
    };
    if candidates.len() >= CANDIDATES_SHOWN_MAX {
        return Err(format!("the request may be from any of {} or more pods", candidates.len()));
    }
    match candidates.iter().find(|other| other.namespace != first.namespace) {
        None => Ok(&first.namespace),
        Some(other) => {
            Err(format!("the request may be from a pod of {} or {}", first.namespace, other.namespace))
        }
    }
}

fn unchecked(resource: &str, why: &str) -> Verdict {
    let reason = format!("quota not checked: {why}");
    log(&format!("{resource}: {reason}"));
    allow(reason)
}

fn allow(reason: String) -> Verdict {
    let limits = Limits { memory_mib: None, compute_percent: None };
    Verdict::Allow(GrantTerms { environment: Vec::new(), limits, reason })
}

berth_policy_sdk::export!(Quota);

#[cfg(test)]
mod tests;
