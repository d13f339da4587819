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

mod screen;
mod story;
mod table;
mod workload;

use anyhow::Context;
use berth::daemon::{Options, Running, Starting};
use berth_config::{Config, FileConfig, ServeArgs};
use berth_gpus::sim::SimGpus;
use clap::Parser;
use fakes::api::Api;
use fakes::program;
use kubelet_standin::{Kubelet, Options as KubeletOptions};
use screen::Screen;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;
use tempfile::TempDir;
use tokio::signal::unix::{SignalKind, signal};

/// An export of a store without allocations, whose ids begin with `5eed0001`.
const EMPTY_STORE: &str = r#"{"berthState":1,"recordFormat":2,"records":1}
{"kind":"meta","value":{"store":1592590337,"next":0}}
"#;

/// From a pod's arrival at the kubelet to its Allocate call: long enough that the daemon knows the pod then, so that
/// rules about pods apply to it.
const ADMISSION_WAIT: Duration = Duration::from_secs(1);

/// Berth with simulated GPUs and a stand-in kubelet.
#[derive(Parser)]
struct Args {
    /// Run the tour once, as plain lines, and exit
    #[arg(long)]
    once: bool,
    /// Where the admin API listens [default: 127.0.0.1:9470; with --once any free port]
    #[arg(long, value_name = "ADDRESS")]
    admin_listen: Option<String>,
}

/// Everything that runs, in one place.
pub(crate) struct Node {
    daemon: Running,
    pub(crate) kubelet: Kubelet,
    pub(crate) api: Api,
    pub(crate) screen: Screen,
    /// The machine, whose memory in use follows the pods.
    pub(crate) gpus: Arc<SimGpus>,
    token_file: PathBuf,
    /// Removed at the end, with the store and the sockets in it.
    _folder: TempDir,
}

impl Node {
    /// The addresses, the token, and the commands of another terminal.
    pub(crate) fn show_head(&self) {
        let (address, file) = (self.daemon.admin_address(), self.token_file.display());
        // Read again, since `berth token rotate` replaces it. Without it the demo continues.
        let token = std::fs::read_to_string(&self.token_file).unwrap_or_default();
        let path = program::beside_this("").map(|programs| format!("PATH=$PATH:{} ", programs.display()));
        let path = path.unwrap_or_default();
        self.screen.head(&format!(
            "page        http://{address}/\n\
             Swagger UI  http://{address}/swagger-ui/\n\
             token       {}\n\
             \n\
             In another terminal, then `berth top` and `berth gpu drain 6 --wait`:\n\
             export {path}BERTH_SERVER=http://{address} BERTH_TOKEN_FILE={file}",
            token.trim()
        ));
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
        let node = Box::pin(start(args)).await?;
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
    // With an id that is known, so that the examples of documents and of Swagger UI name allocations that exist.
    berth_store::import(&folder.path().join("state"), &mut EMPTY_STORE.as_bytes())?;
    let kubelet = Kubelet::new(KubeletOptions {
        pods_api: true,
        admission_wait: ADMISSION_WAIT,
        ..KubeletOptions::new(folder.path().join("kubelet"))
    });
    kubelet.start().await.context("the stand-in kubelet")?;
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
    let token_file = config.admin.token_file.clone();
    let gpus = Arc::new(SimGpus::open("8xh100")?);
    let starting = Starting::open(config, Options { gpus: Some(gpus.clone()), ..Options::default() })
        .await
        .context("if the port is taken, choose another one with --admin-listen 127.0.0.1:0")?;
    let daemon = starting.bring_up_uninterrupted().await?;
    let api = Api::of_file(daemon.admin_address(), token_file.clone());
    let screen = Screen::new(args.once);
    let node = Node { daemon, kubelet, api, screen, gpus, token_file, _folder: folder };
    node.show_head();
    Ok(node)
}
