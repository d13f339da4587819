//! Runs a command. `serve` loads its settings here and runs [`daemon`](crate::daemon).

use crate::args::{self, Cli, Command};
use crate::config::{Choice, Config, ServeArgs, SkippedChecks};
use crate::{author, checks, from_nvidia, shell, state, telemetry, token};
use berth_cli::connection::ClientArgs;
use berth_cli::output::{Out, print_error};
use berth_cli::usage::{self, BadUsage};
use berth_cli::{Request, colour};
use berth_cluster::ApiServer;
use std::process::ExitCode;

/// A signal during the start, before the daemon runs.
#[derive(Debug, thiserror::Error)]
#[error("stopped by a signal while waiting for the node's label")]
struct Interrupted;

/// Runs a command. The exit code is 0 for success and 1 for a failure; [`usage::parse`](crate::usage::parse) exits with 2.
#[must_use]
pub fn run(cli: &Cli) -> ExitCode {
    colour::decide();
    let client = &cli.client;
    let mut out = Out::new(client.output);
    let request = match &cli.command {
        Command::Client(command) => Some(Request::Command(command)),
        Command::Policy { command: args::PolicyCommand::Client(command) } => Some(Request::Policy(command)),
        _ => None,
    };
    if let Some(request) = request {
        return report(berth_cli::run(request, client, &mut out));
    }
    if client.watch.is_some() {
        return report(Err(berth_cli::not_watched().into()));
    }
    let result = match &cli.command {
        Command::Serve(args) => match load(args, client) {
            // A signal is not an error, as later in the start.
            Err(error) if error.is::<Interrupted>() => Ok(()),
            loaded => loaded.and_then(serve),
        },
        Command::Client(_) => Ok(()),
        Command::Policy { command } => return author::run(command, &mut out),
        Command::Config { command: args::ConfigCommand::Check { file, without_files, without_gpus } } => {
            let skipped = SkippedChecks { files: *without_files, gpus: *without_gpus };
            checks::config::run(file, skipped, &mut out)
        }
        Command::Config { command: args::ConfigCommand::FromNvidia { file } } => {
            from_nvidia::run(file, &mut out)
        }
        Command::Node { command: args::NodeCommand::Check(args) } => {
            return checks::node::run(args, client, &mut out);
        }
        Command::State { command } => state::run(command, &mut out),
        Command::Token { command } => token::run(*command, client, &mut out),
        Command::Openapi => out.text(berth_admin::openapi_json()),
        Command::Completions { shell } => shell::completions(*shell, &mut out),
        Command::Man { into } => shell::man(into.as_deref(), &mut out),
    };
    report(result)
}

/// Prints an error and returns the exit code.
fn report(result: anyhow::Result<()>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            print_error(&error);
            exit_code(&error)
        }
    }
}

/// The exit code of a failed command. An invalid log filter is bad usage.
pub(crate) fn exit_code(error: &anyhow::Error) -> ExitCode {
    match error.downcast_ref() {
        Some(telemetry::TelemetryError::Filter { .. }) => ExitCode::from(usage::CODE),
        _ => usage::code(error),
    }
}

/// `berth serve`.
fn serve(config: Config) -> anyhow::Result<()> {
    let traces = crate::telemetry::start(&config)?;
    config.notices.iter().for_each(|notice| tracing::warn!("{notice}"));
    crate::daemon::serve(config, traces)
}

/// Loads the settings and checks the source of the GPUs: the daemon would wait forever for an unknown simulated profile.
///
/// # Errors
/// If the settings are invalid, or the node's label cannot be read.
pub fn load(args: &ServeArgs, client: &ClientArgs) -> anyhow::Result<Config> {
    // The flag of all commands; the daemon creates the token in this file.
    let args = ServeArgs { token_file: client.token_file.clone(), ..args.clone() };
    let config =
        Config::load(&args).map_err(|error| match (error.sole_error("adminListen"), &args.admin_listen) {
            // A flag's error, found late because the rule depends on the file's TLS settings.
            (Some(what), Some(_)) => {
                let text = format!("--admin-listen (or BERTH_ADMIN_LISTEN): {what}");
                anyhow::Error::new(BadUsage(text))
            }
            _ => error.into(),
        })?;
    let config = match Choice::from_args(&args.choice) {
        Some(choice) => {
            let label = node_label(&config, &choice.label)?;
            Config::load_chosen(&args, choice, label)?
        }
        None => config,
    };
    crate::daemon::check_source(&config.gpus).map_err(|error| match args.gpus {
        Some(_) => BadUsage(format!("{error:#}")).into(),
        None => error,
    })?;
    Ok(config)
}

/// The label that selects the configuration file. Logs are not set up yet: temporary failures go to standard error.
fn node_label(config: &Config, key: &str) -> anyhow::Result<Option<String>> {
    anyhow::ensure!(
        config.api_server != ApiServer::Off,
        "--config-dir reads the node label {key} from the API server: set --kubeconfig, or run in a pod with a service account"
    );
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let settings = berth_cluster::Settings::new(config.api_server.clone(), config.node_name.clone());
    let on_retry = |error: &berth_cluster::ConnectError| {
        let max_wait = berth_cluster::LABEL_READ_MAX.as_secs();
        eprintln!(
            "berth: waiting up to {max_wait} s for the node's label {key}: {}",
            berth_cluster::error_chain(error)
        );
    };
    runtime.block_on(async {
        tokio::select! {
            read = berth_cluster::node_label(&settings, key, on_retry) => read.map_err(|error| {
                anyhow::anyhow!("cannot read the node's label {key}: {}", berth_cluster::error_chain(&error))
            }),
            stopped = crate::daemon::wait_for_stop_signal() => Err(stopped.map_or_else(Into::into, |()| Interrupted.into())),
        }
    })
}
