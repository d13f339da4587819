//! `berth`: arguments, configuration, telemetry, daemon; run until a signal; stop in order.

use berth::config::{Config, ServeArgs};
use clap::Parser;
use std::process::ExitCode;

/// A Kubernetes node daemon that shares and guards a node's GPUs.
#[derive(Parser)]
#[command(version)]
enum Command {
    /// Run the daemon on this node
    Serve(ServeArgs),
}

fn main() -> ExitCode {
    if let Some(code) = berth::wasm::compiler_process() {
        return code;
    }
    let Command::Serve(args) = Command::parse();
    let outcome = Config::load(&args).map_err(anyhow::Error::from).and_then(|config| {
        tracing_subscriber::fmt().with_writer(std::io::stderr).init();
        berth::daemon::serve(config)
    });
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("berth: {error:#}");
            ExitCode::FAILURE
        }
    }
}
