//! Bad usage: what was typed, or what the environment says, cannot be meant. Ends with 2, as clap
//! does for what it finds itself.

use super::args::Cli;
use crate::telemetry::TelemetryError;
use clap::error::{ContextKind, ContextValue};
use clap::{Command, CommandFactory, Parser};
use std::ffi::OsString;
use std::process::ExitCode;

/// What bad usage ends with.
const CODE: u8 = 2;

/// An error that is the caller's. Told as its cause is.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(super) struct BadUsage(pub(super) String);

/// What a command that failed ends with.
pub(super) fn code(error: &anyhow::Error) -> ExitCode {
    let filter = matches!(error.downcast_ref(), Some(TelemetryError::Filter { .. }));
    if filter || error.is::<BadUsage>() { ExitCode::from(CODE) } else { ExitCode::FAILURE }
}

/// Reads the arguments and the environment.
///
/// # Errors
/// What to exit with, once everything is said: 2, or 0 for `--help` and `--version`.
pub fn parse() -> Result<Cli, ExitCode> {
    let args: Vec<OsString> = std::env::args_os().collect();
    Cli::try_parse_from(&args).map_err(|error| {
        // Nobody is left to tell if that cannot be printed.
        let _ = error.print();
        if let Some(variable) = variable(&error, &args) {
            super::output::note(&format!("the value comes from the environment variable {variable}"));
        }
        ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(CODE))
    })
}

/// The environment variable behind the argument that an error names, unless the argument was typed.
fn variable(error: &clap::Error, args: &[OsString]) -> Option<String> {
    let ContextValue::String(named) = error.get(ContextKind::InvalidArg)? else {
        return None;
    };
    let flag = named.split([' ', '=', '[']).next()?;
    let typed = args.iter().filter_map(|a| a.to_str()).any(|a| a.split('=').next() == Some(flag));
    let variable = of_flag(&Cli::command(), flag.strip_prefix("--")?)?;
    (!typed && std::env::var_os(&variable).is_some()).then_some(variable)
}

fn of_flag(command: &Command, long: &str) -> Option<String> {
    let own = command.get_arguments().find(|a| a.get_long() == Some(long)).and_then(|a| a.get_env());
    own.map(|variable| variable.to_string_lossy().into_owned())
        .or_else(|| command.get_subcommands().find_map(|inner| of_flag(inner, long)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_of_every_command_are_found_with_their_variables() {
        let command = Cli::command();
        for (long, variable) in
            [("gpus", "BERTH_GPUS"), ("server", "BERTH_SERVER"), ("pass-device-specs", "PASS_DEVICE_SPECS")]
        {
            assert_eq!(of_flag(&command, long).as_deref(), Some(variable));
        }
        assert_eq!(of_flag(&command, "limit"), None);
    }
}
