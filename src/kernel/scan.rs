//! The changes that follow from an inventory scan or from a triaged reading.

use super::change::Change;
use super::command::Rules;
use super::drain_progress;
use super::drain_progress::Occupancy;
use super::gpu::{Inventory, PARTS_MAX, Reading};
use super::health::Health;
use super::ledger::Ledger;
use super::names::PartId;
use super::policy::TriageAnswer;
use super::process::ProcessTable;
use super::time::Now;
use std::collections::BTreeSet;
use std::sync::Arc;

/// The changes of an inventory scan: parts found, changed and gone, and the health of their GPUs.
#[must_use]
pub fn look(ledger: &Ledger, inventory: &Inventory, rules: &Rules, now: Now) -> Vec<Change> {
    let mut changes = Vec::new();
    let processes = ProcessTable::after_scan(ledger, inventory, rules.timing.bypass_ms, now);
    let parts = &inventory.parts[..inventory.parts.len().min(PARTS_MAX)];
    let seen: BTreeSet<_> = parts.iter().map(|p| &p.id).collect();
    for part in parts {
        let known = ledger.part(&part.id);
        if known.is_none_or(|k| !k.present || k.part != *part) {
            changes.push(Change::PartFound(part.clone()));
        }
    }
    for (id, _) in ledger.parts.iter().filter(|(id, p)| p.present && !seen.contains(id)) {
        changes.push(Change::PartGone(id.clone()));
    }
    let gpus_seen: BTreeSet<_> = parts.iter().map(super::gpu::Part::gpu).collect();
    for gpu in ledger.gpus.keys().chain(gpus_seen.iter().copied()).collect::<BTreeSet<_>>() {
        let old = ledger.gpus.get(gpu).map_or_else(|| Health::healthy(now), |g| g.health.clone());
        let error = inventory.scan_errors.get(gpu);
        let new = old.after_scan(gpus_seen.contains(gpu), error, rules.timing.quiet_ms, now);
        if new != old {
            changes.push(Change::HealthChanged { gpu: gpu.clone(), health: new });
        }
        let found = || found_on(ledger, inventory, &processes, gpu, gpus_seen.contains(gpu));
        changes.extend(drain_progress::after_scan(ledger, gpu, found, &rules.timing, now));
    }
    if *ledger.links != inventory.links
        || *ledger.usage != inventory.usage
        || *ledger.scan_errors != inventory.scan_errors
    {
        changes.push(Change::InventoryScanned {
            links: Arc::new(inventory.links.clone()),
            usage: Arc::new(inventory.usage.clone()),
            scan_errors: Arc::new(inventory.scan_errors.clone()),
        });
    }
    if *ledger.processes != processes {
        changes.push(Change::ProcessesSeen(Arc::new(processes)));
    }
    changes
}

/// Whether a GPU that is being drained is still in use. Goes through every process of the GPU, so it is
/// called only for such GPUs.
fn found_on(
    ledger: &Ledger,
    inventory: &Inventory,
    processes: &ProcessTable,
    gpu: &PartId,
    present: bool,
) -> Occupancy {
    if processes.by_gpu.contains_key(gpu) {
        return match processes.count(ledger, gpu) {
            // NVML lists no processes to a daemon that cannot see those of others.
            None => Occupancy::Unknown,
            Some(0) if inventory.scan_errors.contains_key(gpu) => Occupancy::Unknown,
            Some(0) => Occupancy::Empty,
            Some(_) => Occupancy::Busy,
        };
    }
    let parts = ledger.parts_of(gpu).map(|p| &p.part.id);
    let busy = |part: &PartId| inventory.usage.get(part).is_some_and(|u| u.processes > 0);
    if parts.chain([gpu]).any(busy) {
        Occupancy::Busy
    } else if inventory.scan_errors.contains_key(gpu) {
        Occupancy::Unknown
    } else if present && !inventory.usage.contains_key(gpu) {
        // The GPU answers but neither lists nor counts its processes. Counts of some instances do
        // not cover the others.
        Occupancy::Unknown
    } else {
        Occupancy::Empty
    }
}

/// The changes of a triaged reading; none for a part that is not known.
#[must_use]
pub fn triaged(ledger: &Ledger, reading: &Reading, answer: &TriageAnswer, now: Now) -> Vec<Change> {
    let Some(part) = ledger.part(&reading.part) else {
        return Vec::new();
    };
    let gpu = part.part.gpu();
    let Some(state) = ledger.gpus.get(gpu) else {
        return Vec::new();
    };
    let health = state.health.after_triage(answer, now);
    if health == state.health { Vec::new() } else { vec![Change::HealthChanged { gpu: gpu.clone(), health }] }
}
