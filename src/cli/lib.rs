//! The client half of the command line: what talks to a running daemon over its admin API, and knows
//! only what the API says.

mod action;
mod allocation;
mod candidate;
pub mod client;
pub mod colour;
pub mod command;
pub mod connection;
mod decision;
mod drain;
mod event;
mod gpu;

pub mod input_file;
mod names;
pub mod output;
pub mod parameters;
pub mod policy;
mod policy_version;
mod process;
pub mod reach;
mod reason;
mod stack_file;
mod stack_table;
pub mod token;
mod trial;
mod tried;
mod unix;
pub mod upload;
pub mod usage;
mod versions;
mod watch;

use client::Client;
use command::ClientCommand;
use connection::ClientArgs;
use output::Out;
use policy::PolicyCommand;
use usage::BadUsage;

/// A command for a running daemon.
#[derive(Clone, Copy, Debug)]
pub enum Request<'c> {
    /// All but those of `berth policy`.
    Command(&'c ClientCommand),
    /// Of `berth policy`.
    Policy(&'c PolicyCommand),
}

/// Runs a command for a running daemon, with `--watch` again and again.
///
/// # Errors
/// If the daemon cannot be reached or refuses it; the message has advice.
pub fn run(request: Request<'_>, args: &ClientArgs, out: &mut Out) -> anyhow::Result<()> {
    let Some(every) = args.watch else { return ask(request, args, out) };
    if !watch::is_repeatable(request) {
        return Err(not_watched().into());
    }
    watch::run(every, out, |out| ask(request, args, out))
}

/// The error of `--watch` with a command that changes something.
#[must_use]
pub fn not_watched() -> BadUsage {
    let message = "--watch works only with commands that change nothing: `list`, `show`, `process bypass`, `policy stack`";
    BadUsage(message.into())
}

fn ask(request: Request<'_>, args: &ClientArgs, out: &mut Out) -> anyhow::Result<()> {
    let client = Client::new(args)?;
    match request {
        Request::Command(command) => match command {
            ClientCommand::Gpu { command } => gpu::run(command, &client, out),
            ClientCommand::Allocation { command } => allocation::run(command, &client, out),
            ClientCommand::Process { command } => process::run(command, &client, out),
            ClientCommand::Decision { command } => decision::run(command, &client, out),
            ClientCommand::Events(args) => event::run(args, &client, out),
        },
        Request::Policy(command) => policy::run(command, &client, out),
    }
}
