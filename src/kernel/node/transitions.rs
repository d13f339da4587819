//! Transitions: what changed on the node from one ledger to a later one. The log, the event streams of the admin API
//! and Kubernetes events all report the same transitions, each a part of them. Pure.
//!
//! A change that is undone between two ledgers is not a transition, except for allocations: those that ended are in the
//! history.

mod containers;
mod text;

pub use text::GpuName;

use crate::drain::eviction::EvictionRecord;
use crate::drain::eviction_plan::{EvictionStatus, GpuHolder, holders};
use crate::drain::marks::Drain;
use crate::evidence::attribution::{Attributions, Bypass, pods_with_gpu_bypass};
use crate::evidence::limits::MemoryLimit;
use crate::evidence::pods::Pod;
use crate::evidence::runtime::{ContainerBypass, RuntimeContainer};
use crate::grants::allocation::Allocation;
use crate::grants::contested::{Contested, contested};
use crate::hardware::health::{Health, HealthState};
use crate::ids::names::{GpuId, PartId, Resource};
use crate::ids::time::Now;
use crate::node::ledger::{GpuState, Ledger};
use crate::policy::stack::Stack;
use crate::policy::version::PolicyVersion;
use crate::sharing::breaker::Phase;
use crate::sharing::part_state::PartState;
use crate::sharing::via::Via;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// One change of the node.
#[derive(Clone, Debug, PartialEq)]
pub enum Transition {
    /// A part that the node did not have. One that returns after it vanished changes its health instead.
    PartFound(Arc<PartState>),
    /// A part is offered as other devices, or by another policy.
    OffersChanged(Arc<PartState>),
    /// A GPU's health has another state or another reason. A GPU that is new to the node was healthy before.
    HealthChanged {
        /// The GPU.
        gpu: GpuId,
        /// Its health in the earlier ledger.
        before: Health,
        /// Its health now.
        now: Health,
    },
    /// A GPU was cordoned, drained or uncordoned, or the order or its reason is another one.
    DrainChanged {
        /// The GPU.
        gpu: GpuId,
        /// Its drain state in the earlier ledger.
        before: Drain,
        /// Its drain state now.
        now: Drain,
    },
    /// An operator ordered or cancelled the move of a GPU to the other API of the kubelet, or it was moved.
    ViaChanged {
        /// The GPU.
        gpu: GpuId,
        /// Its API in the earlier ledger.
        before: Via,
        /// Its API now.
        now: Via,
    },
    /// A pod blocks a drain with eviction, and did not before or for another reason.
    DrainBlocked {
        /// The GPU that is drained.
        gpu: GpuId,
        /// The pod, as `namespace/name`.
        pod: String,
        /// Why it does not leave, as a text that follows its name.
        reason: String,
    },
    /// A GPU was removed from the list.
    GpuForgotten {
        /// The GPU.
        gpu: GpuId,
        /// Its index, if the earlier ledger had it.
        index: Option<u32>,
    },
    /// An allocation was granted.
    Granted(Arc<Allocation>),
    /// The holder of an allocation became known, or more of it.
    HolderLearned(Arc<Allocation>),
    /// An allocation ended; `ended` is set.
    Ended(Arc<Allocation>),
    /// A device of an allocation turned out to be held by another pod, too.
    Contested(Contested),
    /// The container of an allocation has no memory limit in force that it was granted.
    LimitFailed(Arc<Allocation>, MemoryLimit),
    /// The memory limit of the container of an allocation was changed, and the guard has set it again.
    LimitChanged(Arc<Allocation>, MemoryLimit),
    /// A container names an allocation of another pod, as its pod's author can.
    GrantForged(Arc<Allocation>, Arc<RuntimeContainer>),
    /// The guard restricted or refused a container that could use GPUs that were not allocated to it, or could do neither.
    ContainerBypass(Arc<ContainerBypass>),
    /// The guard shows all containers of the node, or no longer does.
    GuardChanged(bool),
    /// The eviction or deletion of a pod was requested from the API server, with another outcome than before.
    Eviction(EvictionRecord),
    /// Allocations no longer end by themselves, with the reason; or end again.
    EndsWithheldChanged(Option<Arc<str>>),
    /// No device list strategy can work on this node, with the reason and the remedy; or one can again.
    StrategyChanged(Option<Arc<str>>),
    /// Device nodes that containers need do not exist, with the remedy; or all exist again.
    NodesChanged(Option<Arc<str>>),
    /// The free devices of a resource are withdrawn after repeated denials, at first for this time, milliseconds; or
    /// they are listed again (`None`).
    ResourceWithdrawn(Resource, Option<u64>),
    /// A version of a policy was uploaded, or came with the daemon.
    PolicyAdded(Arc<PolicyVersion>),
    /// A version of a policy was deleted.
    PolicyDeleted(Arc<PolicyVersion>),
    /// Another stack is active.
    StackActivated(Arc<Stack>),
    /// A process uses a GPU without an allocation, or does so for another reason.
    BypassStarted(Bypass),
    /// A process no longer uses a GPU without an allocation.
    BypassEnded(Bypass),
    /// The spec of a pod lets it use GPUs without an allocation; its `bypass` is set.
    BypassPossible(Arc<Pod>),
}

/// A process on a part of a GPU: GPU, process id, start in clock ticks, part.
type BypassKey = (GpuId, u32, Option<u64>, PartId);

/// Computes the transitions from ledger to ledger.
#[derive(Debug)]
pub struct Transitions {
    last: Arc<Ledger>,
    bypasses: BTreeMap<BypassKey, Bypass>,
    /// UIDs of the pods that were reported as [`Transition::BypassPossible`].
    bypass_pods: BTreeSet<String>,
    acts: containers::ReportedBypasses,
}

impl Transitions {
    /// Starts at this ledger: transitions up to it are not reported, and its bypasses count as reported.
    #[must_use]
    pub fn since(ledger: Arc<Ledger>) -> Self {
        let bypass_pods = pods_with_gpu_bypass(&ledger).map(|(pod, _)| pod.uid.clone()).collect();
        let mut acts = containers::ReportedBypasses::default();
        acts.step(&ledger);
        Self { bypasses: bypasses(&ledger), bypass_pods, acts, last: ledger }
    }

    /// The ledger of the last step.
    #[must_use]
    pub fn last(&self) -> &Ledger {
        &self.last
    }

    /// The transitions to this ledger, which the next step starts at.
    pub fn step(&mut self, ledger: Arc<Ledger>) -> Vec<Transition> {
        let (old, new) = (&*self.last, &*ledger);
        let mut all = part_transitions(old, new);
        all.extend(gpu_transitions(old, new));
        all.extend(blocked_drains(old, new));
        all.extend(allocation_transitions(old, new));
        all.extend(contests(old, new));
        all.extend(containers::container_transitions(old, new));
        all.extend(self.acts.step(new));
        all.extend(evictions(old, new));
        if old.ends_withheld != new.ends_withheld {
            all.push(Transition::EndsWithheldChanged(new.ends_withheld.clone()));
        }
        if old.device_access.no_strategy != new.device_access.no_strategy {
            all.push(Transition::StrategyChanged(new.device_access.no_strategy.clone()));
        }
        if old.device_access.missing_nodes != new.device_access.missing_nodes {
            all.push(Transition::NodesChanged(new.device_access.missing_nodes.clone()));
        }
        all.extend(withdrawals(old, new));
        all.extend(policy_transitions(old, new));
        if old.stack.revision != new.stack.revision {
            all.push(Transition::StackActivated(Arc::clone(&new.stack)));
        }
        if may_change_bypasses(old, new) {
            all.extend(self.bypass_transitions(&ledger));
        }
        self.last = ledger;
        all
    }

    fn bypass_transitions(&mut self, ledger: &Ledger) -> Vec<Transition> {
        let now = bypasses(ledger);
        let started = now.iter().filter(|(key, bypass)| {
            self.bypasses.get(key).is_none_or(|before| before.reason.as_str() != bypass.reason.as_str())
        });
        let mut all: Vec<_> = started.map(|(_, bypass)| Transition::BypassStarted(bypass.clone())).collect();
        let ended = self.bypasses.iter().filter(|(key, _)| !now.contains_key(*key));
        all.extend(ended.map(|(_, bypass)| Transition::BypassEnded(bypass.clone())));
        self.bypasses = now;
        // While the pods cannot be listed, a missing pod is not known to be gone.
        if let Some(view) = ledger.pods.as_ref().filter(|view| view.current) {
            self.bypass_pods.retain(|uid| view.pods.contains_key(uid));
        }
        for (pod, _) in pods_with_gpu_bypass(ledger) {
            if self.bypass_pods.insert(pod.uid.clone()) {
                all.push(Transition::BypassPossible(Arc::new(pod.clone())));
            }
        }
        all
    }
}

impl Transition {
    /// The GPU that it is about, if it is about one.
    #[must_use]
    pub fn gpu(&self, ledger: &Ledger) -> Option<GpuId> {
        match self {
            Self::PartFound(part) | Self::OffersChanged(part) => Some(part.part.gpu.clone()),
            Self::HealthChanged { gpu, .. }
            | Self::DrainChanged { gpu, .. }
            | Self::ViaChanged { gpu, .. }
            | Self::DrainBlocked { gpu, .. }
            | Self::GpuForgotten { gpu, .. } => Some(gpu.clone()),
            Self::LimitFailed(_, limit) | Self::LimitChanged(_, limit) => Some(limit.gpu.clone()),
            Self::Granted(allocation)
            | Self::HolderLearned(allocation)
            | Self::Ended(allocation)
            | Self::GrantForged(allocation, _) => {
                let part = allocation.devices.first().map(|device| &device.part);
                part.map(|part| ledger.gpu_id_of(part))
            }
            Self::Contested(found) => Some(ledger.gpu_id_of(&found.device.part)),
            Self::Eviction(eviction) => Some(eviction.request.gpu.clone()),
            Self::BypassStarted(bypass) | Self::BypassEnded(bypass) => Some(bypass.gpu.clone()),
            Self::EndsWithheldChanged(_)
            | Self::StrategyChanged(_)
            | Self::NodesChanged(_)
            | Self::GuardChanged(_)
            | Self::ContainerBypass(_)
            | Self::ResourceWithdrawn(..)
            | Self::PolicyAdded(_)
            | Self::PolicyDeleted(_)
            | Self::StackActivated(_)
            | Self::BypassPossible(_) => None,
        }
    }

    /// Whether it is a problem that needs attention.
    #[must_use]
    pub fn is_warning(&self) -> bool {
        match self {
            Self::HealthChanged { now, .. } => now.state != HealthState::Healthy,
            Self::DrainChanged { before, now, .. } => {
                matches!((before, now), (Drain::Drained(_), Drain::Draining(..)))
            }
            Self::EndsWithheldChanged(reason)
            | Self::StrategyChanged(reason)
            | Self::NodesChanged(reason) => reason.is_some(),
            Self::ResourceWithdrawn(_, pause_ms) => pause_ms.is_some(),
            Self::GuardChanged(is_connected) => !is_connected,
            Self::DrainBlocked { .. }
            | Self::Contested(_)
            | Self::LimitFailed(..)
            | Self::LimitChanged(..)
            | Self::GrantForged(..)
            | Self::ContainerBypass(_)
            | Self::BypassStarted(_) => true,
            _ => false,
        }
    }

    /// Whether only a detail changed: the reason of a health that is not unhealthy, the author of a cordon, or a
    /// drain's mark under the same order.
    #[must_use]
    pub fn is_minor(&self) -> bool {
        match self {
            Self::HealthChanged { before, now, .. } => {
                before.state == now.state && now.state != HealthState::Unhealthy
            }
            Self::DrainChanged { before, now, .. } => match (before, now) {
                (Drain::Drained(_), Drain::Drained(_)) => true,
                (Drain::Cordoned(before), Drain::Cordoned(now)) => before.reason() == now.reason(),
                (Drain::Draining(_, before), Drain::Draining(_, now)) => before == now,
                _ => false,
            },
            _ => false,
        }
    }
}

fn part_transitions(old: &Ledger, new: &Ledger) -> Vec<Transition> {
    let same = |id: &PartId, part| old.parts.get(id).is_some_and(|before| Arc::ptr_eq(before, part));
    let mut changed: Vec<_> = new.parts.iter().filter(|(id, part)| !same(id, part)).collect();
    changed.sort_by_key(|(_, part)| part.part.gpu_index);
    let mut all = Vec::new();
    for (id, part) in changed {
        let before = old.parts.get(id);
        if before.is_none() && part.present {
            all.push(Transition::PartFound(Arc::clone(part)));
        }
        let (lines, by) =
            before.map_or((&[][..], None), |before| (&before.lines[..], before.offered_by.as_ref()));
        if lines != part.lines || (by != part.offered_by.as_ref() && !part.lines.is_empty()) {
            all.push(Transition::OffersChanged(Arc::clone(part)));
        }
    }
    all
}

fn gpu_transitions(old: &Ledger, new: &Ledger) -> Vec<Transition> {
    let mut all = Vec::new();
    for (gpu, state) in &new.gpus {
        let before = old.gpus.get(gpu);
        if before.is_some_and(|before| Arc::ptr_eq(before, state)) {
            continue;
        }
        let health = Health { state: HealthState::Healthy, reason: String::new(), ..state.health.clone() };
        let fresh = GpuState { via: state.via.clone(), ..GpuState::new(health, Now::default()) };
        let before = before.map_or(&fresh, AsRef::as_ref);
        if (before.health.state, &before.health.reason) != (state.health.state, &state.health.reason) {
            let (before, now) = (before.health.clone(), state.health.clone());
            all.push(Transition::HealthChanged { gpu: gpu.clone(), before, now });
        }
        if (before.via.api, before.via.moving) != (state.via.api, state.via.moving) {
            let (before, now) = (before.via.clone(), state.via.clone());
            all.push(Transition::ViaChanged { gpu: gpu.clone(), before, now });
        }
        let (before, now) = (before.drain(), state.drain());
        if before != now {
            all.push(Transition::DrainChanged { gpu: gpu.clone(), before, now });
        }
    }
    for gpu in old.gpus.keys().filter(|gpu| !new.gpus.contains_key(gpu)) {
        let index = old.parts_of(gpu).next().map(|part| part.part.gpu_index);
        all.push(Transition::GpuForgotten { gpu: gpu.clone(), index });
    }
    all
}

fn blocked_drains(old: &Ledger, new: &Ledger) -> Vec<Transition> {
    let mut all = Vec::new();
    for (gpu, _) in new.gpus.iter().filter(|(_, state)| state.marks.evicts()) {
        let before = blocking_pods(old, gpu);
        for (pod, reason) in blocking_pods(new, gpu) {
            if before.get(&pod) != Some(&reason) {
                all.push(Transition::DrainBlocked { gpu: gpu.clone(), pod, reason });
            }
        }
    }
    all
}

/// The pods that block a drain with eviction, by name, with the reason.
fn blocking_pods(ledger: &Ledger, gpu: &GpuId) -> BTreeMap<String, String> {
    if !ledger.gpus.get(gpu).is_some_and(|state| state.marks.evicts()) {
        return BTreeMap::new();
    }
    let reason = |holder: &GpuHolder| match &holder.status {
        EvictionStatus::Static => {
            Some("is a static pod: take its file out of the kubelet's manifests".to_owned())
        }
        EvictionStatus::Budget { message } => Some(format!("waits for its disruption budget: {message}")),
        EvictionStatus::Failed { message } => Some(format!("cannot be evicted: {message}")),
        _ => None,
    };
    let name = |holder: &GpuHolder| {
        let or_unknown = |text: &Option<String>| text.clone().unwrap_or_else(|| "?".into());
        format!("{}/{}", or_unknown(&holder.namespace), or_unknown(&holder.pod))
    };
    let holders = holders(ledger, gpu);
    holders.iter().filter_map(|holder| Some((name(holder), reason(holder)?))).collect()
}

/// In the order of grants, then of ends.
fn allocation_transitions(old: &Ledger, new: &Ledger) -> Vec<Transition> {
    if Arc::ptr_eq(&old.live, &new.live) {
        return Vec::new();
    }
    let mut all = Vec::new();
    for (id, allocation) in new.live.iter() {
        match old.live.get(id) {
            None => all.push(Transition::Granted(Arc::clone(allocation))),
            Some(before) if before.holder != allocation.holder => {
                all.push(Transition::HolderLearned(Arc::clone(allocation)));
            }
            Some(_) => {}
        }
    }
    // The history is in the order of the ends: what is new in it follows what was its newest entry.
    let newest = old.ended.back().map(|past| past.id);
    let mut ended: Vec<_> = new.ended.iter().rev().take_while(|past| Some(past.id) != newest).collect();
    ended.reverse();
    for past in ended {
        let allocation = Arc::new(past.allocation());
        if !old.live.contains_key(&past.id) {
            all.push(Transition::Granted(Arc::clone(&allocation)));
        }
        all.push(Transition::Ended(allocation));
    }
    all
}

fn contests(old: &Ledger, new: &Ledger) -> Vec<Transition> {
    if Arc::ptr_eq(&old.sightings, &new.sightings) {
        return Vec::new();
    }
    let known = contested(old);
    let is_known = |found: &Contested| {
        known
            .iter()
            .any(|before| (before.allocation.id, before.other.id) == (found.allocation.id, found.other.id))
    };
    contested(new).into_iter().filter(|found| !is_known(found)).map(Transition::Contested).collect()
}

fn evictions(old: &Ledger, new: &Ledger) -> Vec<Transition> {
    if Arc::ptr_eq(&old.evictions, &new.evictions) {
        return Vec::new();
    }
    let changed = new.evictions.iter().filter(|(uid, eviction)| {
        let before = old.evictions.get(*uid);
        before.is_none_or(|before| {
            before.outcome != eviction.outcome || before.request.method != eviction.request.method
        })
    });
    changed.map(|(_, eviction)| Transition::Eviction(eviction.clone())).collect()
}

/// A breaker that opens or closes; one that is half-open for a while is still one withdrawal.
fn withdrawals(old: &Ledger, new: &Ledger) -> Vec<Transition> {
    if Arc::ptr_eq(&old.breakers, &new.breakers) {
        return Vec::new();
    }
    let pause_ms = |ledger: &Ledger, resource: &Resource| {
        let breaker = ledger.breakers.get(resource).filter(|breaker| breaker.phase != Phase::Closed);
        breaker.map(|breaker| breaker.pause_ms)
    };
    let resources: BTreeSet<_> = old.breakers.keys().chain(new.breakers.keys()).collect();
    let changed = resources.into_iter().filter_map(|resource| {
        let (before, now) = (pause_ms(old, resource), pause_ms(new, resource));
        (before.is_some() != now.is_some()).then(|| Transition::ResourceWithdrawn(resource.clone(), now))
    });
    changed.collect()
}

fn policy_transitions(old: &Ledger, new: &Ledger) -> Vec<Transition> {
    if Arc::ptr_eq(&old.policies, &new.policies) {
        return Vec::new();
    }
    let missing_in =
        |other: &Ledger, version: &Arc<PolicyVersion>| !other.policies.contains_key(&version.digest);
    let added = new.policies.values().filter(|version| missing_in(old, version));
    let deleted = old.policies.values().filter(|version| missing_in(new, version));
    let added = added.map(|version| Transition::PolicyAdded(Arc::clone(version)));
    added.chain(deleted.map(|version| Transition::PolicyDeleted(Arc::clone(version)))).collect()
}

/// Whether anything differs that bypasses follow from: finding the owners of all processes is expensive.
fn may_change_bypasses(old: &Ledger, new: &Ledger) -> bool {
    let same_pods = match (&old.pods, &new.pods) {
        (Some(old), Some(new)) => Arc::ptr_eq(old, new),
        (old, new) => old.is_none() && new.is_none(),
    };
    !(same_pods
        && Arc::ptr_eq(&old.processes, &new.processes)
        && Arc::ptr_eq(&old.live, &new.live)
        && Arc::ptr_eq(&old.ended, &new.ended))
}

fn bypasses(ledger: &Ledger) -> BTreeMap<BypassKey, Bypass> {
    // Checked first: no process counts as a bypass on most nodes.
    if !ledger.processes.by_gpu.values().flatten().any(|seen| seen.is_reported) {
        return BTreeMap::new();
    }
    let all = Attributions::new(ledger).bypasses().into_iter().map(|bypass| {
        let process = &bypass.process;
        let key = (bypass.gpu.clone(), process.pid, process.identity.started_ticks, process.part.clone());
        (key, bypass)
    });
    all.collect()
}

#[cfg(test)]
mod tests;
