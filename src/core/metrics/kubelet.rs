//! Metrics of the kubelet front end: registrations, streams, calls and reconcile passes.

use super::families::Families;
use super::scrape::Scrape;
use super::table;
use berth_observe::counters::{CODES, METHODS, RegistrationState, Rpc};
use std::fmt;

const PASSES: [&str; 3] = ["applied", "partial", "failed"];

pub(super) fn encode(scrape: &Scrape, families: &mut Families<'_>) -> fmt::Result {
    let counters = &scrape.counters.kubelet;
    let registrations = counters.registrations();
    let states =
        registrations.iter().filter_map(|(resource, s)| Some((vec![resource.as_str()], s.at?.as_str())));
    families.states(&table::REGISTRATION, &RegistrationState::ALL.map(RegistrationState::as_str), states)?;
    families.counter(
        &table::REGISTERS,
        counters.registration_outcomes().map(|(outcome, n)| (vec![outcome], n)),
    )?;
    let count = |n: usize| u64::try_from(n).unwrap_or(u64::MAX);
    let streams = registrations.iter().map(|(resource, s)| (vec![resource.as_str()], count(s.streams)));
    families.gauge(&table::STREAMS, streams)?;
    // A method that was never called is 0 under OK: `rate` does not see the first call of a counter that appears with
    // it.
    let calls = METHODS.iter().flat_map(|rpc| {
        let counted = CODES.iter().zip(counters.calls(*rpc));
        let shown = counted.filter(|(code, n)| *n > 0 || **code == CODES[0]);
        shown.map(|(code, n)| (vec![rpc.as_str(), *code], n))
    });
    families.counter(&table::GRPC_CALLS, calls)?;
    let timed = METHODS.iter().filter(|rpc| **rpc != Rpc::ListAndWatch);
    families.histogram(
        &table::GRPC_TIME,
        timed.map(|rpc| (vec![rpc.as_str()], counters.durations(*rpc).read().into())),
    )?;
    let passes = counters.passes();
    families.counter(
        &table::PASSES,
        PASSES.iter().map(|outcome| (vec![*outcome], passes.get(outcome).copied().unwrap_or(0))),
    )?;
    families.duration(&table::PASS_TIME, counters.pass_durations.read())
}
