//! Runs a command. `serve` loads its settings here and runs [`daemon`](crate::daemon).

use crate::args::{CdiCommand, Cli, Command, ConfigCommand, NodeCommand, PolicyCommand, TokenCommand};
use crate::daemon::{exit_on_signals, let_daemon_handle_signals};
use crate::{options, state};
use anyhow::{Context, anyhow, ensure};
use berth_checks::SkippedChecks;
use berth_cli::DaemonCommand;
use berth_cli::endpoint::ClientArgs;
use berth_cli::output::{Out, decide_colours, print_error};
use berth_cli::usage::{self, BadUsage};
use berth_cluster::ApiServer;
use berth_config::{Choice, Config, ServeArgs};
use berth_fleet::controller::{Controller, Settings};
use berth_kube::Connection;
use berth_observe::logs::{self, LogFormat, LogsError};
use berth_observe::trace::{Pump, TracingSettings};
use berth_scenario::{author, pack, policy_new};
use clap::CommandFactory;
use std::path::Path;
use std::process::ExitCode;
use tokio::signal::unix::{SignalKind, signal};

/// Runs a command. The exit code is 0 for success and 1 for a failure; [`usage::parse`](crate::usage::parse) exits with
/// 2.
#[must_use]
pub fn run(cli: &Cli) -> ExitCode {
    decide_colours();
    match dispatch(cli, &mut Out::new(cli.client.output)) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            print_error(&error);
            usage::code(&error)
        }
    }
}

/// Runs a command. Returns false if a check or a test found a failure, which is in its output.
fn dispatch(cli: &Cli, out: &mut Out) -> anyhow::Result<bool> {
    let client = &cli.client;
    let for_daemon = matches!(
        &cli.command,
        Command::Client(_)
            | Command::Node { command: NodeCommand::Client(_) }
            | Command::Policy { command: PolicyCommand::Client(_) }
    );
    if client.watch.is_some() && !for_daemon {
        return Err(berth_cli::not_watched().into());
    }
    match &cli.command {
        Command::Serve(args) => serve(args, client)?,
        Command::Guard { config, own_namespace, log } => {
            guard(config.as_deref(), own_namespace.clone(), *log)?;
        }
        Command::Controller { config, kubeconfig, namespace, log } => {
            controller(config.as_deref(), kubeconfig.as_deref(), namespace.clone(), *log)?;
        }
        Command::Client(command) => berth_cli::run(DaemonCommand::Client(command), client, out)?,
        Command::Policy { command } => match command {
            PolicyCommand::Client(command) => berth_cli::run(DaemonCommand::Policy(command), client, out)?,
            PolicyCommand::New(new) => policy_new::run(new, out)?,
            PolicyCommand::Check { file, parameters } => {
                return author::check(file, parameters.as_deref(), out);
            }
            PolicyCommand::Pack(args) => pack::run(args, out)?,
            PolicyCommand::Test { file, scenarios, shipped } => {
                return author::test(file.as_deref(), scenarios, shipped.as_deref(), out);
            }
        },
        Command::Config { command: ConfigCommand::Check { file, without_files, without_gpus } } => {
            let skipped = SkippedChecks { files: *without_files, gpus: *without_gpus };
            let berth = Cli::command();
            let serve = berth.find_subcommand("serve").context("there is no `serve`")?;
            berth_checks::config::run(file, skipped, serve, out)?;
        }
        Command::Config { command: ConfigCommand::FromNvidia { file } } => {
            berth_checks::nvidia::run(file, out)?;
        }
        Command::Node { command: NodeCommand::Client(command) } => {
            berth_cli::run(DaemonCommand::Node(command), client, out)?;
        }
        Command::Node { command: NodeCommand::Check(args) } => {
            return berth_checks::node::run(args, &load(args, client)?, out);
        }
        Command::Cdi { command: CdiCommand::Check { file, against, without_files } } => {
            return berth_checks::cdi::run(file, against, *without_files, out);
        }
        Command::State { command } => state::run(command, out)?,
        Command::Token { command: TokenCommand::Rotate } => {
            let path = client.token_file();
            berth_http::rotate_token(&path)?;
            out.done(&format!(
                "{} has a new token; a daemon that reads this file no longer accepts the old one",
                path.display()
            ))?;
        }
        Command::Token { command: TokenCommand::Show } => {
            out.text(&format!("{}\n", berth_cli::client::read_token(client)?))?;
        }
        Command::Openapi => out.text(berth_admin::openapi_json())?,
        Command::Completions { shell } => {
            out.text(&crate::usage::completion_script(*shell)?)?;
        }
        Command::Help { command } => out.text(&options::help(command)?)?,
        Command::Options { command } => options::run(command, out)?,
        Command::Man { into } => man(into.as_deref(), out)?,
    }
    Ok(true)
}

/// `berth serve`.
fn serve(args: &ServeArgs, client: &ClientArgs) -> anyhow::Result<()> {
    exit_on_signals().context("cannot listen for signals")?;
    let config = load(args, client)?;
    let traces = start_log(&config, config.observe.tracing.as_ref())?;
    config.loaded.notices.iter().for_each(|notice| tracing::warn!("{notice}"));
    crate::daemon::serve(config, traces)
}

fn start_log(config: &Config, tracing: Option<&TracingSettings>) -> anyhow::Result<Option<Pump>> {
    logs::start(config.observe.log, tracing, &config.node.name).map_err(|error| match error {
        LogsError::Filter { .. } => anyhow::Error::new(BadUsage(error.to_string())),
        LogsError::Headers(_) | LogsError::AlreadySetUp(_) => error.into(),
    })
}

/// Runs `berth guard` until SIGTERM or SIGINT. It has nothing to write at its end, but resumes the containers that it has
/// suspended.
///
/// # Errors
/// If the settings are invalid, or the guard cannot listen for the daemon.
pub fn guard(
    config: Option<&Path>,
    own_namespace: Option<String>,
    log: Option<LogFormat>,
) -> anyhow::Result<()> {
    exit_on_signals().context("cannot listen for signals")?;
    let args = ServeArgs { config: config.map(Path::to_owned), log, is_guard: true, ..ServeArgs::default() };
    let config = Config::load(&args)?;
    // The guard exports no traces: its calls come from the container runtime, which traces them itself.
    start_log(&config, None)?;
    let settings = berth_guard::Settings { own_namespace, ..config.guard };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let ended = runtime.block_on(async {
        tokio::select! {
            ended = berth_guard::run_guard(settings) => Ok(ended?),
            ended = terminated() => ended,
        }
    });
    // Drops the tasks, and does not wait for a call of NVML that hangs.
    runtime.shutdown_background();
    ended
}

/// Waits for SIGTERM or SIGINT.
async fn terminated() -> anyhow::Result<()> {
    let mut terminate = signal(SignalKind::terminate()).context("cannot listen for SIGTERM")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("cannot listen for SIGINT")?;
    let_daemon_handle_signals();
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
    Ok(())
}

/// Runs `berth controller` until SIGTERM or SIGINT, at which it gives its lease back.
fn controller(
    config: Option<&Path>,
    kubeconfig: Option<&Path>,
    namespace: Option<String>,
    log: Option<LogFormat>,
) -> anyhow::Result<()> {
    exit_on_signals().context("cannot listen for signals")?;
    let args = ServeArgs {
        config: config.map(Path::to_owned),
        kubeconfig: kubeconfig.map(Path::to_owned),
        log,
        ..ServeArgs::default()
    };
    let config = Config::load(&args)?;
    start_log(&config, None)?;
    ensure!(
        config.cluster.api_server != ApiServer::Off,
        "the controller works on objects of the API server: set --kubeconfig, or run it in a pod with a service account"
    );
    let settings = Settings {
        connection: Connection::new(config.cluster.api_server),
        namespace,
        name: config.node.name,
        pull: config.cluster.fleet.unwrap_or_default(),
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let ended = runtime.block_on(async {
        let controller = Controller::new(settings).await?;
        let ended = tokio::select! {
            () = controller.run() => Ok(()),
            ended = terminated() => ended,
        };
        controller.release().await;
        tracing::info!("the controller has ended");
        ended
    });
    // Does not wait for a registry that hangs.
    runtime.shutdown_background();
    ended
}

/// Loads the settings and checks the source of the GPUs: the daemon would wait forever for an unknown simulated
/// profile.
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
            let label = node_label(&config, &choice.key)?;
            Config::load_chosen(&args, choice, label)?
        }
        None => config,
    };
    config.gpus.source.check().map_err(|error| match args.gpus {
        Some(_) => anyhow::Error::new(BadUsage(error.to_string())),
        None => error.into(),
    })?;
    Ok(config)
}

/// The label that selects the configuration file. Logs are not set up yet: temporary failures go to standard error.
fn node_label(config: &Config, key: &str) -> anyhow::Result<Option<String>> {
    ensure!(
        config.cluster.api_server != ApiServer::Off,
        "--config-dir reads the node label {key} from the API server: set --kubeconfig, or run in a pod with a service account"
    );
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let settings = berth_cluster::Settings::new(config.cluster.api_server.clone(), config.node.name.clone());
    let on_retry = |error: &berth_cluster::ConnectError| {
        let max_wait = berth_cluster::LABEL_READ_MAX.as_secs();
        eprintln!(
            "berth: waiting up to {max_wait} s for the node's label {key}: {}",
            berth_cluster::error_chain(error)
        );
    };
    runtime.block_on(berth_cluster::node_label(&settings, key, on_retry)).map_err(|error| {
        anyhow!("cannot read the node's label {key}: {}", berth_cluster::error_chain(&error))
    })
}

/// Prints the manual page of `berth`, or writes the pages of all commands to a folder.
fn man(folder: Option<&Path>, out: &mut Out) -> anyhow::Result<()> {
    let Some(folder) = folder else {
        let mut page = Vec::new();
        clap_mangen::Man::new(options::with_all_flags(Cli::command())).render(&mut page)?;
        return out.text(&String::from_utf8(page).context("the manual page is not UTF-8")?);
    };
    let context = || format!("cannot write manual pages into {}", folder.display());
    std::fs::create_dir_all(folder).with_context(context)?;
    clap_mangen::generate_to(options::with_all_flags(Cli::command()), folder).with_context(context)?;
    let pages = std::fs::read_dir(folder).with_context(context)?.count();
    out.done(&format!(
        "wrote {pages} pages to {}; `man -l {}` shows one",
        folder.display(),
        folder.join("berth.1").display()
    ))
}
