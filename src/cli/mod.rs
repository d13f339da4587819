//! The command line: `berth serve` and its checks, and the client half, which talks to a running
//! daemon over its admin API and knows nothing that the API does not say.

mod allocation;
mod args;
mod client;
mod config_check;
mod gpu;
mod node_check;
mod output;
mod policy;
mod state;

pub use args::{Cli, Command, Output};
pub use state::{StateHooks, StateSummary};

use crate::config::{Config, GpuSource};
use client::Client;
use output::Out;
use std::process::ExitCode;

/// What of other rooms the command line needs, given by `main`, so that it names no adapter.
pub struct Hooks {
    /// Starts logs and runs the daemon until a signal.
    pub serve: fn(Config) -> anyhow::Result<()>,
    /// One look at the GPUs: what was found, in one line.
    pub look: fn(&GpuSource) -> anyhow::Result<String>,
    /// What `berth state` does.
    pub state: StateHooks,
}

/// Runs one command. 0 done, 1 refused or failed; bad usage has ended with 2 before.
#[must_use]
pub fn run(cli: Cli, hooks: &Hooks) -> ExitCode {
    let mut out = Out::new(cli.client.output);
    let done = match cli.command {
        Command::Serve(args) => serve(&args, hooks),
        Command::Gpu { command } => Client::new(&cli.client).and_then(|c| gpu::run(&command, &c, &mut out)),
        Command::Allocation { command } => {
            Client::new(&cli.client).and_then(|c| allocation::run(&command, &c, &mut out))
        }
        Command::Policy { command } => {
            Client::new(&cli.client).and_then(|c| policy::run(&command, &c, &mut out))
        }
        Command::Config { command: args::ConfigCommand::Check { file } } => {
            config_check::run(&file, &mut out)
        }
        Command::Node { command: args::NodeCommand::Check(args) } => {
            return node_check::run(&args, hooks.look, &mut out);
        }
        Command::State { command } => state::run(&command, &hooks.state, &mut out),
        Command::Openapi => out.text(crate::admin::openapi_json()),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            output::complain(&error);
            ExitCode::FAILURE
        }
    }
}

fn serve(args: &crate::config::ServeArgs, hooks: &Hooks) -> anyhow::Result<()> {
    let config = Config::load(args)?;
    (hooks.serve)(config)
}
