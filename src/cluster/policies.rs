//! Limits the events of policies: the faults of a policy that fails at every call are one event a minute.

use super::pending_event::PendingEvent;
use berth_core::policy_transitions::{PolicyTransition, policy_transitions};
use berth_core::stack::PolicyStatuses;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;

/// The faults of one policy are one event in this time, however many there are: with a stack of 16 that is 16 events a
/// minute at most. A suspension always is an event.
const FAULT_EVENT_INTERVAL: Duration = Duration::from_secs(60);

/// The policies' last status, and their faults.
#[derive(Debug, Default)]
pub(super) struct PolicyEvents {
    last: Arc<PolicyStatuses>,
    faults: BTreeMap<String, Faults>,
}

/// The faults of one policy that had no event yet.
#[derive(Debug, Default)]
struct Faults {
    times: u64,
    /// The text of the last one.
    last: String,
    /// When its next event may be published; `None`: at once.
    not_before: Option<Instant>,
}

impl PolicyEvents {
    /// The events of this status.
    pub(super) fn events(&mut self, standings: Arc<PolicyStatuses>, now: Instant) -> Vec<PendingEvent> {
        self.faults.retain(|label, _| standings.contains_key(label));
        let mut events = Vec::new();
        for transition in policy_transitions(&self.last, &standings) {
            match transition {
                PolicyTransition::Failed { label, times, last } => {
                    let faults = self.faults.entry(label).or_default();
                    faults.times += times;
                    faults.last = last;
                }
                PolicyTransition::Suspended { ref label, .. } => {
                    // Its text has the last fault.
                    if let Some(faults) = self.faults.get_mut(label) {
                        faults.times = 0;
                    }
                    events.push(PendingEvent::of_policy(&transition));
                }
                PolicyTransition::Resumed { .. } => events.push(PendingEvent::of_policy(&transition)),
            }
        }
        for (label, faults) in &mut self.faults {
            if faults.times > 0 && faults.not_before.is_none_or(|at| now >= at) {
                let (times, last) = (std::mem::take(&mut faults.times), std::mem::take(&mut faults.last));
                let failed = PolicyTransition::Failed { label: label.clone(), times, last };
                events.push(PendingEvent::of_policy(&failed));
                faults.not_before = Some(now + FAULT_EVENT_INTERVAL);
            }
        }
        self.last = standings;
        events
    }

    /// When faults that had no event yet may have one.
    pub(super) fn next_due(&self) -> Option<Instant> {
        self.faults.values().filter(|faults| faults.times > 0).filter_map(|faults| faults.not_before).min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use berth_core::stack::PolicyStatus;

    fn status(label: &str, faults: u64, suspended: bool) -> Arc<PolicyStatuses> {
        let standing = PolicyStatus {
            revision: 1,
            faults,
            suspended,
            last: Some(format!("admit: fault {faults} (trap)")),
        };
        Arc::new(PolicyStatuses::from([(label.to_owned(), standing)]))
    }

    /// Reason, whether it is a warning, and note of each event.
    fn fields(events: Vec<PendingEvent>) -> Vec<(&'static str, bool, String)> {
        events.into_iter().map(|event| (event.reason, event.warning, event.note)).collect()
    }

    #[test]
    fn a_fault_is_an_event_at_once_and_the_following_are_one_a_minute() {
        let (mut policies, begin) = (PolicyEvents::default(), Instant::now());
        let mut at = |second, status| fields(policies.events(status, begin + Duration::from_secs(second)));
        assert_eq!(at(0, status("a@1", 0, false)), []);
        let first = at(1, status("a@1", 1, false));
        assert_eq!(first, [("PolicyFault", true, "policy a@1 failed: admit: fault 1 (trap)".into())]);
        assert_eq!(at(2, status("a@1", 1, false)), [], "nothing new");
        assert_eq!(at(60, status("a@1", 40, false)), [], "too soon");
        assert_eq!(policies.next_due(), Some(begin + Duration::from_secs(61)));
        let mut at = |second, status| fields(policies.events(status, begin + Duration::from_secs(second)));
        let later = at(61, status("a@1", 42, false));
        assert_eq!(later[0].2, "policy a@1 failed 41 times, with the last error: admit: fault 42 (trap)");
        assert_eq!(at(62, status("b@2", 3, false)).len(), 1, "another policy has a minute of its own");
        assert_eq!(policies.next_due(), None);
    }

    #[test]
    fn a_suspension_and_its_end_always_are_events() {
        let (mut policies, now) = (PolicyEvents::default(), Instant::now());
        policies.events(status("a@1", 4, false), now);
        let suspended = fields(policies.events(status("a@1", 5, true), now));
        assert_eq!(suspended.len(), 1, "the last fault is part of it: {suspended:?}");
        assert!(suspended[0].0 == "PolicySuspended" && suspended[0].1, "{suspended:?}");
        assert!(suspended[0].2.contains("unsuspend") && suspended[0].2.contains("fault 5"));
        assert_eq!(policies.events(status("a@1", 5, true), now), []);
        let again = fields(policies.events(status("a@1", 5, false), now));
        assert_eq!((again[0].0, again[0].1), ("PolicyAskedAgain", false));
        // No event for a policy that the stack no longer has.
        policies.events(status("a@1", 6, true), now);
        assert_eq!(policies.events(Arc::default(), now), []);
    }
}
