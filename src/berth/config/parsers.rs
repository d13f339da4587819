//! clap parsers that check values of flags and of the environment by the rules of the file. The values stay text, as in
//! the file.

use super::{BadSetting, Protocol, edits, tracing};
use clap::builder::{BoolishValueParser, TypedValueParser};
use std::path::{Path, PathBuf};

/// An error with only the rule: clap adds the flag and the value.
fn rule<T>(checked: Result<T, BadSetting>, text: &str) -> Result<String, String> {
    match checked {
        Ok(_) => Ok(text.to_owned()),
        Err(bad) => Err(format!("expected {}", bad.rule)),
    }
}

pub(super) fn gpus(text: &str) -> Result<String, String> {
    rule(super::gpu_source(text, None, Path::new("/")), text)
}

pub(super) fn mig_strategy(text: &str) -> Result<String, String> {
    rule(super::mig_strategy(Some(text)), text)
}

pub(super) fn admin_listen(text: &str) -> Result<String, String> {
    // A non-loopback address needs TLS, which the file sets: `Config::merge` checks that.
    rule(super::address("adminListen", text), text)
}

pub(super) fn health_listen(text: &str) -> Result<String, String> {
    rule(super::address("healthListen", text), text)
}

/// As [`BoolishValueParser`]; an empty variable is false, as in NVIDIA's plugin.
pub(super) fn boolish(text: &str) -> Result<bool, String> {
    if text.is_empty() {
        return Ok(false);
    }
    let read = BoolishValueParser::new().parse_ref(&clap::Command::new("berth"), None, text.as_ref());
    read.map_err(|_| "value was not a boolean: expected true or false".into())
}

pub(super) fn device_discovery_strategy(text: &str) -> Result<String, String> {
    super::nvidia::check_discovery(text).map(|()| text.to_owned())
}

/// A path; an empty one counts as not set.
#[allow(clippy::unnecessary_wraps)] // clap requires this signature
pub(super) fn path(text: &str) -> Result<PathBuf, String> {
    Ok(text.into())
}

pub(super) fn device_list_strategy(text: &str) -> Result<String, String> {
    rule(edits::strategies(text.split(',').map(str::trim)), text)
}

pub(super) fn device_id_strategy(text: &str) -> Result<String, String> {
    rule(edits::id_strategy(text), text)
}

/// Checks the text unless it is empty, which OpenTelemetry defines as not set.
fn unless_empty<T>(text: &str, check: impl FnOnce(&str) -> Result<T, BadSetting>) -> Result<String, String> {
    if text.trim().is_empty() { Ok(String::new()) } else { rule(check(text), text) }
}

pub(super) fn tracing_endpoint(text: &str) -> Result<String, String> {
    // clap would show the value, which may contain a password; `Config::merge` refuses it.
    if text.contains('@') {
        return Ok(text.to_owned());
    }
    // A path is valid for `http/protobuf` only, which another flag may set.
    let valid =
        [Some(Protocol::HttpProtobuf), None].map(|protocol| tracing::endpoint(text, protocol).is_ok());
    unless_empty(
        text,
        |text| if valid.contains(&true) { Ok(()) } else { tracing::endpoint(text, None).map(drop) },
    )
}

pub(super) fn tracing_protocol(text: &str) -> Result<String, String> {
    unless_empty(text, tracing::protocol)
}

pub(super) fn tracing_sample_ratio(text: &str) -> Result<String, String> {
    unless_empty(text, tracing::sample_ratio)
}
