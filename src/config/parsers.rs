//! The values of flags and of the environment, checked at the door by the rules that hold for the
//! file. What is taken stays text, since a file may give the same.

use super::{ConfigError, edits};
use std::path::Path;

/// Only the rule: clap says the flag and the value.
fn rule<T>(checked: Result<T, ConfigError>, text: &str) -> Result<String, String> {
    match checked {
        Ok(_) => Ok(text.to_owned()),
        Err(ConfigError::Bad { rule, .. }) => Err(format!("give {rule}")),
        Err(other) => Err(other.to_string()),
    }
}

pub(super) fn gpus(text: &str) -> Result<String, String> {
    rule(super::gpu_source(text, None, Path::new("/")), text)
}

pub(super) fn mig_strategy(text: &str) -> Result<String, String> {
    rule(super::mig_strategy(Some(text)), text)
}

pub(super) fn admin_listen(text: &str) -> Result<String, String> {
    // Whether it may lie beyond this machine depends on the file: `Config::merge` says.
    rule(super::address("adminListen", text), text)
}

pub(super) fn health_listen(text: &str) -> Result<String, String> {
    rule(super::address("healthListen", text), text)
}

pub(super) fn healthchecks(text: &str) -> Result<String, String> {
    match text.trim() {
        "all" | "xids" => Ok(text.to_owned()),
        list => rule(super::xids("DP_DISABLE_HEALTHCHECKS", list), text),
    }
}

pub(super) fn healthchecks_on(text: &str) -> Result<String, String> {
    rule(super::xids("DP_ENABLE_HEALTHCHECKS", text), text)
}

pub(super) fn device_list_strategy(text: &str) -> Result<String, String> {
    rule(edits::strategies(text.split(',').map(str::trim)), text)
}

pub(super) fn device_id_strategy(text: &str) -> Result<String, String> {
    rule(edits::id_strategy(text), text)
}
