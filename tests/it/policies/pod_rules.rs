//! Rules about pods: they need a source that shows which pods request devices, and the daemon says where there is none.

use crate::daemon::process::{BRISK, House, SHARED, SOON, Serving};
use crate::support::guests::{guest, policies};
use berth_kernel::grants::pod_candidates::SHIPPED_WITH_RULES_ABOUT_PODS;
use berth_kernel::ids::time::Now;
use berth_kernel::node::ports::PolicyFiles as _;
use kubelet_standin::{Kubelet, Options};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// From a pod's arrival at the kubelet to its Allocate call: the daemon knows the pod then, on a busy machine, too.
const ADMISSION_WAIT: Duration = Duration::from_secs(5);
/// A stack with a rule about pods.
const STACK: &str = "gpus: sim:1xh100
stack: [{ policy: quota, parameters: { default: { devices: 1 } } }, { policy: timeslice, parameters: { replicas: 4 } }]";
/// What a warning names as the remedy.
const REMEDY: &str = "`--kubeconfig FILE`";

/// A node whose kubelet serves its Pods API.
async fn house_that_shows_pods(settings: &str) -> House {
    let folder = tempfile::tempdir().unwrap();
    let kubelet = Kubelet::new(Options {
        pods_api: true,
        admission_wait: ADMISSION_WAIT,
        ..Options::new(folder.path().join("kubelet"))
    });
    kubelet.start().await.unwrap();
    House { folder, kubelet, settings: format!("{BRISK}\n{settings}") }
}

fn get(serving: &Serving, path: &str) -> Value {
    serving.call("GET", path, &Value::Null)
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

/// What an operator reads who types this, and the exit code.
fn typed(house: &House, serving: &Serving, args: &[&str]) -> (Option<i32>, String) {
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_berth"));
    let server = serving.base.strip_suffix("/api/v1").unwrap();
    let ran = command
        .args(args)
        .env("BERTH_SERVER", server)
        .env("BERTH_TOKEN_FILE", house.folder.path().join("state/token"))
        .output()
        .unwrap();
    let output = String::from_utf8(ran.stdout).unwrap() + &String::from_utf8(ran.stderr).unwrap();
    // Lines are broken at 80 columns.
    (ran.status.code(), output.split_whitespace().collect::<Vec<_>>().join(" "))
}

/// Waits for an answer: decisions are recorded, and shadows called, just after they are made.
fn until(serving: &Serving, path: &str, holds: impl Fn(&Value) -> bool) -> Value {
    let end = Instant::now() + SOON;
    loop {
        let answer = get(serving, path);
        if holds(&answer) {
            return answer;
        }
        assert!(Instant::now() < end, "{path}: {answer}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_without_a_source_of_pods_warns_of_rules_about_pods() {
    let house = House::new(STACK).await;
    let serving = house.serve();
    house.kubelet.wait_allocatable(SHARED, 4, SOON).await.unwrap();
    for path in ["/stack", "/node"] {
        let answer = get(&serving, path);
        assert!(warns_of(&answer, "quota"), "{path}: {answer}");
    }
    let timeslice = json!({"policy": "timeslice", "parameters": {"replicas": 4}});
    let quota = json!({"policy": "quota", "parameters": {"default": {"devices": 2}}});
    let both = json!({"entries": [quota, timeslice]});
    let preview = serving.call("PUT", "/stack?dryRun=true", &both);
    assert!(warns_of(&preview["preview"], "quota"), "{preview}");
    let trial = serving.call("POST", "/trials", &quota);
    assert!(warns_of(&trial, "quota"), "{trial}");
    let trial = serving.call("POST", "/trials", &json!({"entries": [timeslice]}));
    assert_eq!(warnings(&trial), [""; 0], "{trial}");
    let trial = serving.call("POST", "/trials", &json!({"policy": "memory", "alone": true}));
    assert_eq!(warnings(&trial), [""; 0], "its hook admit sets limits: {trial}");

    // Each request is granted, whatever the quota says. A shadow and a replay of another quota count these calls.
    let shadow = serving.call("POST", "/shadows", &quota);
    for name in ["a", "b"] {
        house.start(name, SHARED, 1).await.unwrap();
    }
    until(&serving, "/decisions?outcome=granted", |list| list["items"].as_array().unwrap().len() == 2);
    let replay = serving.call("POST", "/replays", &quota);
    assert_eq!(replay["counts"]["admit"]["withoutCandidates"], 2, "{replay}");
    assert_eq!(replay["counts"]["place"]["withoutCandidates"], 0, "it has no such hook: {replay}");
    let replay = serving.call("POST", "/replays", &timeslice);
    assert_eq!(replay["counts"]["admit"]["withoutCandidates"], 0, "it has no rules about pods: {replay}");
    let path = format!("/shadows/{}", shadow["id"]);
    until(&serving, &path, |shadow| shadow["counts"]["admit"]["withoutCandidates"] == 2);

    let stack = house.folder.path().join("stack.yaml");
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
        let (code, output) = typed(&house, &serving, &args);
        assert!(code == Some(0) && output.contains(text), "{args:?}: {text} is missing in {output}");
    }

    // The daemon does not know what an uploaded policy looks at.
    serving.push(&guest("pass"));
    let stack = serving.call("PUT", "/stack", &json!({"entries": [{"policy": "hostile"}]}));
    assert!(warns_of(&stack, "hostile"), "{stack}");
    assert!(warnings(&stack)[0].contains("rules about pods, if it has any, have no effect"), "{stack}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_kubelet_that_shows_its_pods_makes_rules_about_pods_work() {
    let house = house_that_shows_pods(STACK).await;
    let serving = house.serve();
    house.kubelet.wait_allocatable(SHARED, 4, SOON).await.unwrap();
    until(&serving, "/stack", |stack| warnings(stack).is_empty());
    house.start("a", SHARED, 1).await.unwrap();
    serving.until("its holder", |live| live.len() == 1 && live[0]["holder"]["pod"] == "a");
    let denied = house.start("b", SHARED, 1).await.unwrap_err();
    assert!(denied.contains("namespace ns holds 1 of the 1 devices"), "{denied}");
    let denied = until(&serving, "/decisions?outcome=denied", |list| list["items"] != json!([]));
    assert_eq!(denied["items"][0]["candidates"], json!(["ns/b"]), "{denied}");
    let quota = json!({"policy": "quota", "parameters": {"default": {"devices": 1}}});
    let replay = serving.call("POST", "/replays", &quota);
    assert_eq!(replay["counts"]["admit"]["withoutCandidates"], 0, "{replay}");
    let (code, output) = typed(&house, &serving, &["policy", "replay", "quota"]);
    assert!(code == Some(0) && !output.contains("candidates"), "{output}");
    for path in ["/stack", "/node"] {
        assert_eq!(warnings(&get(&serving, path)), [""; 0], "{path}");
    }
    assert_eq!(house.kubelet.anomalies(), []);

    // Without an answer of the kubelet no source shows pods.
    house.kubelet.stop().await;
    let stack = until(&serving, "/stack", |stack| !warnings(stack).is_empty());
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
