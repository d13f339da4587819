//! Ends, pruning and adoption of allocations: by operators, and after restarts next to another plugin.

use super::held::Held;
use super::world::{World, gpu, resource};
use crate::evidence::kubelet_view::ReconcileView;
use crate::grants::allocation::{Allocation, GrantOrigin, Holder};
use crate::ids::names::{DeviceId, PartId};
use crate::node::change::{Change, Entry};
use crate::node::command::Command;
use crate::node::invariants::i6_no_allocation_of_a_running_pod_ends;
use crate::node::ledger::Ledger;
use std::sync::Arc;

impl World {
    /// Checks that an ended allocation is not adopted again, also after pruning.
    pub(super) fn check_no_ended_allocation_returns(&mut self, before: &Ledger, entry: &Entry) {
        for change in &entry.changes {
            match change {
                Change::Ended { id, .. } => {
                    let ended = &before.live[id];
                    let others = self.ledger.live.values();
                    let is_of_same_pod = |a: &Arc<Allocation>| a.holder.pod_uid == ended.holder.pod_uid;
                    if let Some(uid) = &ended.holder.pod_uid
                        && !others.clone().any(is_of_same_pod)
                    {
                        self.ended_holders.insert((uid.clone(), ended.devices.clone()));
                    }
                }
                // A pruned allocation may be adopted again if a checkpoint shows it.
                Change::Pruned(id) => {
                    let past = before.ended.get(*id).filter(|past| past.may_be_shown_again());
                    if let Some((past, uid)) = past.and_then(|past| Some((past, past.pod_uid()?))) {
                        self.ended_holders.remove(&(uid.to_owned(), past.devices().to_vec()));
                    }
                }
                Change::Granted(Allocation {
                    id,
                    holder: Holder { pod_uid: Some(uid), .. },
                    origin: GrantOrigin::DevicePlugin,
                    devices,
                    ..
                }) => {
                    let adopted = (uid.clone(), devices.clone());
                    assert!(!self.ended_holders.contains(&adopted), "{id} was adopted after its end");
                    assert!(id.store != before.store || id.number >= before.next_number, "{id} is not new");
                }
                _ => {}
            }
        }
    }

    /// Another client of the plugin's socket repeatedly requests a pod's devices, or a free device.
    pub(super) fn allocate_as_foreign_client(&mut self, which: usize, times: usize) {
        let held =
            self.pods.get(which % self.pods.len().max(1)).map(|p| (p.resource.clone(), p.devices.clone()));
        let (resource, devices) = held
            .filter(|_| !which.is_multiple_of(3))
            .unwrap_or((resource(0), vec![DeviceId::whole(gpu(which % 3).as_part())]));
        for _ in 0..times {
            let _ = self.allocate(&resource, devices.clone());
        }
    }

    /// While the daemon was down, another plugin granted a whole GPU to a pod, if the GPU was free.
    pub(super) fn grant_by_other_plugin(&mut self, part: usize) {
        let device = DeviceId::whole(gpu(part % 3).as_part());
        // An instance shares its GPU's hardware.
        let is_on_gpu =
            |part: &PartId| self.ledger.part(part).map_or(part, |p| p.part.gpu.as_part()) == &device.part;
        let touches = |devices: &[DeviceId]| devices.iter().any(|d| is_on_gpu(&d.part));
        let held = self.pods.iter().any(|p| touches(&p.devices));
        // `reconcile_tests` has the case that the ledger still holds the allocation of a stopped pod.
        let in_ledger = self.ledger.live.values().any(|a| touches(&a.devices));
        if !held && !in_ledger {
            let (uid, name) = self.new_pod(None);
            self.pods.push(Held {
                uid,
                name,
                container: "main",
                resource: resource(0),
                devices: vec![device],
                allocation: None,
            });
            self.checkpoint.clone_from(&self.pods);
        }
    }

    /// Adopts allocations from the checkpoint, as before the first registration.
    pub(super) fn adopt(&mut self) {
        let view = ReconcileView {
            began_mono_ms: self.now.mono_ms,
            kubelet: Some(self.kubelet),
            checkpoint: Some(self.checkpoint.iter().map(Held::checkpointed).collect()),
            adopt: true,
            ..ReconcileView::default()
        };
        let before = self.ledger.clone();
        let entry = self.apply(&Command::Reconcile(view)).unwrap();
        i6_no_allocation_of_a_running_pod_ends(&before, &entry, &self.pods, false);
        for pod in self.pods.iter().filter(|p| p.allocation.is_none()) {
            let known = self.ledger.live.values().any(|a| a.holder.pod_uid.as_ref() == Some(&pod.uid));
            let ended = self.ended_holders.contains(&(pod.uid.clone(), pod.devices.clone()));
            assert!(known || ended, "{pod:?} was not adopted");
        }
    }

    /// An operator ends an allocation, whether or not its pod runs. Adopted allocations are ended only while
    /// the history has room to remember them.
    pub(super) fn end_allocation(&mut self, which: usize) {
        let Some((id, allocation)) = self.ledger.live.iter().nth(which % self.ledger.live.len().max(1))
        else {
            return;
        };
        let remembered = self.ledger.ended.iter().filter(|past| past.may_be_shown_again()).count();
        if !allocation.decision.is_adoption() || remembered + 1 < self.ledger.rules.history.allocations {
            self.apply(&Command::End { id: *id, force: true }).unwrap();
        }
    }
}
