//! The plan of [`super::reconcile`] as changes.

use super::allocation::{Allocation, Decision, EndReason, Holder};
use super::change::{Change, Entry};
use super::command::Rules;
use super::decider::Decider;
use super::ledger::Ledger;
use super::names::{AllocationId, DeviceId, PartId, Resource};
use super::offer::claim_share;
use super::part_state::Device;
use super::reconcile::{CheckpointEntry, ReconcileView, plan};
use super::stuck_check::find_stuck;
use super::time::Now;
use std::collections::BTreeMap;
use std::sync::Arc;

/// The changes of one reconcile pass.
#[must_use]
pub fn observe(ledger: &Ledger, view: &ReconcileView, rules: &Rules, now: Now) -> Vec<Change> {
    let plan = plan(ledger, view, &rules.timing, now);
    let stuck = find_stuck(ledger, view, &plan, &rules.timing, now);
    let mut changes: Vec<Change> =
        plan.learned.into_iter().map(|(id, holder)| Change::HolderLearned { id, holder }).collect();
    changes.extend(plan.settled.into_iter().map(Change::OverlapResolved));
    if let Some(seen) = plan.kubelet_seen_wall_ms.filter(|s| Some(*s) != ledger.kubelet_seen_wall_ms) {
        changes.push(Change::KubeletSeen(seen));
    }
    if stuck.as_ref() != ledger.stuck.as_deref() {
        changes.push(Change::StuckChanged(stuck.map(Arc::new)));
    }
    if plan.sightings != *ledger.sightings || plan.hold != ledger.hold {
        changes.push(Change::SightingsUpdated { sightings: Arc::new(plan.sightings), hold: plan.hold });
    }
    let resources: Vec<Resource> =
        plan.ended.iter().filter_map(|(id, _)| ledger.live.get(id)).map(|a| a.resource.clone()).collect();
    changes.extend(end_changes(ledger, rules, &plan.ended, &resources));
    adopt(ledger, &plan.adopted, now, &mut changes);
    changes
}

/// Ends and their consequences: a release resets its resource's breaker, and old records are pruned.
#[must_use]
pub fn end_changes(
    ledger: &Ledger,
    rules: &Rules,
    ends: &[(AllocationId, EndReason)],
    resources: &[Resource],
) -> Vec<Change> {
    let mut changes: Vec<Change> =
        ends.iter().map(|(id, reason)| Change::Ended { id: *id, reason: *reason }).collect();
    for resource in resources {
        if ledger.breakers.contains_key(resource) {
            changes.push(Change::BreakerChanged { resource: resource.clone(), breaker: None });
        }
    }
    let ending = ends.iter().filter_map(|(id, _)| ledger.live.get(id)).map(Arc::as_ref);
    changes.extend(ledger.ended.to_prune(rules.history, ending).into_iter().map(Change::Pruned));
    changes
}

/// Adopts holdings of our resources that this store did not grant.
fn adopt(ledger: &Ledger, holdings: &[CheckpointEntry], now: Now, changes: &mut Vec<Change>) {
    // Later holdings may be on parts that earlier ones changed.
    let mut scratch = ledger.clone();
    for holding in holdings {
        let mut by_part: BTreeMap<&PartId, Vec<&DeviceId>> = BTreeMap::new();
        holding.devices.iter().for_each(|id| by_part.entry(&id.part).or_default().push(id));
        let mut adoption: Vec<Change> = by_part
            .into_iter()
            .filter_map(|(part, ids)| list_adopted(&scratch, part, &holding.resource, &ids, now))
            .collect();
        let id = holding
            .allocation
            .filter(|id| !scratch.live.contains_key(id))
            .unwrap_or(AllocationId { store: scratch.store, number: scratch.next_number });
        adoption.push(Change::Granted(Allocation {
            id,
            resource: holding.resource.clone(),
            devices: holding.devices.clone(),
            granted_wall_ms: now.wall_ms,
            holder: Holder {
                pod_uid: Some(holding.pod_uid.clone()),
                container: Some(holding.container.clone()),
                ..Holder::default()
            },
            overlapped: false,
            decision: Decision {
                by: vec![Decider::Adopted],
                reason: "held when the daemon started".into(),
                ..Decision::default()
            },
            ended: None,
        }));
        scratch.apply(&Entry { at: now, changes: adoption.clone() });
        changes.extend(adoption);
    }
}

/// Lists the devices that a holding names and the offer does not, as retiring ones.
fn list_adopted(
    ledger: &Ledger,
    part: &PartId,
    resource: &Resource,
    ids: &[&DeviceId],
    now: Now,
) -> Option<Change> {
    let state = ledger.part(part)?;
    let mut ranges = state.ranges.clone();
    let mut devices = state.devices.clone();
    for id in ids {
        if let Some(n) = id.share {
            claim_share(&mut ranges, resource, n);
        }
        let key = (resource.clone(), id.share);
        devices.entry(key).or_insert_with(|| Device::adopted(id.share, now.mono_ms));
    }
    let unchanged = devices == state.devices && ranges == state.ranges;
    (!unchanged).then(|| Change::Offered {
        part: part.clone(),
        by: state.offered_by.clone(),
        lines: state.lines.clone(),
        ranges,
        devices,
    })
}
