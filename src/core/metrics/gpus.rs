//! Metrics of GPUs: facts, use, health, scans and drains.

use super::families::{Families, wall_seconds};
use super::scrape::Scrape;
use super::table;
use berth_kernel::drain::eviction_plan::{EvictionStatus, holders};
use berth_kernel::evidence::attribution::Attributions;
use berth_kernel::hardware::gpu::Part;
use berth_kernel::hardware::health::HealthState;
use berth_kernel::ids::names::GpuId;
use berth_kernel::node::ledger::Ledger;
use std::collections::BTreeMap;
use std::fmt;

/// Most GPUs with metrics of their own, lowest indices first: four times the largest node, since vanished GPUs are kept
/// until an operator forgets them.
pub const GPUS_SHOWN_MAX: usize = 64;

const HEALTH: [&str; 4] = ["healthy", "degraded", "unhealthy", "vanished"];
const DRAIN: [&str; 4] = ["active", "cordoned", "draining", "drained"];
const MIB: u64 = 1024 * 1024;

/// Index and UUID of the GPUs with metrics, ordered by index.
pub(super) fn shown(ledger: &Ledger) -> Vec<(String, GpuId)> {
    let indexed = |id: &GpuId| (main_part(ledger, id).map_or(u32::MAX, |part| part.gpu_index), id.clone());
    let mut gpus: Vec<_> = ledger.gpus.keys().map(indexed).collect();
    gpus.sort();
    // Empty for a GPU that vanished and whose index another one has now: two GPUs must not share a label.
    let label = |id: &GpuId| ledger.index_of(id).map(|index| index.to_string()).unwrap_or_default();
    gpus.into_iter().take(GPUS_SHOWN_MAX).map(|(_, id)| (label(&id), id)).collect()
}

/// The whole GPU, or its first MIG instance if only instances are known.
fn main_part<'l>(ledger: &'l Ledger, gpu: &GpuId) -> Option<&'l Part> {
    let any = || ledger.parts.values().map(AsRef::as_ref).find(|part| &part.part.gpu == gpu);
    ledger.part(gpu.as_part()).or_else(any).map(|part| &part.part)
}

fn health(state: HealthState, present: bool) -> &'static str {
    // No scan has recorded a GPU as vanished that was missing at start.
    if present { state.as_str() } else { HealthState::Vanished.as_str() }
}

pub(super) fn encode(scrape: &Scrape, families: &mut Families<'_>) -> fmt::Result {
    let ledger = &*scrape.ledger;
    let gpus = || scrape.gpus.iter().map(|(index, id)| (vec![index.as_str(), id.as_str()], id));
    let parts = || gpus().filter_map(|(labels, id)| Some((labels, main_part(ledger, id)?)));
    let bus = |part: &Part| part.pci_bus.map(|bus| bus.to_string()).unwrap_or_default();
    let facts: Vec<_> = parts().map(|(labels, part)| (labels, part, bus(part))).collect();
    families.info(
        &table::GPU,
        facts.iter().map(|(labels, part, bus)| {
            let capability = part.attributes.get("compute.capability").map_or("", String::as_str);
            [labels.as_slice(), &[part.model.as_str(), bus, capability]].concat()
        }),
    )?;
    families.value(&table::GPUS_UNIDENTIFIED, u64::try_from(ledger.unidentified.len()).ok())?;
    let present = |id: &GpuId| ledger.parts.values().any(|p| p.present && &p.part.gpu == id);
    families.gauge(&table::GPU_PRESENT, gpus().map(|(labels, id)| (labels, u64::from(present(id)))))?;
    // The memory of a GPU is unknown if only its instances are known.
    let whole = parts().filter(|(_, part)| part.is_whole_gpu());
    let known = whole.filter(|(_, part)| part.memory_mib > 0);
    families.gauge(&table::GPU_CAPACITY, known.map(|(labels, part)| (labels, part.memory_mib * MIB)))?;
    let is_known = |id: &GpuId| main_part(ledger, id).is_some_and(|part| part.memory_mib > 0);
    let usage = |id: &GpuId| ledger.usage.get(id.as_part()).filter(|_| is_known(id));
    let used = |id: &GpuId| usage(id)?.memory_used_mib.map(|mib| mib * MIB);
    families.gauge(&table::GPU_USED, gpus().filter_map(|(labels, id)| Some((labels, used(id)?))))?;
    let loads = || gpus().filter_map(|(labels, id)| Some((labels, scrape.loads.get(id)?)));
    let utilization =
        loads().filter_map(|(labels, load)| Some((labels, f64::from(load.utilization_percent?) / 100.0)));
    families.gauge_f64(&table::GPU_UTILIZATION, utilization)?;
    let temperature =
        loads().filter_map(|(labels, load)| Some((labels, u64::from(load.temperature_celsius?))));
    families.gauge(&table::GPU_TEMPERATURE, temperature)?;
    let power = loads().filter_map(|(labels, load)| Some((labels, u64::from(load.power_watts?))));
    families.gauge(&table::GPU_POWER, power)?;
    let processes =
        gpus().filter_map(|(labels, id)| Some((labels, ledger.processes_on(id.as_part())?.into())));
    families.gauge(&table::GPU_PROCESSES, processes)?;
    let mut bypasses: BTreeMap<GpuId, u64> = BTreeMap::new();
    for bypass in Attributions::new(ledger).bypasses() {
        *bypasses.entry(bypass.gpu).or_default() += 1;
    }
    let bypassed = gpus().map(|(labels, id)| (labels, bypasses.get(id).copied().unwrap_or(0)));
    families.gauge(&table::GPU_BYPASSES, bypassed)?;
    let states = || gpus().filter_map(|(labels, id)| Some((labels, id, ledger.gpus.get(id)?)));
    let healths = states().map(|(labels, id, gpu)| (labels, health(gpu.health.state, present(id))));
    families.states(&table::GPU_HEALTH, &HEALTH, healths)?;
    families.states(
        &table::GPU_DRAIN,
        &DRAIN,
        states().map(|(labels, _, gpu)| (labels, gpu.drain().as_str())),
    )?;
    encode_reports(scrape, families)?;
    encode_drains(scrape, families)
}

/// Encodes health changes, XIDs and scans.
fn encode_reports(scrape: &Scrape, families: &mut Families<'_>) -> fmt::Result {
    let changes = scrape.counters.keeper.health_changes();
    families.counter(
        &table::HEALTH_CHANGES,
        HEALTH.iter().map(|state| (vec![*state], changes.get(state).copied().unwrap_or(0))),
    )?;
    let counters = &scrape.counters.gpus;
    let xids = counters.xids();
    let index = |uuid: &str| {
        let listed = scrape.gpus.iter().find(|(_, id)| id.as_str() == uuid);
        listed.map_or("", |(index, _)| index.as_str())
    };
    let codes: Vec<_> = xids.iter().map(|((uuid, code), n)| (uuid, code.to_string(), *n)).collect();
    let counted = codes.iter().map(|(uuid, code, n)| (vec![index(uuid), uuid.as_str(), code.as_str()], *n));
    let other = Some(counters.other_xids()).filter(|n| *n > 0).map(|n| (vec!["", "", "other"], n));
    families.counter(&table::XIDS, counted.chain(other))?;
    let scans = counters.outcomes();
    families.counter(&table::SCANS, scans.map(|(outcome, n)| (vec![outcome], n)))?;
    families.duration(&table::SCAN_TIME, counters.scan_durations.read())?;
    let last_scan = counters.answered_wall_ms().map(|at| (Vec::new(), wall_seconds(at)));
    families.gauge_f64(&table::LAST_SCAN, last_scan)
}

fn encode_drains(scrape: &Scrape, families: &mut Families<'_>) -> fmt::Result {
    let ledger = &*scrape.ledger;
    let gpus = || {
        let shown = scrape.gpus.iter();
        shown.filter_map(|(index, id)| Some((vec![index.as_str(), id.as_str()], id, ledger.gpus.get(id)?)))
    };
    let draining = || gpus().filter_map(|(labels, id, gpu)| Some((labels, id, *gpu.drain().order()?)));
    let held: Vec<_> = draining().map(|(labels, id, _)| (labels, holders(ledger, id))).collect();
    let count = |n: usize| u64::try_from(n).unwrap_or(u64::MAX);
    families.gauge(
        &table::DRAIN_HOLDERS,
        held.iter().map(|(labels, holders)| (labels.clone(), count(holders.len()))),
    )?;
    let blocks = |leaving: &EvictionStatus| {
        matches!(
            leaving,
            EvictionStatus::Static | EvictionStatus::Budget { .. } | EvictionStatus::Failed { .. }
        )
    };
    let blockers = held.iter().map(|(labels, holders)| {
        (labels.clone(), count(holders.iter().filter(|holder| blocks(&holder.status)).count()))
    });
    families.gauge(&table::DRAIN_BLOCKERS, blockers)?;
    let since =
        gpus().filter_map(|(labels, _, gpu)| Some((labels, wall_seconds(gpu.drain().mark()?.since_wall_ms))));
    families.gauge_f64(&table::DRAIN_SINCE, since)?;
    let deadlines =
        draining().filter_map(|(labels, _, order)| Some((labels, wall_seconds(order.deadline_wall_ms?))));
    families.gauge_f64(&table::DRAIN_DEADLINE, deadlines)
}
