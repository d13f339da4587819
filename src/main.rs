//! `berth`: arguments, then the command. `serve` goes on from there: configuration, telemetry,
//! daemon, run until a signal, stop in order.

use berth::cli::{self, Hooks, Looked, StateHooks, StateSummary};
use berth::config::{ApiServer, Config, GpuSource};
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
        init: |dir| Ok(shown(store::init(dir)?)),
        verify: |dir| Ok(shown(store::verify(dir)?)),
    };
    let (check_source, rehearse) = (berth::daemon::check_source, berth::daemon::rehearse);
    let sight = berth::daemon::sight;
    let hooks = Hooks { serve, look, check_source, reach, node_label, rehearse, sight, state };
    cli::parse().map_or_else(|code| code, |cli| cli::run(&cli, &hooks))
}

/// `berth serve`.
fn serve(config: Config) -> anyhow::Result<()> {
    let traces = berth::telemetry::start(&config)?;
    config.notices.iter().for_each(|notice| tracing::warn!("{notice}"));
    berth::daemon::serve(config, traces)
}

/// What `berth node check` asks the API server.
fn reach(config: &Config) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let settings = berth::cluster::Settings::new(config.api_server.clone(), config.node_name.clone());
    let connected = runtime.block_on(berth::cluster::connect(&settings));
    connected.map(drop).map_err(|error| anyhow::anyhow!(berth::cluster::words(&error)))
}

/// What chooses the configuration. Before there are logs: a failure that may pass goes to standard error.
fn node_label(config: &Config, key: &str) -> anyhow::Result<Option<String>> {
    anyhow::ensure!(
        config.api_server != ApiServer::Off,
        "--config-dir reads the node label {key} from the API server: set --kubeconfig, or run in a pod with a service account"
    );
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let settings = berth::cluster::Settings::new(config.api_server.clone(), config.node_name.clone());
    let waits = |error: &berth::cluster::ConnectError| {
        let longest = berth::cluster::LABEL_WAIT_MAX.as_secs();
        eprintln!(
            "berth: waiting up to {longest} s for the node's label {key}: {}",
            berth::cluster::words(error)
        );
    };
    runtime.block_on(async {
        tokio::select! {
            read = berth::cluster::node_label(&settings, key, waits) => read.map_err(|error| {
                anyhow::anyhow!("cannot read the node's label {key}: {}", berth::cluster::words(&error))
            }),
            stopped = berth::daemon::stop_requested() => Err(stopped.map_or_else(Into::into, |()| cli::Interrupted.into())),
        }
    })
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
