//! The log of a daemon without an API server: changes of GPUs, and the effects of signals.

use crate::daemon::process::{House, SOON, Serving};
use crate::support::files;
use serde_json::json;
use std::time::{Duration, Instant};

/// Waits for a line with this text, and returns it.
fn line(serving: &Serving, words: &str) -> String {
    let end = Instant::now() + SOON;
    loop {
        let log = serving.log();
        if let Some(line) = log.lines().find(|line| line.contains(words)) {
            return line.to_owned();
        }
        assert!(Instant::now() < end, "no line says {words:?}:\n{log}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn count(serving: &Serving, words: &str) -> usize {
    serving.log().lines().filter(|line| line.contains(words)).count()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rotated_token_is_logged_once() {
    let house = House::new("gpus: sim:1xt4").await;
    let serving = house.serve();
    line(&serving, "found GPUs");
    let file = house.folder.path().join("state/token");
    let rotated = crate::cli::commands::ran(crate::cli::commands::berth(&[
        "token",
        "rotate",
        "--token-file",
        file.to_str().unwrap(),
    ]));
    assert_eq!(rotated.code, 0, "{}", rotated.err);
    // With the old token.
    for _ in 0..2 {
        assert_eq!(serving.call("GET", "/node", &json!(null))["status"], 401);
    }
    assert!(line(&serving, "has another token").contains("INFO"));
    assert_eq!(count(&serving, "has another token"), 1, "{}", serving.log());
    serving.stop();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn transitions_of_gpus_are_logged_without_an_api_server() {
    let house = House::new("").await;
    let machine = house.folder.path().join("machine.yaml");
    let write = |text: &str| files::replace(&machine, text);
    write("model: t4\ncount: 3\n");
    let gpus = format!("sim:{}", machine.display());
    let serving = house.serve_with(&["--gpus", &gpus, "--api-server", "off"]);
    line(&serving, "found GPUs");
    write("model: t4\ncount: 3\ngpus: [{index: 1, lost: true}, {index: 2, absent: true}]\n");
    assert!(line(&serving, ") is unhealthy: ").contains("WARN"));
    let gone = line(&serving, ") is gone: NVML no longer lists it");
    assert!(gone.contains("WARN") && gone.contains("GPU 2 ("), "{gone}");
    write("model: t4\ncount: 3\n");
    let healthy = line(&serving, ") is healthy again");
    assert!(healthy.contains("INFO") && healthy.contains("GPU 1 ("), "{healthy}");
    assert!(line(&serving, ") is back, and healthy").contains("INFO"));
    assert_eq!(count(&serving, "is gone:"), 1, "once: {}", serving.log());

    // A GPU that stays busy is drained across a restart, and one is missing after it.
    write("model: t4\ncount: 3\ngpus: [{index: 0, processes: 1}]\n");
    let list = serving.call("GET", "/gpus", &json!(null));
    let uuid = list["items"][0]["uuid"].as_str().unwrap().to_owned();
    serving.call("PUT", &format!("/gpus/{uuid}/drain"), &json!({ "reason": "fan" }));
    serving.stop();
    write("model: t4\ncount: 3\ngpus: [{index: 0, processes: 1}, {index: 2, absent: true}]\n");
    let serving = house.serve_with(&["--gpus", &gpus, "--api-server", "off"]);
    assert!(line(&serving, "by admin (fan) continues after the restart").contains("INFO"));
    assert!(line(&serving, ") is gone: NVML no longer lists it").contains("GPU 2 ("));
    let order = json!({ "deadlineSeconds": 1, "atDeadline": "giveUp" });
    serving.call("PUT", &format!("/gpus/{uuid}/drain"), &order);
    assert!(line(&serving, "by admin (fan; drain given up at its deadline)").contains("WARN"));
    serving.stop();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sighup_has_the_configuration_read_again_and_ends_nothing() {
    let house = House::new("gpus: sim:1xt4").await;
    let serving = house.serve();
    line(&serving, "found GPUs");
    for _ in 0..2 {
        serving.signal("-HUP");
        assert!(line(&serving, "was read again: no setting changed").contains("config.yaml"));
    }
    serving.call("GET", "/gpus", &json!(null));
    serving.stop();
}
