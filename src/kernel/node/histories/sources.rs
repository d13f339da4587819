//! Views of all pods, evictions, and processes in a history.

use super::held::{Held, pod_object};
use super::op::PodsUpdate;
use super::world::{PARTS, World, part};
use crate::drain::eviction::EvictionOutcome;
use crate::drain::eviction_plan::{due_requests, is_being_evicted};
use crate::drain::marks::Marks;
use crate::evidence::pods::{Pod, PodsSource, PodsView, Stage};
use crate::grants::allocation::{Allocation, EndReason, GrantOrigin};
use crate::hardware::gpu::Inventory;
use crate::hardware::process::{Owner, PodProcess, Process, ProcessIdentity, ProcessVisibility, Uses};
use crate::node::change::{Change, Entry};
use crate::node::command::Command;
use crate::node::ledger::Ledger;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

impl World {
    pub(super) fn is_running(&self, uid: &str) -> bool {
        let sources = &self.sources;
        let mut holders = self.pods.iter().chain(&sources.lost_from_checkpoint).chain(&sources.lingering);
        holders.any(|held| held.uid == uid) || self.without_gpu.iter().any(|(known, _)| known == uid)
    }

    /// Live allocations whose pod is known and has stopped, except those whose name a running pod has that was deleted
    /// by force: `List` shows the name, and no source shows whose it is while that pod has init containers alone.
    pub(super) fn held_by_stopped_pods(&self) -> Vec<&Arc<Allocation>> {
        let deleted = self.pods.iter().filter(|held| self.sources.force_deleted.contains(&held.uid));
        let names: BTreeSet<&String> = deleted.map(|held| &held.name).collect();
        let has_stopped = |a: &&Arc<Allocation>| {
            a.holder.pod_uid.as_ref().is_some_and(|uid| !self.is_running(uid))
                && a.holder.pod.as_ref().is_none_or(|name| !names.contains(name))
        };
        self.of_device_plugin().filter(has_stopped).collect()
    }

    /// Live allocations, except those whose pod is known by name alone while a pod of this name runs: it may be theirs.
    pub(super) fn not_of_running_names(&self) -> Vec<&Arc<Allocation>> {
        let may_run = |a: &Allocation| {
            let name = a.holder.pod.as_ref().filter(|_| a.holder.pod_uid.is_none());
            name.is_some_and(|name| self.without_gpu.iter().any(|(_, known)| known == name))
        };
        self.of_device_plugin().filter(|a| !may_run(a)).collect()
    }

    fn of_device_plugin(&self) -> impl Iterator<Item = &Arc<Allocation>> {
        self.ledger.live.values().filter(|a| a.origin == GrantOrigin::DevicePlugin)
    }

    /// The kubelet writes the status of its pods.
    pub(super) fn write_status(&mut self) {
        let uids: Vec<String> = self.sources.objects.keys().cloned().collect();
        for uid in uids {
            let stage = if self.is_running(&uid) { Stage::Admitted } else { Stage::Finished };
            let pod = self.sources.objects.get_mut(&uid).unwrap();
            Arc::make_mut(pod).stage = stage;
        }
    }

    pub(super) fn delete_object(&mut self, which: usize, force: bool) {
        let may = |uid: &&String| force || !self.is_running(uid);
        let uids: Vec<String> = self.sources.objects.keys().filter(may).cloned().collect();
        let Some(uid) = uids.get(which % uids.len().max(1)) else { return };
        self.sources.objects.remove(uid);
        if force {
            self.sources.force_deleted.insert(uid.clone());
        }
    }

    /// The kubelet's checkpoint loses the devices of one running pod.
    pub(super) fn lose_from_checkpoint(&mut self, which: usize) {
        if !self.pods.is_empty() {
            let uid = self.pods[which % self.pods.len()].uid.clone();
            let lost: Vec<Held> = self.pods.extract_if(.., |held| held.uid == uid).collect();
            self.checkpoint.clone_from(&self.pods);
            self.stale.retain(|held| held.uid != uid);
            self.sources.lost_from_checkpoint.extend(lost);
        }
    }

    pub(super) fn show_pods(&mut self, update: PodsUpdate) {
        let now = self.now.mono_ms;
        let view = match (update, &mut self.sources.view) {
            (PodsUpdate::Repeated, _) => self.sources.earlier_view.clone(),
            (PodsUpdate::KubeletApi, _) => Some(self.kubelet_view()),
            (PodsUpdate::List, view) => {
                let view = view.get_or_insert_with(|| PodsView::empty(PodsSource::ApiServer));
                refresh(view, &self.sources.objects);
                view.listed_mono_ms = now;
                Some(view.clone())
            }
            // A source without a first list shows nothing, and a watch continues only from a current view.
            (_, None) => None,
            (PodsUpdate::Watch, Some(view)) if !view.current => None,
            (PodsUpdate::Watch, Some(view)) => {
                refresh(view, &self.sources.objects);
                Some(view.clone())
            }
            (PodsUpdate::Silent, Some(view)) => {
                view.current = false;
                Some(view.clone())
            }
            (PodsUpdate::TooMany, Some(view)) => Some(view.ended_only()),
        };
        let Some(view) = view else { return };
        if update != PodsUpdate::Repeated && now.is_multiple_of(3) {
            self.sources.earlier_view = Some(view.clone());
        }
        let before = self.ledger.live.clone();
        self.apply(&Command::Pods(view)).unwrap();
        assert_eq!(self.ledger.live, before, "a view alone ends no allocation");
    }

    fn kubelet_view(&self) -> PodsView {
        let mut view = PodsView::empty(PodsSource::Kubelet);
        view.current = true;
        for held in &self.pods {
            let pod = pod_object(&held.uid, &held.name, Stage::Admitted);
            view.pods.insert(held.uid.clone(), Arc::new(pod));
        }
        for (uid, name) in &self.without_gpu {
            view.pods.insert(uid.clone(), Arc::new(pod_object(uid, name, Stage::Admitted)));
        }
        for uid in (0..self.next_pod).map(|n| format!("uid-{n}")).filter(|uid| !self.is_running(uid)) {
            view.record_removal(uid, false);
        }
        view
    }

    /// One of the due evictions is sent and answered.
    pub(super) fn evict(&mut self, which: usize, outcome: usize) {
        let due = due_requests(&self.ledger, self.now);
        let Some(ask) = due.get(which % due.len().max(1)).cloned() else { return };
        let uid = ask.pod.uid.clone();
        let view = self.ledger.pods.as_ref().unwrap();
        assert!(
            view.current && view.source == PodsSource::ApiServer,
            "pods are evicted only with a current view"
        );
        assert!(view.pods.contains_key(&uid) && is_being_evicted(&self.ledger, &uid), "{uid} is evicted");
        let outcome = match outcome {
            _ if !self.sources.objects.contains_key(&uid) => EvictionOutcome::Gone,
            0 => EvictionOutcome::Budget("one more".into()),
            1 => EvictionOutcome::Failed("no answer".into()),
            _ => EvictionOutcome::Accepted,
        };
        if outcome == EvictionOutcome::Accepted {
            self.pods.retain(|held| held.uid != uid);
            self.sources.lost_from_checkpoint.retain(|held| held.uid != uid);
        }
        self.apply(&Command::RecordEviction { ask, outcome }).unwrap();
        assert!(self.ledger.evictions.contains_key(&uid));
        let again = due_requests(&self.ledger, self.now);
        assert!(again.iter().all(|ask| ask.pod.uid != uid), "the eviction of {uid} is repeated at once");
    }

    /// An inventory scan that shows the processes of all running pods.
    pub(super) fn scan_processes(&mut self, host: bool) {
        let mut inventory = Inventory {
            parts: (0..PARTS).map(part).collect(),
            process_visibility: ProcessVisibility::Visible,
            ..Inventory::default()
        };
        for gpu in (0..PARTS).map(|i| part(i).gpu) {
            inventory.processes.entry(gpu).or_default();
        }
        let uses = Uses { compute: true, ..Uses::default() };
        let mut add = |pid, on: &crate::ids::names::PartId, owner| {
            let gpu = (0..PARTS).map(part).find(|p| p.id == *on).unwrap().gpu;
            let who = ProcessIdentity { name: None, started_ticks: Some(1), owner, ignored: false };
            let process = Process { pid, part: on.clone(), uses, memory_mib: None, identity: who };
            inventory.processes.get_mut(&gpu).unwrap().push(process);
        };
        for (pid, held) in self.pods.iter().chain(&self.sources.lost_from_checkpoint).enumerate() {
            let pod =
                PodProcess { uid: held.uid.clone(), container_id: None, container: Some("main".into()) };
            let parts: BTreeSet<_> = held.devices.iter().map(|d| &d.part).collect();
            for on in parts {
                add(u32::try_from(pid).unwrap() + 2, on, Owner::Pod(pod.clone()));
            }
        }
        if host {
            add(1, &part(0).id, Owner::NoPod { container_id: None });
        }
        let entry = self.apply(&Command::RecordScan(inventory.clone())).unwrap();
        for change in &entry.changes {
            if let Change::MarksChanged { gpu, marks: Marks { drained_wall_ms: Some(_), .. } } = change {
                assert!(inventory.processes[gpu].is_empty(), "{gpu} is drained while processes are on it");
            }
        }
    }

    /// I6, second half: an allocation that ends by the view of all pods has no running pod in it, and without
    /// a readable checkpoint no other allocation ends.
    pub(super) fn i6_ends_agree_with_the_view_of_all_pods(
        &self,
        before: &Ledger,
        entry: &Entry,
        readable: bool,
    ) {
        for change in &entry.changes {
            let Change::Ended { id, reason } = change else {
                continue;
            };
            assert_eq!(*reason == EndReason::PodGone, !readable, "I6: {id} ended as {reason:?}");
            let uid = before.live[id].holder.pod_uid.as_ref();
            let shown = uid.and_then(|uid| {
                let view = before.pods.as_ref().filter(|view| view.current)?;
                view.pods.get(uid).filter(|pod| pod.stage != Stage::Finished)
            });
            let shown_running = shown.is_some() && *reason != EndReason::Superseded;
            assert!(!shown_running, "I6: {id} ended as {reason:?} and its pod is shown running");
        }
    }
}

fn refresh(view: &mut PodsView, objects: &BTreeMap<String, Arc<Pod>>) {
    for (uid, pod) in std::mem::replace(&mut view.pods, objects.clone()) {
        if !objects.contains_key(&uid) {
            view.record_removal(uid, pod.stage == Stage::Finished);
        }
    }
    view.current = true;
}
