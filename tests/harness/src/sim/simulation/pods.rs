//! The Allocates of the kubelet, and what it does with the answers.

use super::ends::Cause;
use super::event::{Fate, Look};
use super::kubelet::Hold;
use super::policies::resource;
use super::rng::Rng;
use super::violation::Violation;
use super::world::World;
use berth_core::keeper::CommandError;
use berth_kernel::grants::allocation::Allocation;
use berth_kernel::ids::names::{AllocationId, DeviceId, Resource};
use berth_kernel::node::command::{Attempt, Command, StackAnswer};
use berth_kernel::node::ledger::Ledger;
use berth_kernel::node::ports::Clock as _;
use berth_kernel::node::refusal::Refusal;
use berth_kernel::policy::hooks::{AdmitRequest, Hook, PlaceRequest};
use std::sync::Arc;

/// The request of a pod, and what the kubelet does with the answer.
pub(crate) struct Wish {
    pub(crate) count: u32,
    pub(crate) pick: u32,
    pub(crate) fate: Fate,
    pub(crate) stale: bool,
    pub(crate) init: bool,
}

impl World {
    /// Pods that another plugin granted devices before this daemon was ever there.
    pub(crate) fn former_plugin(&mut self, rng: &mut Rng) {
        let gpus: Vec<_> =
            self.machine.parts().iter().filter(|p| p.mig.is_none() && !p.mig_enabled).collect();
        for part in gpus {
            let (r, devices) = match rng.below(3) {
                0 => (0, vec![DeviceId::whole(&part.id)]),
                1 => (1, vec![DeviceId::share(&part.id, rng.below(3))]),
                _ => continue,
            };
            let pod = self.kubelet.new_pod();
            let hold = Hold { pod, container: "main", resource: resource(r), devices, allocation: None };
            self.kubelet.record(hold);
        }
    }

    /// A pod's first container requests some of the devices that the kubelet considers free.
    pub(crate) fn start_pod(&mut self, which: u32, wish: &Wish) {
        if !self.kubelet.can_admit() || self.daemon.is_none() {
            return;
        }
        let listed = self.kubelet.lists.keys();
        let Some(resource) = listed.clone().nth(which as usize % listed.count().max(1)).cloned() else {
            return;
        };
        let Wish { count, pick, fate, stale, init } = *wish;
        let mut free = self.kubelet.free(&resource);
        if free.len() < count as usize {
            return;
        }
        let at = pick as usize % free.len();
        free.rotate_left(at);
        let required = if pick.is_multiple_of(5) { free[..1].to_vec() } else { Vec::new() };
        let request =
            PlaceRequest { resource: resource.clone(), available: free, required, size: count as usize };
        let Some(devices) = self.place(request, pick.is_multiple_of(3)) else { return };
        let pod = self.kubelet.new_pod();
        let container = if init { "init" } else { "main" };
        self.admit(pod, container, &resource, devices, fate, stale);
    }

    /// The devices of a pod: the daemon's choice, or the kubelet's own.
    fn place(&mut self, mut request: PlaceRequest, ask: bool) -> Option<Vec<DeviceId>> {
        if ask && let Some(daemon) = &mut self.daemon {
            request.available.sort();
            let placed = daemon.place(&self.around, &request);
            return self.take(placed);
        }
        request.available.truncate(request.size);
        Some(request.available)
    }

    /// The app container gets what the init container had, or some of it.
    pub(crate) fn start_app(&mut self, which: u32, subset: bool) {
        let Some(hold) = self.kubelet.some_hold(which, Some(true)).cloned() else { return };
        if !self.kubelet.can_admit() || self.kubelet.has_app(hold.pod) {
            return;
        }
        let mut devices = hold.devices;
        if subset {
            devices.truncate(1);
        }
        self.admit(hold.pod, "main", &hold.resource, devices, Fate::Runs, false);
    }

    /// A pod takes the name of one that has ended; without devices it starts now.
    pub(crate) fn successor(&mut self, which: u32, devices: bool) {
        if self.kubelet.reuse_name(which) && !devices {
            self.kubelet.new_pod();
        }
    }

    /// Another pod is admitted on the devices of a container that runs.
    pub(crate) fn start_on_held(&mut self, which: u32) {
        let Some(hold) = self.kubelet.some_hold(which, Some(false)).cloned() else { return };
        if self.kubelet.can_admit() && self.daemon.is_some() {
            let pod = self.kubelet.new_pod();
            self.admit(pod, "main", &hold.resource, hold.devices, Fate::Runs, false);
        }
    }

    /// The kubelet lost the answer, and repeats the Allocate of the same container.
    pub(crate) fn reissue(&mut self, which: u32, stale: bool) {
        let Some(hold) = self.kubelet.some_hold(which, None).cloned() else { return };
        if self.kubelet.can_admit() {
            self.admit(hold.pod, hold.container, &hold.resource, hold.devices, Fate::Runs, stale);
        }
    }

    /// An Allocate that no kubelet would send; no pod uses the grant.
    pub(crate) fn odd(&mut self, resource: &Resource, part: u32, share: u32, twice: bool) {
        let part = self.machine.part(part).id.clone();
        let id = if share == 0 { DeviceId::whole(&part) } else { DeviceId::share(&part, share - 1) };
        for _ in 0..=u32::from(twice) {
            self.allocate(resource, vec![id.clone()], false);
        }
    }

    /// A client that is not a kubelet requests the same repeatedly; no pod uses the grants.
    pub(crate) fn foreign_client(&mut self, which: u32, held: bool, times: u32) {
        let hold = self.kubelet.some_hold(which, None).filter(|_| held);
        let (resource, devices) = match hold {
            Some(hold) => (hold.resource.clone(), hold.devices.clone()),
            None => (resource(which % 4), vec![DeviceId::whole(&self.machine.part(which).id)]),
        };
        for _ in 0..times {
            self.allocate(&resource, devices.clone(), false);
        }
    }

    /// A pod whose two containers are named in one Allocate, which is one grant.
    pub(crate) fn start_pair(&mut self, which: u32, count: u32, pick: u32) {
        if !self.kubelet.can_admit() || self.daemon.is_none() {
            return;
        }
        let listed: Vec<Resource> = self.kubelet.lists.keys().cloned().collect();
        let Some(resource) = listed.get(which as usize % listed.len().max(1)) else { return };
        let mut free = self.kubelet.free(resource);
        if free.len() < count as usize {
            return;
        }
        let at = pick as usize % free.len();
        free.rotate_left(at);
        free.truncate(count as usize);
        free.sort();
        let pod = self.kubelet.new_pod();
        let Some(id) = self.allocate(resource, free.clone(), false) else {
            return self.kubelet.end_pod(pod);
        };
        let rest = free.split_off(1);
        for (container, devices) in [("main", free), ("side", rest)] {
            self.kubelet.record(Hold {
                pod,
                container,
                resource: resource.clone(),
                devices,
                allocation: Some(id),
            });
        }
    }

    /// One container: Allocate, and what becomes of the answer.
    fn admit(
        &mut self,
        pod: u32,
        container: &'static str,
        resource: &Resource,
        mut devices: Vec<DeviceId>,
        fate: Fate,
        stale: bool,
    ) {
        devices.sort();
        let Some(id) = self.allocate(resource, devices.clone(), stale) else {
            // The pod has failed; so has one whose daemon died over it.
            return self.kubelet.end_pod(pod);
        };
        let hold = Hold { pod, container, resource: resource.clone(), devices, allocation: Some(id) };
        match fate {
            Fate::Runs => self.kubelet.record(hold),
            Fate::Slow => self.kubelet.record_later(hold, self.around.hands.true_ms()),
            Fate::Dropped => self.kubelet.end_pod(pod),
            Fate::Failed => {
                self.kubelet.record(hold);
                self.kubelet.end_pod(pod);
            }
        }
    }

    /// Allocate as front end and policy thread do it: once, and once more after a round where that
    /// may cure the refusal.
    fn allocate(&mut self, resource: &Resource, devices: Vec<DeviceId>, stale: bool) -> Option<AllocationId> {
        let request = AdmitRequest { resource: resource.clone(), devices, claim: None };
        let asked_mono_ms = self.around.hands.now().mono_ms;
        match self.attempt(&request, Attempt::First, stale)? {
            Err(CommandError::Refused(refusal)) if refusal.reconcile_may_resolve() => {
                self.whole_round(Look { list: true, write: true, read: true });
                self.attempt(&request, Attempt::Last { asked_mono_ms }, false)?.ok()
            }
            answered => answered.ok(),
        }
    }

    fn attempt(
        &mut self,
        request: &AdmitRequest,
        attempt: Attempt,
        stale: bool,
    ) -> Option<Result<AllocationId, CommandError>> {
        let mut again = false;
        loop {
            let daemon = self.daemon.as_mut()?;
            let before = daemon.snapshot();
            let node = if stale && !again { Arc::clone(&self.older) } else { Arc::clone(&before) };
            // A policy is called only if one has the hook, and after another stack was activated meanwhile.
            let answer = if again || node.calls_policies(Hook::Admit) {
                let answer = daemon.admit(&self.around, &node, request);
                self.take(answer)?
            } else {
                StackAnswer::NotCalled
            };
            let allowed = match answer {
                StackAnswer::NotCalled => !before.calls_policies(Hook::Admit),
                StackAnswer::Allow { .. } => true,
                StackAnswer::Deny { .. } | StackAnswer::Faulted { .. } => false,
            };
            let command = Command::Allocate {
                request: request.clone(),
                answer,
                evaluated: (!again).then_some(node.generation),
                attempt,
            };
            let grantable = allowed && may_have_again(&before, request);
            match self.turn(&command, Cause::Grant)? {
                Err(CommandError::Refused(Refusal::Moved)) if !again => again = true,
                Err(error) => {
                    if let (CommandError::Refused(refusal), true) = (&error, grantable) {
                        let what =
                            format!("{:?} are held and asked for again, yet {refusal}", request.devices);
                        self.checks.violations.push(Violation::new("I7", what));
                    }
                    return Some(Err(error));
                }
                Ok(applied) => {
                    let live = &applied.snapshot.live;
                    let granted = |(id, _): &(&AllocationId, &Arc<Allocation>)| !before.live.contains_key(id);
                    let id = live.iter().rev().find(granted).map(|(id, _)| *id);
                    self.granted += 1;
                    return id.map(Ok);
                }
            }
        }
    }
}

/// I7: whether these are all held and may be granted once more.
fn may_have_again(ledger: &Ledger, request: &AdmitRequest) -> bool {
    request.devices.iter().all(|id| {
        ledger.device(&request.resource, id).is_some_and(|d| d.held())
            && ledger.may_grant_device(&request.resource, id)
    })
}
