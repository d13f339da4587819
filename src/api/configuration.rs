//! The configuration file that the daemon follows: its changes while the daemon runs, and its errors.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// The configuration file that the daemon follows. When it changes, its settings are applied while the daemon runs; if it
/// has an error, none of them is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct ConfigurationState {
    /// The path of the file.
    #[schema(example = "/etc/berth/config.yaml")]
    pub file: String,
    /// When the settings that are in use were read from the file.
    #[schema(example = "2026-01-02T03:04:05Z")]
    pub loaded_at: String,
    /// The settings that differed the last time that the file changed, without those of `needsRestart`. Empty if it has not
    /// changed since the daemon started.
    pub changed: Vec<SettingChange>,
    /// The settings whose values in the file apply only after a restart of the daemon. Until then it uses the values that it
    /// started with.
    pub needs_restart: Vec<SettingChange>,
    /// Why the file as it is now is not used; absent if it is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<ConfigurationError>,
}

/// A setting that has another value in the file than before.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct SettingChange {
    /// The key in the file.
    #[schema(example = "stack[0].parameters.replicas")]
    pub key: String,
    /// The value before; absent if the file did not have the key. Values of `admin` and `tracing` are not shown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = "4")]
    pub from: Option<String>,
    /// The value in the file; absent if it does not have the key any more.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = "8")]
    pub to: Option<String>,
    /// When it takes effect.
    pub effect: SettingEffect,
}

/// When a changed setting takes effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub enum SettingEffect {
    /// It took effect when the file was read.
    Applied,
    /// It takes effect when the daemon is restarted.
    AfterRestart,
    /// It has no effect: a flag or an environment variable sets it, or it belongs to the stack while another one that was
    /// activated through the API is in use.
    Overridden,
}

/// The errors because of which the file is not used.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct ConfigurationError {
    /// When they were found.
    #[schema(example = "2026-01-02T03:04:05Z")]
    pub at: String,
    /// All its errors, in the order of their lines.
    pub problems: Vec<SettingProblem>,
}

/// An error of the file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct SettingProblem {
    /// The line, counted from 1; absent if the error is not on a line, as when the file cannot be read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = 3)]
    pub line: Option<u64>,
    /// The key; absent if the error concerns the whole file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = "stack[0].policy")]
    pub key: Option<String>,
    /// What is wrong, and what is allowed.
    pub message: String,
}
