//! Logs faults of policies. A policy that fails at some calls only is never suspended, and may fail at every Allocate.

use crate::log_limit::LogLimit;
use berth_kernel::policy::decision::{CallOutcome, CallRecord};
use berth_kernel::policy::hooks::{FaultKind, Hook};
use std::time::Instant;

/// The faults that were logged, by policy, hook and kind.
#[derive(Debug, Default)]
pub(crate) struct FaultLog(LogLimit<(String, Hook, FaultKind)>);

impl FaultLog {
    /// Logs the faults of one evaluation.
    pub(crate) fn log(&mut self, hook: Hook, calls: &[CallRecord]) {
        for call in calls {
            let CallOutcome::Fault(fault) = &call.outcome else { continue };
            if let Some(omitted) = self.0.admit((call.policy.clone(), hook, fault.kind), Instant::now()) {
                tracing::warn!(policy = call.policy, %hook, %fault, omitted, "a policy failed");
            }
        }
    }
}
