//! A changed configuration file is applied by the running daemon, or refused as a whole.

use crate::support::files::replace;
use crate::support::gpus::{SHARED, WHOLE};
use crate::support::process_node::{BRISK, DaemonProcess, ProcessNode};
use crate::support::wait::{SOON, until};
use serde_json::{Value, json};
use std::fs;
use std::os::unix::fs::symlink;
use std::path::PathBuf;
use tempfile::TempDir;

const RENAMED: &str = "example.com/gpu";

/// A folder with one file as the kubelet mounts a ConfigMap. Writes follow its `AtomicWriter`
/// (`pkg/volume/util/atomic_writer.go` of Kubernetes 1.36): the files are in a folder with a time in its name, and the
/// link `..data` is moved to the next one by a rename.
struct ConfigMap {
    folder: TempDir,
    writes: u32,
}

impl ConfigMap {
    fn new(text: &str) -> Self {
        let mut made = Self { folder: tempfile::tempdir().unwrap(), writes: 0 };
        made.write(text);
        made
    }

    fn file(&self) -> PathBuf {
        self.folder.path().join("config.yaml")
    }

    fn write(&mut self, text: &str) {
        self.writes += 1;
        let at = |name: &str| self.folder.path().join(name);
        let old = fs::read_link(at("..data")).ok();
        let new = format!("..2026_01_02_03_04_05.{}", self.writes);
        fs::create_dir(at(&new)).unwrap();
        fs::write(at(&new).join("config.yaml"), text).unwrap();
        symlink(&new, at("..data_tmp")).unwrap();
        fs::rename(at("..data_tmp"), at("..data")).unwrap();
        if !self.file().is_symlink() {
            symlink("..data/config.yaml", self.file()).unwrap();
        }
        if let Some(old) = old {
            fs::remove_dir_all(self.folder.path().join(old)).unwrap();
        }
    }
}

fn shares(replicas: u32) -> String {
    format!(
        "{BRISK}\ngpus: sim:2xt4\nstack: [{{ policy: timeslice, parameters: {{ replicas: {replicas} }} }}]\n"
    )
}

fn configuration(daemon: &DaemonProcess) -> Value {
    daemon.call("GET", "/node", &Value::Null)["configuration"].clone()
}

/// Where the active stack comes from, and whether it is in place of the file's.
fn overridden(daemon: &DaemonProcess) -> (Value, Value) {
    let node = daemon.call("GET", "/node", &Value::Null);
    (node["stackSource"].clone(), node["fileStackOverridden"].clone())
}

fn metrics(daemon: &DaemonProcess) -> String {
    let url = daemon.base.replace("/api/v1", "/metrics");
    ureq::get(url).call().unwrap().body_mut().read_to_string().unwrap()
}

/// An edited ConfigMap has no effect before the pods are restarted.
/// Report: https://github.com/NVIDIA/gpu-operator/issues/1144
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_changed_configmap_changes_sharing_while_pods_run() {
    let mut map = ConfigMap::new(&format!("{BRISK}\ngpus: sim:2xt4\nstack: [{{ policy: exclusive }}]\n"));
    let node = ProcessNode::new("gpus: sim:2xt4").await;
    let file = map.file();
    let daemon = node.serve_with(&["--config", file.to_str().unwrap()]);
    node.kubelet.wait_allocatable(WHOLE, 2, SOON).await.unwrap();
    let pod = node.start("whole", WHOLE, 1).await.unwrap();
    daemon.until("its holder", |live| live.len() == 1 && live[0]["holder"]["pod"] == "whole");
    let id = daemon.live()[0]["id"].clone();
    let before = configuration(&daemon);
    assert_eq!(before["file"], file.to_str().unwrap());
    assert_eq!((&before["changed"], &before["needsRestart"]), (&json!([]), &json!([])));

    map.write(&shares(3));
    // The held GPU stays the pod's; the free one is cut into shares.
    node.kubelet.wait_allocatable(SHARED, 3, SOON).await.unwrap();
    node.kubelet.wait_allocatable(WHOLE, 1, SOON).await.unwrap();
    let line = daemon.line(|line| line.contains("its changes are in effect"));
    assert!(line.contains("stack[0].policy: exclusive -> timeslice"), "{line}");
    let change = json!({ "key": "stack[0].parameters.replicas", "to": "3", "effect": "applied" });
    assert!(configuration(&daemon)["changed"].as_array().unwrap().contains(&change));
    let share = node.start("share", SHARED, 1).await.unwrap();
    map.write(&shares(6));
    // The held share keeps its third of the GPU, which leaves four sixths.
    node.kubelet.wait_allocatable(SHARED, 5, SOON).await.unwrap();
    let ids: Vec<Value> = daemon.live().iter().map(|live| live["id"].clone()).collect();
    assert!(ids.len() == 2 && ids.contains(&id), "{ids:?}");
    node.kubelet.delete(&share);
    node.kubelet.wait_allocatable(SHARED, 6, SOON).await.unwrap();
    node.kubelet.delete(&pod);
    node.kubelet.wait_allocatable(SHARED, 12, SOON).await.unwrap();
    node.kubelet.wait_allocatable(WHOLE, 0, SOON).await.unwrap();
    assert!(!daemon.log().contains("starting again"), "the same process");
    assert_eq!(node.kubelet.anomalies(), []);
    daemon.stop();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_wrong_file_is_refused_as_a_whole_with_all_its_errors() {
    let node = ProcessNode::of(&shares(2)).await;
    let daemon = node.serve();
    node.kubelet.wait_allocatable(SHARED, 4, SOON).await.unwrap();
    let file = node.folder.path().join("config.yaml");
    let lines = shares(7).lines().count();
    for (text, expected) in [
        (
            format!(
                "{}memoryOvercommit: 0.5\nmigStrategy: mixd\nadmin: {{ tokens: [{{ name: a, right: read, file: /nowhere/token }}] }}\n",
                shares(7)
            ),
            vec![
                (Some(lines + 1), "memoryOvercommit", "expected 1.0 to 16.0"),
                (Some(lines + 2), "migStrategy", "did you mean `mixed`?"),
                (Some(lines + 3), "admin.tokens[0].file", "/nowhere/token"),
            ],
        ),
        (
            format!(
                "{BRISK}\nstack:\n- policy: timeslize\n- {{ policy: exclusive, permissions: {{}} }}\n- policy: binpak\n"
            ),
            vec![(Some(7), "stack[0].policy", "timeslize"), (Some(9), "stack[2].policy", "binpak")],
        ),
        (
            format!(
                "{BRISK}\ngpus: sim:2xt4\nstack:\n- {{ policy: timeslice, parameters: {{ replicaz: 2 }} }}\n- {{ policy: quota, parameters: {{ limit: 4 }} }}\n"
            ),
            vec![
                (Some(8), "stack[0].parameters", "replicaz"),
                (Some(9), "stack[1].parameters", "policy quota@"),
            ],
        ),
        ("stack: [".into(), vec![(None, "", "this is not YAML")]),
    ] {
        replace(&file, &text);
        daemon.signal("-HUP");
        let holds = |error: &Value| {
            let problems = error["problems"].as_array().cloned().unwrap_or_default();
            problems.len() == expected.len()
                && expected.iter().zip(&problems).all(|((line, key, message), problem)| {
                    line.is_none_or(|line| problem["line"] == line)
                        && (key.is_empty() || problem["key"] == *key)
                        && problem["message"].as_str().unwrap().contains(message)
                })
        };
        until(&format!("the errors of {text}"), || holds(&configuration(&daemon)["error"]));
        let line = daemon.line(|line| line.contains("is refused") && line.contains(expected[0].2));
        assert!(expected.iter().all(|(_, _, message)| line.contains(message)), "{line}");
        let stack = daemon.call("GET", "/stack", &Value::Null);
        assert_eq!(stack["entries"][0]["parameters"]["replicas"], 2, "the previous stack stays");
    }
    let checks = daemon.call("GET", "/node", &Value::Null)["checks"].clone();
    let check = checks.as_array().unwrap().iter().find(|check| check["name"] == "configuration").unwrap();
    assert!(check["ok"] == true && check["detail"].as_str().unwrap().contains("is refused"), "{check}");
    assert!(metrics(&daemon).contains("berth_configuration_refused 1\n"));
    let share = node.start("share", SHARED, 1).await.unwrap();
    node.kubelet.delete(&share);
    // The next good file, without a signal.
    replace(&file, shares(4));
    node.kubelet.wait_allocatable(SHARED, 8, SOON).await.unwrap();
    until("no error", || configuration(&daemon)["error"].is_null());
    assert_eq!(node.kubelet.anomalies(), []);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_needs_a_restart_is_named_and_the_rest_is_applied() {
    let node = ProcessNode::new("gpus: sim:2xt4").await;
    let daemon = node.serve();
    node.kubelet.wait_allocatable(WHOLE, 2, SOON).await.unwrap();
    let pod = node.start("whole", WHOLE, 1).await.unwrap();
    let file = node.folder.path().join("config.yaml");
    let text = format!(
        "{BRISK}\ngpus: sim:1xt4\nresource: {RENAMED}\nadmin: {{ limits: {{ readsPerSecond: 5000 }} }}\n\
         containerEdits: {{ deviceIdStrategy: index }}\nadminListen: 127.0.0.1:1\n"
    );
    replace(&file, &text);
    daemon.signal("-HUP");
    // The held device keeps its resource until it is free; both resources are registered meanwhile.
    node.kubelet.wait_allocatable(RENAMED, 1, SOON).await.unwrap();
    node.kubelet.wait_allocatable(WHOLE, 1, SOON).await.unwrap();
    let line = daemon.line(|line| line.contains("need a restart of the daemon"));
    assert!(line.contains("WARN") && line.contains("gpus: sim:2xt4 -> sim:1xt4"), "{line}");
    let state = configuration(&daemon);
    let keys = |list: &str| -> Vec<String> {
        let list = state[list].as_array().unwrap().iter();
        list.map(|change| {
            format!("{} {}", change["key"].as_str().unwrap(), change["effect"].as_str().unwrap())
        })
        .collect()
    };
    assert_eq!(keys("needsRestart"), ["admin.limits.readsPerSecond afterRestart", "gpus afterRestart"]);
    // `--admin-listen` sets the address.
    let expected = ["adminListen overridden", "containerEdits.deviceIdStrategy applied", "resource applied"];
    assert_eq!(keys("changed"), expected);
    assert_eq!(daemon.call("GET", "/gpus", &Value::Null)["items"].as_array().unwrap().len(), 2);
    // A key that is shown as applied has its effect from the next grant on.
    let other = node.start("renamed", RENAMED, 1).await.unwrap();
    let visible = node.kubelet.view(&other, "main").unwrap().envs["NVIDIA_VISIBLE_DEVICES"].clone();
    assert!(["0", "1"].contains(&visible.as_str()), "by its index: {visible}");
    node.kubelet.delete(&pod);
    node.kubelet.wait_allocatable(RENAMED, 2, SOON).await.unwrap();
    node.kubelet.wait_allocatable(WHOLE, 0, SOON).await.unwrap();
    assert_eq!(node.kubelet.anomalies(), []);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stack_of_the_api_stays_and_the_files_is_the_next_after_a_reset() {
    let node = ProcessNode::of(&shares(2)).await;
    let daemon = node.serve();
    node.kubelet.wait_allocatable(SHARED, 4, SOON).await.unwrap();
    let stack = json!({ "entries": [{ "policy": "timeslice", "parameters": { "replicas": 3 } }] });
    daemon.call("PUT", "/stack", &stack);
    node.kubelet.wait_allocatable(SHARED, 6, SOON).await.unwrap();
    replace(&node.folder.path().join("config.yaml"), shares(5));
    daemon.signal("-HUP");
    let line = daemon.line(|line| line.contains("have no effect"));
    assert!(line.contains("berth policy reset") && line.contains("replicas: 2 -> 5"), "{line}");
    assert_eq!(daemon.call("GET", "/stack", &Value::Null)["entries"][0]["parameters"]["replicas"], 3);
    assert_eq!(overridden(&daemon), (json!("api"), json!(true)));
    assert!(metrics(&daemon).contains("\nberth_file_stack_overridden 1\n"));
    daemon.call("DELETE", "/stack/override", &Value::Null);
    node.kubelet.wait_allocatable(SHARED, 10, SOON).await.unwrap();
    assert_eq!(overridden(&daemon), (json!("file"), json!(false)));
    assert!(metrics(&daemon).contains("\nberth_file_stack_overridden 0\n"));
    assert!(metrics(&daemon).contains("\nberth_configuration_refused 0\n"));
    replace(&node.folder.path().join("config.yaml"), "stack: [{ policy: timeslize }]\n");
    daemon.signal("-HUP");
    until("the refusal", || metrics(&daemon).contains("\nberth_configuration_refused 1\n"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reset_and_a_signal_at_one_moment_leave_the_newest_file_active() {
    let of = |policy: &str| format!("{BRISK}\ngpus: sim:2xt4\nstack: [{{ policy: {policy} }}]\n");
    let node = ProcessNode::of(&of("exclusive")).await;
    let daemon = node.serve();
    node.kubelet.wait_allocatable(WHOLE, 2, SOON).await.unwrap();
    daemon.call("PUT", "/stack", &json!({ "entries": [] }));
    let file = node.folder.path().join("config.yaml");
    let file_policy =
        || daemon.call("GET", "/stack", &Value::Null)["fileStack"]["entries"][0]["policy"].clone();
    replace(&file, of("spread"));
    daemon.signal("-HUP");
    until("the second file", || file_policy() == "spread");
    // The reset first compiles the policy of the second file; meanwhile the third one is read.
    std::thread::scope(|scope| {
        let reset = scope.spawn(|| daemon.call("DELETE", "/stack/override", &Value::Null));
        replace(&file, of("exclusive"));
        daemon.signal("-HUP");
        until("the third file", || file_policy() == "exclusive");
        reset.join().unwrap();
    });
    let active = || daemon.call("GET", "/stack", &Value::Null);
    until("the file's stack to be active", || {
        let stack = active();
        stack["source"] == "file" && stack["entries"][0]["policy"] == "exclusive"
    });
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_wrong_stack_behind_a_stack_of_the_api_is_shown_and_the_rest_is_applied() {
    let node = ProcessNode::of(&shares(2)).await;
    let daemon = node.serve();
    node.kubelet.wait_allocatable(SHARED, 4, SOON).await.unwrap();
    let stack = json!({ "entries": [{ "policy": "timeslice", "parameters": { "replicas": 3 } }] });
    daemon.call("PUT", "/stack", &stack);
    let file = node.folder.path().join("config.yaml");
    let wrong = format!(
        "{}containerEdits: {{ deviceIdStrategy: index }}\n",
        shares(2).replace("policy: timeslice", "policy: timeslize")
    );
    replace(&file, &wrong);
    daemon.signal("-HUP");
    let file_stack = || daemon.call("GET", "/stack", &Value::Null)["fileStack"].clone();
    until("the error of the file's stack", || file_stack()["error"].to_string().contains("timeslize"));
    let applied = json!({ "key": "containerEdits.deviceIdStrategy", "to": "index", "effect": "applied" });
    // The stack is applied first, and the configuration is shown as in use after all of it is applied.
    until("the rest of the file to be in use", || {
        configuration(&daemon)["changed"].as_array().unwrap().contains(&applied)
    });
    let state = configuration(&daemon);
    assert!(state["error"].is_null(), "the file is in use: {state}");
    let pod = node.start("share", SHARED, 1).await.unwrap();
    let visible = node.kubelet.view(&pod, "main").unwrap().envs["NVIDIA_VISIBLE_DEVICES"].clone();
    assert!(["0", "1"].contains(&visible.as_str()), "by its index: {visible}");
    // There is nothing to go back to; with the next good file there is.
    let refused = daemon.call("DELETE", "/stack/override", &Value::Null);
    assert!(refused["detail"].as_str().unwrap().contains("timeslize"), "{refused}");
    replace(&file, shares(5));
    daemon.signal("-HUP");
    until("no error", || file_stack()["error"].is_null());
    node.kubelet.delete(&pod);
    daemon.call("DELETE", "/stack/override", &Value::Null);
    node.kubelet.wait_allocatable(SHARED, 10, SOON).await.unwrap();
    // Without a stack of the API the same file is refused as a whole.
    replace(&file, &wrong);
    daemon.signal("-HUP");
    until("it is refused", || configuration(&daemon)["error"]["problems"].to_string().contains("timeslize"));
    node.kubelet.wait_allocatable(SHARED, 10, SOON).await.unwrap();
}
