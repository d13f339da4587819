//! `berth`: arguments, then the command. `serve` goes on from there: configuration, telemetry,
//! daemon, run until a signal, stop in order.

use berth::cli::{self, Hooks};
use berth::config::{Config, GpuSource};
use std::process::ExitCode;

fn main() -> ExitCode {
    // This binary is the policies' compiler, too: started by the daemon, before any argument is
    // looked at.
    if let Some(code) = berth::wasm::compiler_process() {
        return code;
    }
    let hooks =
        Hooks { serve, look, check_source: berth::daemon::check_source, rehearse: berth::daemon::rehearse };
    cli::parse().map_or_else(|code| code, |cli| cli::run(cli, &hooks))
}

/// `berth serve`.
fn serve(config: Config) -> anyhow::Result<()> {
    berth::telemetry::start(config.log)?;
    berth::daemon::serve(config)
}

/// What `berth node check` says of the GPUs.
fn look(source: &GpuSource) -> anyhow::Result<String> {
    let gpus = berth::daemon::open_gpus(source.clone())?;
    let found = gpus.look()?;
    let count = found.parts.iter().filter(|p| p.parent.is_none()).count();
    anyhow::ensure!(count > 0, "{} shows no GPU", gpus.describe());
    let mut text = format!("{count} GPUs, {}", gpus.describe());
    for (gpu, trouble) in &found.troubles {
        text += &format!("; {gpu} does not work: {trouble}");
    }
    Ok(text)
}
