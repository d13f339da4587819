//! Tells the log of policies that fail: in full the first time, and then once a minute as long as it
//! goes on. A policy that fails now and then is never suspended, and fails at every Allocate.

use berth_kernel::decision::{CallNote, Said};
use berth_kernel::policy::{FaultKind, Hook};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// How often the same kind of fault of the same hook of a policy is told.
const AGAIN_AFTER: Duration = Duration::from_secs(60);
/// Kinds that are remembered: 16 policies with four hooks that fail in four ways. Past that all is
/// forgotten, and told anew.
const REMEMBERED_MAX: usize = 256;

/// What was told.
#[derive(Debug, Default)]
pub(super) struct FaultLog {
    told: BTreeMap<(String, Hook, FaultKind), Told>,
}

#[derive(Debug)]
struct Told {
    at: Instant,
    /// How many were not told since.
    silent: u64,
}

impl FaultLog {
    /// Tells of the faults of one walk.
    pub(super) fn tell(&mut self, hook: Hook, calls: &[CallNote]) {
        for call in calls {
            let Said::Fault(fault) = &call.said else { continue };
            if let Some(untold) = self.due(&call.policy, hook, fault.kind, Instant::now()) {
                tracing::warn!(policy = call.policy, %hook, %fault, untold, "a policy failed");
            }
        }
    }

    /// How many faults of this kind were not told, if this one is to be.
    fn due(&mut self, policy: &str, hook: Hook, kind: FaultKind, now: Instant) -> Option<u64> {
        let key = (policy.to_owned(), hook, kind);
        if let Some(told) = self.told.get_mut(&key) {
            if now.duration_since(told.at) < AGAIN_AFTER {
                told.silent += 1;
                return None;
            }
            told.at = now;
            return Some(std::mem::take(&mut told.silent));
        }
        if self.told.len() >= REMEMBERED_MAX {
            self.told.clear();
        }
        self.told.insert(key, Told { at: now, silent: 0 });
        Some(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fault_is_told_at_once_and_then_once_a_minute_with_how_many_there_were() {
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
    fn what_is_remembered_is_bounded() {
        let (mut log, now) = (FaultLog::default(), Instant::now());
        for n in 0..10_000 {
            log.due(&format!("p{n}"), Hook::Offer, FaultKind::Trap, now);
            assert!(log.told.len() <= REMEMBERED_MAX);
        }
    }
}
