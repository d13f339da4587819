//! Metrics of devices, as the kubelet lists them, and of allocations.

use super::families::Families;
use super::scrape::Scrape;
use super::table;
use berth_kernel::evidence::limits::{LimitState, MemoryLimit};
use berth_kernel::evidence::runtime::BypassOutcome;
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

const OUTCOMES: [BypassOutcome; 3] = [BypassOutcome::Failed, BypassOutcome::Stripped, BypassOutcome::Denied];
const LIMIT_STATES: [&str; 5] = ["pending", "set", "late", "failed", "stale"];

/// What the guard shows of memory limits.
pub(super) fn encode_limits(scrape: &Scrape, families: &mut Families<'_>) -> fmt::Result {
    let view = scrape.ledger.runtime.as_deref();
    let is_connected = view.map(|view| view.is_whole);
    let is_needed = scrape.ledger.rules.why_guard_is_needed().is_some();
    families.value(&table::GUARD_CONNECTED, is_connected.or(is_needed.then_some(false)).map(u64::from))?;
    // A container with several allocations is listed with each.
    let containers = view.into_iter().flat_map(|view| view.containers.values().flatten());
    let containers: BTreeMap<&str, _> = containers.map(|one| (one.id.as_str(), one)).collect();
    let limits: Vec<_> = containers.values().flat_map(|container| &container.limits).collect();
    let recent = |limit: &MemoryLimit| limit.reading.filter(|reading| !reading.is_stale);
    let state = |limit: &MemoryLimit| match (limit.state, recent(limit)) {
        (LimitState::Pending, _) => "pending",
        (LimitState::Failed, _) => "failed",
        (LimitState::Set | LimitState::Late, None) => "stale",
        (LimitState::Set, Some(_)) => "set",
        (LimitState::Late, Some(_)) => "late",
    };
    let count = |wanted| limits.iter().filter(|limit| state(limit) == wanted).count();
    let counts = LIMIT_STATES.map(|state| (vec![state], u64::try_from(count(state)).unwrap_or(u64::MAX)));
    families.gauge(&table::LIMITS, counts.into_iter().filter(|_| view.is_some()))?;
    let bypasses = |outcome| {
        view.map_or(0, |view| {
            view.container_bypasses.iter().filter(|bypass| bypass.outcome == outcome).count()
        })
    };
    let counts = OUTCOMES
        .map(|outcome| (vec![outcome.as_str()], u64::try_from(bypasses(outcome)).unwrap_or(u64::MAX)));
    families.gauge(&table::BYPASS_CONTAINERS, counts.into_iter().filter(|_| view.is_some()))?;
    let mut used: BTreeMap<&GpuId, u64> = BTreeMap::new();
    for (gpu, reading) in limits.iter().filter_map(|limit| Some((&limit.gpu, recent(limit)?))) {
        *used.entry(gpu).or_default() += reading.used_mib.saturating_mul(1 << 20);
    }
    let of_gpu = |(index, gpu): &'_ (String, GpuId)| Some((index.clone(), gpu.clone(), *used.get(gpu)?));
    let shown: Vec<_> = scrape.gpus.iter().filter_map(of_gpu).collect();
    families.gauge(
        &table::LIMIT_USED,
        shown.iter().map(|(index, gpu, n)| (vec![index.as_str(), gpu.as_str()], *n)),
    )
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
