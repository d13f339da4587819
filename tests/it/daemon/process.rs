//! The daemon as a process: pods, changes of the stack, restarts, and errors at the start.

use crate::support::gpus::{SHARED, WHOLE};
use crate::support::process_node::{ProcessNode, berth, ended};
use crate::support::wait::SOON;
use serde_json::{Value, json};
use std::net::TcpListener;
use std::path::Path;
use std::time::{Duration, Instant};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pod_gets_the_gpu_that_a_policy_chose_and_the_record_survives_a_kill() {
    let node =
        ProcessNode::new("gpus: sim:2xt4\nstack: [{ policy: mixed, parameters: { replicas: 4 } }]").await;
    let mut daemon = node.serve();
    node.kubelet.wait_allocatable(SHARED, 8, SOON).await.unwrap();
    node.kubelet.wait_allocatable(WHOLE, 2, SOON).await.unwrap();
    let uid = node.start("a", SHARED, 1).await.unwrap();
    // The share's GPU is no longer to be had whole.
    node.kubelet.wait_allocatable(WHOLE, 1, SOON).await.unwrap();
    let known = |live: &[Value]| {
        live.len() == 1 && live[0]["holder"]["pod"] == "a" && live[0]["holder"]["podUid"].as_str().is_some()
    };
    daemon.until("its holder", known);
    let before = daemon.live();
    let view = node.kubelet.view(&uid, "main").unwrap();
    assert_eq!(view.envs["BERTH_ALLOCATION_ID_NVIDIA_COM_GPU_SHARED"], before[0]["id"].as_str().unwrap());

    daemon.child.kill().unwrap();
    daemon.child.wait().unwrap();
    let daemon = node.serve();
    node.kubelet.wait_allocatable(WHOLE, 1, SOON).await.unwrap();
    daemon.until("the same holder", known);
    assert_eq!(daemon.live()[0]["id"], before[0]["id"]);

    node.kubelet.delete(&uid);
    daemon.until("its end", <[Value]>::is_empty);
    node.kubelet.wait_allocatable(WHOLE, 2, SOON).await.unwrap();
    assert_eq!(node.kubelet.anomalies(), []);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_stack_changes_without_effect_on_running_pods() {
    let node = ProcessNode::new("gpus: sim:2xt4\nstack: [{ policy: exclusive }]").await;
    let daemon = node.serve();
    node.kubelet.wait_allocatable(WHOLE, 2, SOON).await.unwrap();
    node.start("whole", WHOLE, 1).await.unwrap();
    let stack = json!({ "entries": [{ "policy": "timeslice", "parameters": { "replicas": 3 } }] });
    daemon.call("PUT", "/stack", &stack);
    // The held GPU stays the pod's; the free one is cut into shares.
    node.kubelet.wait_allocatable(SHARED, 3, SOON).await.unwrap();
    for name in ["s1", "s2", "s3"] {
        node.start(name, SHARED, 1).await.unwrap();
    }
    node.start("s4", SHARED, 1).await.unwrap_err();
    daemon.until("four holders", |live| live.iter().filter(|a| a["holder"]["pod"].is_string()).count() == 4);
    let bad = json!({ "entries": [{ "policy": "timeslice", "parameters": { "replicaz": 3 } }] });
    let problem = daemon.call("PUT", "/stack", &bad);
    assert!(problem["detail"].as_str().unwrap().contains("replicaz"), "{problem}");
    assert_eq!(daemon.call("GET", "/stack", &Value::Null)["entries"][0]["parameters"]["replicas"], 3);
    assert_eq!(node.kubelet.anomalies(), []);
}

/// One GPU of a node shared, the others whole.
/// Report: https://github.com/NVIDIA/k8s-device-plugin/issues/1786
/// Report: https://github.com/NVIDIA/k8s-device-plugin/issues/628
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_latched_gpu_is_listed_in_one_mode_and_changes_when_it_is_idle() {
    let parameters = "{ advertise: latched, replicas: 4, settleSeconds: 1 }";
    let node =
        ProcessNode::new(&format!("gpus: sim:3xt4\nstack: [{{ policy: mixed, parameters: {parameters} }}]"))
            .await;
    let _daemon = node.serve();
    node.kubelet.wait_allocatable(SHARED, 4, SOON).await.unwrap();
    node.kubelet.wait_allocatable(WHOLE, 2, SOON).await.unwrap();
    let mut pods = Vec::new();
    for name in ["a", "b", "c", "d"] {
        pods.push(node.start(name, SHARED, 1).await.unwrap());
    }
    // No free share is left and one whole GPU is more than its reserve: it turns.
    node.kubelet.wait_allocatable(SHARED, 8, SOON).await.unwrap();
    node.kubelet.wait_allocatable(WHOLE, 1, SOON).await.unwrap();
    for uid in &pods {
        node.kubelet.delete(uid);
    }
    // The last whole GPU goes, so an idle shared one turns back once it has settled.
    node.start("e", WHOLE, 1).await.unwrap();
    node.kubelet.wait_allocatable(SHARED, 4, SOON).await.unwrap();
    node.kubelet.wait_allocatable(WHOLE, 2, SOON).await.unwrap();
    assert_eq!(node.kubelet.anomalies(), []);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sigterm_ends_it_within_a_second_and_removes_its_sockets() {
    let node = ProcessNode::new("gpus: sim:2xt4").await;
    let mut daemon = node.serve();
    node.kubelet.wait_allocatable(WHOLE, 2, SOON).await.unwrap();
    node.start("a", WHOLE, 1).await.unwrap();
    assert_eq!(node.sockets().len(), 1);
    let began = Instant::now();
    daemon.signal("-TERM");
    let status = daemon.child.wait().unwrap();
    let took = began.elapsed();
    // Within a second as released; a test beside others on a busy machine gets more.
    assert!(status.success() && took < Duration::from_secs(5), "{status} after {took:?}");
    assert!(node.sockets().is_empty(), "{:?}", node.sockets());
    // What was granted is there again, and served within the kubelet's patience.
    let daemon = node.serve();
    node.kubelet.wait_allocatable(WHOLE, 2, SOON).await.unwrap();
    assert_eq!(daemon.live().len(), 1);
    assert_eq!(node.kubelet.anomalies(), []);
}

/// The daemon starts before the driver is loaded.
/// Report: https://github.com/NVIDIA/k8s-device-plugin/issues/170
/// Report: https://github.com/NVIDIA/gpu-operator/issues/81
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn it_waits_for_gpus_and_for_the_kubelet_and_can_be_stopped_meanwhile() {
    let node = ProcessNode::new("gpus: nvml\nnvmlLibrary: /nowhere/libnvidia-ml.so.1").await;
    let mut daemon = node.serve();
    let end = Instant::now() + SOON;
    let named =
        || daemon.call("GET", "/node", &Value::Null).to_string().contains("/nowhere/libnvidia-ml.so.1");
    while !named() {
        assert!(Instant::now() < end, "the API does not say what it waits for");
        std::thread::sleep(Duration::from_millis(20));
    }
    daemon.signal("-TERM");
    assert!(daemon.child.wait().unwrap().success());

    let node = ProcessNode::new("gpus: sim:2xt4").await;
    node.kubelet.stop().await;
    let daemon = node.serve();
    daemon.until("the API to answer", <[Value]>::is_empty);
    node.kubelet.start().await.unwrap();
    node.kubelet.wait_allocatable(WHOLE, 2, SOON).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn errors_at_the_start_are_reported_with_advice() {
    let node = ProcessNode::new("gpus: sim:2xt4").await;
    let _first = node.serve();
    let (code, output) = ended(&mut node.command());
    assert!(code == Some(1) && output.contains("in use by another process"), "{code:?}: {output}");

    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let (code, output) = ended(
        berth()
            .args(["serve", "--gpus", "sim:2xt4", "--admin-listen", &address])
            .arg("--state-dir")
            .arg(node.folder.path().join("other")),
    );
    assert!(code == Some(1) && output.contains("--admin-listen"), "{code:?}: {output}");

    let file = node.folder.path().join("file");
    std::fs::write(&file, "").unwrap();
    let below = file.join("below");
    let (code, output) = ended(berth().args(["serve", "--gpus", "sim:2xt4", "--state-dir"]).arg(below));
    assert!(code == Some(1) && output.contains("--state-dir"), "{code:?}: {output}");

    for (settings, says) in [
        ("gpuss: nvml", "gpuss"),
        ("stack: [{ policy: tetris }]", "tetris"),
        ("stack: [{ policy: mixed, parameters: { replicas: 0 } }]", "replicas"),
    ] {
        let other = ProcessNode::new(&format!("{settings}\ngpus: sim:2xt4")).await;
        let (code, output) = ended(&mut other.command());
        assert!(code == Some(1) && output.contains(says), "{settings}: {code:?}: {output}");
    }
    let (code, _) = ended(berth().args(["serve", "--no-such-flag"]));
    assert_eq!(code, Some(2));
    assert!(Path::new(env!("CARGO_BIN_EXE_berth")).exists());
}
