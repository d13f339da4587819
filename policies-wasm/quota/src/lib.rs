//! `quota`: how many devices and how much memory a namespace may hold on this node.
//!
//! It denies only where it is sure who asks, since a denial fails the pod for good: all candidates
//! must be of one namespace. Otherwise it allows and says in the grant's reason, and in the log, that
//! it did not check.

mod limit;
mod usage;

use berth_policy_sdk::{
    AdmitRequest, Description, GrantTerms, Hooks, Limits, Node, Policy, Request, Verdict, log,
};
use serde::Deserialize;

pub use limit::{Limit, Others};
use usage::Usage;

/// After so many bytes no further entry is put into a reason: the daemon takes 1024, and an entry adds
/// 150 at most.
const REASON_BYTES: usize = 512;
/// Entries at most: more than namespaces that share a node, and 256 x 1000 devices are counted in no time.
const ENTRIES_MAX: usize = 256;
/// With so many candidates the daemon shows no more: who asks may be one of the others.
const CANDIDATES_SHOWN_MAX: usize = 64;

/// What an operator may set.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Parameters {
    /// What namespaces may hold; all entries that fit a namespace count.
    pub namespaces: Vec<Limit>,
    /// What each of the other namespaces may hold; anything if it is missing.
    #[serde(rename = "default")]
    pub others: Option<Others>,
    /// Whether devices whose holder is not yet known count for whoever asks.
    pub count_unknown: bool,
}

/// The policy with its parameters.
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
            summary: "Devices and memory that a namespace may hold on this node.".into(),
            hooks: Hooks::ADMIT,
            parameters_schema: include_str!("../schema.json").into(),
        }
    }

    fn new(parameters: Parameters) -> Result<Self, String> {
        if parameters.namespaces.len() > ENTRIES_MAX {
            let count = parameters.namespaces.len();
            return Err(format!("namespaces: {count} entries; at most {ENTRIES_MAX} are taken"));
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
        let namespace = match asker(&request.request) {
            Ok(namespace) => namespace,
            Err(why) => return self.concerns(resource).then(|| unchecked(resource, &why)),
        };
        let usage = Usage::of(node, namespace, self.parameters.count_unknown);
        let mut said = String::new();
        for limit in self.limits_of(namespace).iter().filter(|limit| limit.counts(resource)) {
            let before = usage.count(limit, &[]);
            let after = usage.count(limit, &request.devices);
            if let Some(denial) = limit.denial(namespace, before, after) {
                return Some(Verdict::Deny(denial));
            }
            if said.len() < REASON_BYTES {
                said += if said.is_empty() { "" } else { "; " };
                said += &limit.state(namespace, after);
            }
        }
        (!said.is_empty()).then(|| allow(said))
    }
}

impl Quota {
    /// The limits of a namespace: its own entries, or else the default.
    fn limits_of(&self, namespace: &str) -> Vec<Limit> {
        let own = self.parameters.namespaces.iter().filter(|limit| limit.fits(namespace));
        let own: Vec<Limit> = own.cloned().collect();
        let others = self.parameters.others.iter().map(Others::limit);
        if own.is_empty() { others.collect() } else { own }
    }

    /// Whether anyone's limit counts devices of this resource.
    fn concerns(&self, resource: &str) -> bool {
        let own = self.parameters.namespaces.iter().cloned();
        own.chain(self.parameters.others.iter().map(Others::limit)).any(|limit| limit.counts(resource))
    }
}

/// The namespace that asks.
///
/// # Errors
/// Why it is not known for sure, as a clause.
fn asker(request: &Request) -> Result<&str, String> {
    if let Some(claim) = &request.claim {
        return Ok(&claim.namespace);
    }
    let candidates = &request.candidates;
    let Some(first) = candidates.first() else {
        return Err("no source shows which pod asks".into());
    };
    if candidates.len() >= CANDIDATES_SHOWN_MAX {
        return Err(format!("{} or more pods may be asking", candidates.len()));
    }
    match candidates.iter().find(|other| other.namespace != first.namespace) {
        None => Ok(&first.namespace),
        Some(other) => Err(format!("pods of {} and {} may be asking", first.namespace, other.namespace)),
    }
}

fn unchecked(resource: &str, why: &str) -> Verdict {
    let words = format!("quota not checked: {why}");
    log(&format!("{resource}: {words}"));
    allow(words)
}

fn allow(reason: String) -> Verdict {
    let limits = Limits { memory_mib: None, compute_percent: None };
    Verdict::Allow(GrantTerms { environment: Vec::new(), limits, reason })
}

berth_policy_sdk::export!(Quota);

#[cfg(test)]
mod tests;
