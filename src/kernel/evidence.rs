//! What one round says of one allocation.

use super::allocation::{ADOPTED, Allocation, Holder};
use super::ledger::Ledger;
use super::names::{AllocationId, DeviceId};
use super::reconcile::{Checkpointed, ListedHold, PodList, RoundView};

/// What one round says of one allocation.
pub(super) struct Evidence {
    /// By the checkpoint or `List`.
    pub(super) learned: Holder,
    /// The checkpoint names its id.
    pub(super) by_id: bool,
    /// The checkpoint names one of its devices, under whatever id.
    pub(super) by_device: bool,
    /// The checkpoint names its devices under other pods only, and its own UID is known.
    pub(super) under_another_pod: bool,
    /// Its devices are in the checkpoint, but only under ids of other allocations.
    pub(super) under_another_id: bool,
    /// `List` shows its pod, or it has no pod to look for.
    pub(super) listed: bool,
    /// The checkpoint names it, or `List` its pod.
    pub(super) names: bool,
    /// The account that would name it answered: `List` where its pod's name is known, else the checkpoint.
    pub(super) can_name: bool,
}

impl Evidence {
    /// `List` shows the very pod that holds it.
    pub(super) fn held_by_list(&self, allocation: &Allocation) -> bool {
        self.listed && allocation.holder.pod.is_some()
    }

    /// No source shows it any more.
    pub(super) fn gone(&self, allocation: &Allocation) -> bool {
        let devices_gone = !self.by_device || (allocation.overlapped && self.under_another_id);
        // A pod that lives on with other containers does not keep a superseded grant alive.
        let pod_gone = !self.listed || (allocation.overlapped && self.under_another_id);
        !self.by_id && devices_gone && pod_gone
    }
}

/// What `view` says of `allocation`; `list` is its `List` if that was fetched after the grant.
pub(super) fn evidence(
    ledger: &Ledger,
    allocation: &Allocation,
    view: &RoundView,
    list: Option<&PodList>,
) -> Evidence {
    let on_devices: Vec<&Checkpointed> = view
        .checkpoint
        .iter()
        .flatten()
        .filter(|c| c.resource == allocation.resource && shares_device(&c.devices, &allocation.devices))
        .collect();
    let own = view.checkpoint.iter().flatten().find(|c| c.allocation == Some(allocation.id));
    // An entry without an id of ours was answered by another plugin: it can only be of what was
    // adopted.
    let adopted = allocation.decision.by == [ADOPTED];
    let claim = own.or_else(|| {
        on_devices
            .iter()
            .copied()
            .find(|c| c.allocation.is_none() && adopted && c.devices == allocation.devices)
    });
    let mut learned = Holder::default();
    if let Some(c) = claim {
        learned.pod_uid = Some(c.pod_uid.clone());
        learned.container = Some(c.container.clone());
    }
    let mut known = allocation.holder.clone();
    known.learn(&learned);
    if let Some(hold) = listed_hold(ledger, allocation, &known, view, list) {
        learned.namespace = Some(hold.namespace.clone());
        learned.pod = Some(hold.pod.clone());
        learned.container.get_or_insert_with(|| hold.container.clone());
        // Where the checkpoint cannot be read, whoever knows all pods lends the UID.
        if known.pod_uid.is_none()
            && view.checkpoint.is_none()
            && let Some(pods) = &ledger.pods
            && let Some(pod) = pods.named(&hold.namespace, &hold.pod, allocation.granted_wall_ms)
        {
            learned.pod_uid = Some(pod.uid.clone());
        }
    } else if known.pod.is_none() {
        // An init container's pod is named by the app container of the same UID.
        if let Some(pod) = known.pod_uid.as_deref().and_then(|uid| ledger.pod_by_uid(uid)) {
            learned.learn(&pod);
        }
    }
    known.learn(&learned);
    let listed = match (&known.namespace, &known.pod, list) {
        (Some(namespace), Some(pod), Some(list)) => list.pods.contains(&(namespace.clone(), pod.clone())),
        _ => false,
    };
    let foreign = |c: &&&Checkpointed| c.allocation.is_some_and(|id| id != allocation.id);
    let by_other_pod = |c: &&Checkpointed| known.pod_uid.as_ref().is_some_and(|uid| *uid != c.pod_uid);
    Evidence {
        by_id: own.is_some(),
        names: claim.is_some() || listed,
        can_name: if known.pod.is_some() { list.is_some() } else { view.checkpoint.is_some() },
        by_device: !on_devices.is_empty(),
        under_another_pod: !on_devices.is_empty() && on_devices.iter().all(by_other_pod),
        under_another_id: !on_devices.is_empty()
            && on_devices.iter().filter(foreign).count() == on_devices.len(),
        learned,
        listed,
    }
}

/// The container that `List` shows with exactly these devices. Only the newest allocation of the
/// devices can be meant, or an older one of the same pod whose container is the one shown: another
/// pod's container may have the same name.
fn listed_hold<'v>(
    ledger: &Ledger,
    allocation: &Allocation,
    known: &Holder,
    view: &RoundView,
    list: Option<&'v PodList>,
) -> Option<&'v ListedHold> {
    let newest = allocation.keys().all(|key| ledger.holders_of(&key).last() == Some(&allocation.id));
    let meant = newest || newest_shares_pod(ledger, allocation, view);
    list?.held.iter().find(|h| {
        h.resource == allocation.resource
            && h.devices == allocation.devices
            && match &known.container {
                Some(container) => *container == h.container && meant,
                None => newest,
            }
            && known.pod.as_ref().is_none_or(|pod| *pod == h.pod)
    })
}

/// Whether the newest allocation on the same devices is of the same pod, by UID.
pub(super) fn newest_shares_pod(ledger: &Ledger, allocation: &Allocation, view: &RoundView) -> bool {
    let uid_of = |id: AllocationId| {
        let shown =
            view.checkpoint.iter().flatten().find(|c| c.allocation == Some(id)).map(|c| c.pod_uid.clone());
        shown.or_else(|| ledger.live.get(&id).and_then(|a| a.holder.pod_uid.clone()))
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
