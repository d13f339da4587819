//! Converts transitions of the node and of policies into events of the API.

use super::ring::WORDS_BYTES_MAX;
use berth_api::{Event, EventKind, rfc3339};
use berth_core::policy_transitions::PolicyTransition;
use berth_kernel::drain::Drain;
use berth_kernel::ledger::Ledger;
use berth_kernel::time::Now;
use berth_kernel::transitions::{GpuName, Transition};

/// An event about the whole node. `words` are cut at [`WORDS_BYTES_MAX`].
pub(crate) fn node_event(kind: EventKind, mut words: String, ledger: &Ledger, now: Now) -> Event {
    words.truncate(words.floor_char_boundary(WORDS_BYTES_MAX));
    Event {
        kind,
        at: rfc3339(now.wall_ms),
        generation: ledger.generation,
        gpu: None,
        allocation: None,
        policy: None,
        words,
    }
}

/// The event of a transition; `None` for those that only the log and Kubernetes events report.
pub(crate) fn transition_event(transition: &Transition, ledger: &Ledger, now: Now) -> Option<Event> {
    let (mut allocation, mut policy) = (None, None);
    let kind = match transition {
        Transition::PartFound(_) => EventKind::GpuFound,
        Transition::OffersChanged(_) => EventKind::OffersChanged,
        Transition::HealthChanged { .. } => EventKind::GpuHealth,
        Transition::DrainChanged { now, .. } => match now {
            Drain::Active => EventKind::GpuUncordoned,
            Drain::Cordoned(_) => EventKind::GpuCordoned,
            Drain::Draining(..) => EventKind::GpuDraining,
            Drain::Drained(_) => EventKind::GpuDrained,
        },
        Transition::GpuForgotten { .. } => EventKind::GpuForgotten,
        Transition::Granted(granted) => {
            allocation = Some(granted.id);
            EventKind::AllocationGranted
        }
        Transition::HolderLearned(held) => {
            allocation = Some(held.id);
            EventKind::AllocationHolder
        }
        Transition::Ended(ended) => {
            allocation = Some(ended.id);
            EventKind::AllocationEnded
        }
        Transition::Eviction(_) => EventKind::Eviction,
        Transition::HoldChanged(_) => EventKind::Hold,
        Transition::PolicyAdded(version) => {
            policy = Some(version.label());
            EventKind::PolicyUploaded
        }
        Transition::PolicyDeleted(version) => {
            policy = Some(version.label());
            EventKind::PolicyDeleted
        }
        Transition::StackActivated(_) => EventKind::StackActivated,
        Transition::BypassStarted(_) => EventKind::Bypass,
        Transition::BypassEnded(_) => EventKind::BypassOver,
        // An eviction event has the reason already; pods are listed by `/pods`.
        Transition::DrainBlocked { .. } | Transition::BypassPossible(_) => return None,
    };
    let gpu = transition.gpu(ledger).map(|gpu| gpu.to_string());
    let event = node_event(kind, transition.describe(ledger, GpuName::Index), ledger, now);
    Some(Event { gpu, allocation: allocation.map(|id| id.to_string()), policy, ..event })
}

/// The event of a policy of the active stack.
pub(crate) fn policy_event(transition: &PolicyTransition, ledger: &Ledger, now: Now) -> Event {
    let kind = match transition {
        PolicyTransition::Failed { .. } => EventKind::PolicyFault,
        PolicyTransition::Suspended { .. } => EventKind::PolicySuspended,
        PolicyTransition::Resumed { .. } => EventKind::PolicyAskedAgain,
    };
    let event = node_event(kind, transition.describe(), ledger, now);
    Event { policy: Some(transition.label().to_owned()), ..event }
}
