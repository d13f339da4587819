//! The lines of `berth node check`.

use serde::Serialize;

/// The result of one check.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Line {
    /// What was checked.
    pub(super) check: &'static str,
    pub(super) level: Level,
    /// The finding.
    pub(super) detail: String,
    /// The fix.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) fix: Option<String>,
}

/// The severity of a result.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(super) enum Level {
    /// The requirement is met.
    #[serde(rename = "ok")]
    Ok,
    /// The daemon runs, but waits or lacks a feature.
    #[serde(rename = "WARN")]
    Warn,
    /// The daemon would not start, or no container would get a GPU.
    #[serde(rename = "FAIL")]
    Fail,
}

impl Level {
    pub(super) fn as_str(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Warn => "WARN",
            Self::Fail => "FAIL",
        }
    }
}

impl Line {
    pub(super) fn ok(check: &'static str, detail: impl Into<String>) -> Self {
        Self { check, level: Level::Ok, detail: detail.into(), fix: None }
    }

    pub(super) fn warn(check: &'static str, detail: impl Into<String>, fix: impl Into<String>) -> Self {
        Self { check, level: Level::Warn, detail: detail.into(), fix: Some(fix.into()) }
    }

    pub(super) fn fail(check: &'static str, detail: impl Into<String>, fix: impl Into<String>) -> Self {
        Self { check, level: Level::Fail, detail: detail.into(), fix: Some(fix.into()) }
    }
}
