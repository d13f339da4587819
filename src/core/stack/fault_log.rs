//! Logs faults of policies: the first one at once, and then one line a minute. A policy that fails at some calls only is
//! never suspended, and may fail at every Allocate.

use berth_kernel::decision::{CallOutcome, CallRecord};
use berth_kernel::policy::{FaultKind, Hook};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// Least time between two lines about the same kind of fault of the same hook of a policy.
const LOG_INTERVAL: Duration = Duration::from_secs(60);
/// Most kinds that are kept: those of 16 policies with four hooks that fail in four ways. When there are more, all are
/// dropped, and logged again.
const KINDS_MAX: usize = 256;

/// The faults that were logged.
#[derive(Debug, Default)]
pub(crate) struct FaultLog {
    logged: BTreeMap<(String, Hook, FaultKind), Logged>,
}

#[derive(Debug)]
struct Logged {
    at: Instant,
    /// How many were not logged since.
    omitted: u64,
}

impl FaultLog {
    /// Logs the faults of one evaluation.
    pub(crate) fn log(&mut self, hook: Hook, calls: &[CallRecord]) {
        for call in calls {
            let CallOutcome::Fault(fault) = &call.outcome else { continue };
            if let Some(omitted) = self.due(&call.policy, hook, fault.kind, Instant::now()) {
                tracing::warn!(policy = call.policy, %hook, %fault, omitted, "a policy failed");
            }
        }
    }

    /// The number of omitted faults of this kind, if this one is to be logged.
    fn due(&mut self, policy: &str, hook: Hook, kind: FaultKind, now: Instant) -> Option<u64> {
        let key = (policy.to_owned(), hook, kind);
        if let Some(logged) = self.logged.get_mut(&key) {
            if now.duration_since(logged.at) < LOG_INTERVAL {
                logged.omitted += 1;
                return None;
            }
            logged.at = now;
            return Some(std::mem::take(&mut logged.omitted));
        }
        if self.logged.len() >= KINDS_MAX {
            self.logged.clear();
        }
        self.logged.insert(key, Logged { at: now, omitted: 0 });
        Some(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fault_is_logged_at_once_and_then_once_a_minute_with_the_number_of_omitted_ones() {
        let (mut log, begin) = (FaultLog::default(), Instant::now());
        let mut at = |seconds: u64, policy: &str, kind| {
            log.due(policy, Hook::Admit, kind, begin + Duration::from_secs(seconds))
        };
        assert_eq!(at(0, "a", FaultKind::Trap), Some(0));
        assert_eq!(at(1, "a", FaultKind::Trap), None);
        assert_eq!(at(1, "a", FaultKind::Fuel), Some(0), "another kind");
        assert_eq!(at(1, "b", FaultKind::Trap), Some(0), "another policy");
        assert_eq!(at(59, "a", FaultKind::Trap), None);
        assert_eq!(at(60, "a", FaultKind::Trap), Some(2));
        assert_eq!(at(61, "a", FaultKind::Trap), None);
    }

    #[test]
    fn the_number_of_kept_kinds_is_limited() {
        let (mut log, now) = (FaultLog::default(), Instant::now());
        for n in 0..10_000 {
            log.due(&format!("p{n}"), Hook::Offer, FaultKind::Trap, now);
            assert!(log.logged.len() <= KINDS_MAX);
        }
    }
}
