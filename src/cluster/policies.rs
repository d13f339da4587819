//! What is told of policies: that they fail, are suspended, and are asked again. The difference of two
//! looks at how they fare.

use super::news::{Notice, calm, warning};
use berth_core::admission::{FAULTS_TO_SUSPEND, Standing, Standings};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;

/// Faults of one policy are told so often, however many there are: with a stack of 16 that is 16 events
/// a minute at most. That it is suspended is told in any case.
const FAULTS_EVERY: Duration = Duration::from_secs(60);

/// What was told so far.
#[derive(Debug, Default)]
pub(super) struct Policies {
    seen: Arc<Standings>,
    /// When faults of a policy were told, and how many there had been then.
    told: BTreeMap<String, (Instant, u64)>,
}

impl Policies {
    /// What is to be told of how policies fare now.
    pub(super) fn news(&mut self, standings: Arc<Standings>, now: Instant) -> Vec<Notice> {
        self.told.retain(|label, _| standings.contains_key(label));
        let mut notices = Vec::new();
        for (label, (_, faults)) in &mut self.told {
            // Counts begin anew with an activation, and may be higher by now than they were.
            let seen = self.seen.get(label).map(|standing| standing.revision);
            let anew = |s: &Standing| s.faults < *faults || Some(s.revision) != seen;
            if standings.get(label).is_some_and(anew) {
                *faults = 0;
            }
        }
        for (label, standing) in standings.iter() {
            let before = self.seen.get(label).cloned().unwrap_or_default();
            let notice = match (before.suspended, standing.suspended) {
                (false, true) => Some(suspended(label, standing)),
                (true, false) => {
                    let note = format!("policy {label} was suspended and is asked again");
                    Some(calm("PolicyAskedAgain", "Ask", note))
                }
                _ => self.failed(label, standing, now),
            };
            notices.extend(notice);
        }
        self.seen = standings;
        notices
    }

    /// When faults that were not told yet may be.
    pub(super) fn due(&self) -> Option<Instant> {
        let untold = |label: &str, faults: u64| self.seen.get(label).is_some_and(|s| s.faults > faults);
        let waiting = self.told.iter().filter(|(label, (_, faults))| untold(label, *faults));
        waiting.map(|(_, (at, _))| *at + FAULTS_EVERY).min()
    }

    fn failed(&mut self, label: &str, standing: &Standing, now: Instant) -> Option<Notice> {
        let told = self.told.get(label);
        let before = told.map_or(0, |(_, faults)| *faults);
        let due = told.is_none_or(|(at, _)| now.duration_since(*at) >= FAULTS_EVERY);
        if standing.faults == before || !due {
            return None;
        }
        self.told.insert(label.to_owned(), (now, standing.faults));
        let last = standing.last.as_deref().unwrap_or("no word of it");
        let note = match standing.faults - before {
            1 => format!("policy {label} failed: {last}"),
            n => format!("policy {label} failed {n} times, the last time so: {last}"),
        };
        Some(warning("PolicyFault", "Ask", note))
    }
}

fn suspended(label: &str, standing: &Standing) -> Notice {
    let last = standing.last.as_deref().unwrap_or("no word of it");
    let note = format!(
        "policy {label} is not asked any more after {FAULTS_TO_SUSPEND} faults in a row (`berth policy unsuspend` \
         has it asked again): {last}"
    );
    warning("PolicySuspended", "Ask", note)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fares(label: &str, faults: u64, suspended: bool) -> Arc<Standings> {
        let standing =
            Standing { revision: 1, faults, suspended, last: Some(format!("admit: fault {faults} (trap)")) };
        Arc::new(Standings::from([(label.to_owned(), standing)]))
    }

    fn told(notices: Vec<Notice>) -> Vec<(&'static str, bool, String)> {
        notices.into_iter().map(|n| (n.reason, n.warning, n.note)).collect()
    }

    #[test]
    fn a_fault_is_told_at_once_and_the_following_once_a_minute() {
        let (mut policies, begin) = (Policies::default(), Instant::now());
        let mut at = |second, fares| told(policies.news(fares, begin + Duration::from_secs(second)));
        assert_eq!(at(0, fares("a@1", 0, false)), []);
        let first = at(1, fares("a@1", 1, false));
        assert_eq!(first, [("PolicyFault", true, "policy a@1 failed: admit: fault 1 (trap)".into())]);
        assert_eq!(at(2, fares("a@1", 1, false)), [], "nothing new");
        assert_eq!(at(60, fares("a@1", 40, false)), [], "too soon");
        assert_eq!(policies.due(), Some(begin + Duration::from_secs(61)), "but not forgotten");
        let mut at = |second, fares| told(policies.news(fares, begin + Duration::from_secs(second)));
        let later = at(61, fares("a@1", 42, false));
        assert!(
            later[0].2.starts_with("policy a@1 failed 41 times, the last time so: admit: fault 42"),
            "{later:?}"
        );
        // Another activation begins its counts anew, and as many faults as before are news.
        assert_eq!(at(62, fares("a@1", 0, false)), []);
        assert_eq!(at(200, fares("a@1", 42, false)).len(), 1);
        assert_eq!(at(199, fares("a@1", 1, false)), [], "that of another activation, too soon");
        assert_eq!(at(201, fares("b@2", 3, false)).len(), 1, "another policy has a minute of its own");
        let more = Standing { revision: 2, faults: 9, suspended: false, last: Some("again".into()) };
        let words = at(300, Arc::new(Standings::from([("b@2".to_owned(), more)])));
        assert_eq!(words[0].2, "policy b@2 failed 9 times, the last time so: again", "all are of revision 2");
    }

    #[test]
    fn a_suspension_and_its_end_are_told_in_any_case() {
        let (mut policies, now) = (Policies::default(), Instant::now());
        policies.news(fares("a@1", 4, false), now);
        let suspended = told(policies.news(fares("a@1", 5, true), now));
        assert!(suspended[0].0 == "PolicySuspended" && suspended[0].1, "{suspended:?}");
        assert!(suspended[0].2.contains("unsuspend") && suspended[0].2.contains("fault 5"));
        assert_eq!(policies.news(fares("a@1", 5, true), now), []);
        let again = told(policies.news(fares("a@1", 5, false), now));
        assert_eq!((again[0].0, again[0].1), ("PolicyAskedAgain", false));
        // A stack without it says nothing of it.
        policies.news(fares("a@1", 6, true), now);
        assert_eq!(policies.news(Arc::default(), now), []);
    }
}
