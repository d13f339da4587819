//! What a command ends with: one rule for all of them.
//!
//! - 0: it is done.
//! - 2: bad usage. What was typed, or what an environment variable says, cannot be meant, whatever there is on
//!   this machine: an unknown flag, a missing argument, a value without the form that it must have. clap finds most
//!   of it; [`BadUsage`] is for the rest.
//! - 1: everything else. It could have been meant, and is refused or fails: a file that is not there, or that
//!   holds something else than it should (bad YAML among it), a policy, GPU or allocation that nobody knows, a
//!   daemon that does not answer or says no, a check or a test that found something.

use std::process::ExitCode;
use std::time::Duration;

/// What bad usage ends with.
pub const CODE: u8 = 2;

/// An error that is the caller's. Told as its cause is.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct BadUsage(pub String);

/// What a command that failed ends with.
#[must_use]
pub fn code(error: &anyhow::Error) -> ExitCode {
    if error.is::<BadUsage>() { ExitCode::from(CODE) } else { ExitCode::FAILURE }
}

/// A span of time as it is typed.
///
/// # Errors
/// How one is written.
pub fn time(text: &str) -> Result<Duration, String> {
    humantime::parse_duration(text)
        .map_err(|_| "give a number with its unit, such as 30s, 10m or 2h (ms, s, m, h, d)".into())
}
