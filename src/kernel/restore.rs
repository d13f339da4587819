//! Restores a ledger from its records (I5).

use super::allocation::Allocation;
use super::health::Health;
use super::history::History;
use super::ledger::{GpuState, Ledger};
use super::names::DeviceId;
use super::part_state::{Device, DeviceState, PartState};
use super::record::{PartRecord, Record, StackHead};
use super::sighting::Sighting;
use super::stack::Stack;
use super::time::Now;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Restores a ledger. Parts are absent until a scan finds them, and waits start now.
#[must_use]
pub fn restore(records: Vec<Record>, now: Now) -> Ledger {
    let mut ledger = Ledger::default();
    let (mut live, mut ended, mut policies) = (BTreeMap::new(), Vec::new(), BTreeMap::new());
    let (mut stack, mut entries) = (Stack::default(), BTreeMap::new());
    let mut past = BTreeMap::new();
    let mut past_entries = Vec::new();
    let (mut all_marks, mut healths) = (Vec::new(), Vec::new());
    for record in records {
        match record {
            Record::Meta(meta) => {
                ledger.store = meta.store;
                ledger.next_number = meta.next_number;
                ledger.kubelet_seen_wall_ms = meta.kubelet_seen_wall_ms;
            }
            Record::Part(record) => restore_part(&mut ledger, record, now),
            Record::Marks(gpu, marks) => all_marks.push((gpu, marks)),
            Record::Health(record) => healths.push(record),
            Record::Allocation(mut a) => match a.ended.take() {
                Some(end) => ended.push((a, end)),
                None => drop(live.insert(a.id, Arc::new(a))),
            },
            Record::Policy(v) => {
                policies.insert(v.digest.clone(), Arc::new(v));
            }
            Record::Stack(head) => {
                stack = restore_stack(head);
            }
            Record::PastStack(head) => drop(past.insert(head.revision, restore_stack(head))),
            Record::PastStackEntry(revision, i, entry) => past_entries.push((revision, i, entry)),
            Record::StackEntry(i, entry) => {
                entries.insert(i, entry);
            }
        }
    }
    for (gpu, marks) in all_marks {
        if let Some(state) = ledger.gpus.get_mut(&gpu) {
            Arc::make_mut(state).marks = marks;
        }
    }
    for record in healths {
        if let Some(state) = ledger.gpus.get_mut(&record.gpu) {
            Arc::make_mut(state).health = Health {
                state: record.state,
                reason: record.reason,
                since_wall_ms: record.since_wall_ms,
                quiet_ms: record.quiet_ms,
                // The elapsed time is not stored, so the wait starts again.
                again_mono_ms: now.mono_ms.saturating_add(record.quiet_ms.unwrap_or(0)),
                history: record.history,
            };
        }
    }
    stack.entries = entries.into_values().collect();
    ledger.sightings =
        Arc::new(live.iter().map(|(id, a)| (*id, Sighting::restored(&a.holder, now))).collect());
    let held: Vec<Arc<Allocation>> = live.values().cloned().collect();
    held.iter().for_each(|a| restore_holders(&mut ledger, a));
    ledger.live = Arc::new(live);
    ledger.ended = Arc::new(History::restored(ended));
    ledger.policies = Arc::new(policies);
    ledger.stack = Arc::new(stack);
    past_entries.sort_by_key(|(revision, i, _)| (*revision, *i));
    for (revision, _, entry) in past_entries {
        if let Some(stack) = past.get_mut(&revision) {
            stack.entries.push(entry);
        }
    }
    ledger.past_stacks = Arc::new(past.into_iter().map(|(r, stack)| (r, Arc::new(stack))).collect());
    ledger
}

/// A stack without its entries, which are separate records.
fn restore_stack(head: StackHead) -> Stack {
    let StackHead { revision, from_api, by, why, since_wall_ms, entries: _ } = head;
    Stack { revision, from_api, by, why, since_wall_ms, entries: Vec::new() }
}

fn restore_part(ledger: &mut Ledger, record: PartRecord, now: Now) {
    let mut state = PartState::new(record.part, now.mono_ms);
    state.present = false;
    state.offered_by = record.offered_by;
    state.lines = record.lines;
    state.ranges = record.ranges;
    for run in record.runs {
        let standing = if run.retiring {
            DeviceState::Retiring { since_mono_ms: now.mono_ms }
        } else {
            DeviceState::Offered
        };
        let device = Device {
            consumes: run.consumes,
            state: standing,
            holders: Vec::new(),
            last_allocate_mono_ms: None,
        };
        match run.first {
            None => {
                state.devices.insert((run.resource, None), device);
            }
            Some(first) => state.devices.extend(
                (first..first.saturating_add(run.len))
                    .map(|n| ((run.resource.clone(), Some(n)), device.clone())),
            ),
        }
    }
    // Health has its own record. Nothing is granted on the part until a scan finds it.
    let health = Health::healthy(now);
    let gpu = state.part.gpu().clone();
    ledger.gpus.entry(gpu).or_insert_with(|| Arc::new(GpuState::new(health)));
    ledger.parts.insert(state.part.id.clone(), Arc::new(state));
}

fn restore_holders(ledger: &mut Ledger, allocation: &Allocation) {
    for DeviceId { part, share } in &allocation.devices {
        let Some(state) = ledger.parts.get_mut(part) else {
            continue;
        };
        if let Some(device) = Arc::make_mut(state).devices.get_mut(&(allocation.resource.clone(), *share)) {
            device.holders.push(allocation.id);
        }
    }
}

/// Adds to a ledger that was restored while the process runs what only memory held: presence, health and
/// monotonic times.
#[must_use]
pub fn carry_over(mut restored: Ledger, old: &Ledger) -> Ledger {
    restored.generation = old.generation + 1;
    restored.links = Arc::clone(&old.links);
    restored.usage = Arc::clone(&old.usage);
    restored.scan_errors = Arc::clone(&old.scan_errors);
    restored.processes = Arc::clone(&old.processes);
    restored.breakers = Arc::clone(&old.breakers);
    restored.hold.clone_from(&old.hold);
    restored.stuck.clone_from(&old.stuck);
    restored.pods.clone_from(&old.pods);
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
    for (id, gpu) in &mut restored.gpus {
        if let Some(before) = old.gpus.get(id) {
            let gpu = Arc::make_mut(gpu);
            gpu.health = before.health.clone();
            gpu.empty = before.empty;
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
