//! A label of the node selects its configuration among the files of a folder, as NVIDIA's config-manager does; a
//! changed label selects the other file.

use crate::support::api_server::{ApiServer, NODE, Read, Unread};
use crate::support::gpus::{SHARED, WHOLE};
use crate::support::process_node::{DaemonProcess, ProcessNode, ended};
use crate::support::wait::{SOON, until_some};
use serde_json::Value;
use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use tempfile::TempDir;

const LABEL: &str = "nvidia.com/device-plugin.config";

/// A folder as the kubelet mounts a ConfigMap: links to a folder beside them.
fn configs() -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    let data = folder.path().join("..2026");
    std::fs::create_dir(&data).unwrap();
    std::os::unix::fs::symlink("..2026", folder.path().join("..data")).unwrap();
    for (name, text) in [
        ("default", "stack: [{ policy: exclusive }]\n"),
        ("shared", "stack: [{ policy: timeslice, parameters: { replicas: 4 } }]\n"),
        ("broken", "stack: [{ policy: timeslice }\n"),
        // Errors that show only once the file is used.
        ("unknown", "stack: [{ policy: timeslize }]\n"),
        ("parameters", "stack: [{ policy: timeslice, parameters: { replicaz: 4 } }]\n"),
        ("admission", "stack: [{ policy: quota, parameters: { limit: 4 } }]\n"),
        ("permissions", "stack: [{ policy: memory }]\n"),
        ("profile", "gpus: sim:9xfoo\n"),
        ("files", "admin: { tls: { certFile: /nowhere/tls.crt, keyFile: /nowhere/tls.key } }\n"),
    ] {
        std::fs::write(data.join(name), text).unwrap();
        std::os::unix::fs::symlink(format!("..data/{name}"), folder.path().join(name)).unwrap();
    }
    folder
}

fn command(node: &ProcessNode, server: &ApiServer, configs: &TempDir) -> Command {
    let mut command = node.command();
    command.arg("--kubeconfig").arg(server.kubeconfig(node.folder.path()));
    command.args(["--node-name", NODE]).arg("--config-dir").arg(configs.path());
    command
}

/// Continues at the address of the program that replaced the first one.
fn started_again(daemon: &mut DaemonProcess) {
    daemon.base = until_some("it starts again", || {
        let log = daemon.log();
        let after = log.split_once("starting again")?.1.split_once("Swagger UI at ")?.1;
        Some(after.split_once("/swagger-ui")?.0.to_owned() + "/api/v1")
    });
}

/// Another label, another file: the plugin crashes.
/// Report: https://github.com/NVIDIA/k8s-device-plugin/issues/364
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_label_selects_the_file_and_can_change_while_pods_run() {
    let (server, configs) = (ApiServer::start(), configs());
    let node = ProcessNode::new("gpus: sim:2xt4").await;
    let mut daemon = node.serve_as(&mut command(&node, &server, &configs));
    // Without the label: the fallback `named`.
    node.kubelet.wait_allocatable(WHOLE, 2, SOON).await.unwrap();
    daemon.line(|line| line.contains("using the configuration default"));
    node.start("whole", WHOLE, 1).await.unwrap();
    daemon.until("its holder", |live| live.len() == 1 && live[0]["holder"]["pod"] == "whole");
    let before = daemon.live();

    // What cannot be used changes nothing.
    for (name, why) in [
        ("gone", "\"gone\", but"),
        ("broken", "is invalid"),
        ("unknown", "line 1, column 19: stack[0].policy: stack entry timeslize: this node has no policy"),
        ("parameters", "stack[0].parameters: policy timeslice@"),
        ("admission", "stack[0].parameters: policy quota@"),
        ("permissions", "may not name nvidia.com/gpu.mem-4g (permissions.resources)"),
        ("profile", "known are t4"),
        ("files", "admin.tls: "),
    ] {
        server.world.label(LABEL, name, "kubectl");
        daemon.line(|line| line.contains("keeping default") && line.contains(why));
    }
    server.world.label(LABEL, "default", "kubectl");
    daemon.line(|line| line.contains("still selects default"));

    server.world.label(LABEL, "shared", "kubectl");
    started_again(&mut daemon);
    // The held GPU stays the pod's; the free one is cut into shares.
    node.kubelet.wait_allocatable(SHARED, 4, SOON).await.unwrap();
    node.kubelet.wait_allocatable(WHOLE, 1, SOON).await.unwrap();
    assert_eq!(daemon.live()[0]["id"], before[0]["id"]);
    daemon.line(|line| line.contains("using the configuration shared"));
    assert_eq!(daemon.call("GET", "/stack", &Value::Null)["entries"][0]["policy"], "timeslice");
    assert_eq!(node.kubelet.anomalies(), []);
    // The same process all along.
    daemon.stop();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn with_a_folder_of_files_the_environment_applies_and_is_reported_as_without_one() {
    let (server, configs) = (ApiServer::start(), configs());
    let node = ProcessNode::new("gpus: sim:1xt4").await;
    // The file below by NVIDIA's name: what it holds counts, too.
    let mut with_flag = node.command();
    let mut command = crate::support::process_node::berth();
    let file = node.folder.path().join("config.yaml");
    let args = with_flag.get_args().collect::<Vec<_>>();
    let at = args.iter().position(|arg| *arg == "--config").unwrap();
    command.args(&args[..at]).args(&args[at + 2..]).env("CONFIG_FILE", file);
    command.arg("--kubeconfig").arg(server.kubeconfig(node.folder.path()));
    command.args(["--node-name", NODE]).arg("--config-dir").arg(configs.path());
    let daemon = node.serve_as(command.env("GFD_ONESHOT", "true"));
    node.kubelet.wait_allocatable(WHOLE, 1, SOON).await.unwrap();
    assert!(daemon.line(|line| line.contains("set, not used: GFD_ONESHOT=\"true\": ")).contains("WARN"));
    daemon.stop();
    // Which is dropped beside Berth's own.
    let daemon = node.serve_as(with_flag.env("CONFIG_FILE", "/nvidia.yaml"));
    daemon.line(|line| line.contains("set, not used: CONFIG_FILE=\"/nvidia.yaml\": --config is set, too"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_signal_between_two_configurations_ends_the_daemon() {
    let (server, configs) = (ApiServer::start(), configs());
    let node = ProcessNode::new("gpus: sim:1xt4").await;
    // At times during the stop, between the two programs, and during the next start.
    let mut delay = 0;
    loop {
        server.world.label(LABEL, "default", "kubectl");
        let mut daemon = node.serve_as(&mut command(&node, &server, &configs));
        node.kubelet.wait_allocatable(WHOLE, 1, SOON).await.unwrap();
        server.world.label(LABEL, "shared", "kubectl");
        daemon.line(|line| line.contains("starting again with"));
        std::thread::sleep(Duration::from_millis(delay));
        let has_next_started = daemon.log().contains("using the configuration shared");
        daemon.signal("-TERM");
        let end = Instant::now() + SOON;
        let status = loop {
            if let Some(status) = daemon.child.try_wait().unwrap() {
                break status;
            }
            assert!(Instant::now() < end, "the signal after {delay} ms is lost:\n{}", daemon.log());
            std::thread::sleep(Duration::from_millis(10));
        };
        assert_eq!(status.code(), Some(0), "{delay} ms: {status}:\n{}", daemon.log());
        if has_next_started {
            break;
        }
        // On a slow machine all of it takes longer.
        delay += 4 + delay / 8;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_the_right_to_watch_the_label_is_read_with_each_attempt() {
    let (server, configs) = (ApiServer::start(), configs());
    server.world.read_fault(Read::NodeWatch, Some(Unread::Refuse(403)));
    let node = ProcessNode::new("gpus: sim:1xt4").await;
    let mut daemon = node.serve_as(&mut command(&node, &server, &configs));
    node.kubelet.wait_allocatable(WHOLE, 1, SOON).await.unwrap();
    server.world.label(LABEL, "shared", "kubectl");
    started_again(&mut daemon);
    node.kubelet.wait_allocatable(SHARED, 4, SOON).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_start_waits_for_the_label_or_fails_with_advice() {
    let (server, configs) = (ApiServer::start(), configs());
    let node = ProcessNode::new("gpus: sim:1xt4").await;
    let cases: [(&str, &[&str], &str); 6] = [
        ("gone", &["--config-default", "default"], "names the configuration \"gone\", but"),
        ("broken", &[], "is invalid"),
        ("", &["--config-default", "nothing"], "--config-default names the configuration \"nothing\""),
        ("", &["--config-fallbacks", "single"], "has no label nvidia.com/device-plugin.config"),
        ("", &["--config-fallbacks", "first"], "named, single or empty"),
        ("", &["--api-server", "off"], "--config-dir reads the node label"),
    ];
    for (label, flags, words) in cases {
        server.world.label(LABEL, label, "kubectl");
        let (code, error) = ended(command(&node, &server, &configs).args(flags));
        let usage = flags.contains(&"first");
        assert_eq!(code, Some(if usage { 2 } else { 1 }), "{error}");
        assert!(error.contains(words), "{label} {flags:?}: {error}");
    }
    server.world.refuse(Some(403));
    let (code, error) = ended(&mut command(&node, &server, &configs));
    assert!(code == Some(1) && error.contains("ClusterRole berth"), "{error}");

    // A server that is not ready yet.
    server.world.refuse(Some(503));
    let waiting = || {
        let mut child = command(&node, &server, &configs).stderr(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines().map(Result::unwrap);
        let waits = lines.next().unwrap();
        assert!(waits.contains("waiting up to 45 s for the node's label"), "{waits}");
        (child, lines)
    };
    // On SIGTERM and SIGINT it ends as a daemon does, and not by the signal, which process 1 of a container would not.
    // On SIGHUP it does not end.
    for signals in [&["-HUP", "-TERM"], &["-HUP", "-INT"]] {
        let (mut child, _lines) = waiting();
        for signal in signals {
            assert!(
                Command::new("kill").args([signal, &*child.id().to_string()]).status().unwrap().success()
            );
        }
        assert_eq!(child.wait().unwrap().code(), Some(0), "{signals:?}");
    }

    let (mut child, mut lines) = waiting();
    server.world.refuse(None);
    let started = lines.find(|line| line.contains("Swagger UI at"));
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(started.is_some());
}
