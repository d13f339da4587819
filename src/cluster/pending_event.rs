//! Converts transitions of the node and of policies into Kubernetes events. Pure.

use berth_core::policy_transitions::PolicyTransition;
use berth_kernel::drain::Drain;
use berth_kernel::evict::{EvictionMethod, EvictionOutcome, EvictionRecord};
use berth_kernel::health::HealthState;
use berth_kernel::ledger::Ledger;
use berth_kernel::pods::Pod;
use berth_kernel::transitions::{GpuName, Transition};

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
    pub(super) fn pod(pod: &Pod) -> Self {
        let (namespace, name, uid) = (pod.namespace.clone(), pod.name.clone(), pod.uid.clone());
        Self::Pod { namespace, name, uid }
    }
}

impl PendingEvent {
    /// The event of a transition; `None` for those that only the event streams of the admin API report. Bypasses have
    /// events of their own, see [`super::bypass`].
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
            Transition::DrainBlocked { .. } => ("GPUDrainBlocked", "Drain"),
            Transition::GpuForgotten { .. } => ("GPUForgotten", "Forget"),
            Transition::HoldChanged(Some(_)) => ("AllocationsOnHold", "Hold"),
            Transition::HoldChanged(None) => ("AllocationsHoldOver", "Hold"),
            Transition::Eviction(asked) => return Self::of_eviction(asked, ledger),
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
    fn of_eviction(asked: &EvictionRecord, ledger: &Ledger) -> Option<Self> {
        if asked.outcome != EvictionOutcome::Accepted {
            return None;
        }
        let done = match asked.request.method {
            EvictionMethod::Evict => "evicted",
            EvictionMethod::Delete => "deleted at the deadline of a drain",
        };
        let drain = ledger.gpus.get(&asked.request.gpu).map(|gpu| gpu.drain()).unwrap_or_default();
        let by = drain.mark().map_or_else(String::new, |mark| format!(" {}", mark.by_and_reason()));
        let gpu = GpuName::IndexAndUuid.of(ledger, &asked.request.gpu);
        let regarding = Regarding::pod(&asked.request.pod);
        let note = format!("{done}: {gpu} is being drained{by}");
        Some(Self { regarding, ..Self::of_node(false, "GPUDrain", "Evict", note) })
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
    pub(super) fn of_node(
        warning: bool,
        reason: &'static str,
        action: &'static str,
        mut note: String,
    ) -> Self {
        note.truncate(note.floor_char_boundary(NOTE_BYTES_MAX));
        Self { regarding: Regarding::Node, warning, reason, action, note }
    }
}

#[cfg(test)]
pub(super) mod tests;
