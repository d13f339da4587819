//! Berth: a Kubernetes node daemon that shares and guards a node's GPUs. This package puts the crates
//! beside it together: the command line, configuration, start and stop, checks, scenarios, logs and
//! traces.

pub mod args;
mod author;
mod checks;
pub mod command;
pub mod config;
pub mod daemon;
mod from_nvidia;
mod policy_new;
pub mod scenario;
mod shell;
mod state;
pub mod telemetry;
mod token;
pub mod trace;
pub mod usage;

use std::process::ExitCode;

/// The whole program: arguments, then the command.
#[must_use]
pub fn main() -> ExitCode {
    // The program is the policies' compiler as well: the daemon starts it again for that, and then no
    // argument of the command line is there.
    if let Some(code) = berth_wasm::compiler_process() {
        return code;
    }
    usage::parse().map_or_else(|code| code, |cli| command::run(&cli))
}
