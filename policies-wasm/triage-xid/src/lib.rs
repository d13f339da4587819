//! `triage-xid`: what an XID or another health reading means, and when the GPU recovers.
//!
//! A fault that is told anew as long as it lasts (a recovery action, rows that wait, a GPU that
//! answers no look) heals by itself a while after it is over. One that only an event told does not
//! show whether it is over: where NVIDIA asks for a reset, the GPU stays unhealthy until an operator
//! says that it is well. What it does not know it passes on.

mod parameters;
mod xids;

use berth_policy_sdk::{Description, Hooks, Node, Policy, Reading, Severity, TriageAnswer};

pub use parameters::{Judgement, Override, Parameters};
use xids::Class;

/// Quiet time after what is told anew at every look: many looks, which come every few seconds.
const TOLD_ANEW_SECONDS: u32 = 60;
/// Quiet time of a GPU that answers no look while it is off the bus, and of an ECC error, after which
/// the driver tells in XIDs and its recovery action what is to be done.
const SETTLE_SECONDS: u32 = 300;

/// The policy with its parameters.
#[derive(Clone, Debug)]
pub struct TriageXid {
    parameters: Parameters,
}

impl Policy for TriageXid {
    type Parameters = Parameters;

    fn describe() -> Description {
        Description {
            name: "triage-xid".into(),
            version: env!("CARGO_PKG_VERSION").into(),
            summary: "What XIDs and other health readings mean, and when a GPU recovers.".into(),
            hooks: Hooks::TRIAGE,
            parameters_schema: include_str!("../schema.json").into(),
        }
    }

    fn new(parameters: Parameters) -> Result<Self, String> {
        parameters.check()?;
        Ok(Self { parameters })
    }

    fn triage(&self, _: &Node, reading: &Reading) -> Option<TriageAnswer> {
        match reading.source.as_str() {
            "xid" => self.xid(reading.code),
            "ecc" => Some(unhealthy(
                "uncorrectable ECC error; should the GPU need a reset, the driver says so",
                Some(SETTLE_SECONDS),
            )),
            "lost" => Some(unhealthy("the GPU fell off the bus: reboot the node", Some(SETTLE_SECONDS))),
            "recovery" | "recovery-action" => recovery(reading.code),
            "rows" => rows(reading.code),
            _ => None,
        }
    }
}

impl TriageXid {
    fn xid(&self, code: u64) -> Option<TriageAnswer> {
        let known = xids::known(code);
        let meaning = known.map_or("not in the table", |(_, meaning)| meaning);
        if let Some(set) = self.parameters.set(code) {
            let reason = format!("XID {code}: {meaning} (judged by the parameters of triage-xid)");
            return Some(TriageAnswer { reason, ..set });
        }
        let (class, _) = known?;
        let (severity, again, advice) = match class {
            Class::Application => (Severity::Ignore, None, ", by an application"),
            Class::Notice => (Severity::Ignore, None, ""),
            Class::Watch => (Severity::Degraded, Some(self.parameters.degraded_seconds), ""),
            Class::Reset => (Severity::Unhealthy, self.parameters.reset_seconds, ": reset the GPU"),
            Class::Bus => (Severity::Unhealthy, Some(SETTLE_SECONDS), ": reboot the node"),
            Class::Hands => (Severity::Unhealthy, None, ""),
        };
        let word = matches!((severity, again), (Severity::Unhealthy, None));
        let then = if word { ", then `berth gpu mark-healthy`" } else { "" };
        let reason = format!("XID {code}: {meaning}{advice}{then}");
        Some(TriageAnswer { severity, reason, again_after_seconds: again })
    }
}

/// NVML's `nvmlDeviceGpuRecoveryAction_t`. Whatever it asks for, no new work is to be started.
fn recovery(code: u64) -> Option<TriageAnswer> {
    let wants = match code {
        0 => return Some(ignore("the GPU asks for no action")),
        1 => "a reset",
        2 => "a reboot of the node",
        3 => "an end of all peer-to-peer work",
        4 => "an end of its work and then a reset",
        5 => "a recovery of the IMEX domain",
        6 => "a reset of its PCIe bus",
        7 => "a reboot of the system",
        _ => return None,
    };
    Some(unhealthy(&format!("the GPU asks for {wants} (recovery action {code})"), Some(TOLD_ANEW_SECONDS)))
}

/// Remapped rows: 1, some wait for a reset; 2, one could not be remapped.
fn rows(code: u64) -> Option<TriageAnswer> {
    let again_after_seconds = Some(TOLD_ANEW_SECONDS);
    match code {
        1 => Some(TriageAnswer {
            severity: Severity::Degraded,
            reason: "a memory row is remapped at the next reset; work goes on without it".into(),
            again_after_seconds,
        }),
        2 => {
            Some(unhealthy("a memory row could not be remapped: have the GPU replaced", again_after_seconds))
        }
        _ => None,
    }
}

fn ignore(reason: &str) -> TriageAnswer {
    TriageAnswer { severity: Severity::Ignore, reason: reason.into(), again_after_seconds: None }
}

fn unhealthy(reason: &str, again_after_seconds: Option<u32>) -> TriageAnswer {
    TriageAnswer { severity: Severity::Unhealthy, reason: reason.into(), again_after_seconds }
}

berth_policy_sdk::export!(TriageXid);

#[cfg(test)]
mod tests;
