//! The kubelet: registrations, streams, calls, rounds.

use super::families::Families;
use super::scrape::Scrape;
use super::table;
use crate::figures::{At, CODES, METHODS, Rpc};
use std::fmt;

const ROUNDS: [&str; 3] = ["applied", "partial", "failed"];

pub(super) fn tell(scrape: &Scrape, families: &mut Families<'_>) -> fmt::Result {
    let figures = &scrape.figures.kubelet;
    let standings = figures.standings();
    let at = standings.iter().filter_map(|(resource, s)| Some((vec![resource.as_str()], s.at?.as_str())));
    families.states(&table::REGISTRATION, &At::ALL.map(At::as_str), at)?;
    families.counter(&table::REGISTERS, figures.registers().map(|(outcome, n)| (vec![outcome], n)))?;
    let count = |n: usize| u64::try_from(n).unwrap_or(u64::MAX);
    let streams = standings.iter().map(|(resource, s)| (vec![resource.as_str()], count(s.streams)));
    families.gauge(&table::STREAMS, streams)?;
    // A call that was never made counts 0 under OK, so that the first one shows.
    let calls = METHODS.iter().flat_map(|rpc| {
        let counted = CODES.iter().zip(figures.calls(*rpc));
        let shown = counted.filter(|(code, n)| *n > 0 || **code == CODES[0]);
        shown.map(|(code, n)| (vec![rpc.as_str(), *code], n))
    });
    families.counter(&table::GRPC_CALLS, calls)?;
    let timed = METHODS.iter().filter(|rpc| **rpc != Rpc::ListAndWatch);
    families.histogram(
        &table::GRPC_TIME,
        timed.map(|rpc| (vec![rpc.as_str()], figures.times(*rpc).read().into())),
    )?;
    let rounds = figures.rounds();
    families.counter(
        &table::ROUNDS,
        ROUNDS.iter().map(|outcome| (vec![*outcome], rounds.get(outcome).copied().unwrap_or(0))),
    )?;
    families.times(&table::ROUND_TIME, figures.round_times.read())
}
