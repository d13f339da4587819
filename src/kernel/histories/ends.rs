//! What ends, is pruned and comes again: restarts beside another plugin, and an operator's word.

use super::world::{Held, World, gpu, resource};
use crate::allocation::{ADOPTED, Allocation, Holder};
use crate::change::{Change, Entry};
use crate::command::Command;
use crate::invariants::i6_nothing_that_lives_ends;
use crate::ledger::Ledger;
use crate::names::{DeviceId, PartId};
use crate::reconcile::{Checkpointed, RoundView};
use std::sync::Arc;

impl World {
    /// What has ended does not come to life again, whatever was pruned since.
    pub(super) fn nothing_comes_back(&mut self, before: &Ledger, entry: &Entry) {
        for change in &entry.changes {
            match change {
                Change::Ended { id, .. } => {
                    let ended = &before.live[id];
                    let others = self.ledger.live.values();
                    let held = |a: &Arc<Allocation>| a.holder.pod_uid == ended.holder.pod_uid;
                    if let Some(uid) = &ended.holder.pod_uid
                        && !others.clone().any(held)
                    {
                        self.let_go.insert((uid.clone(), ended.devices.clone()));
                    }
                }
                // What was pruned for want of room is not known any more, whatever a checkpoint may show.
                Change::Pruned(id) => {
                    let past = before.ended.get(*id).filter(|past| past.may_be_shown_again());
                    if let Some((past, uid)) = past.and_then(|past| Some((past, past.pod_uid()?))) {
                        self.let_go.remove(&(uid.to_owned(), past.devices().to_vec()));
                    }
                }
                Change::Granted(Allocation {
                    id,
                    holder: Holder { pod_uid: Some(uid), .. },
                    devices,
                    ..
                }) => {
                    let adopted = (uid.clone(), devices.clone());
                    assert!(!self.let_go.contains(&adopted), "{id} was taken over after its end");
                    assert!(id.store != before.store || id.number >= before.next_number, "{id} is not new");
                }
                _ => {}
            }
        }
    }

    /// Another client of our socket asks again and again for what a pod holds, or for a device of its own.
    pub(super) fn foreign_client(&mut self, which: usize, times: usize) {
        let held =
            self.pods.get(which % self.pods.len().max(1)).map(|p| (p.resource.clone(), p.devices.clone()));
        let (resource, devices) = held
            .filter(|_| !which.is_multiple_of(3))
            .unwrap_or((resource(0), vec![DeviceId::whole(&gpu(which % 3))]));
        for _ in 0..times {
            let _ = self.allocate(&resource, devices.clone());
        }
    }

    /// While we were away another plugin gave a whole GPU to a pod, if nobody has any of it.
    pub(super) fn foreign(&mut self, part: usize) {
        let device = DeviceId::whole(&gpu(part % 3));
        // An instance of a GPU is of the same hardware.
        let of_gpu = |part: &PartId| self.ledger.part(part).map_or(part, |p| p.part.gpu()) == &device.part;
        let touches = |devices: &[DeviceId]| devices.iter().any(|d| of_gpu(&d.part));
        let held = self.pods.iter().any(|p| touches(&p.devices));
        // Where the ledger does not know yet that a pod went, see `reconcile_tests`.
        let known = self.ledger.live.values().any(|a| touches(&a.devices));
        if !held && !known {
            let uid = format!("uid-{}", self.next_pod);
            self.next_pod += 1;
            self.sources.made(&uid);
            self.pods.push(Held { uid, resource: resource(0), devices: vec![device], allocation: None });
            self.file.clone_from(&self.pods);
        }
    }

    /// Before the first registration: the checkpoint as it lies there.
    pub(super) fn adopt(&mut self) {
        let view = RoundView {
            began_mono_ms: self.now.mono_ms,
            kubelet: Some(self.kubelet),
            checkpoint: Some(self.file.iter().map(checkpointed).collect()),
            adopt: true,
            ..RoundView::default()
        };
        let before = self.ledger.clone();
        let entry = self.turn(&Command::Observe(view)).unwrap();
        i6_nothing_that_lives_ends(&before, &entry, &self.pods, false);
        for pod in self.pods.iter().filter(|p| p.allocation.is_none()) {
            let known = self.ledger.live.values().any(|a| a.holder.pod_uid.as_ref() == Some(&pod.uid));
            let ended = self.let_go.contains(&(pod.uid.clone(), pod.devices.clone()));
            assert!(known || ended, "{pod:?} was not taken over");
        }
    }

    /// An operator ends an allocation, whether or not its pod lives. Of what was taken over only as
    /// many as the history remembers beside what ends next.
    pub(super) fn end(&mut self, which: usize) {
        let Some((id, allocation)) = self.ledger.live.iter().nth(which % self.ledger.live.len().max(1))
        else {
            return;
        };
        let words = self.ledger.ended.iter().filter(|past| past.may_be_shown_again()).count();
        if allocation.decision.by != [ADOPTED] || words + 1 < self.rules.history.allocations {
            self.turn(&Command::End { id: *id, force: true }).unwrap();
        }
    }
}

pub(super) fn checkpointed(held: &Held) -> Checkpointed {
    Checkpointed {
        pod_uid: held.uid.clone(),
        container: "main".into(),
        resource: held.resource.clone(),
        devices: held.devices.clone(),
        allocation: held.allocation,
    }
}
