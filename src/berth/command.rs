//! Runs one command of the command line. `serve` reads its settings here, and goes on in
//! [`daemon`](crate::daemon).

use crate::args::{self, Cli, Command};
use crate::config::{Choice, Config, ServeArgs, Without};
use crate::{author, checks, from_nvidia, shell, state, telemetry, token};
use berth_cli::connection::ClientArgs;
use berth_cli::output::{Out, print_error};
use berth_cli::usage::{self, BadUsage};
use berth_cli::{Request, colour};
use berth_cluster::ApiServer;
use std::process::ExitCode;

/// A signal ended a start before the daemon was there.
#[derive(Debug, thiserror::Error)]
#[error("stopped by a signal while waiting for the node's label")]
struct Interrupted;

/// Runs one command. 0 done, 1 refused or failed; bad usage has ended with 2 before.
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
        return ended(berth_cli::run(request, client, &mut out));
    }
    if client.watch.is_some() {
        return ended(Err(berth_cli::not_watched().into()));
    }
    let done = match &cli.command {
        Command::Serve(args) => match load(args, client) {
            // As at a signal later in the start.
            Err(error) if error.is::<Interrupted>() => Ok(()),
            loaded => loaded.and_then(serve),
        },
        Command::Client(_) => Ok(()),
        Command::Policy { command } => return author::run(command, &mut out),
        Command::Config { command: args::ConfigCommand::Check { file, without_files, without_gpus } } => {
            let without = Without { files: *without_files, gpus: *without_gpus };
            checks::config::run(file, without, &mut out)
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
    ended(done)
}

fn ended(done: anyhow::Result<()>) -> ExitCode {
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            print_error(&error);
            exit_code(&error)
        }
    }
}

/// What a command that failed ends with. A log filter that cannot be meant is bad usage.
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

/// The settings, with GPUs that can be: a simulated profile that is not known would be waited for
/// in vain.
pub fn load(args: &ServeArgs, client: &ClientArgs) -> anyhow::Result<Config> {
    // One flag for all commands: to the daemon it says where the token is to be.
    let args = ServeArgs { token_file: client.token_file.clone(), ..args.clone() };
    let config =
        Config::load(&args).map_err(|error| match (error.only("adminListen"), &args.admin_listen) {
            // Only the file can say whether there is TLS.
            (Some(what), Some(_)) => {
                let words = format!("--admin-listen (or BERTH_ADMIN_LISTEN): {what}");
                anyhow::Error::new(BadUsage(words))
            }
            _ => error.into(),
        })?;
    let config = match Choice::of(&args.choice) {
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

/// What chooses the configuration. Before there are logs: a failure that may pass goes to standard error.
fn node_label(config: &Config, key: &str) -> anyhow::Result<Option<String>> {
    anyhow::ensure!(
        config.api_server != ApiServer::Off,
        "--config-dir reads the node label {key} from the API server: set --kubeconfig, or run in a pod with a service account"
    );
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let settings = berth_cluster::Settings::new(config.api_server.clone(), config.node_name.clone());
    let waits = |error: &berth_cluster::ConnectError| {
        let longest = berth_cluster::LABEL_READ_MAX.as_secs();
        eprintln!(
            "berth: waiting up to {longest} s for the node's label {key}: {}",
            berth_cluster::error_chain(error)
        );
    };
    runtime.block_on(async {
        tokio::select! {
            read = berth_cluster::node_label(&settings, key, waits) => read.map_err(|error| {
                anyhow::anyhow!("cannot read the node's label {key}: {}", berth_cluster::error_chain(&error))
            }),
            stopped = crate::daemon::stop_requested() => Err(stopped.map_or_else(Into::into, |()| Interrupted.into())),
        }
    })
}
