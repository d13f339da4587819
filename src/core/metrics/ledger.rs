//! The ledger, its one writer and its store.

use super::families::Families;
use super::scrape::Scrape;
use super::table;
use std::fmt;

pub(super) fn tell(scrape: &Scrape, families: &mut Families<'_>) -> fmt::Result {
    families.one(&table::GENERATION, Some(scrape.ledger.generation))?;
    let count = |n: usize| u64::try_from(n).unwrap_or(u64::MAX);
    let (kubelet, other) = scrape.waiting;
    families.gauge(&table::QUEUE, [(vec!["kubelet"], count(kubelet)), (vec!["other"], count(other))])?;
    let figures = &scrape.figures.keeper;
    families.times(&table::TURN_TIME, figures.turns.read())?;
    families.times(&table::APPEND_TIME, figures.appends.read())?;
    families.counter(&table::APPEND_FAILURES, [(Vec::new(), figures.append_failures())])?;
    families.one(&table::STORE_SIZE, figures.store_bytes())?;
    families.one(&table::STORE_TROUBLE, Some(u64::from(scrape.store_failed)))
}
