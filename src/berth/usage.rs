//! Parses the command line and prints its errors.

use crate::args::Cli;
use anyhow::Context;
use berth_cli::usage::{CODE, interval};
use clap::builder::StyledStr;
use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Command, CommandFactory, Parser};
use clap_complete::CompleteEnv;
use clap_complete::env::Shells;
use std::ffi::OsString;
use std::io::IsTerminal;
use std::process::ExitCode;

/// The variable with which the script of `berth completions` runs the program.
const COMPLETE_VARIABLE: &str = "BERTH_COMPLETE";

/// Parses the arguments and the environment, and prints errors and help.
///
/// # Errors
/// The exit code: 2, or 0 for `--help` and `--version`.
pub fn parse() -> Result<Cli, ExitCode> {
    let args: Vec<OsString> = std::env::args_os().collect();
    parse_from(&args).map_err(|mut error| {
        if error.kind() == ErrorKind::MissingSubcommand {
            let help = command_of(&error).render_help();
            eprint!(
                "{}",
                if std::io::stderr().is_terminal() { help.ansi().to_string() } else { help.to_string() }
            );
            return ExitCode::from(CODE);
        }
        plain_usage(&mut error);
        // A word that a group of commands does not know is about its own subject.
        let word = error.get(ContextKind::InvalidSubcommand).map(ToString::to_string);
        let word = word.filter(|_| command_of(&error).get_name() == "berth");
        let command = word.and_then(|word| command_for(&word));
        if let Some(command) = command {
            let tip = StyledStr::from(format!("the command is `{command}`"));
            error.insert(ContextKind::Suggested, ContextValue::StyledStrs(vec![tip]));
            error.remove(ContextKind::SuggestedSubcommand);
        }
        // A failure to print cannot be reported.
        let _ = error.print();
        if let Some(variable) = variable(&error, &args) {
            berth_cli::output::note(&format!("the value comes from the environment variable {variable}"));
        }
        ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(CODE))
    })
}

/// Parses the arguments; `-w 5` is `-w=5` unless the 5 is an argument of the command, such as the GPU of `gpu show`.
fn parse_from(args: &[OsString]) -> Result<Cli, clap::Error> {
    Cli::try_parse_from(args).or_else(|error| {
        let is_watch = |arg: &OsString| arg == "-w" || arg == "--watch";
        let is_interval = |arg: &OsString| arg.to_str().is_some_and(|arg| interval(arg).is_ok());
        let place = args.windows(2).position(|pair| is_watch(&pair[0]) && is_interval(&pair[1]));
        let Some(place) = place.filter(|_| error.kind() == ErrorKind::UnknownArgument) else {
            return Err(error);
        };
        let mut joined = args.to_vec();
        let value = joined.remove(place + 1);
        joined[place].push("=");
        joined[place].push(value);
        Cli::try_parse_from(joined).map_err(|_| error)
    })
}

/// Berth's command for a subcommand that a user of kubectl, nvidia-smi or nvtop may type.
fn command_for(word: &str) -> Option<&'static str> {
    Some(match word {
        "get" | "gpus" => "berth gpu list",
        "describe" => "berth gpu show",
        "cordon" => "berth gpu cordon",
        "uncordon" => "berth gpu uncordon",
        "drain" => "berth gpu drain",
        "status" | "info" => "berth node show",
        "pods" | "pod" | "allocations" => "berth allocation list",
        "ps" | "processes" => "berth process list",
        "logs" | "log" | "history" => "berth events --since 1h",
        "stack" => "berth policy stack",
        _ => return None,
    })
}

/// Answers the script of `berth completions`; `None` if this is no request of one. Completing may ask the daemon, and
/// then opens a connection like any command.
pub(crate) fn complete() -> Option<ExitCode> {
    let request = CompleteEnv::with_factory(Cli::command).var(COMPLETE_VARIABLE);
    match request.try_complete(std::env::args_os(), std::env::current_dir().ok().as_deref()) {
        Ok(false) => None,
        Ok(true) => Some(ExitCode::SUCCESS),
        Err(error) => {
            let _ = error.print();
            Some(ExitCode::FAILURE)
        }
    }
}

/// The script that completes `berth` in a shell.
///
/// # Errors
/// If the library does not know the shell, which it does for all values of `Shell`.
pub(crate) fn completion_script(shell: clap_complete::Shell) -> anyhow::Result<String> {
    let name = shell.to_string();
    let shells = Shells::builtins();
    let completer = shells.completer(&name).with_context(|| format!("no completions for {name}"))?;
    let mut script = Vec::new();
    completer.write_registration(COMPLETE_VARIABLE, "berth", "berth", "berth", &mut script)?;
    String::from_utf8(script).context("the script is not UTF-8")
}

/// Replaces the usage line. clap adds the arguments that are set, also by the environment, so that `--server <URL>`
/// would look required; the command's own usage line has only the required ones.
fn plain_usage(error: &mut clap::Error) {
    if error.get(ContextKind::Usage).is_some() {
        let usage = command_of(error).render_usage();
        error.insert(ContextKind::Usage, ContextValue::StyledStr(usage));
    }
}

/// The command that an error is about, by its usage line; the root if it has none.
fn command_of(error: &clap::Error) -> Command {
    let mut command = Cli::command();
    command.build();
    let Some(ContextValue::StyledStr(line)) = error.get(ContextKind::Usage) else { return command };
    // `Usage: berth policy push ...`: up to the last subcommand.
    for name in line.to_string().split_whitespace().skip(2) {
        let Some(inner) = command.find_subcommand(name).cloned() else { break };
        command = inner;
    }
    command
}

/// The environment variable of the argument that an error names, unless the argument is on the command line.
fn variable(error: &clap::Error, args: &[OsString]) -> Option<String> {
    let ContextValue::String(argument) = error.get(ContextKind::InvalidArg)? else {
        return None;
    };
    let flag = argument.split([' ', '=', '[']).next()?;
    let is_on_command_line =
        args.iter().filter_map(|a| a.to_str()).any(|a| a.split('=').next() == Some(flag));
    let variable = find_variable(&Cli::command(), flag.strip_prefix("--")?)?;
    (!is_on_command_line && std::env::var_os(&variable).is_some()).then_some(variable)
}

fn find_variable(command: &Command, long: &str) -> Option<String> {
    let own = command.get_arguments().find(|a| a.get_long() == Some(long)).and_then(|a| a.get_env());
    own.map(|variable| variable.to_string_lossy().into_owned())
        .or_else(|| command.get_subcommands().find_map(|inner| find_variable(inner, long)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_usage_line_shows_only_required_arguments() {
        for (command, usage) in [
            ("berth --server http://x policy push", "Usage: berth policy push [OPTIONS] <FILE>"),
            ("berth policy --output json test", "Usage: berth policy test [OPTIONS] <FILE> <SCENARIOS>..."),
            ("berth --server http://x gpu", "Usage: berth gpu [OPTIONS] <COMMAND>"),
            ("berth gpu show 1 2 --token-file t", "Usage: berth gpu show [OPTIONS] <GPU>"),
            ("berth --dance", "Usage: berth [OPTIONS] <COMMAND>"),
        ] {
            let mut error = Cli::try_parse_from(command.split(' ')).unwrap_err();
            plain_usage(&mut error);
            let text = error.to_string();
            assert!(text.lines().any(|line| line == usage), "{command}: {text}");
        }
    }

    #[test]
    fn an_interval_may_follow_its_flag() {
        let parse = |line: &str| {
            parse_from(&line.split(' ').map(OsString::from).collect::<Vec<_>>()).map(|cli| cli.client.watch)
        };
        for (line, milliseconds) in [
            ("berth gpu list -w 5", 5000),
            ("berth -w=0.5 gpu list", 500),
            ("berth gpu show 3 --watch 500ms", 500),
            ("berth gpu list -w", 2000),
            // The number is the GPU.
            ("berth gpu show -w 3", 2000),
        ] {
            let interval = parse(line).unwrap().map(|interval| interval.as_millis());
            assert_eq!(interval, Some(milliseconds), "{line}");
        }
        for line in ["berth gpu list -w soon", "berth gpu list -w=soon", "berth gpu list 5 -w"] {
            assert!(parse(line).is_err(), "{line}");
        }
    }

    /// No such word is a command of `berth` itself, and each command that is named exists.
    #[test]
    fn a_word_of_other_tools_names_a_command() {
        for word in
            ["get", "describe", "cordon", "uncordon", "drain", "status", "pods", "ps", "logs", "stack"]
        {
            let command = command_for(word).unwrap();
            assert!(Cli::try_parse_from(["berth", word]).is_err(), "{word}");
            let result = Cli::try_parse_from(command.split(' ').chain(["--help"]));
            assert_eq!(result.unwrap_err().kind(), clap::error::ErrorKind::DisplayHelp, "{command}");
        }
        assert_eq!(command_for("gpu"), None);
    }

    #[test]
    fn the_variables_of_flags_are_found_in_all_commands() {
        let command = Cli::command();
        for (long, variable) in
            [("gpus", "BERTH_GPUS"), ("server", "BERTH_SERVER"), ("pass-device-specs", "PASS_DEVICE_SPECS")]
        {
            assert_eq!(find_variable(&command, long).as_deref(), Some(variable));
        }
        assert_eq!(find_variable(&command, "limit"), None);
    }
}
