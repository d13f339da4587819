//! `triage-xid`: judges XIDs and other health readings, and when a GPU is healthy again.
//!
//! A fault that every scan reports as long as it lasts (a recovery action, rows that wait for a reset, a GPU
//! that does not answer) needs no confirmation: the GPU is healthy some time after the last report. An
//! event does not show whether its cause is over: if NVIDIA requires a reset, the GPU stays unhealthy until
//! an operator marks it healthy. Unknown readings are passed on.

mod parameters;

use berth_policy_sdk::{Description, Hooks, Node, Policy, Reading, Severity, TriageAnswer};
use berth_xids::{self as xids, Class};

pub use parameters::{Judgement, Override, Parameters};

/// Time after the last report of a fault that every scan reports: many scans, which are a few seconds apart.
const REPEATED_FAULT_SECONDS: u32 = 60;
/// Time after the last error of a GPU off the bus, which fails every scan until then.
const SETTLE_SECONDS: u32 = 300;

/// The policy `triage-xid`.
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
            summary: "Judges XIDs and other health readings, and when a GPU is healthy again.".into(),
            hooks: Hooks::TRIAGE,
            parameters_schema: include_str!("../schema.json").into(),
        }
    }

    fn new(parameters: Parameters) -> Result<Self, String> {
        parameters.check()?;
        Ok(Self { parameters })
    }

    fn triage(&self, _: &Node, reading: &Reading) -> Option<TriageAnswer> {
        let (source, code) = (reading.source.as_str(), reading.code);
        if let Some(judgement) = self.parameters.judgement_of_source(source, code) {
            let reason =
                format!("{source} {code}: {} (judged by the parameters of triage-xid)", reading.detail);
            return Some(TriageAnswer { reason, ..judgement });
        }
        match source {
            "xid" => self.xid(code),
            // Most are contained to one application, or repaired. If the GPU needs a reset, the driver reports that as an
            // XID or a recovery action.
            "ecc" => Some(TriageAnswer {
                severity: Severity::Degraded,
                reason: "uncorrectable ECC error; if the GPU needs a reset, the driver reports that as well"
                    .into(),
                again_after_seconds: Some(self.parameters.degraded_seconds),
            }),
            "lost" => Some(unhealthy("the GPU fell off the bus: reboot the node", Some(SETTLE_SECONDS))),
            "recovery" | "recovery-action" => recovery(code),
            "rows" => rows(code),
            _ => None,
        }
    }
}

impl TriageXid {
    fn xid(&self, code: u64) -> Option<TriageAnswer> {
        let known = xids::known(code);
        let meaning = known.map_or("not in the table", |(_, meaning)| meaning);
        if let Some(judgement) = self.parameters.judgement(code) {
            let reason = format!("XID {code}: {meaning} (judged by the parameters of triage-xid)");
            return Some(TriageAnswer { reason, ..judgement });
        }
        let (class, _) = known?;
        let (severity, again, advice) = match class {
            Class::Application => (Severity::Ignore, None, ", by an application"),
            Class::Notice => (Severity::Ignore, None, ""),
            Class::Degraded => (Severity::Degraded, Some(self.parameters.degraded_seconds), ""),
            Class::Reset => (Severity::Unhealthy, self.parameters.reset_seconds, ": reset the GPU"),
            Class::Bus => (Severity::Unhealthy, Some(SETTLE_SECONDS), ": reboot the node"),
            Class::ManualWork => (Severity::Unhealthy, None, ""),
        };
        let needs_operator = matches!((severity, again), (Severity::Unhealthy, None));
        let then = if needs_operator { ", then `berth gpu mark-healthy`" } else { "" };
        let reason = format!("XID {code}: {meaning}{advice}{then}");
        Some(TriageAnswer { severity, reason, again_after_seconds: again })
    }
}

/// NVML's `nvmlDeviceGpuRecoveryAction_t`. With any of these actions but 5 no new work may start on the GPU.
fn recovery(code: u64) -> Option<TriageAnswer> {
    let action = match code {
        0 => return Some(ignore("the GPU requires no action")),
        1 => "a reset",
        2 => "a reboot of the node",
        3 => "a stop of all peer-to-peer work",
        4 => "a stop of its work and then a reset",
        5 => "a recovery of the IMEX domain",
        6 => "a reset of its PCIe bus",
        7 => "a reboot of the system",
        _ => return None,
    };
    let reason = format!("the GPU requires {action} (recovery action {code})");
    // The IMEX domain concerns work across nodes alone.
    let severity = if code == 5 { Severity::Degraded } else { Severity::Unhealthy };
    Some(TriageAnswer { severity, ..unhealthy(&reason, Some(REPEATED_FAULT_SECONDS)) })
}

/// Remapped rows: 1, some wait for a reset; 2, one could not be remapped.
fn rows(code: u64) -> Option<TriageAnswer> {
    let again_after_seconds = Some(REPEATED_FAULT_SECONDS);
    match code {
        1 => Some(TriageAnswer {
            severity: Severity::Degraded,
            reason: "a memory row will be remapped at the next reset; the GPU works until then".into(),
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
