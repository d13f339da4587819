//! Computes the events of policies from two successive statuses: faults, suspensions, and that a policy is asked again.

use super::transitions::{PendingEvent, normal, warning};
use berth_core::admission::{FAULTS_TO_SUSPEND, Standing, Standings};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;

/// The faults of one policy are one event in this time, however many there are: with a stack of 16 that is 16 events a
/// minute at most. A suspension always is an event.
const FAULT_EVENT_INTERVAL: Duration = Duration::from_secs(60);

/// The note of a fault without a text.
const NO_ERROR_TEXT: &str = "no error text";

/// The policies' last status, and the events of it so far.
#[derive(Debug, Default)]
pub(super) struct PolicyEvents {
    last: Arc<Standings>,
    /// When faults of a policy last were an event, and how many faults it had then.
    reported: BTreeMap<String, (Instant, u64)>,
}

impl PolicyEvents {
    /// The events of this status.
    pub(super) fn events(&mut self, standings: Arc<Standings>, now: Instant) -> Vec<PendingEvent> {
        self.reported.retain(|label, _| standings.contains_key(label));
        let mut notices = Vec::new();
        for (label, (_, faults)) in &mut self.reported {
            // An activation resets the counts; they may be higher by now than before it.
            let revision = self.last.get(label).map(|standing| standing.revision);
            let is_reset = |s: &Standing| s.faults < *faults || Some(s.revision) != revision;
            if standings.get(label).is_some_and(is_reset) {
                *faults = 0;
            }
        }
        for (label, standing) in standings.iter() {
            let before = self.last.get(label).cloned().unwrap_or_default();
            let notice = match (before.suspended, standing.suspended) {
                (false, true) => Some(suspension_event(label, standing)),
                (true, false) => {
                    let note = format!("policy {label} was suspended and is asked again");
                    Some(normal("PolicyAskedAgain", "Ask", note))
                }
                _ => self.fault_event(label, standing, now),
            };
            notices.extend(notice);
        }
        self.last = standings;
        notices
    }

    /// When faults that are not reported yet may next be an event.
    pub(super) fn next_due(&self) -> Option<Instant> {
        let is_waiting = |label: &str, faults: u64| self.last.get(label).is_some_and(|s| s.faults > faults);
        let waiting = self.reported.iter().filter(|(label, (_, faults))| is_waiting(label, *faults));
        waiting.map(|(_, (at, _))| *at + FAULT_EVENT_INTERVAL).min()
    }

    fn fault_event(&mut self, label: &str, standing: &Standing, now: Instant) -> Option<PendingEvent> {
        let reported = self.reported.get(label);
        let before = reported.map_or(0, |(_, faults)| *faults);
        let due = reported.is_none_or(|(at, _)| now.duration_since(*at) >= FAULT_EVENT_INTERVAL);
        if standing.faults == before || !due {
            return None;
        }
        self.reported.insert(label.to_owned(), (now, standing.faults));
        let last = standing.last.as_deref().unwrap_or(NO_ERROR_TEXT);
        let note = match standing.faults - before {
            1 => format!("policy {label} failed: {last}"),
            n => format!("policy {label} failed {n} times, the last time so: {last}"),
        };
        Some(warning("PolicyFault", "Ask", note))
    }
}

fn suspension_event(label: &str, standing: &Standing) -> PendingEvent {
    let last = standing.last.as_deref().unwrap_or(NO_ERROR_TEXT);
    let note = format!(
        "policy {label} is not asked any more after {FAULTS_TO_SUSPEND} faults in a row (`berth policy unsuspend` \
         has it asked again): {last}"
    );
    warning("PolicySuspended", "Ask", note)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status(label: &str, faults: u64, suspended: bool) -> Arc<Standings> {
        let standing =
            Standing { revision: 1, faults, suspended, last: Some(format!("admit: fault {faults} (trap)")) };
        Arc::new(Standings::from([(label.to_owned(), standing)]))
    }

    /// Reason, whether it is a warning, and note of each event.
    fn fields(notices: Vec<PendingEvent>) -> Vec<(&'static str, bool, String)> {
        notices.into_iter().map(|n| (n.reason, n.warning, n.note)).collect()
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
        assert_eq!(policies.next_due(), Some(begin + Duration::from_secs(61)), "it waits");
        let mut at = |second, status| fields(policies.events(status, begin + Duration::from_secs(second)));
        let later = at(61, status("a@1", 42, false));
        assert!(
            later[0].2.starts_with("policy a@1 failed 41 times, the last time so: admit: fault 42"),
            "{later:?}"
        );
        // Another activation resets the counts: as many faults as before are an event.
        assert_eq!(at(62, status("a@1", 0, false)), []);
        assert_eq!(at(200, status("a@1", 42, false)).len(), 1);
        assert_eq!(at(199, status("a@1", 1, false)), [], "of another activation, but too soon");
        assert_eq!(at(201, status("b@2", 3, false)).len(), 1, "another policy has a minute of its own");
        let more = Standing { revision: 2, faults: 9, suspended: false, last: Some("again".into()) };
        let events = at(300, Arc::new(Standings::from([("b@2".to_owned(), more)])));
        assert_eq!(
            events[0].2, "policy b@2 failed 9 times, the last time so: again",
            "all are of revision 2"
        );
    }

    #[test]
    fn a_suspension_and_its_end_always_are_events() {
        let (mut policies, now) = (PolicyEvents::default(), Instant::now());
        policies.events(status("a@1", 4, false), now);
        let suspended = fields(policies.events(status("a@1", 5, true), now));
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
