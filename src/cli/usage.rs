//! The exit status of every command.
//!
//! - 0: success.
//! - 2: bad usage. The arguments or an environment variable are wrong whatever the state of this machine: an unknown
//!   flag, a missing argument, a value in the wrong form. clap finds most of it; [`BadUsage`] is for the rest.
//! - 1: every other failure: a file that is missing or has the wrong content (bad YAML among it), an unknown policy,
//!   GPU or allocation, a daemon that does not answer or refuses, a check or a test that found something.

use std::process::ExitCode;
use std::time::Duration;

/// The exit status of bad usage.
pub const CODE: u8 = 2;

/// Bad usage, with what is wrong.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct BadUsage(pub String);

/// The exit status for an error.
#[must_use]
pub fn code(error: &anyhow::Error) -> ExitCode {
    if error.is::<BadUsage>() { ExitCode::from(CODE) } else { ExitCode::FAILURE }
}

/// Parses a duration, such as `30s`.
///
/// # Errors
/// If it is not one; the message has the expected form.
pub fn time(text: &str) -> Result<Duration, String> {
    humantime::parse_duration(text)
        .map_err(|_| "give a number with its unit, such as 30s, 10m or 2h (ms, s, m, h, d)".into())
}

/// As [`time`]; a number alone is seconds, as with `watch`.
///
/// # Errors
/// As for [`time`].
pub fn interval(text: &str) -> Result<Duration, String> {
    match text.parse().map(Duration::try_from_secs_f64) {
        Ok(Ok(seconds)) => Ok(seconds),
        _ => time(text),
    }
}
