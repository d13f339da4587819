//! `berth`: arguments, then the command. `serve` goes on from there: configuration, telemetry,
//! daemon, run until a signal, stop in order.

use berth::cli::{self, Hooks, Looked, StateHooks, StateSummary};
use berth::config::{Config, GpuSource};
use berth::store::{self, Summary};
use std::process::ExitCode;

fn main() -> ExitCode {
    // This binary is the policies' compiler, too: started by the daemon, before any argument is
    // looked at.
    if let Some(code) = berth::wasm::compiler_process() {
        return code;
    }
    let state = StateHooks {
        export: |dir, out| Ok(store::export(dir, out)?),
        import: |dir, lines| Ok(shown(store::import(dir, lines)?)),
        verify: |dir| Ok(shown(store::verify(dir)?)),
    };
    let (check_source, rehearse) = (berth::daemon::check_source, berth::daemon::rehearse);
    let sight = berth::daemon::sight;
    let hooks = Hooks { serve, look, check_source, reach, rehearse, sight, state };
    cli::parse().map_or_else(|code| code, |cli| cli::run(&cli, &hooks))
}

/// `berth serve`.
fn serve(config: Config) -> anyhow::Result<()> {
    let traces = berth::telemetry::start(&config)?;
    berth::daemon::serve(config, traces)
}

/// What `berth node check` asks the API server.
fn reach(config: &Config) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let settings = berth::cluster::Settings::new(config.api_server.clone(), config.node_name.clone());
    let connected = runtime.block_on(berth::cluster::connect(&settings));
    connected.map(drop).map_err(|error| anyhow::anyhow!(berth::cluster::words(&error)))
}

/// What `berth node check` says of the GPUs.
fn look(source: &GpuSource) -> anyhow::Result<Looked> {
    let gpus = berth::daemon::open_gpus(source.clone())?;
    let found = gpus.look()?;
    let count = found.parts.iter().filter(|p| p.parent.is_none()).count();
    anyhow::ensure!(count > 0, "{} shows no GPU", gpus.describe());
    let mut text = format!("{count} GPUs, {}", gpus.describe());
    for (gpu, trouble) in &found.troubles {
        text += &format!("; {gpu} does not work: {trouble}");
    }
    Ok(Looked { text, parts: found.parts })
}

fn shown(Summary { appends, records, kinds }: Summary) -> StateSummary {
    StateSummary { appends, records, kinds }
}
