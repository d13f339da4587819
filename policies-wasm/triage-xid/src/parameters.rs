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
    /// Judgements of other readings, which replace those of the policy.
    pub sources: Vec<SourceOverride>,
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

/// The judgement of a reading that is not an XID.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct SourceOverride {
    /// Its source, such as `ecc`, `rows`, `recovery` or `lost`.
    pub source: String,
    /// Its code; if it is missing, every code of the source.
    pub code: Option<u64>,
    /// How bad it is.
    pub severity: Judgement,
    /// As [`Override::again_after_seconds`].
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
        Self {
            xids: Vec::new(),
            ignore: Vec::new(),
            sources: Vec::new(),
            degraded_seconds: 3600,
            reset_seconds: None,
        }
    }
}

impl Parameters {
    pub(crate) fn check(&self) -> Result<(), String> {
        let counts =
            [("xids", self.xids.len()), ("ignore", self.ignore.len()), ("sources", self.sources.len())];
        for (key, count) in counts {
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
            check_time(&format!("xids[{n}]"), "an XID", xid.severity, xid.again_after_seconds)?;
        }
        let mut seen = BTreeSet::new();
        for (n, entry) in self.sources.iter().enumerate() {
            if entry.source == "xid" {
                return Err(format!("sources[{n}].source: XIDs are judged by `xids` and `ignore`"));
            }
            if !seen.insert((&entry.source, entry.code)) {
                return Err(format!("sources[{n}]: {:?} has more than one judgement", entry.source));
            }
            check_time(&format!("sources[{n}]"), "a source", entry.severity, entry.again_after_seconds)?;
        }
        Ok(())
    }

    /// The judgement of a reading that is not an XID in the parameters, without a reason. One with its code goes before one
    /// without.
    pub(crate) fn judgement_of_source(&self, source: &str, code: u64) -> Option<TriageAnswer> {
        let entry = |wanted| self.sources.iter().find(|e| e.source == source && e.code == wanted);
        let entry = entry(Some(code)).or_else(|| entry(None))?;
        Some(entry.severity.answer(entry.again_after_seconds))
    }

    /// The judgement of an XID in the parameters, without a reason.
    pub(crate) fn judgement(&self, code: u64) -> Option<TriageAnswer> {
        if self.ignore.contains(&code) {
            return Some(Judgement::Ignore.answer(None));
        }
        let xid = self.xids.iter().find(|xid| xid.code == code)?;
        Some(xid.severity.answer(xid.again_after_seconds))
    }
}

impl Judgement {
    /// The answer without a reason.
    fn answer(self, again_after_seconds: Option<u32>) -> TriageAnswer {
        let severity = match self {
            Self::Ignore => Severity::Ignore,
            Self::Degraded => Severity::Degraded,
            Self::Unhealthy => Severity::Unhealthy,
        };
        TriageAnswer { severity, reason: String::new(), again_after_seconds }
    }
}

fn check_time(key: &str, what: &str, severity: Judgement, seconds: Option<u32>) -> Result<(), String> {
    check_seconds(&format!("{key}.againAfterSeconds"), seconds)?;
    if severity == Judgement::Ignore && seconds.is_some() {
        return Err(format!(
            "{key}.againAfterSeconds: {what} with severity `ignore` needs no time; remove it"
        ));
    }
    Ok(())
}

fn check_seconds(key: &str, seconds: Option<u32>) -> Result<(), String> {
    match seconds {
        Some(seconds) if seconds == 0 || seconds > SECONDS_MAX => {
            Err(format!("{key}: {seconds} is out of range; write 1 to {SECONDS_MAX}"))
        }
        _ => Ok(()),
    }
}
