//! Metrics of devices, as the kubelet lists them, and of allocations.

use super::families::Families;
use super::scrape::Scrape;
use super::table;
use berth_kernel::ids::names::{GpuId, PartId, Resource};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

const STATES: [&str; 4] = ["free", "held", "withdrawn", "retiring"];
const HOW: [&str; 2] = ["granted", "adopted"];
const REASONS: [&str; 5] = ["released", "neverStarted", "podGone", "superseded", "operator"];

pub(super) fn encode(scrape: &Scrape, families: &mut Families<'_>) -> fmt::Result {
    let devices: Vec<_> = scrape.listed.keys().map(|resource| (resource, states(scrape, resource))).collect();
    families.gauge(
        &table::DEVICES,
        devices.iter().flat_map(|(resource, counts)| {
            STATES.iter().zip(counts).map(|(state, n)| (vec![resource.as_str(), state], *n))
        }),
    )?;
    let live = live(scrape);
    let index = |gpu: &GpuId| {
        let listed = scrape.gpus.iter().find(|(_, id)| id == gpu);
        listed.map_or("", |(index, _)| index.as_str())
    };
    let shown = live.iter().filter(|((_, gpu), _)| scrape.gpus.iter().any(|(_, id)| id == gpu));
    families.gauge(
        &table::ALLOCATIONS,
        shown.map(|((resource, gpu), n)| (vec![resource.as_str(), index(gpu), gpu.as_str()], *n)),
    )?;
    let counters = &scrape.counters.keeper;
    families.counter(&table::GRANTED, with_zeros(scrape, &counters.grants(), &HOW))?;
    families.counter(&table::ENDED, with_zeros(scrape, &counters.ends(), &REASONS))?;
    let refusals = scrape.counters.kubelet.refusals();
    families.counter(&table::REFUSALS, refusals.iter().map(|(kind, n)| (vec![*kind], *n)))?;
    families.value(&table::ON_HOLD, Some(u64::from(scrape.ledger.ends_withheld.is_some())))?;
    let blocked_ends =
        scrape.ledger.blocked_ends.as_deref().map_or(0, |blocked_ends| blocked_ends.allocations);
    families.value(&table::STUCK, Some(u64::try_from(blocked_ends).unwrap_or(u64::MAX)))
}

/// Number of a resource's devices in each of [`STATES`].
fn states(scrape: &Scrape, resource: &Resource) -> [u64; 4] {
    let mut counts = [0; 4];
    for listed in &scrape.listed[resource] {
        let Some(device) = scrape.ledger.device(resource, &listed.id) else { continue };
        let state = match () {
            () if device.held() => 1,
            () if !device.offered() => 3,
            () if listed.healthy => 0,
            () => 2,
        };
        counts[state] += 1;
    }
    counts
}

/// Number of live allocations by resource and GPU; 0 for pairs without one whose GPU offers the resource.
fn live(scrape: &Scrape) -> BTreeMap<(Resource, GpuId), u64> {
    let ledger = &scrape.ledger;
    let mut counts: BTreeMap<(Resource, GpuId), u64> = BTreeMap::new();
    for part in ledger.parts.values() {
        for (resource, _) in part.devices.keys() {
            counts.entry((resource.clone(), part.part.gpu.clone())).or_default();
        }
    }
    for allocation in ledger.live.values() {
        let gpu = |part: &PartId| ledger.part(part).map(|part| part.part.gpu.clone());
        let gpus: BTreeSet<GpuId> = allocation.devices.iter().filter_map(|id| gpu(&id.part)).collect();
        for gpu in gpus {
            *counts.entry((allocation.resource.clone(), gpu)).or_default() += 1;
        }
    }
    counts
}

/// The counters of every resource, including zeros: `rate` does not see the first event of a counter that
/// appears with it.
fn with_zeros<'a>(
    scrape: &'a Scrape,
    counts: &BTreeMap<(String, &'static str), u64>,
    labels: &[&'static str],
) -> Vec<(Vec<&'a str>, u64)> {
    let mut values = Vec::new();
    for resource in scrape.counted.iter() {
        for label in labels {
            let n = counts.get(&(resource.clone(), *label)).copied().unwrap_or(0);
            values.push((vec![resource.as_str(), *label], n));
        }
    }
    values
}
