//! Converts transitions of the node and of policies into Kubernetes events, and computes those of GPUs that are used
//! without an allocation and of pods that can use them so. Pure, except for the record of what was reported.

use berth_core::policy_transitions::PolicyTransition;
use berth_kernel::drain::eviction::{EvictionMethod, EvictionOutcome, EvictionRecord};
use berth_kernel::drain::marks::Drain;
use berth_kernel::evidence::attribution::{Attributions, Bypass, pods_with_gpu_bypass};
use berth_kernel::evidence::pods::{BypassKind, Pod, PodBypass};
use berth_kernel::evidence::runtime::BypassOutcome;
use berth_kernel::grants::allocation::{Allocation, Holder};
use berth_kernel::hardware::health::HealthState;
use berth_kernel::hardware::process::{Process, TrackedProcess};
use berth_kernel::ids::names::GpuId;
use berth_kernel::node::ledger::Ledger;
use berth_kernel::node::transitions::{GpuName, Transition};
use std::collections::{BTreeMap, BTreeSet};

/// Longest note of an event, bytes (the limit of events.k8s.io/v1).
const NOTE_BYTES_MAX: usize = 1024;

/// One Kubernetes event to publish.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct PendingEvent {
    pub(super) regarding: Regarding,
    /// Whether its type is `Warning`, else `Normal`.
    pub(super) warning: bool,
    /// CamelCase, as `kubectl describe` shows it.
    pub(super) reason: &'static str,
    /// The `action` of events.k8s.io/v1: what was done.
    pub(super) action: &'static str,
    /// The text.
    pub(super) note: String,
}

/// The object that an event is about.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Regarding {
    /// This node.
    Node,
    /// A pod of this node.
    Pod { namespace: String, name: String, uid: String },
}

impl Regarding {
    fn pod(pod: &Pod) -> Self {
        let (namespace, name, uid) = (pod.namespace.clone(), pod.name.clone(), pod.uid.clone());
        Self::Pod { namespace, name, uid }
    }
}

impl PendingEvent {
    /// The event of a transition; `None` for those that only the event streams of the admin API report. Bypasses have
    /// events of their own, see [`Bypasses`].
    pub(super) fn of_transition(transition: &Transition, ledger: &Ledger) -> Option<Self> {
        if transition.is_minor() {
            return None;
        }
        let (reason, action) = match transition {
            Transition::HealthChanged { before, now, .. } => match (before.state, now.state) {
                (_, HealthState::Vanished) => ("GPUVanished", "Scan"),
                (HealthState::Vanished, _) => ("GPUReturned", "Scan"),
                (_, HealthState::Healthy) => ("GPUHealthy", "Scan"),
                (_, HealthState::Unhealthy) => ("GPUUnhealthy", "Scan"),
                (_, HealthState::Degraded) => ("GPUDegraded", "Scan"),
            },
            Transition::DrainChanged { before, now, .. } => match (before, now) {
                (_, Drain::Active) => ("GPUUncordoned", "Uncordon"),
                (Drain::Draining(..) | Drain::Drained(_), Drain::Cordoned(_)) => ("GPUDrainStopped", "Drain"),
                (_, Drain::Cordoned(_)) => ("GPUCordoned", "Cordon"),
                (_, Drain::Draining(..)) => ("GPUDraining", "Drain"),
                (_, Drain::Drained(_)) => ("GPUDrained", "Drain"),
            },
            Transition::ViaChanged { before, now, .. } => match (before.api == now.api, now.moving) {
                (true, true) => ("GPUMoving", "Move"),
                (true, false) => ("GPUMoveCancelled", "Move"),
                (false, _) => ("GPUMoved", "Move"),
            },
            Transition::DrainBlocked { .. } => ("GPUDrainBlocked", "Drain"),
            Transition::GpuForgotten { .. } => ("GPUForgotten", "Forget"),
            Transition::EndsWithheldChanged(Some(_)) => ("AllocationsOnHold", "Hold"),
            Transition::EndsWithheldChanged(None) => ("AllocationsHoldOver", "Hold"),
            Transition::StrategyChanged(Some(_)) => ("NoDeviceStrategy", "Scan"),
            Transition::StrategyChanged(None) => ("DeviceStrategyFound", "Scan"),
            Transition::NodesChanged(Some(_)) => ("DeviceNodesMissing", "Scan"),
            Transition::NodesChanged(None) => ("DeviceNodesFound", "Scan"),
            Transition::ResourceWithdrawn(_, Some(_)) => ("ResourceWithdrawn", "Allocate"),
            Transition::ResourceWithdrawn(_, None) => ("ResourceListed", "Allocate"),
            Transition::Eviction(eviction) => return Self::of_eviction(eviction, ledger),
            Transition::Contested(found) => {
                return Some(Self::of_holder(
                    transition,
                    "GPUContested",
                    "Reconcile",
                    &found.allocation,
                    ledger,
                ));
            }
            Transition::LimitFailed(allocation, _) => {
                return Some(Self::of_holder(transition, "LimitNotSet", "Limit", allocation, ledger));
            }
            Transition::LimitChanged(allocation, _) => {
                return Some(Self::of_holder(transition, "LimitChanged", "Limit", allocation, ledger));
            }
            Transition::GrantForged(_, container) => {
                let (namespace, name, uid) = (&container.namespace, &container.pod, &container.pod_uid);
                let regarding =
                    Regarding::Pod { namespace: namespace.clone(), name: name.clone(), uid: uid.clone() };
                return Some(Self::of_pod(transition, "GrantForged", "Reconcile", regarding, ledger));
            }
            Transition::ContainerBypass(bypass) => {
                let reason = match bypass.outcome {
                    BypassOutcome::Failed => "GPUBypassNotStopped",
                    BypassOutcome::Stripped => "GPUBypassStripped",
                    BypassOutcome::Denied => "GPUBypassDenied",
                };
                let regarding = Regarding::Pod {
                    namespace: bypass.namespace.clone(),
                    name: bypass.pod.clone(),
                    uid: bypass.pod_uid.clone(),
                };
                return Some(Self::of_pod(transition, reason, "Guard", regarding, ledger));
            }
            Transition::GuardChanged(true) => ("GuardConnected", "Connect"),
            Transition::GuardChanged(false) => ("GuardAway", "Connect"),
            Transition::PartFound(_)
            | Transition::OffersChanged(_)
            | Transition::Granted(_)
            | Transition::HolderLearned(_)
            | Transition::Ended(_)
            | Transition::PolicyAdded(_)
            | Transition::PolicyDeleted(_)
            | Transition::StackActivated(_)
            | Transition::BypassStarted(_)
            | Transition::BypassEnded(_)
            | Transition::BypassPossible(_) => return None,
        };
        let note = transition.describe(ledger, GpuName::IndexAndUuid);
        Some(Self::of_node(transition.is_warning(), reason, action, note))
    }

    /// The event of a pod that was evicted or deleted; it regards the pod.
    fn of_eviction(eviction: &EvictionRecord, ledger: &Ledger) -> Option<Self> {
        if eviction.outcome != EvictionOutcome::Accepted {
            return None;
        }
        let done = match eviction.request.method {
            EvictionMethod::Evict => "evicted",
            EvictionMethod::Delete => "deleted at the deadline of a drain",
        };
        let drain = ledger.gpus.get(&eviction.request.gpu).map(|gpu| gpu.drain()).unwrap_or_default();
        let by = drain.mark().map_or_else(String::new, |mark| format!(" {}", mark.by_and_reason()));
        let gpu = GpuName::IndexAndUuid.of(ledger, &eviction.request.gpu);
        let regarding = Regarding::pod(&eviction.request.pod);
        let note = format!("{done}: {gpu} is being drained{by}");
        Some(Self { regarding, ..Self::of_node(false, "GPUDrain", "Evict", note) })
    }

    /// A warning about an allocation; it regards the pod, or the node while the pod's name is unknown.
    fn of_holder(
        transition: &Transition,
        reason: &'static str,
        action: &'static str,
        allocation: &Allocation,
        ledger: &Ledger,
    ) -> Self {
        let regarding = match allocation.holder.clone() {
            Holder { namespace: Some(namespace), pod: Some(name), pod_uid: Some(uid), .. } => {
                Regarding::Pod { namespace, name, uid }
            }
            _ => Regarding::Node,
        };
        Self::of_pod(transition, reason, action, regarding, ledger)
    }

    /// A warning about a pod, as a rule.
    fn of_pod(
        transition: &Transition,
        reason: &'static str,
        action: &'static str,
        regarding: Regarding,
        ledger: &Ledger,
    ) -> Self {
        let note = transition.describe(ledger, GpuName::IndexAndUuid);
        Self { regarding, ..Self::of_node(true, reason, action, note) }
    }

    /// The event of a policy.
    pub(super) fn of_policy(transition: &PolicyTransition) -> Self {
        let (warning, reason) = match transition {
            PolicyTransition::Failed { .. } => (true, "PolicyFault"),
            PolicyTransition::Suspended { .. } => (true, "PolicySuspended"),
            PolicyTransition::Resumed { .. } => (false, "PolicyAskedAgain"),
        };
        Self::of_node(warning, reason, "Ask", transition.describe())
    }

    /// An event that regards the node. The note is cut at [`NOTE_BYTES_MAX`].
    fn of_node(warning: bool, reason: &'static str, action: &'static str, mut note: String) -> Self {
        note.truncate(note.floor_char_boundary(NOTE_BYTES_MAX));
        Self { regarding: Regarding::Node, warning, reason, action, note }
    }
}

/// Bypasses with the same key are reported as one: a job that starts process after process is one event. A pod can
/// choose the names of its processes, so a pod counts by its UID only.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Key {
    gpu: GpuId,
    by: Actor,
    reason: &'static str,
}

/// The pod or the processes that use a GPU.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Actor {
    /// A pod, by UID.
    Pod(String),
    /// Processes of this name that are in no pod.
    Named(String),
}

/// The bypasses that were reported and are not over.
#[derive(Debug, Default)]
pub(super) struct Bypasses {
    open: BTreeSet<Key>,
    /// UIDs of the reported pods whose spec reaches GPUs.
    pods: BTreeSet<String>,
}

impl Bypasses {
    /// The events of this snapshot, at most `max`. Those beyond it are returned for a later snapshot, if they still
    /// apply.
    pub(super) fn events(&mut self, ledger: &Ledger, max: usize) -> Vec<PendingEvent> {
        let mut notices = Vec::new();
        let now = current_bypasses(ledger);
        for (key, one) in &now {
            if notices.len() < max && self.open.insert(key.clone()) {
                notices.push(bypass_event(ledger, key, one));
            }
        }
        self.close(ledger, &now, max, &mut notices);
        self.report_pods(ledger, max, &mut notices);
        notices
    }

    /// Removes bypasses that are over; a GPU whose last one is over has an event.
    fn close(
        &mut self,
        ledger: &Ledger,
        now: &BTreeMap<Key, Bypass>,
        max: usize,
        notices: &mut Vec<PendingEvent>,
    ) {
        self.open.retain(|key| ledger.gpus.contains_key(&key.gpu));
        // A process that replaced another a moment ago continues its bypass, before it counts as one itself.
        let alone: BTreeSet<(&GpuId, Actor)> = ledger.processes.by_gpu.iter().flat_map(unexplained).collect();
        let used = |gpu: &GpuId| alone.iter().any(|(on, _)| *on == gpu);
        // The processes of a GPU that does not answer are unknown.
        let answers = |gpu: &GpuId| ledger.processes.by_gpu.contains_key(gpu);
        let open: BTreeSet<GpuId> = self.open.iter().map(|key| key.gpu.clone()).collect();
        for gpu in open.iter().filter(|gpu| answers(gpu) && !used(gpu)) {
            if notices.len() < max {
                let gpu_name = GpuName::IndexAndUuid.of(ledger, gpu);
                let note = format!("{gpu_name} is no longer used without an allocation");
                notices.push(PendingEvent::of_node(false, "GPUBypassOver", "Scan", note));
                self.open.retain(|key| key.gpu != *gpu);
            }
        }
        self.open.retain(|key| {
            !(answers(&key.gpu) && used(&key.gpu))
                || now.contains_key(key)
                || alone.contains(&(&key.gpu, key.by.clone()))
        });
    }

    /// Adds an event for each new pod whose spec lets it use GPUs without an allocation; it regards the pod.
    fn report_pods(&mut self, ledger: &Ledger, max: usize, notices: &mut Vec<PendingEvent>) {
        if let Some(view) = ledger.pods.as_ref().filter(|view| view.current) {
            self.pods.retain(|uid| view.pods.contains_key(uid));
        }
        for (pod, by) in pods_with_gpu_bypass(ledger) {
            if notices.len() < max && !self.pods.contains(&pod.uid) {
                notices.push(possible_bypass_event(pod, by));
                self.pods.insert(pod.uid.clone());
            }
        }
    }
}

/// The actors on a GPU that no allocation explains, whether they count as a bypass already or not yet.
fn unexplained<'l>(
    (gpu, all): (&'l GpuId, &'l Vec<TrackedProcess>),
) -> impl Iterator<Item = (&'l GpuId, Actor)> {
    all.iter().filter(|seen| seen.unexplained_since.is_some()).map(move |seen| (gpu, actor(&seen.process)))
}

fn actor(process: &Process) -> Actor {
    let named = || process.identity.name.clone().unwrap_or_default();
    process.identity.owner.pod().map_or_else(|| Actor::Named(named()), |pod| Actor::Pod(pod.uid.clone()))
}

/// One bypass for each key.
fn current_bypasses(ledger: &Ledger) -> BTreeMap<Key, Bypass> {
    // Checked first: this runs for every snapshot, and finding the owners of processes is expensive.
    if !ledger.processes.by_gpu.values().flatten().any(|seen| seen.is_reported) {
        return BTreeMap::new();
    }
    let all = Attributions::new(ledger).bypasses().into_iter().map(|bypass| {
        let (gpu, by) = (bypass.gpu.clone(), actor(&bypass.process));
        (Key { gpu, by, reason: bypass.reason.as_str() }, bypass)
    });
    // Reversed, so that of several processes with one key the one with the lowest id stays.
    all.rev().collect()
}

/// The event of a bypass. Its note has nothing that differs between the processes of one key, so that the API server
/// counts a repetition and not another event.
fn bypass_event(ledger: &Ledger, key: &Key, one: &Bypass) -> PendingEvent {
    let by = match &key.by {
        Actor::Pod(uid) => {
            let known = ledger.pod_by_uid(uid);
            let name = known.and_then(|pod| Some(format!("{}/{}", pod.namespace?, pod.pod?)));
            format!("pod {}", name.unwrap_or_else(|| uid.clone()))
        }
        Actor::Named(name) if name.is_empty() => "a process".into(),
        // Every process chooses its own name.
        Actor::Named(name) => format!("process {}", name.escape_debug()),
    };
    let gpu = GpuName::IndexAndUuid.of(ledger, &key.gpu);
    let note = format!("{gpu} is used without an allocation by {by}: {}", one.reason.describe());
    PendingEvent::of_node(true, "GPUBypassed", "Scan", note)
}

/// The event of a pod whose spec lets it use GPUs. A warning if it names or mounts GPUs; a privileged pod, or one that
/// takes variables from elsewhere, may not use them at all.
fn possible_bypass_event(pod: &Pod, by: &PodBypass) -> PendingEvent {
    let warning = matches!(by.kind, BypassKind::NamesGpus | BypassKind::MountsGpus);
    let note = format!("can use GPUs of this node without an allocation: {}", by.describe());
    let event = PendingEvent::of_node(warning, "GPUBypassPossible", "Scan", note);
    PendingEvent { regarding: Regarding::pod(pod), ..event }
}

#[cfg(test)]
pub(super) mod tests;
