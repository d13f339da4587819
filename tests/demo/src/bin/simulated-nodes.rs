//! Nodes of a fleet without machines: whole daemons in one process, each with simulated GPUs, a stand-in kubelet and pods that come
//! and go, at a real API server.
//!
//! ```text
//! target/quick/simulated-nodes --kubeconfig FILE --nodes 50
//! ```
//!
//! It creates the Node objects, too, as ready. Where a node controller runs, something else must renew their leases.

// It prints for people: that is its purpose.
#![allow(clippy::print_stdout)]

use anyhow::Context;
use berth::daemon::{Options, Running, Starting};
use berth_config::{Config, FileConfig, ServeArgs};
use berth_gpus::sim::SimGpus;
use berth_kube::{ApiServer, Connection};
use clap::Parser;
use k8s_openapi::api::core::v1::Node;
use kube::Api;
use kube::api::{Patch, PatchParams};
use kubelet_standin::{Kubelet, PodSpec};
use serde_json::json;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tempfile::TempDir;
use tokio::signal::unix::{SignalKind, signal};
use tokio::task::JoinSet;
use tokio::time::{interval, sleep};

/// The models of the GPUs: one node after the other has the next one.
const MODELS: [&str; 3] = ["sim:2xh100", "sim:2xa100", "sim:2xl40s"];
/// The settings of a node; the waits are shorter than those of a real one.
const CONFIGURATION: &str = "
stack:
  - policy: exclusive
rounds: { listEveryMs: 1000, listEveryCordonedMs: 1000, roundEveryMs: 5000 }
";
/// How long a pod runs.
const POD_RUNS: Duration = Duration::from_millis(500);

/// Simulated nodes of a fleet at a real API server.
#[derive(Parser)]
struct Args {
    /// The API server; the user must be allowed to create nodes
    #[arg(long, value_name = "FILE")]
    kubeconfig: PathBuf,
    /// How many nodes
    #[arg(long, default_value_t = 50)]
    nodes: usize,
    /// The beginning of their names
    #[arg(long, default_value = "sim")]
    prefix: String,
    /// How many different GPU models they have: 1 to 3
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u8).range(1..=3))]
    models: u8,
    /// A folder with an OCI image layout, from which the nodes read the policies of registry.example
    #[arg(long, value_name = "FOLDER")]
    layout: Option<PathBuf>,
    /// A repository from which the nodes may pull policies, too; may be repeated
    #[arg(long, value_name = "REPOSITORY")]
    repository: Vec<String>,
    /// The time between two pods of a node, milliseconds; 0 for no pods
    #[arg(long, default_value_t = 1_000)]
    pod_every_ms: u64,
}

/// One node; dropped in the order of its fields.
struct SimulatedNode {
    daemon: Running,
    kubelet: Kubelet,
    _folder: TempDir,
}

fn main() -> ExitCode {
    // Policies are compiled by a child process, which is this very program.
    if let Some(code) = berth_wasm::compiler_process() {
        return code;
    }
    let args = Args::parse();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    match runtime.context("cannot start").and_then(|runtime| runtime.block_on(run(&args))) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("simulated-nodes: {error:#}");
            ExitCode::FAILURE
        }
    }
}

async fn run(args: &Args) -> anyhow::Result<()> {
    let (mut terminate, mut interrupt) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    let connection = Connection::new(ApiServer::Kubeconfig(args.kubeconfig.clone()));
    let (client, url) = connection.client().await?;
    let api: Api<Node> = Api::all(client);
    let begin = Instant::now();
    let mut nodes = Vec::new();
    let mut pods = JoinSet::new();
    let start = async {
        for number in 0..args.nodes {
            let name = format!("{}-{number:04}", args.prefix);
            let model = MODELS[number % usize::from(args.models)];
            register(&api, &name, model).await.with_context(|| format!("Node {name}"))?;
            let node = Box::pin(start(args, &name, model)).await.with_context(|| format!("node {name}"))?;
            if args.pod_every_ms > 0 {
                pods.spawn(run_pods(node.kubelet.clone(), Duration::from_millis(args.pod_every_ms)));
            }
            nodes.push(node);
            if (number + 1).is_multiple_of(10) || number + 1 == args.nodes {
                println!(
                    "{} of {} nodes have started after {:.0} s",
                    number + 1,
                    args.nodes,
                    begin.elapsed().as_secs_f32()
                );
            }
        }
        anyhow::Ok(())
    };
    let started = tokio::select! {
        started = start => started,
        _ = terminate.recv() => Ok(()),
        _ = interrupt.recv() => Ok(()),
    };
    if started.is_ok() && nodes.len() == args.nodes {
        println!("simulated-nodes: {} nodes at {url}; Ctrl-C stops them", args.nodes);
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
    }
    pods.shutdown().await;
    let mut stops = JoinSet::new();
    for node in nodes {
        stops.spawn(async move {
            node.daemon.stop().await;
            node.kubelet.stop().await;
        });
    }
    while stops.join_next().await.is_some() {}
    started
}

/// Creates the Node object, or makes the known one ready.
async fn register(api: &Api<Node>, name: &str, model: &str) -> anyhow::Result<()> {
    let params = PatchParams::apply("simulated-nodes").force();
    let labels = json!({"pool": "sim", "model": model.trim_start_matches("sim:2x")});
    let object = json!({
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": labels},
    });
    api.patch(name, &params, &Patch::Apply(object)).await?;
    let ready = json!({
        "type": "Ready",
        "status": "True",
        "reason": "Simulated",
        "message": "the node is simulated",
    });
    let status = json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}, "status": {"conditions": [ready]}});
    api.patch_status(name, &params, &Patch::Apply(status)).await?;
    Ok(())
}

async fn start(args: &Args, name: &str, model: &str) -> anyhow::Result<SimulatedNode> {
    let folder = tempfile::Builder::new().prefix("berth-sim-").tempdir().context("cannot make a folder")?;
    let kubelet = Kubelet::started(folder.path().join("kubelet")).await.context("the stand-in kubelet")?;
    let mut fleet = json!({"enabled": true});
    if let Some(layout) = &args.layout {
        let own = args.repository.iter().map(String::as_str);
        fleet["repositories"] = own.chain(["registry.example"]).collect();
        fleet["layouts"] = json!([layout]);
    }
    let config = Config::merge(
        &ServeArgs {
            node_name: Some(name.to_owned()),
            kubelet_dir: Some(folder.path().join("kubelet")),
            state_dir: Some(folder.path().join("state")),
            gpus: Some(model.to_owned()),
            admin_listen: Some("127.0.0.1:0".to_owned()),
            kubeconfig: Some(args.kubeconfig.clone()),
            ..ServeArgs::default()
        },
        FileConfig::parse(&format!("{CONFIGURATION}fleet: {fleet}\n")).map_err(anyhow::Error::msg)?,
    )?;
    let gpus = Arc::new(SimGpus::open(model.trim_start_matches("sim:"))?);
    let starting = Starting::open(config, Options { gpus: Some(gpus), ..Options::default() }).await?;
    let daemon = starting.bring_up_uninterrupted().await?;
    Ok(SimulatedNode { daemon, kubelet, _folder: folder })
}

/// Runs pods that each take one device, so that policies are called; never returns.
async fn run_pods(kubelet: Kubelet, every: Duration) {
    let mut ticks = interval(every);
    for number in 0_u64.. {
        ticks.tick().await;
        // After a change of the stack the kubelet still knows the resource of the one before, without devices.
        let mut resources = kubelet.resources().into_iter();
        let Some(resource) = resources.find(|one| kubelet.allocatable(one).is_some_and(|free| free > 0))
        else {
            continue;
        };
        let pod = PodSpec::new("sim", &format!("pod-{number}")).container("main", &[(resource.as_str(), 1)]);
        let uid = pod.uid.clone();
        // A pod that is refused is gone.
        if kubelet.admit(pod).await.is_ok() && kubelet.run(&uid).await.is_ok() {
            sleep(POD_RUNS).await;
        }
        kubelet.finish(&uid);
        kubelet.delete(&uid);
    }
}
