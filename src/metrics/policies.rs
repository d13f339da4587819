//! Policies: calls, faults and times by version and hook, and who is suspended.

use super::Seen;
use super::families::{Families, Label};
use crate::admission::Fared;
use std::fmt;

/// Name and beginning of the digest, of a label `name@digest`.
fn version(label: &str) -> [Label<'_>; 2] {
    let (policy, digest) = label.split_once('@').unwrap_or((label, ""));
    [("policy", policy), ("digest", digest)]
}

pub(super) fn tell(seen: &Seen, families: &mut Families<'_>) -> fmt::Result {
    let hooks = || {
        let all = seen.tally.policies.iter();
        all.flat_map(|(label, counted)| {
            counted.hooks.iter().map(move |(hook, fared)| {
                let labels = [version(label).as_slice(), &[("hook", hook.as_str())]].concat();
                (labels, fared)
            })
        })
    };
    families.counter(
        "policy_calls",
        "Calls of policies. An answer that breaks a rule is a fault.",
        hooks().flat_map(|(labels, fared)| {
            outcomes(fared).map(|(outcome, n)| ([labels.as_slice(), &[("outcome", outcome)]].concat(), n))
        }),
    )?;
    families.counter(
        "policy_faults",
        "Calls that failed, by the kind of fault.",
        hooks().flat_map(|(labels, fared)| {
            let kinds = fared.faults.iter();
            kinds.map(move |(kind, n)| ([labels.as_slice(), &[("kind", kind.as_str())]].concat(), *n))
        }),
    )?;
    families.seconds(
        "policy_call_duration",
        "Wall time of calls of policies.",
        hooks().map(|(labels, fared)| (labels, fared.times)),
    )?;
    families.gauge(
        "policy_suspended",
        "Whether a policy of the active stack is no longer asked, after faults in a row.",
        None,
        seen.standings
            .iter()
            .map(|(label, standing)| (version(label).to_vec(), u64::from(standing.suspended))),
    )
}

fn outcomes(fared: &Fared) -> [(&'static str, u64); 3] {
    [("answer", fared.answers()), ("pass", fared.passes), ("fault", fared.failed())]
}
