//! A label of the node chooses its configuration among the files of a folder, as NVIDIA's config-manager does, and a
//! label that changes takes the other file over.

use crate::api_server::{ApiServer, NODE, Read, Unread};
use crate::cluster::until;
use crate::daemon::{House, SHARED, SOON, Serving, WHOLE, ended};
use serde_json::Value;
use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
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
    ] {
        std::fs::write(data.join(name), text).unwrap();
        std::os::unix::fs::symlink(format!("..data/{name}"), folder.path().join(name)).unwrap();
    }
    folder
}

fn command(house: &House, server: &ApiServer, configs: &TempDir) -> Command {
    let mut command = house.command();
    command.arg("--kubeconfig").arg(server.kubeconfig(house.folder.path()));
    command.args(["--node-name", NODE]).arg("--config-dir").arg(configs.path());
    command
}

/// Goes on at the address of the program that was started in place of the first one.
fn started_again(serving: &mut Serving) {
    serving.base = until("it starts again", || {
        let log = serving.log();
        let after = log.split_once("starting again")?.1.split_once("Swagger UI at ")?.1;
        Some(after.split_once("/swagger-ui")?.0.to_owned() + "/api/v1")
    });
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_label_of_the_node_chooses_the_file_and_another_label_takes_over_under_running_pods() {
    let (server, configs) = (ApiServer::start(), configs());
    let house = House::new("gpus: sim:2xt4").await;
    let mut serving = house.serve_as(&mut command(&house, &server, &configs));
    // Without the label: the fallback `named`.
    house.kubelet.wait_allocatable(WHOLE, 2, SOON).await.unwrap();
    serving.line(|line| line.contains("the configuration is default"));
    house.start("whole", WHOLE, 1).await.unwrap();
    serving.until("its holder", |live| live.len() == 1 && live[0]["holder"]["pod"] == "whole");
    let before = serving.live();

    // What cannot be used changes nothing.
    for (name, why) in [("gone", "\"gone\", and"), ("broken", "is wrong")] {
        server.world.label(LABEL, name, "kubectl");
        serving.line(|line| line.contains("stays default") && line.contains(why));
    }
    server.world.label(LABEL, "default", "kubectl");
    serving.line(|line| line.contains("chooses default as before"));

    server.world.label(LABEL, "shared", "kubectl");
    started_again(&mut serving);
    // The held GPU stays the pod's; the free one is cut into shares.
    house.kubelet.wait_allocatable(SHARED, 4, SOON).await.unwrap();
    house.kubelet.wait_allocatable(WHOLE, 1, SOON).await.unwrap();
    assert_eq!(serving.live()[0]["id"], before[0]["id"]);
    serving.line(|line| line.contains("the configuration is shared"));
    assert_eq!(serving.call("GET", "/stack", &Value::Null)["entries"][0]["policy"], "timeslice");
    assert_eq!(house.kubelet.anomalies(), []);
    // The same process all along.
    serving.stop();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_the_right_to_watch_the_label_is_read() {
    let (server, configs) = (ApiServer::start(), configs());
    server.world.read_fault(Read::NodeWatch, Some(Unread::Refuse(403)));
    let house = House::new("gpus: sim:1xt4").await;
    let mut serving = house.serve_as(&mut command(&house, &server, &configs));
    house.kubelet.wait_allocatable(WHOLE, 1, SOON).await.unwrap();
    let line = serving.line(|line| line.contains("is not watched, and read every 60 s"));
    assert!(line.contains("watch nodes"), "{line}");
    server.world.label(LABEL, "shared", "kubectl");
    started_again(&mut serving);
    house.kubelet.wait_allocatable(SHARED, 4, SOON).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_start_waits_for_the_label_where_that_helps_and_else_says_what_to_do() {
    let (server, configs) = (ApiServer::start(), configs());
    let house = House::new("gpus: sim:1xt4").await;
    let cases: [(&str, &[&str], &str); 6] = [
        ("gone", &["--config-default", "default"], "names the configuration \"gone\", and"),
        ("broken", &[], "is wrong"),
        ("", &["--config-default", "nothing"], "--config-default names the configuration \"nothing\""),
        ("", &["--config-fallbacks", "single"], "has no label nvidia.com/device-plugin.config"),
        ("", &["--config-fallbacks", "first"], "named, single or empty"),
        ("", &["--api-server", "off"], "--config-dir needs the API server"),
    ];
    for (label, flags, words) in cases {
        server.world.label(LABEL, label, "kubectl");
        let (code, error) = ended(command(&house, &server, &configs).args(flags));
        let usage = flags.contains(&"first");
        assert_eq!(code, Some(if usage { 2 } else { 1 }), "{error}");
        assert!(error.contains(words), "{label} {flags:?}: {error}");
    }
    server.world.refuse(Some(403));
    let (code, error) = ended(&mut command(&house, &server, &configs));
    assert!(code == Some(1) && error.contains("ClusterRole berth"), "{error}");

    // A server that is not ready yet.
    server.world.refuse(Some(503));
    let mut child = command(&house, &server, &configs).stderr(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines().map(Result::unwrap);
    let waits = lines.next().unwrap();
    assert!(waits.contains("waiting up to 45 s for the node's label"), "{waits}");
    server.world.refuse(None);
    let started = lines.find(|line| line.contains("Swagger UI at"));
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(started.is_some());
}
