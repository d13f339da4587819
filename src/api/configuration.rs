//! The configuration file of the daemon, and what became of its changes.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// The configuration file. A change of it is applied while the daemon runs, or refused as a whole.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct ConfigurationState {
    /// The file.
    #[schema(example = "/etc/berth/config.yaml")]
    pub file: String,
    /// When the settings in use were read from it.
    #[schema(example = "2026-01-02T03:04:05Z")]
    pub loaded_at: String,
    /// What the last reading that changed something changed; empty since the start.
    pub changed: Vec<SettingChange>,
    /// The settings of the file that need a restart of the daemon; it uses their values of its start.
    pub needs_restart: Vec<SettingChange>,
    /// Why the present file is refused, as a whole; absent if it is in use.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<ConfigurationError>,
}

/// A setting whose value in the file differs from the one that was in use.
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
    /// It is in effect.
    Applied,
    /// With the next start of the daemon.
    AfterRestart,
    /// Never: a flag or a variable sets it, or the stack was activated through the API.
    Overridden,
}

/// Why the present file is refused.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct ConfigurationError {
    /// When it was refused.
    #[schema(example = "2026-01-02T03:04:05Z")]
    pub at: String,
    /// All its errors, in the order of their lines.
    pub problems: Vec<SettingProblem>,
}

/// An error of the file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct SettingProblem {
    /// Its line, from 1; absent if it has none in the file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = 3)]
    pub line: Option<u64>,
    /// The key; absent if it is of the file as a whole.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = "stack[0].policy")]
    pub key: Option<String>,
    /// What is wrong with it.
    pub message: String,
}
