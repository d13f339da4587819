//! Reads the arguments, and says what is wrong with them.

use crate::args::Cli;
use berth_cli::usage::CODE;
use clap::error::{ContextKind, ContextValue};
use clap::{Command, CommandFactory, Parser};
use std::ffi::OsString;
use std::process::ExitCode;

/// Reads the arguments and the environment.
///
/// # Errors
/// What to exit with, once everything is said: 2, or 0 for `--help` and `--version`.
pub fn parse() -> Result<Cli, ExitCode> {
    let args: Vec<OsString> = std::env::args_os().collect();
    Cli::try_parse_from(&args).map_err(|mut error| {
        plain_usage(&mut error);
        // Nobody is left to tell if that cannot be printed.
        let _ = error.print();
        if let Some(variable) = variable(&error, &args) {
            berth_cli::output::note(&format!("the value comes from the environment variable {variable}"));
        }
        ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(CODE))
    })
}

/// clap writes into the usage line what it was given beside what it needs, and counts the environment as given:
/// `--server <URL>` would look as if it were needed. The command's own usage line says what is.
fn plain_usage(error: &mut clap::Error) {
    let Some(ContextValue::StyledStr(line)) = error.get(ContextKind::Usage) else { return };
    let line = line.to_string();
    let mut command = Cli::command();
    command.build();
    // `Usage: berth policy push ...`: as far as these are commands.
    for word in line.split_whitespace().skip(2) {
        let Some(inner) = command.find_subcommand(word).cloned() else { break };
        command = inner;
    }
    let usage = command.render_usage();
    error.insert(ContextKind::Usage, ContextValue::StyledStr(usage));
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
    fn a_usage_line_shows_what_is_needed_and_not_what_was_given() {
        for (typed, usage) in [
            ("berth --server http://x policy push", "Usage: berth policy push [OPTIONS] <FILE>"),
            ("berth policy --output json test", "Usage: berth policy test [OPTIONS] <FILE> <SCENARIOS>..."),
            ("berth --server http://x gpu", "Usage: berth gpu [OPTIONS] <COMMAND>"),
            ("berth gpu show 1 2 --token-file t", "Usage: berth gpu show [OPTIONS] <GPU>"),
            ("berth --dance", "Usage: berth [OPTIONS] <COMMAND>"),
        ] {
            let mut error = Cli::try_parse_from(typed.split(' ')).unwrap_err();
            plain_usage(&mut error);
            let told = error.to_string();
            assert!(told.lines().any(|line| line == usage), "{typed}: {told}");
        }
    }

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
