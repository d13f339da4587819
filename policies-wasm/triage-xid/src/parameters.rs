//! What an operator may set.

use std::collections::BTreeSet;

use berth_policy_sdk::{Severity, TriageAnswer};
use serde::Deserialize;

/// Overrides and ignored XIDs at most, each: NVIDIA has published fewer than 200 XIDs.
const ENTRIES_MAX: usize = 256;
/// Quiet time at most: a week. Who wants more wants an operator's word.
const SECONDS_MAX: u32 = 7 * 24 * 3600;

/// The parameters of `triage-xid`.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Parameters {
    /// Judgements that count instead of those of the table.
    pub xids: Vec<Override>,
    /// XIDs that say nothing of the GPU.
    pub ignore: Vec<u64>,
    /// Quiet time after which a degraded GPU is healthy again, seconds.
    pub degraded_seconds: u32,
    /// Quiet time after an XID that asks for a reset, seconds; if it is missing, only an operator's
    /// word heals.
    pub reset_seconds: Option<u32>,
}

/// The judgement of one XID.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Override {
    /// The XID.
    pub code: u64,
    /// How bad it is.
    pub severity: Judgement,
    /// Quiet time after it, seconds; if it is missing, only an operator's word heals.
    pub again_after_seconds: Option<u32>,
}

/// How bad an XID is.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub enum Judgement {
    /// It says nothing of the GPU.
    Ignore,
    /// The GPU is granted on, and shown as degraded.
    Degraded,
    /// Nothing new is granted on the GPU.
    Unhealthy,
}

impl Default for Parameters {
    fn default() -> Self {
        Self { xids: Vec::new(), ignore: Vec::new(), degraded_seconds: 3600, reset_seconds: None }
    }
}

impl Parameters {
    pub(crate) fn check(&self) -> Result<(), String> {
        for (key, count) in [("xids", self.xids.len()), ("ignore", self.ignore.len())] {
            if count > ENTRIES_MAX {
                return Err(format!("{key}: {count} entries; at most {ENTRIES_MAX} are taken"));
            }
        }
        check_seconds("degradedSeconds", Some(self.degraded_seconds))?;
        check_seconds("resetSeconds", self.reset_seconds)?;
        let mut seen: BTreeSet<u64> = self.ignore.iter().copied().collect();
        for (n, xid) in self.xids.iter().enumerate() {
            if !seen.insert(xid.code) {
                return Err(format!("xids[{n}].code: {} is judged twice", xid.code));
            }
            check_seconds(&format!("xids[{n}].againAfterSeconds"), xid.again_after_seconds)?;
            if xid.severity == Judgement::Ignore && xid.again_after_seconds.is_some() {
                return Err(format!(
                    "xids[{n}].againAfterSeconds: what is ignored needs no time; leave it out"
                ));
            }
        }
        Ok(())
    }

    /// What is set for an XID, without a reason.
    pub(crate) fn set(&self, code: u64) -> Option<TriageAnswer> {
        let answer = |severity, again_after_seconds| TriageAnswer {
            severity,
            reason: String::new(),
            again_after_seconds,
        };
        if self.ignore.contains(&code) {
            return Some(answer(Severity::Ignore, None));
        }
        let xid = self.xids.iter().find(|xid| xid.code == code)?;
        let severity = match xid.severity {
            Judgement::Ignore => Severity::Ignore,
            Judgement::Degraded => Severity::Degraded,
            Judgement::Unhealthy => Severity::Unhealthy,
        };
        Some(answer(severity, xid.again_after_seconds))
    }
}

fn check_seconds(key: &str, seconds: Option<u32>) -> Result<(), String> {
    match seconds {
        Some(seconds) if seconds == 0 || seconds > SECONDS_MAX => Err(format!(
            "{key}: {seconds} is out of range; write 1 to {SECONDS_MAX}, or leave it out for an operator's word"
        )),
        _ => Ok(()),
    }
}
