//! The values of flags and of the environment, checked at the door by the rules that hold for the
//! file. What is taken stays text, since a file may give the same.

use super::{BadSetting, Protocol, edits, tracing};
use clap::builder::{BoolishValueParser, TypedValueParser};
use std::path::{Path, PathBuf};

/// Only the rule: clap says the flag and the value.
fn rule<T>(checked: Result<T, BadSetting>, text: &str) -> Result<String, String> {
    match checked {
        Ok(_) => Ok(text.to_owned()),
        Err(bad) => Err(format!("give {}", bad.rule)),
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

/// As [`BoolishValueParser`]; an empty variable is false, as NVIDIA's plugin reads it.
pub(super) fn boolish(text: &str) -> Result<bool, String> {
    if text.is_empty() {
        return Ok(false);
    }
    let read = BoolishValueParser::new().parse_ref(&clap::Command::new("berth"), None, text.as_ref());
    read.map_err(|_| "value was not a boolean: give true or false".into())
}

pub(super) fn device_discovery_strategy(text: &str) -> Result<String, String> {
    super::nvidia::discovery(text).map(|()| text.to_owned())
}

/// A path that may be empty: the variable then counts as not set.
#[allow(clippy::unnecessary_wraps)] // the form that clap asks for
pub(super) fn path(text: &str) -> Result<PathBuf, String> {
    Ok(text.into())
}

pub(super) fn device_list_strategy(text: &str) -> Result<String, String> {
    rule(edits::strategies(text.split(',').map(str::trim)), text)
}

pub(super) fn device_id_strategy(text: &str) -> Result<String, String> {
    rule(edits::id_strategy(text), text)
}

/// An empty variable counts as none, by OpenTelemetry's rules.
fn unless_empty<T>(text: &str, check: impl FnOnce(&str) -> Result<T, BadSetting>) -> Result<String, String> {
    if text.trim().is_empty() { Ok(String::new()) } else { rule(check(text), text) }
}

pub(super) fn tracing_endpoint(text: &str) -> Result<String, String> {
    // clap would show the value, which may hold a password: that is refused where it is read.
    if text.contains('@') {
        return Ok(text.to_owned());
    }
    // A path is right for one protocol, which another flag may name.
    let spoken = [Some(Protocol::HttpProtobuf), None].map(|spoken| tracing::endpoint(text, spoken).is_ok());
    unless_empty(
        text,
        |text| if spoken.contains(&true) { Ok(()) } else { tracing::endpoint(text, None).map(drop) },
    )
}

pub(super) fn tracing_protocol(text: &str) -> Result<String, String> {
    unless_empty(text, tracing::protocol)
}

pub(super) fn tracing_sample_ratio(text: &str) -> Result<String, String> {
    unless_empty(text, tracing::sample_ratio)
}
