//! `berth options`: the flags that the help of a command leaves out, so that each help is one screen.

use crate::args::Cli;
use berth_cli::endpoint::ClientArgs;
use berth_cli::output::Out;
use berth_cli::usage::BadUsage;
use clap::{Args, Command, CommandFactory};

const CONNECTION: &str = "\
Every command that talks to a running daemon takes these flags, before or after its
name. A flag that shows an environment variable can be set in it instead; `export
BERTH_SERVER=... BERTH_TOKEN_FILE=...` is enough for a session. Do not set
BERTH_TOKEN_FILE in the shell of `berth serve`, which would use that file as its own
token file.

";

pub(super) fn run(command: &[String], out: &mut Out) -> anyhow::Result<()> {
    let text = match command {
        [] => CONNECTION.to_owned() + &connection(),
        names => of_command(names)?,
    };
    out.text(&text)
}

/// The flags of the connection.
fn connection() -> String {
    let flags = Command::new("berth").disable_help_flag(true).help_template("{all-args}");
    with_all_flags(ClientArgs::augment_args(flags)).render_help().to_string()
}

/// `berth help`: the help of a command.
pub(super) fn help(names: &[String]) -> Result<String, BadUsage> {
    help_of(Cli::command(), names)
}

/// The help of a command with all of its flags.
fn of_command(names: &[String]) -> Result<String, BadUsage> {
    help_of(with_all_flags(Cli::command()), names)
}

fn help_of(mut command: Command, names: &[String]) -> Result<String, BadUsage> {
    command.build();
    for name in names {
        let Some(inner) = command.find_subcommand(name).cloned() else {
            let parent = command.get_name();
            return Err(BadUsage(format!("there is no command `{name}` in `{parent}`; --help lists them")));
        };
        command = inner;
    }
    Ok(command.render_help().to_string())
}

/// The command with all flags and variables in its help, except those of NVIDIA's device plugin that are not Berth's.
pub(super) fn with_all_flags(command: Command) -> Command {
    command.mut_args(|arg| arg.hide_short_help(false).hide_env(false)).mut_subcommands(with_all_flags)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each command with its path, the root first.
    fn all(command: &Command, path: &str, into: &mut Vec<(String, Command)>) {
        into.push((path.to_owned(), command.clone()));
        for inner in command.get_subcommands().filter(|inner| !inner.is_hide_set()) {
            all(inner, &format!("{path} {}", inner.get_name()), into);
        }
    }

    #[test]
    fn the_help_of_each_command_is_one_screen_of_80_columns() {
        let mut root = Cli::command().term_width(80);
        root.build();
        let mut commands = Vec::new();
        all(&root, "berth", &mut commands);
        assert!(commands.len() > 50, "{}", commands.len());
        let mut long = Vec::new();
        for (path, mut command) in commands {
            let help = command.render_help().to_string();
            let lines = help.lines().count();
            let wide: Vec<_> = help.lines().filter(|line| line.chars().count() > 80).collect();
            if lines > 40 || !wide.is_empty() {
                long.push(format!("{path}: {lines} lines, too wide: {wide:?}"));
            }
            assert!(!help.contains("--client-key"), "{path} shows the flags of the connection");
        }
        assert!(long.is_empty(), "{long:#?}");
    }

    #[test]
    fn the_flags_that_help_leaves_out_are_shown_here() {
        let connection = connection();
        for flag in ["--server", "--token-file", "--ca-file", "--client-cert", "--client-key", "BERTH_SERVER"]
        {
            assert!(connection.contains(flag), "{flag}: {connection}");
        }
        let serve = of_command(&["serve".into()]).unwrap();
        for part in
            ["--gpus", "BERTH_GPUS", "--tracing-sample-ratio", "OTEL_TRACES_SAMPLER_ARG", "--skip-adoption"]
        {
            assert!(serve.contains(part), "{part}: {serve}");
        }
        assert!(help(&["gpu".into(), "cordon".into()]).unwrap().contains("berth gpu cordon [OPTIONS]"));
        assert!(help(&[]).unwrap().contains("Commands:") && help(&["dance".into()]).is_err());
        assert!(of_command(&["node".into(), "check".into()]).unwrap().contains("--config-fallbacks"));
        assert!(
            of_command(&["gpu".into(), "dance".into()]).unwrap_err().to_string().contains("`dance` in `gpu`")
        );
    }
}
