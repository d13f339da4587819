//! Containers as the container runtime shows them in a history: some outlive their pod at the kubelet, some exit in
//! their sandbox.

use super::held::Held;
use super::op::RuntimeUpdate;
use super::world::World;
use crate::evidence::runtime::{RuntimeContainer, RuntimeView, Tie};
use crate::node::command::Command;
use std::collections::BTreeMap;
use std::sync::Arc;

impl World {
    /// The kubelet forgets a pod as if it had ended, as after a deletion by force, and its containers go on.
    pub(super) fn linger(&mut self, which: usize) {
        if !self.pods.is_empty() {
            let uid = self.pods[which % self.pods.len()].uid.clone();
            self.stale = self.pods.clone();
            let lingering: Vec<Held> = self.pods.extract_if(.., |held| held.uid == uid).collect();
            self.sources.force_deleted.insert(uid.clone());
            self.sources.objects.remove(&uid);
            self.sources.lingering.extend(lingering);
        }
    }

    pub(super) fn show_runtime(&mut self, update: RuntimeUpdate) {
        let exited = match update {
            RuntimeUpdate::Whole { exited } => exited,
            RuntimeUpdate::Away => {
                let known = self.ledger.runtime.as_deref().cloned().unwrap_or_default();
                let away = RuntimeView { is_whole: false, ..known };
                self.apply(&Command::SeeContainers(away)).unwrap();
                return;
            }
            RuntimeUpdate::GuardRestarted => {
                self.sources.guard_run += 1;
                0
            }
        };
        let sources = &mut self.sources;
        let running = self.pods.iter().chain(&sources.lost_from_checkpoint).chain(&sources.lingering);
        let mut view = RuntimeView { is_whole: true, guard_run: sources.guard_run, ..RuntimeView::default() };
        let mut annotations = BTreeMap::new();
        for (position, held) in running.enumerate() {
            view.pods.insert(held.uid.clone());
            if exited & (1 << (position % 64)) != 0 {
                continue;
            }
            let key = (held.uid.clone(), held.container);
            let Some(allocation) = sources.annotations.get(&key).copied().or(held.allocation) else {
                continue;
            };
            annotations.insert(key, allocation);
            let container = RuntimeContainer {
                id: format!("{}/{}", held.uid, held.container),
                namespace: "ns".into(),
                pod: held.name.clone(),
                pod_uid: held.uid.clone(),
                name: held.container.into(),
                tie: Tie::Annotation,
                is_cgroup_known: true,
                is_privileged: false,
                limits: Vec::new(),
            };
            view.containers.entry(allocation).or_default().push(Arc::new(container));
        }
        sources.annotations = annotations;
        let live = self.ledger.live.keys().copied().collect::<Vec<_>>();
        self.apply(&Command::SeeContainers(view)).unwrap();
        assert!(self.ledger.live.keys().copied().eq(live), "a view of the runtime alone ends no allocation");
    }
}
