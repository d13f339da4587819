//! Berth without a cluster: the daemon with eight simulated GPUs, a stand-in kubelet and a small
//! made-up workload.
//!
//! ```text
//! cargo build --profile quick -p berth -p demo
//! target/quick/demo          # until Ctrl-C: watch it, call its API
//! target/quick/demo --once   # the story to its end, under a minute
//! ```
//!
//! What is real: the daemon, its store, its WebAssembly policies, the gRPC over unix sockets, the
//! admin API. What is made up: the GPUs and the pods.

// It prints for people: that is its purpose.
#![allow(clippy::print_stdout)]

mod story;
mod table;
mod workload;

use anyhow::Context;
use berth::config::{Config, FileConfig, ServeArgs};
use berth::daemon::{Daemon, Options};
use clap::Parser;
use fakes::api::Api;
use fakes::program;
use kubelet_standin::Kubelet;
use std::path::PathBuf;
use std::process::ExitCode;
use tempfile::TempDir;
use tokio::signal::unix::{SignalKind, signal};

/// Berth with simulated GPUs and a stand-in kubelet.
#[derive(Parser)]
struct Args {
    /// Run the story to its end and leave
    #[arg(long)]
    once: bool,
    /// Where the admin API listens [default: 127.0.0.1:9470; with --once any free port]
    #[arg(long, value_name = "ADDRESS")]
    admin_listen: Option<String>,
}

/// Everything that runs, in one place.
pub(crate) struct Node {
    daemon: Daemon,
    pub(crate) kubelet: Kubelet,
    pub(crate) api: Api,
    token_file: PathBuf,
    /// Removed at the end, with the store and the sockets in it.
    _folder: TempDir,
}

impl Node {
    /// How to get in, again: what was printed first has scrolled away by now.
    pub(crate) fn print_way_in(&self) {
        let (address, file) = (self.daemon.admin_address(), self.token_file.display());
        println!("page   http://{address}/");
        // Read again, since `berth token rotate` replaces it. Without it the demo continues.
        if let Ok(token) = std::fs::read_to_string(&self.token_file) {
            println!("token  {}", token.trim());
        }
        println!("berth  export BERTH_SERVER=http://{address} BERTH_TOKEN_FILE={file}");
        println!();
    }
}

fn main() -> ExitCode {
    // Policies are compiled by a child process, which is this very program.
    if let Some(code) = berth_wasm::compiler_process() {
        return code;
    }
    let args = Args::parse();
    match run(&args) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("demo: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: &Args) -> anyhow::Result<bool> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(4).enable_all().build()?;
    runtime.block_on(async {
        let mut terminate = signal(SignalKind::terminate())?;
        let node = start(args).await?;
        let outcome = tokio::select! {
            outcome = story::tell(&node, args.once) => Some(outcome),
            _ = tokio::signal::ctrl_c() => None,
            _ = terminate.recv() => None,
        };
        if outcome.is_none() {
            println!("\nstopping: streams end, sockets go, the store is closed");
        }
        node.daemon.stop().await;
        node.kubelet.stop().await;
        match outcome {
            None => Ok(true),
            Some(result) => result.map(|story| {
                println!("demo: ok pods={} refused_unexpectedly={}", story.pods, story.refused_unexpectedly);
                story.refused_unexpectedly == 0
            }),
        }
    })
}

async fn start(args: &Args) -> anyhow::Result<Node> {
    let usual = if args.once { "127.0.0.1:0" } else { "127.0.0.1:9470" };
    let admin_listen = args.admin_listen.clone().unwrap_or_else(|| usual.to_owned());
    let folder = tempfile::Builder::new().prefix("berth-demo-").tempdir().context("cannot make a folder")?;
    let kubelet = Kubelet::started(folder.path().join("kubelet")).await.context("the stand-in kubelet")?;
    let config = Config::merge(
        &ServeArgs {
            node_name: Some("demo-node".into()),
            kubelet_dir: Some(folder.path().join("kubelet")),
            state_dir: Some(folder.path().join("state")),
            gpus: Some("sim:8xh100".into()),
            admin_listen: Some(admin_listen),
            ..ServeArgs::default()
        },
        FileConfig::parse(story::CONFIGURATION).map_err(anyhow::Error::msg)?,
    )?;
    let token_file = config.token_file.clone();
    let mut daemon = Daemon::build(config, Options::default())
        .await
        .context("if the port is taken, choose another one with --admin-listen 127.0.0.1:0")?;
    daemon.bring_up().await?;
    let token = std::fs::read_to_string(&token_file).context("the token file")?;
    let api = Api::of_file(daemon.admin_address(), token_file.clone());
    println!("page        http://{}/", daemon.admin_address());
    println!("Swagger UI  http://{}/swagger-ui/", daemon.admin_address());
    println!("token       {}", token.trim());
    println!("token file  {}", token_file.display());
    println!();
    println!("In another terminal:");
    if let Ok(programs) = program::beside_this("") {
        println!("  export PATH={}:$PATH", programs.display());
    }
    println!(
        "  export BERTH_SERVER=http://{} BERTH_TOKEN_FILE={}",
        daemon.admin_address(),
        token_file.display()
    );
    println!("  berth gpu list");
    println!("  berth gpu drain 6 --wait");
    println!();
    Ok(Node { daemon, kubelet, api, token_file, _folder: folder })
}
