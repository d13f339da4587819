//! Metrics of the ledger, the keeper and the store.

use super::families::Families;
use super::scrape::Scrape;
use super::table;
use std::fmt;

pub(super) fn encode(scrape: &Scrape, families: &mut Families<'_>) -> fmt::Result {
    families.value(&table::GENERATION, Some(scrape.ledger.generation))?;
    let count = |n: usize| u64::try_from(n).unwrap_or(u64::MAX);
    let (kubelet, other) = scrape.queue_lengths;
    families.gauge(&table::QUEUE, [(vec!["kubelet"], count(kubelet)), (vec!["other"], count(other))])?;
    let counters = &scrape.counters.keeper;
    families.duration(&table::TURN_TIME, counters.turn_durations.read())?;
    families.duration(&table::APPEND_TIME, counters.append_durations.read())?;
    families.counter(&table::APPEND_FAILURES, [(Vec::new(), counters.append_failures())])?;
    families.value(&table::STORE_SIZE, counters.store_bytes())?;
    families.value(&table::STORE_FAILED, Some(u64::from(scrape.store_failed)))
}
