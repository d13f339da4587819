//! Berth: a Kubernetes node daemon that shares and guards a node's GPUs. This crate composes the other ones: command
//! line, start, stop and reload.

pub mod args;
pub mod command;
pub mod daemon;
mod options;
mod state;
pub mod usage;

use std::process::ExitCode;

/// Runs the program.
#[must_use]
pub fn main() -> ExitCode {
    // The daemon starts this program as the compiler of policies, too, without arguments of the command line.
    if let Some(code) = berth_wasm::compiler_process() {
        return code;
    }
    // So do the scripts of `berth completions`, with the line in which a word is completed.
    if let Some(code) = usage::complete() {
        return code;
    }
    usage::parse().map_or_else(|code| code, |cli| command::run(&cli))
}
