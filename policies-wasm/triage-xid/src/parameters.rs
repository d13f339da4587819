//! The parameters of `triage-xid`.

use std::collections::BTreeSet;

use berth_policy_sdk::{Severity, TriageAnswer};
use serde::Deserialize;

/// Entries of `xids` and of `ignore` at most: NVIDIA has published fewer than 200 XIDs.
const ENTRIES_MAX: usize = 256;
/// Longest time: a week. For a longer one, the GPU should wait for `berth gpu mark-healthy`.
const SECONDS_MAX: u32 = 7 * 24 * 3600;

/// The parameters of `triage-xid`.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Parameters {
    /// Judgements that replace those of the table.
    pub xids: Vec<Override>,
    /// XIDs to ignore.
    pub ignore: Vec<u64>,
    /// Time without an error after which a degraded GPU is healthy again, seconds.
    pub degraded_seconds: u32,
    /// Time without an error after an XID that requires a reset, seconds; if it is missing, only
    /// `berth gpu mark-healthy` makes the GPU healthy.
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
    /// Time without an error after which the GPU is healthy again, seconds; if it is missing, only
    /// `berth gpu mark-healthy` makes it healthy.
    pub again_after_seconds: Option<u32>,
}

/// How bad an XID is.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub enum Judgement {
    /// It has no effect.
    Ignore,
    /// Devices of the GPU are still granted, and it is shown as degraded.
    Degraded,
    /// No new devices of the GPU are granted.
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
                return Err(format!("{key}: {count} entries; at most {ENTRIES_MAX} are allowed"));
            }
        }
        check_seconds("degradedSeconds", Some(self.degraded_seconds))?;
        check_seconds("resetSeconds", self.reset_seconds)?;
        let mut seen: BTreeSet<u64> = self.ignore.iter().copied().collect();
        for (n, xid) in self.xids.iter().enumerate() {
            if !seen.insert(xid.code) {
                return Err(format!("xids[{n}].code: {} has more than one judgement", xid.code));
            }
            check_seconds(&format!("xids[{n}].againAfterSeconds"), xid.again_after_seconds)?;
            if xid.severity == Judgement::Ignore && xid.again_after_seconds.is_some() {
                return Err(format!(
                    "xids[{n}].againAfterSeconds: an XID with severity `ignore` needs no time; remove it"
                ));
            }
        }
        Ok(())
    }

    /// The judgement of an XID in the parameters, without a reason.
    pub(crate) fn judgement(&self, code: u64) -> Option<TriageAnswer> {
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
        Some(seconds) if seconds == 0 || seconds > SECONDS_MAX => {
            Err(format!("{key}: {seconds} is out of range; write 1 to {SECONDS_MAX}"))
        }
        _ => Ok(()),
    }
}
