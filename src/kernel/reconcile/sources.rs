//! What the kubelet's sources show of each allocation in one reconcile pass.

use super::{CheckpointEntry, ListedHolding, ReconcileView};
use crate::allocation::{Allocation, Holder};
use crate::ledger::Ledger;
use crate::names::{AllocationId, DeviceId, Resource};
use std::collections::{BTreeSet, HashMap};

/// What the sources of one reconcile pass show of an allocation.
pub(super) struct Evidence {
    /// Holder fields that the checkpoint or `List` shows.
    pub(super) learned: Holder,
    /// The checkpoint contains its id.
    pub(super) by_id: bool,
    /// The checkpoint contains its id, or one of its devices that is not only under ids of other allocations.
    pub(super) in_checkpoint: bool,
    /// The checkpoint contains its devices only under other pods, and its own pod's UID is known.
    pub(super) under_another_pod: bool,
    /// A later grant includes some of its devices, and the checkpoint contains them only under ids of other
    /// allocations.
    pub(super) reissued: bool,
    /// `List` shows its pod.
    pub(super) listed: bool,
    /// The checkpoint shows the allocation, or `List` shows its pod.
    pub(super) is_shown: bool,
    /// The source that would show it could be read: `List` if its pod's name is known, else the checkpoint.
    pub(super) can_be_shown: bool,
    /// No source shows it.
    pub(super) is_gone: bool,
}

/// The view of one pass, indexed: a pass looks up every live allocation, and a node may have a thousand.
pub(super) struct Sources<'v> {
    view: &'v ReconcileView,
    /// The first entry of the checkpoint with each allocation id.
    by_id: HashMap<AllocationId, &'v CheckpointEntry>,
    /// The entries of the checkpoint with each device, as indices.
    by_device: HashMap<(&'v Resource, &'v DeviceId), Vec<usize>>,
    /// The containers of `List` with exactly these devices.
    listed: HashMap<(&'v Resource, &'v [DeviceId]), Vec<&'v ListedHolding>>,
}

impl<'v> Sources<'v> {
    pub(super) fn new(view: &'v ReconcileView) -> Self {
        let mut sources =
            Self { view, by_id: HashMap::new(), by_device: HashMap::new(), listed: HashMap::new() };
        for (index, entry) in view.checkpoint.iter().flatten().enumerate() {
            if let Some(id) = entry.allocation {
                sources.by_id.entry(id).or_insert(entry);
            }
            for device in &entry.devices {
                sources.by_device.entry((&entry.resource, device)).or_default().push(index);
            }
        }
        for holding in view.list.iter().flat_map(|list| &list.held) {
            sources.listed.entry((&holding.resource, &holding.devices)).or_default().push(holding);
        }
        sources
    }

    /// The entries of the checkpoint with a device of this allocation, in the checkpoint's order.
    fn on_devices(&self, allocation: &'v Allocation) -> Vec<&'v CheckpointEntry> {
        let entries = self.view.checkpoint.as_deref().unwrap_or_default();
        let keys = allocation.devices.iter().map(|id| (&allocation.resource, id));
        let indices: BTreeSet<usize> =
            keys.filter_map(|key| self.by_device.get(&key)).flatten().copied().collect();
        indices.into_iter().map(|index| &entries[index]).collect()
    }

    /// The evidence on `allocation`; `since_grant`: whether the pass began after the grant.
    pub(super) fn evidence(
        &self,
        ledger: &Ledger,
        allocation: &'v Allocation,
        since_grant: bool,
    ) -> Evidence {
        let view = self.view;
        // A list from before the grant may name the pod that held these devices before.
        let list = view.list.as_ref().filter(|_| since_grant);
        let on_devices = self.on_devices(allocation);
        let own = self.by_id.get(&allocation.id).copied();
        // An entry without an allocation id was answered by another plugin: it can only belong to an adopted
        // allocation.
        let adopted = allocation.decision.is_adoption();
        let entry = own.or_else(|| {
            let mut entries = on_devices.iter().copied();
            entries.find(|c| c.allocation.is_none() && adopted && c.devices == allocation.devices)
        });
        let mut learned = Holder::default();
        if let Some(c) = entry {
            learned.pod_uid = Some(c.pod_uid.clone());
            learned.container = Some(c.container.clone());
        }
        let mut known = allocation.holder.clone();
        known.fill_from(&learned);
        if let Some(hold) = self.listed_hold(ledger, allocation, &known).filter(|_| since_grant) {
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
        let by_id = own.is_some();
        let by_device = !on_devices.is_empty();
        let is_of_another_id = |c: &&CheckpointEntry| c.allocation.is_some_and(|id| id != allocation.id);
        let is_of_another_pod =
            |c: &&CheckpointEntry| known.pod_uid.as_ref().is_some_and(|uid| *uid != c.pod_uid);
        let under_another_id = by_device && on_devices.iter().all(is_of_another_id);
        let reissued = allocation.overlapped && under_another_id;
        Evidence {
            by_id,
            in_checkpoint: by_id || (by_device && !under_another_id),
            under_another_pod: by_device && on_devices.iter().all(is_of_another_pod),
            is_shown: entry.is_some() || listed,
            can_be_shown: if known.pod.is_some() { list.is_some() } else { view.checkpoint.is_some() },
            // A pod that still runs other containers does not keep a superseded grant live.
            is_gone: !by_id && (reissued || !(by_device || listed)),
            learned,
            reissued,
            listed,
        }
    }

    /// The container that `List` shows with exactly these devices. It belongs to the newest allocation of the
    /// devices, or to an older one of the same pod with this container name: another pod's container may have
    /// the same name.
    fn listed_hold(
        &self,
        ledger: &Ledger,
        allocation: &'v Allocation,
        known: &Holder,
    ) -> Option<&'v ListedHolding> {
        let listed = self.listed.get(&(&allocation.resource, &*allocation.devices))?;
        let holders = |id| ledger.holders_of(&allocation.resource, id);
        let newest = allocation.devices.iter().all(|id| holders(id).last() == Some(&allocation.id));
        let is_candidate = newest || self.newest_shares_pod(ledger, allocation);
        listed.iter().copied().find(|h| {
            let is_container = match &known.container {
                Some(container) => *container == h.container && is_candidate,
                None => newest,
            };
            is_container && known.pod.as_ref().is_none_or(|pod| *pod == h.pod)
        })
    }

    /// Whether all newer allocations of the same devices are of the same pod, by UID.
    pub(super) fn newest_shares_pod(&self, ledger: &Ledger, allocation: &Allocation) -> bool {
        let uid_of = |id: AllocationId| {
            let entry = self.by_id.get(&id);
            let known = || ledger.live.get(&id)?.holder.pod_uid.as_deref();
            entry.map(|c| c.pod_uid.as_str()).or_else(known)
        };
        let own = uid_of(allocation.id);
        let mut holders =
            allocation.devices.iter().flat_map(|id| ledger.holders_of(&allocation.resource, id));
        own.is_some() && holders.all(|holder| *holder <= allocation.id || uid_of(*holder) == own)
    }
}
