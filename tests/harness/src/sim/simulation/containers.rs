//! The containers as the container runtime shows them, through the guard. They begin with what the kubelet has written
//! down and mostly end with their pod; some go on although the kubelet has forgotten the pod, and some exit in their
//! sandbox.

use super::ends::Cause;
use super::event::Containers;
use super::kubelet::{Hold, Kubelet, uid};
use super::limits::Driver;
use super::world::World;
use berth_kernel::evidence::runtime::{RuntimeContainer, RuntimeView, Tie};
use berth_kernel::ids::names::AllocationId;
use berth_kernel::ids::time::Now;
use berth_kernel::node::command::Command;
use berth_kernel::node::ledger::Ledger;
use berth_kernel::node::ports::Clock;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Whether the node of this seed has a guard. Not all have: the other sources must do without.
pub(crate) fn has_guard(seed: u64) -> bool {
    seed % 3 == 1
}

/// The runtime and the guard.
#[derive(Debug, Default)]
pub(crate) struct Runtime {
    /// Containers that go on although the kubelet has forgotten their pod.
    left: Vec<Hold>,
    /// The guard's run.
    run: u64,
    /// The allocation in the annotation of each container, by its pod and name: it keeps what it was created with.
    annotations: BTreeMap<(u32, &'static str), AllocationId>,
    driver: Driver,
}

impl Runtime {
    /// Everything that there is, without the containers at these positions, which have exited.
    fn view(&mut self, kubelet: &Kubelet, ledger: &Ledger, exited: u64, now: Now) -> RuntimeView {
        let is_left = |pod: u32| self.left.iter().any(|hold| hold.pod == pod);
        // A container whose devices the kubelet has lost goes on, too.
        self.annotations.retain(|(pod, _), _| kubelet.is_alive(*pod) || is_left(*pod));
        for hold in kubelet.recorded().chain(&self.left) {
            if let Some(allocation) = hold.allocation {
                self.annotations.entry((hold.pod, hold.container)).or_insert(allocation);
            }
        }
        let mut position = 0;
        self.annotations.retain(|_, _| {
            position += 1;
            exited & (1 << (position % 64)) == 0
        });
        let mut containers: BTreeMap<AllocationId, Vec<Arc<RuntimeContainer>>> = BTreeMap::new();
        // Some views follow from a container alone, and repeat what was read before.
        if exited == 0 {
            self.driver.read_all(now);
        }
        for ((pod, name), allocation) in &self.annotations {
            self.driver.start(ledger, *allocation, now);
            let container = RuntimeContainer {
                id: format!("{pod}/{name}"),
                namespace: "ns".into(),
                pod: kubelet.name(*pod),
                pod_uid: uid(*pod),
                name: (*name).into(),
                tie: Tie::Annotation,
                is_cgroup_known: true,
                is_privileged: false,
                limits: self.driver.shown(*allocation),
            };
            containers.entry(*allocation).or_default().push(Arc::new(container));
        }
        let alive = (1..=kubelet.made()).filter(|pod| kubelet.is_alive(*pod) || is_left(*pod));
        let pods = alive.map(uid).collect();
        RuntimeView { is_whole: true, guard_run: self.run, pods, containers, ..RuntimeView::default() }
    }
}

impl World {
    /// The guard sends what the runtime shows; the view is submitted at once.
    pub(crate) fn show_containers(&mut self, how: Containers) {
        if self.daemon.is_none() {
            return;
        }
        let now = self.around.hands.now();
        let view = match how {
            Containers::Whole { exited } => {
                let ledger = self.newest();
                self.runtime.view(&self.kubelet, &ledger, exited, now)
            }
            Containers::Away => {
                let known = self.ledger().runtime.as_deref().cloned().unwrap_or_default();
                RuntimeView { is_whole: false, ..known }
            }
            Containers::GuardRestarted => {
                self.runtime.run += 1;
                let ledger = self.newest();
                self.runtime.view(&self.kubelet, &ledger, 0, now)
            }
        };
        self.turn(&Command::SeeContainers(view), Cause::Nothing);
    }

    /// Another program changes a memory limit; the guard notices with its next view.
    pub(crate) fn drift(&mut self, which: u32, to_mib: Option<u64>) {
        self.runtime.driver.drift(which, to_mib);
    }

    /// A pod ends for the kubelet, and its containers go on.
    pub(crate) fn leave_containers(&mut self, which: u32) {
        let Some(pod) = self.kubelet.some_hold(which, None).map(|hold| hold.pod) else { return };
        let containers = self.kubelet.recorded().filter(|hold| hold.pod == pod);
        self.runtime.left.extend(containers.cloned());
        self.kubelet.end_pod(pod);
    }

    /// The containers that went on end.
    pub(crate) fn end_left_containers(&mut self) {
        self.runtime.left.clear();
    }
}
