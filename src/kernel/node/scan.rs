//! The changes that follow from an inventory scan or from a triaged reading.

use crate::drain::progress;
use crate::drain::progress::Occupancy;
use crate::hardware::gpu::{Inventory, PARTS_MAX, Part, ScanError};
use crate::hardware::health::Health;
use crate::hardware::judgement::TriagedReading;
use crate::hardware::process::ProcessTable;
use crate::ids::names::{GpuId, PartId};
use crate::ids::time::Now;
use crate::node::change::Change;
use crate::node::ledger::Ledger;
use std::borrow::Cow;
use std::collections::BTreeSet;
use std::sync::Arc;

/// The changes of an inventory scan: parts found, changed and gone, and the health of their GPUs.
#[must_use]
pub fn changes(ledger: &Ledger, inventory: &Inventory, now: Now) -> Vec<Change> {
    let timing = &ledger.rules.timing;
    let mut changes = Vec::new();
    let processes = ProcessTable::after_scan(ledger, inventory, timing.bypass_ms, now);
    let parts = inventory.parts.iter().take(PARTS_MAX).map(|part| with_known_facts(ledger, inventory, part));
    let parts: Vec<Cow<'_, Part>> = parts.collect();
    let seen: BTreeSet<_> = parts.iter().map(|p| &p.id).collect();
    for part in &parts {
        let known = ledger.part(&part.id);
        if known.is_none_or(|k| !k.present || k.part != **part) {
            changes.push(Change::PartFound(Part::clone(part)));
        }
    }
    for (id, _) in ledger.parts.iter().filter(|(id, p)| p.present && !seen.contains(id)) {
        changes.push(Change::PartGone(id.clone()));
    }
    let gpus_seen: BTreeSet<_> = parts.iter().map(|part| &part.gpu).collect();
    for gpu in ledger.gpus.keys().chain(gpus_seen.iter().copied()).collect::<BTreeSet<_>>() {
        let old = ledger.gpus.get(gpu).map_or_else(|| Health::healthy(now), |g| g.health.clone());
        let is_present = gpus_seen.contains(gpu);
        let missing = (!is_present).then(|| missing_error(ledger, inventory, gpu)).flatten();
        let error = inventory.scan_errors.get(gpu).or(missing.as_ref());
        let signs = inventory.signs.iter();
        let signs = signs.filter(|sign| parts.iter().any(|part| part.id == sign.part && &part.gpu == gpu));
        let new = old.with_signs(signs, now).after_scan(is_present, error, timing.quiet_ms, now);
        if new != old {
            changes.push(Change::HealthChanged { gpu: gpu.clone(), health: new });
        }
        let found = || found_on(ledger, inventory, &processes, gpu, is_present);
        changes.extend(progress::after_scan(ledger, gpu, found, now));
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
    if *ledger.unidentified != inventory.unidentified {
        changes.push(Change::UnidentifiedChanged(Arc::new(inventory.unidentified.clone())));
    }
    if *ledger.excluded != inventory.excluded {
        changes.push(Change::ExcludedChanged(Arc::new(inventory.excluded.clone())));
    }
    if *ledger.processes != processes {
        changes.push(Change::ProcessesSeen(Arc::new(processes)));
    }
    changes
}

/// The part with the facts that are known of it: those of the ledger, if the scan could not read all of them.
fn with_known_facts<'i>(ledger: &Ledger, inventory: &Inventory, part: &'i Part) -> Cow<'i, Part> {
    match ledger.part(&part.id).filter(|_| part.is_whole_gpu() && inventory.incomplete.contains(&part.gpu)) {
        None => Cow::Borrowed(part),
        Some(known) => Cow::Owned(Part {
            gpu_index: part.gpu_index,
            minor: part.minor.or(known.part.minor),
            pci_bus: part.pci_bus.or(known.part.pci_bus),
            ..known.part.clone()
        }),
    }
}

/// Why a GPU is not in the inventory, if the scan found a GPU in its slot that could not be identified.
fn missing_error(ledger: &Ledger, inventory: &Inventory, gpu: &GpuId) -> Option<ScanError> {
    let part = &ledger.part(gpu.as_part())?.part;
    let one = inventory.unidentified.iter().find(|one| one.is_in_slot_of(part))?;
    Some(format!("{one}, in its slot, is not identified: {}", one.reason).into())
}

/// Whether a GPU that is being drained is still in use. Goes through every process of the GPU, so it is
/// called only for such GPUs.
fn found_on(
    ledger: &Ledger,
    inventory: &Inventory,
    processes: &ProcessTable,
    gpu: &GpuId,
    present: bool,
) -> Occupancy {
    if processes.by_gpu.contains_key(gpu) {
        return match processes.count(ledger, gpu.as_part()) {
            // NVML lists no processes to a daemon that cannot see those of others.
            None => Occupancy::Unknown,
            Some(0) if inventory.scan_errors.contains_key(gpu) => Occupancy::Unknown,
            Some(0) => Occupancy::Empty,
            Some(_) => Occupancy::Busy,
        };
    }
    let parts = ledger.parts_of(gpu).map(|p| &p.part.id);
    let busy = |part: &PartId| inventory.usage.get(part).is_some_and(|u| u.processes > 0);
    if parts.chain([gpu.as_part()]).any(busy) {
        Occupancy::Busy
    } else if inventory.scan_errors.contains_key(gpu) {
        Occupancy::Unknown
    } else if present && !inventory.usage.contains_key(gpu.as_part()) {
        // The GPU answers but neither lists nor counts its processes. Counts of some instances do
        // not cover the others.
        Occupancy::Unknown
    } else {
        Occupancy::Empty
    }
}

/// The changes of a triaged reading; none for a part that is not known.
#[must_use]
pub fn apply_triage(ledger: &Ledger, triaged: &TriagedReading, now: Now) -> Vec<Change> {
    let Some(part) = ledger.part(&triaged.reading.part) else {
        return Vec::new();
    };
    let gpu = &part.part.gpu;
    let Some(state) = ledger.gpus.get(gpu) else {
        return Vec::new();
    };
    let health = state.health.after_reading(triaged, ledger.stack.revision, now);
    if health == state.health { Vec::new() } else { vec![Change::HealthChanged { gpu: gpu.clone(), health }] }
}
