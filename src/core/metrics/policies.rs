//! Policies: calls, faults and times by version and hook, who is suspended; and the record of decisions.

use super::families::{Families, Values};
use super::scrape::Scrape;
use super::table;
use crate::admission::Fared;
use std::fmt;

/// Name and beginning of the digest, of a label `name@digest`.
fn version(label: &str) -> [&str; 2] {
    let (policy, digest) = label.split_once('@').unwrap_or((label, ""));
    [policy, digest]
}

fn with<'a>(labels: &[&'a str], last: &'a str) -> Values<'a> {
    [labels, &[last]].concat()
}

pub(super) fn tell(scrape: &Scrape, families: &mut Families<'_>) -> fmt::Result {
    families.one(&table::REVISION, Some(scrape.ledger.stack.revision))?;
    let decisions = scrape.tally.decisions.iter();
    families.counter(
        &table::DECISIONS,
        decisions.map(|((hook, outcome), n)| (vec![hook.as_str(), *outcome], *n)),
    )?;
    let hooks = || {
        let all = scrape.tally.policies.iter();
        all.flat_map(|(label, counted)| {
            counted.hooks.iter().map(move |(hook, fared)| (with(&version(label), hook.as_str()), fared))
        })
    };
    families.counter(
        &table::POLICY_CALLS,
        hooks().flat_map(|(labels, fared)| outcomes(fared).map(|(outcome, n)| (with(&labels, outcome), n))),
    )?;
    families.counter(
        &table::POLICY_FAULTS,
        hooks().flat_map(|(labels, fared)| {
            fared.faults.iter().map(move |(kind, n)| (with(&labels, kind.as_str()), *n))
        }),
    )?;
    families.histogram(&table::POLICY_TIME, hooks().map(|(labels, fared)| (labels, fared.times.into())))?;
    let standings = scrape.standings.iter();
    families.gauge(
        &table::POLICY_SUSPENDED,
        standings.map(|(label, standing)| (version(label).to_vec(), u64::from(standing.suspended))),
    )?;
    let Some(journal) = scrape.journal else { return Ok(()) };
    families.one(&table::JOURNAL_KEPT, Some(journal.kept))?;
    families.one(&table::JOURNAL_BYTES, Some(journal.bytes))?;
    families.counter(&table::JOURNAL_DROPPED, [(Vec::new(), journal.dropped)])?;
    families.counter(&table::JOURNAL_LOST, [(Vec::new(), journal.lost)])
}

fn outcomes(fared: &Fared) -> [(&'static str, u64); 3] {
    [("answer", fared.answers()), ("pass", fared.passes), ("fault", fared.failed())]
}
