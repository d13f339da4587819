//! What the sources of one reconcile pass show of an allocation.

use super::allocation::{Allocation, Holder};
use super::ledger::Ledger;
use super::names::{AllocationId, DeviceId};
use super::reconcile::{CheckpointEntry, ListedHolding, PodList, ReconcileView};

/// What the sources of one reconcile pass show of an allocation.
pub(super) struct Evidence {
    /// Holder fields that the checkpoint or `List` shows.
    pub(super) learned: Holder,
    /// The checkpoint contains its id.
    pub(super) by_id: bool,
    /// The checkpoint contains one of its devices, under any id.
    pub(super) by_device: bool,
    /// The checkpoint contains its devices only under other pods, and its own pod's UID is known.
    pub(super) under_another_pod: bool,
    /// The checkpoint contains its devices only under ids of other allocations.
    pub(super) under_another_id: bool,
    /// `List` shows its pod.
    pub(super) listed: bool,
    /// The checkpoint shows the allocation, or `List` shows its pod.
    pub(super) is_shown: bool,
    /// The source that would show it could be read: `List` if its pod's name is known, else the checkpoint.
    pub(super) can_be_shown: bool,
}

impl Evidence {
    /// `List` shows the pod that holds it.
    pub(super) fn held_by_list(&self, allocation: &Allocation) -> bool {
        self.listed && allocation.holder.pod.is_some()
    }

    /// No source shows it.
    pub(super) fn is_gone(&self, allocation: &Allocation) -> bool {
        let devices_gone = !self.by_device || (allocation.overlapped && self.under_another_id);
        // A pod that still runs other containers does not keep a superseded grant live.
        let pod_gone = !self.listed || (allocation.overlapped && self.under_another_id);
        !self.by_id && devices_gone && pod_gone
    }
}

/// The evidence of `view` on `allocation`; `list` is the view's `List` if it was fetched after the grant.
pub(super) fn evidence(
    ledger: &Ledger,
    allocation: &Allocation,
    view: &ReconcileView,
    list: Option<&PodList>,
) -> Evidence {
    let on_devices: Vec<&CheckpointEntry> = view
        .checkpoint
        .iter()
        .flatten()
        .filter(|c| c.resource == allocation.resource && shares_device(&c.devices, &allocation.devices))
        .collect();
    let own = view.checkpoint.iter().flatten().find(|c| c.allocation == Some(allocation.id));
    // An entry without an allocation id was answered by another plugin: it can only belong to an adopted
    // allocation.
    let adopted = allocation.decision.is_adoption();
    let entry = own.or_else(|| {
        on_devices
            .iter()
            .copied()
            .find(|c| c.allocation.is_none() && adopted && c.devices == allocation.devices)
    });
    let mut learned = Holder::default();
    if let Some(c) = entry {
        learned.pod_uid = Some(c.pod_uid.clone());
        learned.container = Some(c.container.clone());
    }
    let mut known = allocation.holder.clone();
    known.fill_from(&learned);
    if let Some(hold) = listed_hold(ledger, allocation, &known, view, list) {
        learned.namespace = Some(hold.namespace.clone());
        learned.pod = Some(hold.pod.clone());
        learned.container.get_or_insert_with(|| hold.container.clone());
        // While the checkpoint cannot be read, the UID comes from the view of all pods.
        if known.pod_uid.is_none()
            && view.checkpoint.is_none()
            && let Some(pods) = &ledger.pods
            && let Some(pod) = pods.find_by_name(&hold.namespace, &hold.pod, allocation.granted_wall_ms)
        {
            learned.pod_uid = Some(pod.uid.clone());
        }
    } else if known.pod.is_none() {
        // `List` shows no init containers: the name comes from the pod's other allocations or the pods view.
        if let Some(pod) = known.pod_uid.as_deref().and_then(|uid| ledger.pod_by_uid(uid)) {
            learned.fill_from(&pod);
        }
    }
    known.fill_from(&learned);
    let listed = match (&known.namespace, &known.pod, list) {
        (Some(namespace), Some(pod), Some(list)) => list.pods.contains(&(namespace.clone(), pod.clone())),
        _ => false,
    };
    let is_other = |c: &&&CheckpointEntry| c.allocation.is_some_and(|id| id != allocation.id);
    let is_of_other_pod = |c: &&CheckpointEntry| known.pod_uid.as_ref().is_some_and(|uid| *uid != c.pod_uid);
    Evidence {
        by_id: own.is_some(),
        is_shown: entry.is_some() || listed,
        can_be_shown: if known.pod.is_some() { list.is_some() } else { view.checkpoint.is_some() },
        by_device: !on_devices.is_empty(),
        under_another_pod: !on_devices.is_empty() && on_devices.iter().all(is_of_other_pod),
        under_another_id: !on_devices.is_empty()
            && on_devices.iter().filter(is_other).count() == on_devices.len(),
        learned,
        listed,
    }
}

/// The container that `List` shows with exactly these devices. It belongs to the newest allocation of the
/// devices, or to an older one of the same pod with this container name: another pod's container may have
/// the same name.
fn listed_hold<'v>(
    ledger: &Ledger,
    allocation: &Allocation,
    known: &Holder,
    view: &ReconcileView,
    list: Option<&'v PodList>,
) -> Option<&'v ListedHolding> {
    let newest = allocation.keys().all(|key| ledger.holders_of(&key).last() == Some(&allocation.id));
    let is_candidate = newest || newest_shares_pod(ledger, allocation, view);
    list?.held.iter().find(|h| {
        h.resource == allocation.resource
            && h.devices == allocation.devices
            && match &known.container {
                Some(container) => *container == h.container && is_candidate,
                None => newest,
            }
            && known.pod.as_ref().is_none_or(|pod| *pod == h.pod)
    })
}

/// Whether all newer allocations of the same devices are of the same pod, by UID.
pub(super) fn newest_shares_pod(ledger: &Ledger, allocation: &Allocation, view: &ReconcileView) -> bool {
    let uid_of = |id: AllocationId| {
        let checkpointed =
            view.checkpoint.iter().flatten().find(|c| c.allocation == Some(id)).map(|c| c.pod_uid.clone());
        checkpointed.or_else(|| ledger.live.get(&id).and_then(|a| a.holder.pod_uid.clone()))
    };
    let own = uid_of(allocation.id);
    own.is_some()
        && allocation.keys().all(|key| {
            ledger.holders_of(&key).iter().filter(|h| **h > allocation.id).all(|newer| uid_of(*newer) == own)
        })
}

fn shares_device(a: &[DeviceId], b: &[DeviceId]) -> bool {
    a.iter().any(|id| b.contains(id))
}
