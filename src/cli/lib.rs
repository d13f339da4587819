//! The client half of the command line: what talks to a running daemon over its admin API, and knows
//! only what the API says.

mod allocation;
pub mod args;
pub mod client;
pub mod colour;
mod decision;
mod drain;
mod event;
mod gpu;
mod hints;
mod names;
pub mod output;
pub mod parameters;
pub mod policy;
mod process;
pub mod reach;
mod stack_file;
pub mod token;
mod trial;
mod tried;
mod unix;
pub mod upload;
pub mod usage;
mod versions;
mod watch;

use args::{ClientArgs, ClientCommand, PolicyCommand};
use client::Client;
use output::Out;
use usage::BadUsage;

/// A command for a running daemon.
#[derive(Clone, Copy, Debug)]
pub enum Request<'c> {
    /// One of the groups that only ask a daemon.
    Command(&'c ClientCommand),
    /// Of `berth policy`.
    Policy(&'c PolicyCommand),
}

/// Runs a command for a running daemon, with `--watch` again and again.
///
/// # Errors
/// If the daemon cannot be reached or refuses it; says what to do.
pub fn run(request: Request<'_>, args: &ClientArgs, out: &mut Out) -> anyhow::Result<()> {
    let Some(every) = args.watch else { return ask(request, args, out) };
    if !watch::looks(request) {
        return Err(not_watched().into());
    }
    watch::run(every, out, |out| ask(request, args, out))
}

/// The answer to `--watch` with a command that changes something.
#[must_use]
pub fn not_watched() -> BadUsage {
    let words = "--watch goes with commands that only look: `list`, `show`, `process bypass`, `policy stack`";
    BadUsage(words.into())
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
