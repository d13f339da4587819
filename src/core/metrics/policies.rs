//! Metrics of policies (calls, faults, latencies and suspensions) and of the decision journal.

use super::families::{Families, Values};
use super::scrape::Scrape;
use super::table;
use crate::stack::CallStats;
use std::fmt;

/// Splits a label `name@digest` into the policy's name and the beginning of its digest.
fn version(label: &str) -> [&str; 2] {
    let (policy, digest) = label.split_once('@').unwrap_or((label, ""));
    [policy, digest]
}

fn with<'a>(labels: &[&'a str], last: &'a str) -> Values<'a> {
    [labels, &[last]].concat()
}

pub(super) fn encode(scrape: &Scrape, families: &mut Families<'_>) -> fmt::Result {
    families.value(&table::REVISION, Some(scrape.ledger.stack.revision))?;
    let decisions = scrape.call_counters.decisions.iter();
    families.counter(
        &table::DECISIONS,
        decisions.map(|((hook, outcome), n)| (vec![hook.as_str(), *outcome], *n)),
    )?;
    let hooks = || {
        let policies = scrape.call_counters.policies.iter();
        policies.flat_map(|(label, counters)| {
            counters.hooks.iter().map(move |(hook, stats)| (with(&version(label), hook.as_str()), stats))
        })
    };
    families.counter(
        &table::POLICY_CALLS,
        hooks().flat_map(|(labels, stats)| outcomes(stats).map(|(outcome, n)| (with(&labels, outcome), n))),
    )?;
    families.counter(
        &table::POLICY_FAULTS,
        hooks().flat_map(|(labels, stats)| {
            stats.faults.iter().map(move |(kind, n)| (with(&labels, kind.as_str()), *n))
        }),
    )?;
    families
        .histogram(&table::POLICY_TIME, hooks().map(|(labels, stats)| (labels, stats.latencies.into())))?;
    let statuses = scrape.policy_statuses.iter();
    families.gauge(
        &table::POLICY_SUSPENDED,
        statuses.map(|(label, status)| (version(label).to_vec(), u64::from(status.suspended))),
    )?;
    let Some(journal) = scrape.journal else { return Ok(()) };
    families.value(&table::JOURNAL_KEPT, Some(journal.kept))?;
    families.value(&table::JOURNAL_BYTES, Some(journal.bytes))?;
    families.counter(&table::JOURNAL_DROPPED, [(Vec::new(), journal.dropped)])?;
    families.counter(&table::JOURNAL_LOST, [(Vec::new(), journal.lost)])
}

fn outcomes(stats: &CallStats) -> [(&'static str, u64); 3] {
    [("answer", stats.answers()), ("pass", stats.passes), ("fault", stats.failed())]
}
