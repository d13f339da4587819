//! The evidence of a grant of the device plugin: what the kubelet's `List` and checkpoint show of it in one reconcile
//! pass.

use crate::evidence::kubelet_view::{CheckpointEntry, ListedHolding, ReconcileView};
use crate::evidence::pods::PodState;
use crate::evidence::sighting::Sighting;
use crate::grants::allocation::{Allocation, Holder};
use crate::ids::names::{AllocationId, DeviceId, Resource};
use crate::node::ledger::Ledger;
use std::collections::{BTreeSet, HashMap, HashSet};

/// What the sources of one reconcile pass show of an allocation.
pub(super) struct Evidence {
    /// Holder fields that the checkpoint or `List` shows.
    pub(super) learned: Holder,
    /// The checkpoint contains its id.
    pub(super) by_id: bool,
    /// The checkpoint contains its entry: its id or, for an adopted allocation, its devices without an id.
    pub(super) has_entry: bool,
    /// That entry contains all of its devices. Of an allocation for two containers of a pod, each entry contains some.
    pub(super) is_entry_complete: bool,
    /// `List` shows its container or one of its devices in a container. `List` leaves out init containers.
    pub(super) is_container_listed: bool,
    /// A fresh checkpoint contains one of its devices under its own pod and under another one.
    pub(super) contested: bool,
    /// The checkpoint contains its id; or it contains one of its devices, not only under other pods and not only under
    /// the ids of other allocations.
    pub(super) in_checkpoint: bool,
    /// The checkpoint contains its devices only under other pods, and its own pod's UID is known.
    pub(super) under_another_pod: bool,
    /// A later grant includes some of its devices, and the checkpoint contains them only under ids of other
    /// allocations.
    pub(super) reissued: bool,
    /// `List` shows its pod, and not only another pod of the same name.
    pub(super) is_pod_listed: bool,
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
    /// The devices of all containers of `List`.
    listed_devices: HashSet<(&'v Resource, &'v DeviceId)>,
    /// The containers of `List` that hold devices, by namespace and name of their pod.
    by_pod: HashMap<(&'v str, &'v str), Vec<&'v ListedHolding>>,
}

impl<'v> Sources<'v> {
    pub(super) fn new(view: &'v ReconcileView) -> Self {
        let mut sources = Self {
            view,
            by_id: HashMap::new(),
            by_device: HashMap::new(),
            listed: HashMap::new(),
            listed_devices: HashSet::new(),
            by_pod: HashMap::new(),
        };
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
            sources.listed_devices.extend(holding.devices.iter().map(|id| (&holding.resource, id)));
            sources.by_pod.entry((&holding.namespace, &holding.pod)).or_default().push(holding);
        }
        sources
    }

    /// Whether the checkpoint contains an entry that was last recorded under the kubelet whose socket was created at
    /// `recorded_under_wall_ms`. If so, the present kubelet has restored the whole file of that kubelet, and an entry
    /// of that time that is missing now belongs to a pod that has ended.
    pub(super) fn restores_entries_of(&self, ledger: &Ledger, recorded_under_wall_ms: Option<u64>) -> bool {
        recorded_under_wall_ms.is_some_and(|created| {
            let mut restored = self.by_id.keys().filter_map(|id| ledger.sightings.get(id));
            restored.any(|sighting| sighting.recorded_under_wall_ms == Some(created))
        })
    }

    /// The entries of the checkpoint with a device of this allocation, in the checkpoint's order.
    fn on_devices(&self, allocation: &'v Allocation) -> Vec<&'v CheckpointEntry> {
        let entries = self.view.checkpoint.as_deref().unwrap_or_default();
        let keys = allocation.devices.iter().map(|id| (&allocation.resource, id));
        let indices: BTreeSet<usize> =
            keys.filter_map(|key| self.by_device.get(&key)).flatten().copied().collect();
        indices.into_iter().map(|index| &entries[index]).collect()
    }

    /// What this pass shows of the allocation's holder, and all that is known of it then. `entry`: its entry in the
    /// checkpoint.
    fn learn(
        &self,
        ledger: &Ledger,
        allocation: &'v Allocation,
        entry: Option<&CheckpointEntry>,
        began_after_grant: bool,
    ) -> (Holder, Holder) {
        let mut learned = Holder::default();
        if let Some(c) = entry {
            learned.pod_uid = Some(c.pod_uid.clone());
            learned.container = Some(c.container.clone());
        }
        let mut known = allocation.holder.clone();
        known.update_from(&learned);
        let hold = self.listed_hold(ledger, allocation, &known).filter(|_| began_after_grant);
        if let Some(hold) = hold {
            learned.container.get_or_insert_with(|| hold.container.clone());
            // While the checkpoint cannot be read, the UID comes from the view of all pods.
            if known.pod_uid.is_none()
                && self.view.checkpoint.is_none()
                && let Some(pods) = &ledger.pods
                && let Some(pod) = pods.find_by_name(&hold.namespace, &hold.pod, allocation.granted_wall_ms)
            {
                learned.pod_uid = Some(pod.uid.clone());
            }
        }
        // A UID identifies its pod for good and a name does not, so the pods source, which has both, overrides `List`.
        let uid = learned.pod_uid.as_deref().or(known.pod_uid.as_deref());
        if let Some(pod) = uid.and_then(|uid| ledger.pod_in_view(uid)) {
            learned.update_from(&pod);
        } else if let Some(hold) = hold {
            learned.namespace = Some(hold.namespace.clone());
            learned.pod = Some(hold.pod.clone());
        } else if known.pod.is_none()
            && let Some(pod) = known.pod_uid.as_deref().and_then(|uid| ledger.pod_by_uid(uid))
        {
            // `List` shows no init containers: the name comes from the pod's other allocations.
            learned.update_from(&pod);
        }
        known.update_from(&learned);
        (learned, known)
    }

    /// The evidence on `allocation`; `began_after_grant`: whether the pass began after the grant.
    pub(super) fn evidence(
        &self,
        ledger: &Ledger,
        allocation: &'v Allocation,
        sighting: &Sighting,
        began_after_grant: bool,
    ) -> Evidence {
        let view = self.view;
        // A list from before the grant may name the pod that held these devices before.
        let list = view.list.as_ref().filter(|_| began_after_grant);
        let on_devices = self.on_devices(allocation);
        let own = self.by_id.get(&allocation.id).copied();
        // An entry without an allocation id was answered by another plugin: it can only belong to an adopted
        // allocation.
        let adopted = allocation.decision.is_adoption();
        let entry = own.or_else(|| {
            let mut entries = on_devices.iter().copied();
            let holder = &allocation.holder;
            entries.find(|c| {
                // Two containers of one pod may have the same devices; so may containers of two pods, by a fault of the
                // kubelet.
                let belongs_to_holder = holder.pod_uid.as_ref().is_none_or(|uid| *uid == c.pod_uid)
                    && holder.container.as_ref().is_none_or(|container| *container == c.container);
                c.allocation.is_none() && adopted && c.devices == allocation.devices && belongs_to_holder
            })
        });
        let (learned, known) = self.learn(ledger, allocation, entry, began_after_grant);
        let is_pod_listed = match (&known.namespace, &known.pod, list) {
            (Some(namespace), Some(pod), Some(list)) => {
                list.pods.contains(&(namespace.clone(), pod.clone()))
                    && (entry.is_some()
                        || !self.is_name_of_another_pod(
                            ledger,
                            allocation,
                            &known,
                            sighting,
                            began_after_grant,
                        ))
            }
            _ => false,
        };
        let by_id = own.is_some();
        let is_of_another_id = |c: &&CheckpointEntry| c.allocation.is_some_and(|id| id != allocation.id);
        let is_of_another_pod =
            |c: &&CheckpointEntry| known.pod_uid.as_ref().is_some_and(|uid| *uid != c.pod_uid);
        let under_another_id = !on_devices.is_empty() && on_devices.iter().all(is_of_another_id);
        // An entry of a pod that is known to be another one shows nothing of this allocation.
        let by_device = !on_devices.iter().all(is_of_another_pod);
        let reissued = allocation.overlapped && under_another_id;
        Evidence {
            by_id,
            has_entry: entry.is_some(),
            is_entry_complete: entry.is_some_and(|entry| entry.devices == allocation.devices),
            is_container_listed: self.is_container_listed(ledger, allocation, &known),
            contested: entry.is_some() && on_devices.iter().any(is_of_another_pod),
            in_checkpoint: by_id || (by_device && !under_another_id),
            under_another_pod: !on_devices.is_empty() && on_devices.iter().all(is_of_another_pod),
            is_shown: entry.is_some() || is_pod_listed,
            can_be_shown: if known.pod.is_some() { list.is_some() } else { view.checkpoint.is_some() },
            // A pod that still runs other containers does not keep a superseded grant live.
            is_gone: !by_id && (reissued || !(by_device || is_pod_listed)),
            learned,
            reissued,
            is_pod_listed,
        }
    }

    /// Whether `List` shows the name of the allocation's pod only because another pod has it now, as the next pod of a
    /// StatefulSet does. Called only if the checkpoint does not contain the allocation's entry. If a restart may have
    /// made the kubelet lose that entry, a pod that is listed without devices still counts as the allocation's pod,
    /// since its containers keep running.
    fn is_name_of_another_pod(
        &self,
        ledger: &Ledger,
        allocation: &Allocation,
        known: &Holder,
        sighting: &Sighting,
        began_after_grant: bool,
    ) -> bool {
        let (Some(namespace), Some(name)) = (&known.namespace, &known.pod) else {
            return false;
        };
        let has_new_pod = |uid: &str| {
            ledger.pods.as_ref().is_some_and(|pods| pods.has_other_pod_of_name(namespace, name, uid))
        };
        let pod_state = ledger.pod_state_of(allocation);
        // Its kubelet reported that its containers have ended.
        if pod_state == PodState::Over {
            return true;
        }
        let listed = self.by_pod.get(&(namespace.as_str(), name.as_str())).map_or(&[][..], Vec::as_slice);
        // The devices of a container never change while its pod exists.
        let mut of_container = listed.iter().filter(|h| Some(&h.container) == known.container.as_ref());
        let is_own = |h: &&ListedHolding| {
            h.resource == allocation.resource && h.devices == allocation.devices && self.may_be_of(h, known)
        };
        if of_container.clone().next().is_some() && !of_container.any(is_own) {
            return true;
        }
        let holds_these = listed.iter().any(is_own);
        // A pod that was deleted by force may still have its containers, and the kubelet still lists their devices. If
        // the new pod had the devices, they would have a newer allocation.
        let is_newest = || {
            let mut holders = allocation.devices.iter().map(|id| ledger.holders_of(&allocation.resource, id));
            holders.all(|holders| holders.last() == Some(&allocation.id))
        };
        if pod_state != PodState::Alive && known.pod_uid.as_deref().is_some_and(has_new_pod) {
            return !(holds_these && is_newest());
        }
        if holds_these || !(self.view.fresh && began_after_grant && self.view.checkpoint.is_some()) {
            return false;
        }
        if self
            .view
            .kubelet
            .is_some_and(|kubelet| sighting.is_of_kubelet(allocation.granted_wall_ms, kubelet))
        {
            return true;
        }
        let mut uids = listed.iter().flat_map(|holding| self.uids_of(holding)).peekable();
        uids.peek().is_some() && known.pod_uid.as_ref().is_some_and(|uid| uids.all(|other| other != uid))
    }

    /// Whether `List` shows the allocation's container with exactly its devices, or shows one of its devices in any
    /// container while this is the newest allocation of that device.
    fn is_container_listed(&self, ledger: &Ledger, allocation: &Allocation, known: &Holder) -> bool {
        let with_devices = self.listed.get(&(&allocation.resource, allocation.devices.as_slice()));
        let mut containers = with_devices.into_iter().flatten().map(|holding| &holding.container);
        let newest = |id| ledger.holders_of(&allocation.resource, id).last() == Some(&allocation.id);
        let listed = |id| self.listed_devices.contains(&(&allocation.resource, id));
        containers.any(|name| Some(name) == known.container.as_ref())
            || allocation.devices.iter().any(|id| newest(id) && listed(id))
    }

    /// Whether this container of `List` may be one of the pod with the known UID: the checkpoint contains what it holds
    /// under this UID, or not at all.
    fn may_be_of(&self, holding: &ListedHolding, known: &Holder) -> bool {
        let mut uids = self.uids_of(holding).peekable();
        uids.peek().is_none() || known.pod_uid.as_ref().is_none_or(|uid| uids.any(|other| other == uid))
    }

    /// The UIDs under which the checkpoint contains what `List` shows of a container.
    fn uids_of<'s>(&'s self, holding: &'s ListedHolding) -> impl Iterator<Item = &'v str> + 's {
        let entries = self.view.checkpoint.as_deref().unwrap_or_default();
        let first = holding.devices.first();
        let on_first = first.and_then(|device| self.by_device.get(&(&holding.resource, device)));
        on_first.into_iter().flatten().map(|index| &entries[*index]).filter_map(|entry| {
            (entry.devices == holding.devices && entry.container == holding.container)
                .then_some(entry.pod_uid.as_str())
        })
    }

    /// The container that `List` shows with exactly these devices. It belongs to the newest allocation of the
    /// devices, or to an older one of the same pod with this container name: another pod's container may have
    /// the same name. `None` as well if containers of several pods have these devices and none of them is known to be
    /// this allocation's.
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
        let mut own = listed.iter().copied().filter(|h| {
            let is_container = match &known.container {
                Some(container) => *container == h.container && is_candidate,
                None => newest,
            };
            let is_pod = match (&known.namespace, &known.pod) {
                (Some(namespace), Some(pod)) => (namespace, pod) == (&h.namespace, &h.pod),
                _ => true,
            };
            is_container
                && is_pod
                && self.may_be_of(h, known)
                && !is_of_another_allocation(ledger, allocation, known, h)
        });
        let first = own.next()?;
        own.all(|h| (&h.namespace, &h.pod) == (&first.namespace, &first.pod)).then_some(first)
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

    /// Whether newer live allocations give its pod each of its devices again.
    pub(super) fn is_granted_again(&self, ledger: &Ledger, allocation: &Allocation) -> bool {
        let newest = |id| ledger.holders_of(&allocation.resource, id).last();
        let has_newer = |id| newest(id).is_some_and(|newest| *newest != allocation.id);
        allocation.devices.iter().all(has_newer) && self.newest_shares_pod(ledger, allocation)
    }
}

/// Whether this container of `List` is known to be that of another pod with an allocation of the same devices.
fn is_of_another_allocation(
    ledger: &Ledger,
    allocation: &Allocation,
    known: &Holder,
    holding: &ListedHolding,
) -> bool {
    let on_first = allocation.devices.iter().take(1);
    let mut others = on_first
        .flat_map(|id| ledger.holders_of(&allocation.resource, id))
        .filter(|id| **id != allocation.id)
        .filter_map(|id| ledger.live.get(id));
    others.any(|other| {
        let holder = &other.holder;
        other.devices == holding.devices
            && holder.namespace.as_ref() == Some(&holding.namespace)
            && holder.pod.as_ref() == Some(&holding.pod)
            && holder.container.as_ref() == Some(&holding.container)
            && holder.pod_uid.is_some()
            && holder.pod_uid != known.pod_uid
    })
}
