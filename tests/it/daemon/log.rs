//! The log of a daemon without an API server: changes of GPUs, and the effects of signals.

use crate::support::files;
use crate::support::process_node::{DaemonProcess, ProcessNode};
use crate::support::wait::SOON;
use serde_json::json;
use std::time::{Duration, Instant};

/// Waits for a line with this text, and returns it.
fn line(daemon: &DaemonProcess, words: &str) -> String {
    let end = Instant::now() + SOON;
    loop {
        let log = daemon.log();
        if let Some(line) = log.lines().find(|line| line.contains(words)) {
            return line.to_owned();
        }
        assert!(Instant::now() < end, "no line says {words:?}:\n{log}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn count(daemon: &DaemonProcess, words: &str) -> usize {
    daemon.log().lines().filter(|line| line.contains(words)).count()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rotated_token_is_logged_once() {
    let node = ProcessNode::new("gpus: sim:1xt4").await;
    let daemon = node.serve();
    line(&daemon, "found GPUs");
    let file = node.folder.path().join("state/token");
    let rotated = crate::cli::commands::ran(crate::cli::commands::berth(&[
        "token",
        "rotate",
        "--token-file",
        file.to_str().unwrap(),
    ]));
    assert_eq!(rotated.code, 0, "{}", rotated.err);
    // With the old token.
    for _ in 0..2 {
        assert_eq!(daemon.call("GET", "/node", &json!(null))["status"], 401);
    }
    assert!(line(&daemon, "has another token").contains("INFO"));
    assert_eq!(count(&daemon, "has another token"), 1, "{}", daemon.log());
    daemon.stop();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn transitions_of_gpus_are_logged_without_an_api_server() {
    let node = ProcessNode::new("").await;
    let machine = node.folder.path().join("machine.yaml");
    let write = |text: &str| files::replace(&machine, text);
    write("model: t4\ncount: 3\n");
    let gpus = format!("sim:{}", machine.display());
    let daemon = node.serve_with(&["--gpus", &gpus, "--api-server", "off"]);
    line(&daemon, "found GPUs");
    write("model: t4\ncount: 3\ngpus: [{index: 1, lost: true}, {index: 2, absent: true}]\n");
    assert!(line(&daemon, ") is unhealthy: ").contains("WARN"));
    let gone = line(&daemon, ") is gone: NVML no longer lists it");
    assert!(gone.contains("WARN") && gone.contains("GPU 2 ("), "{gone}");
    write("model: t4\ncount: 3\n");
    let healthy = line(&daemon, ") is healthy again");
    assert!(healthy.contains("INFO") && healthy.contains("GPU 1 ("), "{healthy}");
    assert!(line(&daemon, ") is back, and healthy").contains("INFO"));
    assert_eq!(count(&daemon, "is gone:"), 1, "once: {}", daemon.log());

    // A GPU that stays busy is drained across a restart, and one is missing after it.
    write("model: t4\ncount: 3\ngpus: [{index: 0, processes: 1}]\n");
    let list = daemon.call("GET", "/gpus", &json!(null));
    let uuid = list["items"][0]["uuid"].as_str().unwrap().to_owned();
    daemon.call("PUT", &format!("/gpus/{uuid}/drain"), &json!({ "reason": "fan" }));
    daemon.stop();
    write("model: t4\ncount: 3\ngpus: [{index: 0, processes: 1}, {index: 2, absent: true}]\n");
    let daemon = node.serve_with(&["--gpus", &gpus, "--api-server", "off"]);
    assert!(line(&daemon, "by admin (fan) continues after the restart").contains("INFO"));
    assert!(line(&daemon, ") is gone: NVML no longer lists it").contains("GPU 2 ("));
    let order = json!({ "deadlineSeconds": 1, "atDeadline": "giveUp" });
    daemon.call("PUT", &format!("/gpus/{uuid}/drain"), &order);
    assert!(line(&daemon, "by admin (fan; drain given up at its deadline)").contains("WARN"));
    daemon.stop();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sighup_has_the_configuration_read_again_and_ends_nothing() {
    let node = ProcessNode::new("gpus: sim:1xt4").await;
    let daemon = node.serve();
    line(&daemon, "found GPUs");
    for _ in 0..2 {
        daemon.signal("-HUP");
        assert!(line(&daemon, "was read again: no setting changed").contains("config.yaml"));
    }
    daemon.call("GET", "/gpus", &json!(null));
    daemon.stop();
}
