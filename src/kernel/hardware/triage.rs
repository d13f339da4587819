//! The triage of readings: their severity, and the judgement of the baseline, for which every policy passes.

use crate::hardware::gpu::{
    ECC, PAGES, RECOVERED, RECOVERY, RECOVERY_IMEX, ROWS, ROWS_PENDING, Reading, XID,
};
use berth_xids::{self as xids, Class};

/// The judgement of a reading.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TriageAnswer {
    /// Its severity.
    pub severity: Severity,
    /// Why.
    pub reason: String,
    /// Seconds after which the state expires without further readings; `None`: until an operator marks
    /// the GPU healthy.
    pub again_after_s: Option<u32>,
}

impl TriageAnswer {
    /// How long its state lasts without further readings, milliseconds; `None`: until an operator marks the GPU
    /// healthy.
    #[must_use]
    pub fn quiet_ms(&self) -> Option<u64> {
        self.again_after_s.map(|s| u64::from(s) * 1000)
    }
}

/// The severity of a reading.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Severity {
    /// Does not concern the GPU's health.
    Ignore,
    /// The GPU is still granted but shown as degraded.
    Degraded,
    /// The GPU gets no new grants.
    Unhealthy,
}

impl Severity {
    /// The severity of this name.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        [Self::Ignore, Self::Degraded, Self::Unhealthy].into_iter().find(|severity| severity.as_str() == text)
    }

    /// Its name in the API and in the contract.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Ignore => "ignore",
            Self::Degraded => "degraded",
            Self::Unhealthy => "unhealthy",
        }
    }
}

/// The judgements of XIDs that replace those of the table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct XidRules {
    /// XIDs without effect.
    pub ignored: Vec<u64>,
    /// XIDs that make a GPU unhealthy, unless they are ignored.
    pub counted: Vec<u64>,
}

impl Default for XidRules {
    /// Errors of applications and notices are ignored.
    fn default() -> Self {
        Self { ignored: harmless_xids(), counted: Vec::new() }
    }
}

/// The end of the range of XIDs; NVIDIA has published fewer than 200.
const XIDS_END: u64 = 1000;

/// XIDs that do not concern the GPU itself: errors of applications, and notices.
#[must_use]
pub fn harmless_xids() -> Vec<u64> {
    let is_harmless =
        |code: &u64| matches!(xids::known(*code), Some((Class::Application | Class::Notice, _)));
    (0..XIDS_END).filter(is_harmless).collect()
}

/// Whether the GPU needs a reset after this: by NVIDIA's table of XIDs, or by the recovery action that the driver
/// requires.
pub(crate) fn needs_reset(reading: &Reading) -> bool {
    match reading.source.as_str() {
        XID => matches!(xids::known(reading.code), Some((Class::Reset, _))),
        RECOVERY => ![RECOVERED, RECOVERY_IMEX].contains(&reading.code),
        _ => false,
    }
}

/// The triage of a reading for which every policy passes.
#[must_use]
pub fn baseline_triage(reading: &Reading, xids: &XidRules, quiet_ms: u64) -> TriageAnswer {
    let severity = match (reading.source.as_str(), reading.code) {
        (XID, code) if xids.ignored.contains(&code) => Severity::Ignore,
        (XID, code) if xids.counted.contains(&code) => Severity::Unhealthy,
        (XID, code) if matches!(xids::known(code), Some((Class::Degraded, _))) => Severity::Degraded,
        // Most ECC errors are contained to one application, or repaired; else the driver reports an XID or a recovery
        // action, too. Rows that wait for a reset do no harm until then, and the IMEX domain concerns other nodes.
        (ECC, _) | (ROWS, ROWS_PENDING) | (PAGES, _) | (RECOVERY, RECOVERY_IMEX) => Severity::Degraded,
        (RECOVERY, RECOVERED) => Severity::Ignore,
        _ => Severity::Unhealthy,
    };
    let reason = match reading.source.as_str() {
        XID => format!("XID {}: {}", reading.code, reading.detail),
        other => format!("{other}: {}", reading.detail),
    };
    // Scans repeat a sign while it lasts, so it ends by itself. An event is reported once: what needs a reset stays out
    // until the driver shows one, or an operator says so.
    let waits = severity == Severity::Unhealthy && !reading.is_sign() && needs_reset(reading);
    let again_after_s = if waits { None } else { u32::try_from(quiet_ms / 1000).ok() };
    TriageAnswer { severity, reason, again_after_s }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pending_row_degrades_and_a_failed_one_makes_unhealthy() {
        let sign = |code| Reading {
            part: crate::ids::names::PartId::parse("GPU-0").unwrap(),
            source: ROWS.into(),
            code,
            detail: "rows".into(),
        };
        let severity = |code| baseline_triage(&sign(code), &XidRules::default(), 60_000).severity;
        assert_eq!(severity(ROWS_PENDING), Severity::Degraded);
        assert_eq!(severity(crate::hardware::gpu::ROWS_FAILED), Severity::Unhealthy);
    }

    #[test]
    fn the_baseline_judges_by_nvidias_table() {
        let xids = XidRules::default();
        let severity = |source: &str, code| {
            let part = crate::ids::names::PartId::parse("GPU-0").unwrap();
            let reading = Reading { part, source: source.into(), code, detail: String::new() };
            baseline_triage(&reading, &xids, 60_000).severity
        };
        for code in [8, 13, 31, 43, 45, 68, 108, 137, 154] {
            assert_eq!(severity(XID, code), Severity::Ignore, "{code}");
        }
        for code in [63, 74, 92, 94, 109, 144, 155, 160] {
            assert_eq!(severity(XID, code), Severity::Degraded, "{code}");
        }
        for code in [46, 48, 64, 79, 95, 119, 140, 400] {
            assert_eq!(severity(XID, code), Severity::Unhealthy, "{code}");
        }
        assert_eq!(severity(ECC, 3), Severity::Degraded, "contained, unless an XID says otherwise");
        assert_eq!(severity(RECOVERY, 1), Severity::Unhealthy);
        assert_eq!(severity(RECOVERY, RECOVERY_IMEX), Severity::Degraded);
        let part = crate::ids::names::PartId::parse("GPU-0").unwrap();
        let contained = Reading { part, source: XID.into(), code: 94, detail: String::new() };
        let counted = XidRules { ignored: Vec::new(), counted: vec![94] };
        assert_eq!(baseline_triage(&contained, &counted, 60_000).severity, Severity::Unhealthy);
    }
}
