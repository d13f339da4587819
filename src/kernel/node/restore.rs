//! Restores a ledger from its records (I5).

use crate::evidence::sighting::Sighting;
use crate::grants::allocation::Allocation;
use crate::grants::history::History;
use crate::hardware::health::{Health, HealthState};
use crate::hardware::judgement::Judgement;
use crate::ids::names::GpuId;
use crate::ids::time::Now;
use crate::node::ledger::{GpuState, Ledger};
use crate::node::record::{HealthRecord, PartRecord, Record, StackHead};
use crate::policy::judge_again::is_outdated;
use crate::policy::stack::Stack;
use crate::sharing::part_state::{Device, DeviceState, PartState};
use std::collections::BTreeSet;
use std::sync::Arc;

/// Restores a ledger. Parts are absent until a scan finds them, and waits start now.
#[must_use]
pub fn restore(mut records: Vec<Record>, now: Now) -> Ledger {
    // Records follow those that they need: marks, health and API a part, allocations the devices of parts and older
    // allocations, entries their stack.
    records.sort_by_cached_key(Record::key);
    let mut ledger = Ledger::default();
    let mut ended = Vec::new();
    for record in records {
        match record {
            Record::Meta(meta) => {
                ledger.store = meta.store;
                ledger.next_number = meta.next_number;
                ledger.kubelet_seen_wall_ms = meta.kubelet_seen_wall_ms;
            }
            Record::Part(record) => restore_part(&mut ledger, record, now),
            Record::Marks(gpu, marks) => ledger.with_gpu(&gpu, |state| state.marks = marks.restored(now)),
            Record::Via(gpu, via) => ledger.with_gpu(&gpu, |state| state.via = via.restored(now)),
            Record::Health(record) => {
                ledger.with_gpu(&record.gpu.clone(), |state| state.health = restore_health(record, now));
            }
            Record::Allocation(mut allocation) => match allocation.ended.take() {
                Some(end) => ended.push((allocation, end)),
                None => restore_live(&mut ledger, allocation, now),
            },
            Record::Policy(version) => {
                Arc::make_mut(&mut ledger.policies).insert(version.digest.clone(), Arc::new(version));
            }
            Record::Stack(head) => ledger.stack = restore_stack(head),
            Record::StackEntry(_, entry) => Arc::make_mut(&mut ledger.stack).entries.push(entry),
            Record::PastStack(head) => {
                Arc::make_mut(&mut ledger.past_stacks).insert(head.revision, restore_stack(head));
            }
            Record::PastStackEntry(revision, _, entry) => {
                if let Some(stack) = Arc::make_mut(&mut ledger.past_stacks).get_mut(&revision) {
                    Arc::make_mut(stack).entries.push(entry);
                }
            }
        }
    }
    ledger.ended = Arc::new(History::restored(ended));
    ledger
}

fn restore_health(record: HealthRecord, now: Now) -> Health {
    let HealthRecord { gpu: _, state, reason, since_wall_ms, quiet_ms, until_reset, history, mut judgements } =
        record;
    // The elapsed time is not stored, so the wait starts again.
    let quiet_until_mono_ms = now.mono_ms.saturating_add(quiet_ms.unwrap_or(0));
    judgements.iter_mut().for_each(|one| one.at_mono_ms = now.mono_ms);
    // A record without judgements does not say what made the GPU unhealthy, so no activation ends it.
    if judgements.is_empty() && matches!(state, HealthState::Degraded | HealthState::Unhealthy) {
        judgements.push(Judgement::of_scan(&reason, quiet_ms, now));
    }
    Health { state, reason, since_wall_ms, quiet_ms, until_reset, quiet_until_mono_ms, history, judgements }
}

fn restore_live(ledger: &mut Ledger, allocation: Allocation, now: Now) {
    let id = allocation.id;
    for device_id in &allocation.devices {
        ledger.with_device(&allocation.resource, device_id, |device| device.holders.push(id));
    }
    Arc::make_mut(&mut ledger.sightings).insert(id, Sighting::restored(&allocation.holder, now));
    Arc::make_mut(&mut ledger.live).insert(id, Arc::new(allocation));
}

/// A stack without its entries, which are separate records.
fn restore_stack(head: StackHead) -> Arc<Stack> {
    let StackHead { revision, origin, failed, by, why, since_wall_ms, entries: _ } = head;
    Arc::new(Stack { revision, origin, failed, by, why, since_wall_ms, entries: Vec::new() })
}

fn restore_part(ledger: &mut Ledger, record: PartRecord, now: Now) {
    let mut state = PartState::new(record.part, now.mono_ms);
    state.present = false;
    state.offered_by = record.offered_by;
    state.lines = record.lines;
    state.ranges = record.ranges;
    for run in record.runs {
        let retiring = DeviceState::Retiring { since_mono_ms: now.mono_ms };
        let device = Device::new(run.consumes, if run.retiring { retiring } else { DeviceState::Offered });
        let shares: Vec<Option<u32>> = match run.first {
            None => vec![None],
            Some(first) => (first..first.saturating_add(run.len)).map(Some).collect(),
        };
        state.devices.extend(shares.into_iter().map(|n| ((run.resource.clone(), n), device.clone())));
    }
    // Health has its own record. Nothing is granted on the part until a scan finds it.
    let health = Health::healthy(now);
    let gpu = state.part.gpu.clone();
    ledger.gpus.entry(gpu).or_insert_with(|| Arc::new(GpuState::new(health, now)));
    ledger.parts.insert(state.part.id.clone(), Arc::new(state));
}

/// Adds to a ledger that was restored while the process runs what only memory held: presence, health and
/// monotonic times.
#[must_use]
pub fn carry_over(mut restored: Ledger, old: &Ledger) -> Ledger {
    restored.generation = old.generation + 1;
    restored.rules = Arc::clone(&old.rules);
    restored.links = Arc::clone(&old.links);
    restored.usage = Arc::clone(&old.usage);
    restored.scan_errors = Arc::clone(&old.scan_errors);
    restored.unidentified = Arc::clone(&old.unidentified);
    restored.excluded = Arc::clone(&old.excluded);
    restored.processes = Arc::clone(&old.processes);
    restored.breakers = Arc::clone(&old.breakers);
    restored.ends_withheld.clone_from(&old.ends_withheld);
    restored.device_access = Arc::clone(&old.device_access);
    restored.blocked_ends.clone_from(&old.blocked_ends);
    restored.pods.clone_from(&old.pods);
    restored.runtime.clone_from(&old.runtime);
    restored.evictions = Arc::clone(&old.evictions);
    for (id, state) in &mut restored.parts {
        let Some(before) = old.parts.get(id) else {
            continue;
        };
        let state = Arc::make_mut(state);
        state.present = before.present;
        state.present_changed_mono_ms = before.present_changed_mono_ms;
        // If the held state differs, an end was stored without being applied: the part is idle from now on.
        if state.held() == before.held() {
            state.idle_since_mono_ms = before.idle_since_mono_ms;
        }
        for (key, device) in &mut state.devices {
            if let Some(device_before) = before.devices.get(key) {
                device.last_allocate_mono_ms = device_before.last_allocate_mono_ms;
            }
        }
    }
    // An activation whose append failed may have been written after all, with the health that it judged again.
    let is_outdated = |one: &Judgement| is_outdated(&restored, one, &restored.stack.entries);
    let outdated = old.gpus.iter().filter(|(_, state)| state.health.judgements.iter().any(is_outdated));
    let outdated: BTreeSet<GpuId> = outdated.map(|(gpu, _)| gpu.clone()).collect();
    for (id, gpu) in &mut restored.gpus {
        if let Some(before) = old.gpus.get(id) {
            let gpu = Arc::make_mut(gpu);
            if !outdated.contains(id) {
                gpu.health = before.health.clone();
            }
            gpu.marks.carry_deadlines(&before.marks);
            gpu.empty = before.empty;
            if (gpu.via.api, gpu.via.moving) == (before.via.api, before.via.moving) {
                gpu.via.since_mono_ms = before.via.since_mono_ms;
                // A wait begins again: the store may have devices that were not listed before.
                if before.unlisting_wait_since_mono_ms.is_none() {
                    gpu.unlisting_wait_since_mono_ms = None;
                }
            }
        }
    }
    let sightings = Arc::make_mut(&mut restored.sightings);
    for (id, sighting) in sightings {
        if let Some(before) = old.sightings.get(id) {
            *sighting = *before;
        }
    }
    restored
}
