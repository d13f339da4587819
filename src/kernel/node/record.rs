//! The records of a ledger in the store; [`crate::node::restore`] reads them back.
//!
//! A record is the state of one object, not a change: the store holds the newest record of each, so its
//! size follows the node's, and all records together give the ledger (I5).

use crate::drain::marks::Marks;
use crate::grants::allocation::Allocation;
use crate::hardware::gpu::Part;
use crate::hardware::health::{Health, HealthState, PastHealth};
use crate::hardware::judgement::Judgement;
use crate::ids::names::{AllocationId, Digest, GpuId, PartId, Resource};
use crate::node::change::{Change, Entry};
use crate::node::ledger::{GpuState, Ledger};
use crate::policy::decider::Decider;
use crate::policy::stack::{FailedRevision, Stack, StackEntry, StackOrigin};
use crate::policy::version::PolicyVersion;
use crate::sharing::offer::{Consumes, OfferLine, ShareRange};
use crate::sharing::part_state::PartState;
use crate::sharing::via::Via;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// The state of one object.
#[derive(Clone, Debug, PartialEq)]
pub enum Record {
    /// Counters of the whole ledger.
    Meta(Meta),
    /// A part and its devices.
    Part(PartRecord),
    /// A GPU's marks, where it has any.
    Marks(GpuId, Marks),
    /// The API of a GPU, where it is not the device plugin API without an order.
    Via(GpuId, Via),
    /// A GPU's health and its history.
    Health(HealthRecord),
    /// An allocation, live or ended.
    Allocation(Allocation),
    /// A policy version.
    Policy(PolicyVersion),
    /// The active stack without its entries.
    Stack(StackHead),
    /// One entry of the active stack.
    StackEntry(usize, StackEntry),
    /// A previously active stack without its entries.
    PastStack(StackHead),
    /// One entry of the stack that was active at this revision.
    PastStackEntry(u64, usize, StackEntry),
}

/// The key of a record. The order is that of the store.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum RecordKey {
    /// See [`Record::Meta`].
    Meta,
    /// See [`Record::Part`].
    Part(PartId),
    /// See [`Record::Marks`].
    Marks(GpuId),
    /// See [`Record::Allocation`].
    Allocation(AllocationId),
    /// See [`Record::Policy`].
    Policy(Digest),
    /// See [`Record::Stack`].
    Stack,
    /// See [`Record::StackEntry`].
    StackEntry(usize),
    /// See [`Record::Health`].
    Health(GpuId),
    /// See [`Record::PastStack`]; by revision.
    PastStack(u64),
    /// See [`Record::PastStackEntry`].
    PastStackEntry(u64, usize),
    /// See [`Record::Via`].
    Via(GpuId),
}

/// A GPU's health and its history in the store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HealthRecord {
    /// The GPU.
    pub gpu: GpuId,
    /// See [`crate::hardware::health::Health`] for all fields.
    pub state: HealthState,
    /// The reason.
    pub reason: String,
    /// Since when, milliseconds since 1970.
    pub since_wall_ms: u64,
    /// Time without bad readings until it is healthy again, milliseconds.
    pub quiet_ms: Option<u64>,
    /// Whether a reset ends it.
    pub until_reset: bool,
    /// Earlier states, oldest first.
    pub history: Vec<PastHealth>,
    /// The judgements that led to the state. Their times are not stored, and are 0.
    pub judgements: Vec<Judgement>,
}

/// Counters of the whole ledger.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Meta {
    /// Identifies the store in allocation ids; drawn at random once.
    pub store: u32,
    /// The number of the next allocation. Stored separately, since the newest allocation may have been
    /// pruned.
    pub next_number: u64,
    /// See [`Ledger::kubelet_seen_wall_ms`].
    pub kubelet_seen_wall_ms: Option<u64>,
}

/// A part and its devices in the store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PartRecord {
    /// The hardware.
    pub part: Part,
    /// Source of the offer; `None` before the first.
    pub offered_by: Option<Decider>,
    /// Its offer.
    pub lines: Vec<OfferLine>,
    /// Owners of the share numbers.
    pub ranges: Vec<ShareRange>,
    /// Its devices, as runs of equal ones.
    pub runs: Vec<DeviceRun>,
}

/// Equal devices with consecutive share numbers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceRun {
    /// Their resource.
    pub resource: Resource,
    /// The first share number; `None` is the whole part, a run of one.
    pub first: Option<u32>,
    /// Number of devices.
    pub len: u32,
    /// What each takes.
    pub consumes: Consumes,
    /// Whether they are retiring.
    pub retiring: bool,
}

/// A stack without its entries.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StackHead {
    /// Counts activations.
    pub revision: u64,
    /// Who decided that it is active.
    pub origin: StackOrigin,
    /// The revision of the GPUNode that failed last.
    pub failed: Option<Box<FailedRevision>>,
    /// The caller who activated it.
    pub by: String,
    /// The caller's reason; may be empty.
    pub why: String,
    /// When it was activated, milliseconds since 1970.
    pub since_wall_ms: u64,
    /// Number of entries.
    pub entries: usize,
}

/// One write to the store. Only a few exist at once, so the size difference of the variants does not matter.
#[allow(clippy::large_enum_variant)]
#[derive(Clone, Debug, PartialEq)]
pub enum Write {
    /// Stores or replaces a record.
    Put(Record),
    /// Deletes a record.
    Delete(RecordKey),
}

impl Record {
    /// Its key.
    #[must_use]
    pub fn key(&self) -> RecordKey {
        match self {
            Self::Meta(_) => RecordKey::Meta,
            Self::Part(p) => RecordKey::Part(p.part.id.clone()),
            Self::Marks(gpu, _) => RecordKey::Marks(gpu.clone()),
            Self::Via(gpu, _) => RecordKey::Via(gpu.clone()),
            Self::Health(h) => RecordKey::Health(h.gpu.clone()),
            Self::Allocation(a) => RecordKey::Allocation(a.id),
            Self::Policy(v) => RecordKey::Policy(v.digest.clone()),
            Self::Stack(_) => RecordKey::Stack,
            Self::StackEntry(i, _) => RecordKey::StackEntry(*i),
            Self::PastStack(head) => RecordKey::PastStack(head.revision),
            Self::PastStackEntry(revision, i, _) => RecordKey::PastStackEntry(*revision, *i),
        }
    }
}

/// The writes that bring the store from `before` to `next`, which is `before` with `entry` applied.
#[must_use]
pub fn writes(before: &Ledger, entry: &Entry, next: &Ledger) -> Vec<Write> {
    let mut keys = BTreeSet::new();
    for change in entry.changes.iter().filter(|c| c.is_durable()) {
        add_keys(change, before, next, &mut keys);
    }
    // Avoids a search of the history for pruned allocations.
    let pruned: BTreeSet<AllocationId> = entry.changes.iter().filter_map(pruned_id).collect();
    let is_deleted = |key: &RecordKey| matches!(key, RecordKey::Allocation(id) if pruned.contains(id) && !next.live.contains_key(id));
    let record = |key: &RecordKey| if is_deleted(key) { None } else { record_of(next, key) };
    keys.into_iter().map(|key| record(&key).map_or(Write::Delete(key), Write::Put)).collect()
}

fn pruned_id(change: &Change) -> Option<AllocationId> {
    match change {
        Change::Pruned(id) => Some(*id),
        _ => None,
    }
}

/// Adds the keys of the records that a change affects.
fn add_keys(change: &Change, before: &Ledger, next: &Ledger, keys: &mut BTreeSet<RecordKey>) {
    let mut add = |key| {
        keys.insert(key);
    };
    match change {
        // After a start each part is found as the store has it.
        Change::PartFound(part) if before.part(&part.id).is_some_and(|known| known.part == *part) => {}
        Change::PartFound(part) => {
            add(RecordKey::Part(part.id.clone()));
            if !before.gpus.contains_key(&part.gpu) {
                add(RecordKey::Via(part.gpu.clone()));
            }
        }
        Change::Offered { part, .. } | Change::PartForgotten(part) => add(RecordKey::Part(part.clone())),
        Change::Delisted(key) => add(RecordKey::Part(key.id.part.clone())),
        Change::GpuForgotten(gpu) => {
            add(RecordKey::Marks(gpu.clone()));
            add(RecordKey::Via(gpu.clone()));
            add(RecordKey::Health(gpu.clone()));
            before.parts_of(gpu).for_each(|p| add(RecordKey::Part(p.part.id.clone())));
        }
        Change::MarksChanged { gpu, .. } => add(RecordKey::Marks(gpu.clone())),
        Change::ViaChanged { gpu, .. } => add(RecordKey::Via(gpu.clone())),
        Change::Granted(allocation) => {
            add(RecordKey::Meta);
            add(RecordKey::Allocation(allocation.id));
            // Older allocations become overlapped by the grant.
            let holders = |id| next.holders_of(&allocation.resource, id);
            let holders = allocation.devices.iter().flat_map(holders);
            holders.for_each(|id| add(RecordKey::Allocation(*id)));
        }
        Change::HolderLearned { id, .. }
        | Change::ClaimPodsChanged { id, .. }
        | Change::OverlapResolved(id)
        | Change::Ended { id, .. }
        | Change::Pruned(id) => {
            add(RecordKey::Allocation(*id));
        }
        Change::KubeletSeen(_) => add(RecordKey::Meta),
        Change::PolicyAdded(version) | Change::PolicyUpdated(version) => {
            add(RecordKey::Policy(version.digest.clone()));
        }
        Change::PolicyDeleted(digest) => add(RecordKey::Policy(digest.clone())),
        Change::StackOriginChanged(_) => add(RecordKey::Stack),
        Change::StackActivated(_) => {
            add(RecordKey::Stack);
            // Health that was judged again is written with the stack that did so, or a crash would leave judgements of
            // a policy that is gone.
            let health =
                |ledger: &Ledger, gpu| ledger.gpus.get(gpu).map(|state| health_record(gpu, &state.health));
            let judged_again = next.gpus.keys().filter(|gpu| health(before, gpu) != health(next, gpu));
            judged_again.for_each(|gpu| add(RecordKey::Health(gpu.clone())));
            let entries_max = before.stack.entries.len().max(next.stack.entries.len());
            (0..entries_max).for_each(|i| add(RecordKey::StackEntry(i)));
            let (old, new) = (&*before.past_stacks, &*next.past_stacks);
            let added = new.values().filter(|s| !old.contains_key(&s.revision));
            let removed = old.values().filter(|s| !new.contains_key(&s.revision));
            added.chain(removed).for_each(|stack| past_keys(stack).for_each(&mut add));
        }
        Change::PartGone(_)
        | Change::InventoryScanned { .. }
        | Change::UnidentifiedChanged(_)
        | Change::ExcludedChanged(_)
        | Change::HealthChanged { .. }
        | Change::EmptyChanged { .. }
        | Change::SightingsUpdated { .. }
        | Change::ProcessesSeen(_)
        | Change::BlockedEndsChanged(_)
        | Change::PodsSeen(_)
        | Change::RuntimeSeen(_)
        | Change::EvictionsUpdated(_)
        | Change::DeviceAccessChanged(_)
        | Change::RulesChanged(_)
        | Change::Unlisted(_)
        | Change::BreakerChanged { .. } => {}
    }
}

fn record_of(ledger: &Ledger, key: &RecordKey) -> Option<Record> {
    match key {
        RecordKey::Meta => Some(Record::Meta(Meta {
            store: ledger.store,
            next_number: ledger.next_number,
            kubelet_seen_wall_ms: ledger.kubelet_seen_wall_ms,
        })),
        RecordKey::Part(id) => ledger.part(id).map(|p| Record::Part(part_record(p))),
        RecordKey::Marks(gpu) => {
            let marks = ledger.gpus.get(gpu).map(|g| &g.marks).filter(|marks| !marks.is_empty())?;
            Some(Record::Marks(gpu.clone(), marks.clone()))
        }
        RecordKey::Via(gpu) => {
            let via = ledger.gpus.get(gpu).map(|g| &g.via).filter(|via| **via != Via::default())?;
            Some(Record::Via(gpu.clone(), Via { since_mono_ms: 0, ..via.clone() }))
        }
        RecordKey::Health(gpu) => Some(Record::Health(health_record(gpu, &ledger.gpus.get(gpu)?.health))),
        RecordKey::Allocation(id) => ledger
            .live
            .get(id)
            .map(|a| Allocation::clone(a))
            .or_else(|| ledger.ended.get(*id).map(|past| past.allocation()))
            .map(Record::Allocation),
        RecordKey::Policy(digest) => {
            ledger.policies.get(digest).map(|v| Record::Policy(PolicyVersion::clone(v)))
        }
        RecordKey::Stack => Some(Record::Stack(stack_head(&ledger.stack))),
        RecordKey::StackEntry(i) => ledger.stack.entries.get(*i).map(|e| Record::StackEntry(*i, e.clone())),
        RecordKey::PastStack(revision) => {
            ledger.past_stacks.get(revision).map(|s| Record::PastStack(stack_head(s)))
        }
        RecordKey::PastStackEntry(revision, i) => {
            let entry = ledger.past_stacks.get(revision)?.entries.get(*i)?;
            Some(Record::PastStackEntry(*revision, *i, entry.clone()))
        }
    }
}

/// Every record of a ledger, that is, the contents of its store.
#[must_use]
pub fn records(ledger: &Ledger) -> Vec<Record> {
    let mut keys = BTreeSet::from([RecordKey::Meta, RecordKey::Stack]);
    keys.extend(ledger.parts.keys().cloned().map(RecordKey::Part));
    keys.extend(ledger.gpus.keys().cloned().map(RecordKey::Marks));
    keys.extend(ledger.gpus.keys().cloned().map(RecordKey::Via));
    keys.extend(ledger.gpus.keys().cloned().map(RecordKey::Health));
    keys.extend(ledger.live.keys().copied().map(RecordKey::Allocation));
    keys.extend(ledger.ended.iter().map(|a| RecordKey::Allocation(a.id)));
    keys.extend(ledger.policies.keys().cloned().map(RecordKey::Policy));
    keys.extend((0..ledger.stack.entries.len()).map(RecordKey::StackEntry));
    keys.extend(ledger.past_stacks.values().flat_map(|stack| past_keys(stack)));
    keys.iter().filter_map(|key| record_of(ledger, key)).collect()
}

/// The health records of all GPUs.
#[must_use]
pub fn health_records(ledger: &Ledger) -> BTreeMap<GpuId, HealthRecord> {
    let record = |(gpu, state): (&GpuId, &Arc<GpuState>)| (gpu.clone(), health_record(gpu, &state.health));
    ledger.gpus.iter().map(record).collect()
}

/// The writes that update a store's health records. Health is published before it is written, since it
/// does not depend on the disk.
#[must_use]
pub fn health_writes(
    written: &BTreeMap<GpuId, HealthRecord>,
    now: &BTreeMap<GpuId, HealthRecord>,
) -> Vec<Write> {
    let removed = written.keys().filter(|gpu| !now.contains_key(*gpu));
    let deletes = removed.map(|gpu| Write::Delete(RecordKey::Health(gpu.clone())));
    let changed = now.iter().filter(|(gpu, record)| written.get(*gpu) != Some(*record));
    deletes.chain(changed.map(|(_, record)| Write::Put(Record::Health(record.clone())))).collect()
}

/// The record of a GPU that was always healthy has no state of interest, but since when it works.
fn health_record(gpu: &GpuId, health: &Health) -> HealthRecord {
    HealthRecord {
        gpu: gpu.clone(),
        state: health.state,
        reason: health.reason.clone(),
        since_wall_ms: health.since_wall_ms,
        quiet_ms: health.quiet_ms,
        until_reset: health.until_reset,
        history: health.history.clone(),
        judgements: health.judgements.iter().map(|one| Judgement { at_mono_ms: 0, ..one.clone() }).collect(),
    }
}

fn past_keys(stack: &Stack) -> impl Iterator<Item = RecordKey> + use<> {
    let revision = stack.revision;
    let entries = (0..stack.entries.len()).map(move |i| RecordKey::PastStackEntry(revision, i));
    std::iter::once(RecordKey::PastStack(revision)).chain(entries)
}

fn stack_head(stack: &Stack) -> StackHead {
    StackHead {
        revision: stack.revision,
        origin: stack.origin.clone(),
        failed: stack.failed.clone(),
        by: stack.by.clone(),
        why: stack.why.clone(),
        since_wall_ms: stack.since_wall_ms,
        entries: stack.entries.len(),
    }
}

fn part_record(state: &PartState) -> PartRecord {
    let mut runs: Vec<DeviceRun> = Vec::new();
    for ((resource, share), device) in &state.devices {
        let retiring = !device.offered();
        let extends = runs.last().is_some_and(|run| {
            run.resource == *resource
                && run.consumes == device.consumes
                && run.retiring == retiring
                && run.first.is_some_and(|first| Some(first + run.len) == *share)
        });
        match runs.last_mut() {
            Some(run) if extends => run.len += 1,
            _ => runs.push(DeviceRun {
                resource: resource.clone(),
                first: *share,
                len: 1,
                consumes: device.consumes,
                retiring,
            }),
        }
    }
    PartRecord {
        part: state.part.clone(),
        offered_by: state.offered_by.clone(),
        lines: state.lines.clone(),
        ranges: state.ranges.clone(),
        runs,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::time::Now;
    use crate::node::restore::restore;

    #[test]
    fn a_gpu_that_always_worked_keeps_since_when_over_a_restart() {
        let start = Now { wall_ms: 1_000, mono_ms: 5 };
        let part = Part::whole_gpu(GpuId::parse("GPU-0").unwrap(), 0);
        let mut ledger = Ledger::default();
        ledger.apply(&Entry { at: start, changes: vec![Change::PartFound(part)] });
        let restored = restore(records(&ledger), Now { wall_ms: 900_000, mono_ms: 7 });
        let health = |ledger: &Ledger| ledger.gpus.values().next().unwrap().health.clone();
        assert_eq!(health(&restored).since_wall_ms, 1_000);
        assert_eq!(health_records(&restored), health_records(&ledger));
    }
}
