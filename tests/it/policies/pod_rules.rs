//! Rules about pods: they need a source that shows which pods request devices, and the daemon says where there is none.

use crate::support::gpus::SHARED;
use crate::support::guests::{guest, policies};
use crate::support::process_node::{BRISK, ProcessNode};
use crate::support::wait::SOON;
use berth_kernel::grants::pod_candidates::SHIPPED_WITH_RULES_ABOUT_PODS;
use berth_kernel::ids::time::Now;
use berth_kernel::node::ports::PolicyFiles as _;
use kubelet_standin::{Kubelet, Options};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// From a pod's arrival at the kubelet to its Allocate call: the daemon knows the pod then, on a busy machine, too.
const ADMISSION_WAIT: Duration = Duration::from_secs(5);
/// A stack with a rule about pods.
const STACK: &str = "gpus: sim:1xh100
stack: [{ policy: quota, parameters: { default: { devices: 1 } } }, { policy: timeslice, parameters: { replicas: 4 } }]";
/// What a warning names as the remedy.
const REMEDY: &str = "`--kubeconfig FILE`";

/// A node whose kubelet serves its Pods API.
async fn node_that_shows_pods(settings: &str) -> ProcessNode {
    let folder = tempfile::tempdir().unwrap();
    let kubelet = Kubelet::new(Options {
        pods_api: true,
        admission_wait: ADMISSION_WAIT,
        ..Options::new(folder.path().join("kubelet"))
    });
    kubelet.start().await.unwrap();
    ProcessNode { folder, kubelet, settings: format!("{BRISK}\n{settings}") }
}

/// The texts of `warnings`.
fn warnings(answer: &Value) -> Vec<String> {
    let all = answer["warnings"].as_array().into_iter().flatten();
    all.map(|warning| warning.as_str().unwrap().to_owned()).collect()
}

/// Whether the only warning is that of this policy, with the remedy.
fn warns_of(answer: &Value, policy: &str) -> bool {
    match warnings(answer).as_slice() {
        [warning] => warning.starts_with(&format!("policy {policy}@")) && warning.contains(REMEDY),
        _ => false,
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_without_a_source_of_pods_warns_of_rules_about_pods() {
    let node = ProcessNode::new(STACK).await;
    let daemon = node.serve();
    node.kubelet.wait_allocatable(SHARED, 4, SOON).await.unwrap();
    for path in ["/stack", "/node"] {
        let answer = daemon.get(path);
        assert!(warns_of(&answer, "quota"), "{path}: {answer}");
    }
    let timeslice = json!({"policy": "timeslice", "parameters": {"replicas": 4}});
    let quota = json!({"policy": "quota", "parameters": {"default": {"devices": 2}}});
    let both = json!({"entries": [quota, timeslice]});
    let preview = daemon.call("PUT", "/stack?dryRun=true", &both);
    assert!(warns_of(&preview["preview"], "quota"), "{preview}");
    let trial = daemon.call("POST", "/trials", &quota);
    assert!(warns_of(&trial, "quota"), "{trial}");
    let trial = daemon.call("POST", "/trials", &json!({"entries": [timeslice]}));
    assert_eq!(warnings(&trial), [""; 0], "{trial}");
    let trial = daemon.call("POST", "/trials", &json!({"policy": "memory", "alone": true}));
    assert_eq!(warnings(&trial), [""; 0], "its hook admit sets limits: {trial}");

    // Each request is granted, whatever the quota says. A shadow and a replay of another quota count these calls.
    let shadow = daemon.call("POST", "/shadows", &quota);
    for name in ["a", "b"] {
        node.start(name, SHARED, 1).await.unwrap();
    }
    daemon.get_until("/decisions?outcome=granted", |list| list["items"].as_array().unwrap().len() == 2);
    let replay = daemon.call("POST", "/replays", &quota);
    assert_eq!(replay["counts"]["admit"]["withoutCandidates"], 2, "{replay}");
    assert_eq!(replay["counts"]["place"]["withoutCandidates"], 0, "it has no such hook: {replay}");
    let replay = daemon.call("POST", "/replays", &timeslice);
    assert_eq!(replay["counts"]["admit"]["withoutCandidates"], 0, "it has no rules about pods: {replay}");
    let path = format!("/shadows/{}", shadow["id"]);
    daemon.get_until(&path, |shadow| shadow["counts"]["admit"]["withoutCandidates"] == 2);

    let stack = node.folder.path().join("stack.yaml");
    std::fs::write(&stack, both.to_string()).unwrap();
    let quota = r#"{"default": {"devices": 2}}"#;
    for (args, text) in [
        (vec!["policy", "try", "quota", "--parameters", quota], "warning: policy quota@"),
        (vec!["policy", "stack"], "warning: policy quota@"),
        (vec!["policy", "activate", stack.to_str().unwrap(), "--yes"], "warning: policy quota@"),
        (vec!["node", "show"], "warning: policy quota@"),
        (vec!["policy", "replay", "quota", "--parameters", quota], "2 of 2 calls of admit had no candidates"),
        (vec!["policy", "shadow", "show", "1"], "2 of 2 calls of admit had no candidates"),
    ] {
        // Lines are broken at 80 columns.
        let (code, output) = daemon.run_client(&args);
        let output = output.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(code == Some(0) && output.contains(text), "{args:?}: {text} is missing in {output}");
    }

    // The daemon does not know what an uploaded policy looks at.
    daemon.push(&guest("pass"));
    let stack = daemon.call("PUT", "/stack", &json!({"entries": [{"policy": "hostile"}]}));
    assert!(warns_of(&stack, "hostile"), "{stack}");
    assert!(warnings(&stack)[0].contains("rules about pods, if it has any, have no effect"), "{stack}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_kubelet_that_shows_its_pods_makes_rules_about_pods_work() {
    let node = node_that_shows_pods(STACK).await;
    let daemon = node.serve();
    node.kubelet.wait_allocatable(SHARED, 4, SOON).await.unwrap();
    daemon.get_until("/stack", |stack| warnings(stack).is_empty());
    node.start("a", SHARED, 1).await.unwrap();
    daemon.until("its holder", |live| live.len() == 1 && live[0]["holder"]["pod"] == "a");
    let denied = node.start("b", SHARED, 1).await.unwrap_err();
    assert!(denied.contains("namespace ns holds 1 of the 1 devices"), "{denied}");
    let denied = daemon.get_until("/decisions?outcome=denied", |list| list["items"] != json!([]));
    assert_eq!(denied["items"][0]["candidates"], json!(["ns/b"]), "{denied}");
    let quota = json!({"policy": "quota", "parameters": {"default": {"devices": 1}}});
    let replay = daemon.call("POST", "/replays", &quota);
    assert_eq!(replay["counts"]["admit"]["withoutCandidates"], 0, "{replay}");
    let (code, output) = daemon.run_client(&["policy", "replay", "quota"]);
    assert!(code == Some(0) && !output.contains("candidates"), "{output}");
    for path in ["/stack", "/node"] {
        assert_eq!(warnings(&daemon.get(path)), [""; 0], "{path}");
    }
    assert_eq!(node.kubelet.anomalies(), []);

    // Without an answer of the kubelet no source shows pods.
    node.kubelet.stop().await;
    let stack = daemon.get_until("/stack", |stack| !warnings(stack).is_empty());
    assert!(warnings(&stack)[0].contains("the kubelet's Pods API does not show at present"), "{stack}");
}

/// The sources of a policy, without its tests.
fn sources(folder: &Path) -> String {
    let files = folder.join("src").read_dir().unwrap().map(|file| file.unwrap().path());
    let is_tested = |file: &PathBuf| file.file_name().is_some_and(|name| name != "tests.rs");
    files.filter(is_tested).map(|file| std::fs::read_to_string(file).unwrap()).collect()
}

#[test]
fn the_shipped_policies_with_rules_about_pods_are_those_that_read_candidates() {
    let root = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../policies-wasm"));
    let shipped = policies().shipped(Now::default());
    assert!(shipped.len() > 5);
    for version in shipped {
        let reads = sources(&root.join(&version.name)).contains(".candidates");
        let is_listed = SHIPPED_WITH_RULES_ABOUT_PODS.contains(&version.name.as_str());
        assert_eq!(is_listed, reads, "{}", version.name);
    }
}
