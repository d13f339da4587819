//! The command line: `berth serve` and its checks, and the client half, which talks to a running
//! daemon over its admin API and knows nothing that the API does not say.

mod allocation;
mod args;
mod author;
mod client;
mod colour;
mod config_check;
mod decision;
mod drain;
mod event;
mod from_nvidia;
mod gpu;
mod hints;
mod names;
mod node_check;
mod output;
mod parameters;
mod policy;
mod policy_new;
mod process;
mod reach;
mod shell;
mod stack_file;
mod state;
mod token;
mod trial;
mod tried;
mod unix;
mod upload;
mod usage;
mod versions;
mod watch;

pub use args::{Cli, Command, Output};
pub use event::EventsArgs;
pub use process::ProcessCommand;
pub use state::{StateCommand, StateDir, StateHooks, StateSummary};
pub use usage::parse;

use crate::config::{Choice, Config, Findings, GpuSource, ServeArgs, Without};
use crate::kernel::gpu::Part;
use crate::kernel::process::Sight;
use args::ClientArgs;
use client::Client;
use output::Out;
use std::process::ExitCode;
use std::time::Duration;

/// What of other rooms the command line needs, given by `main`, so that it names no adapter.
pub struct Hooks {
    /// Starts logs and runs the daemon until a signal.
    pub serve: fn(Config) -> anyhow::Result<()>,
    /// One look at the GPUs.
    pub look: fn(&GpuSource) -> anyhow::Result<Looked>,
    /// How far a daemon here could tell whose the processes on its GPUs are.
    pub sight: fn(&Config) -> Sight,
    /// What `berth state` does.
    pub state: StateHooks,
    /// Whether the GPU source can ever work.
    pub check_source: fn(&GpuSource) -> anyhow::Result<()>,
    /// Whether the API server answers and knows this node.
    pub reach: fn(&Config) -> anyhow::Result<()>,
    /// The value of a label of this node, by the API server.
    pub node_label: fn(&Config, &str) -> anyhow::Result<Option<String>>,
    /// Does with a configuration's GPUs and stack what a start does.
    pub rehearse: Rehearse,
}

/// A signal ended a start before the daemon was there.
#[derive(Debug, thiserror::Error)]
#[error("stopped by a signal while waiting for the node's label")]
pub struct Interrupted;

/// Does with a configuration's GPUs and stack what a start does, but for what is left out.
pub type Rehearse = fn(&Config, Without) -> anyhow::Result<Findings>;

/// What a look at the GPUs found.
pub struct Looked {
    /// In one line.
    pub text: String,
    /// GPUs and MIG instances.
    pub parts: Vec<Part>,
}

/// Runs one command. 0 done, 1 refused or failed; bad usage has ended with 2 before.
#[must_use]
pub fn run(cli: &Cli, hooks: &Hooks) -> ExitCode {
    colour::decide();
    let mut out = Out::new(cli.client.output);
    if let Some(every) = cli.client.watch {
        return ended(watched(every, cli, &mut out));
    }
    let done = match &cli.command {
        Command::Serve(args) => match load(args, &cli.client, hooks) {
            // As at a signal later in the start.
            Err(error) if error.is::<Interrupted>() => Ok(()),
            loaded => loaded.and_then(hooks.serve),
        },
        Command::Gpu { .. }
        | Command::Allocation { .. }
        | Command::Process { .. }
        | Command::Decision { .. }
        | Command::Events(_) => ask(cli, &mut out),
        Command::Policy { command } if author::is_offline(command) => {
            return author::run(command, &mut out);
        }
        Command::Policy { .. } => ask(cli, &mut out),
        Command::Config { command: args::ConfigCommand::Check { file, without_files, without_gpus } } => {
            let without = Without { files: *without_files, gpus: *without_gpus };
            config_check::run(file, without, hooks.rehearse, &mut out)
        }
        Command::Config { command: args::ConfigCommand::FromNvidia { file } } => {
            from_nvidia::run(file, &mut out)
        }
        Command::Node { command: args::NodeCommand::Check(args) } => {
            return node_check::run(args, &cli.client, hooks, &mut out);
        }
        Command::State { command } => state::run(command, &hooks.state, &mut out),
        Command::Token { command } => token::run(*command, &cli.client, &mut out),
        Command::Openapi => out.text(crate::admin::openapi_json()),
        Command::Completions { shell } => shell::completions(*shell, &mut out),
        Command::Man { into } => shell::man(into.as_deref(), &mut out),
    };
    ended(done)
}

/// What a running daemon is asked.
fn ask(cli: &Cli, out: &mut Out) -> anyhow::Result<()> {
    let client = Client::new(&cli.client)?;
    match &cli.command {
        Command::Gpu { command } => gpu::run(command, &client, out),
        Command::Allocation { command } => allocation::run(command, &client, out),
        Command::Process { command } => process::run(command, &client, out),
        Command::Decision { command } => decision::run(command, &client, out),
        Command::Events(args) => event::run(args, &client, out),
        Command::Policy { command } => policy::run(command, &client, out),
        // No other command talks to a daemon.
        _ => Ok(()),
    }
}

fn watched(every: Duration, cli: &Cli, out: &mut Out) -> anyhow::Result<()> {
    if !watch::looks(&cli.command) {
        let words =
            "--watch goes with commands that only look: `list`, `show`, `process bypass`, `policy stack`";
        return Err(usage::BadUsage(words.into()).into());
    }
    watch::run(every, out, |out| ask(cli, out))
}

fn ended(done: anyhow::Result<()>) -> ExitCode {
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            output::complain(&error);
            usage::code(&error)
        }
    }
}

/// The settings, with GPUs that can be: a simulated profile that is not known would be waited for
/// in vain.
fn load(args: &ServeArgs, client: &ClientArgs, hooks: &Hooks) -> anyhow::Result<Config> {
    // One flag for all commands: to the daemon it says where the token is to be.
    let args = ServeArgs { token_file: client.token_file.clone(), ..args.clone() };
    let config =
        Config::load(&args).map_err(|error| match (error.only("adminListen"), &args.admin_listen) {
            // Only the file can say whether there is TLS.
            (Some(what), Some(_)) => {
                let words = format!("--admin-listen (or BERTH_ADMIN_LISTEN): {what}");
                anyhow::Error::new(usage::BadUsage(words))
            }
            _ => error.into(),
        })?;
    let config = match Choice::of(&args.choice) {
        Some(choice) => {
            let label = (hooks.node_label)(&config, &choice.label)?;
            Config::load_chosen(&args, choice, label)?
        }
        None => config,
    };
    (hooks.check_source)(&config.gpus).map_err(|error| match args.gpus {
        Some(_) => usage::BadUsage(format!("{error:#}")).into(),
        None => error,
    })?;
    Ok(config)
}
