//! MIG with `timeslice`: instances that are shared, and names that must not stand for two kinds of parts. The real
//! binary over the fake NVML, with the stand-in kubelet.

use crate::gpus::mig::Rig;
use crate::support::gpus::{SHARED, WHOLE};
use crate::support::process_node::{DaemonProcess, ProcessNode};
use crate::support::wait::{SOON, until};
use fake_nvml::State;
use serde_json::{Value, json};

const SMALL: &str = "nvidia.com/mig-1g.10gb";

/// The check of this name in `/node`: whether it is well, and its detail.
fn check(daemon: &DaemonProcess, name: &str) -> (bool, String) {
    let node = daemon.call("GET", "/node", &Value::Null);
    let check = node["checks"].as_array().unwrap().iter().find(|check| check["name"] == name).unwrap();
    (check["ok"].as_bool().unwrap(), check["detail"].as_str().unwrap_or_default().to_owned())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn single_never_lists_shares_of_gpus_and_instances_by_one_name() {
    let mut state = State::h100(2);
    state.split(1, &[1, 1]);
    let stack = |resource: &str| json!({"entries": [{"policy": "timeslice", "parameters": {"replicas": 4, "resource": resource}}]});
    let rig = Rig::new(&state, &format!("migStrategy: single\nstack: {}", stack(WHOLE)["entries"])).await;
    let daemon = rig.node.serve();
    until("the stack's refusal", || check(&daemon, "mig").1.contains("rename the shares"));
    let (ok, why) = check(&daemon, "mig");
    assert!(!ok);
    for words in [WHOLE, "1g.10gb on GPU 1", "no MIG mode on GPU 0", "mixed"] {
        assert!(why.contains(words), "{words} is missing in {why}");
    }
    assert!(rig.node.kubelet.resources().is_empty());
    // The answer to the activation of such a stack says so at once.
    let answer = daemon.call("PUT", "/stack", &stack(WHOLE));
    assert_eq!(answer["warnings"], json!([why]));
    // With separate names a pod can distinguish them.
    let answer = daemon.call("PUT", "/stack", &stack(SHARED));
    assert_eq!(answer.get("warnings"), None, "{answer}");
    rig.allocatable(&[(SHARED, 4), (WHOLE, 2)]).await;
    assert!(check(&daemon, "mig").0);
    assert_eq!(rig.node.kubelet.anomalies(), []);
}

/// More containers than MIG instances.
/// Report: https://github.com/NVIDIA/gpu-operator/issues/1287
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn instances_are_shared_by_the_name_of_their_profile() {
    let mut state = State::h100(2);
    state.split(1, &[1, 1]);
    let stack = json!([{"policy": "timeslice", "parameters": {
        "failRequestsGreaterThanOne": true,
        "resources": [
            {"name": WHOLE, "rename": SHARED, "replicas": 3},
            {"name": SMALL, "replicas": 2, "devices": ["1:0"]},
        ],
    }}]);
    let rig = Rig::new(&state, &format!("migStrategy: mixed\nstack: {stack}")).await;
    let _daemon = rig.node.serve();
    // Two shares of one instance, and the other one whole.
    rig.allocatable(&[(SHARED, 3), (SMALL, 3)]).await;
    let uuid = |at: usize| state.gpus[1].mig.as_ref().unwrap().instances[at].uuid.clone();
    let listed = rig.node.kubelet.listed(SMALL).into_iter();
    let listed: Vec<String> = listed.filter(|(_, health)| health == "Healthy").map(|(id, _)| id).collect();
    let mut expected = [format!("{}::0", uuid(0)), format!("{}::1", uuid(0)), uuid(1)];
    expected.sort();
    assert_eq!(listed, expected);
    let refused = rig.node.start("two", SHARED, 2).await.unwrap_err();
    assert!(
        refused.contains("at most 1 share of nvidia.com/gpu.shared, and this one requests 2"),
        "{refused}"
    );
    let pod = rig.node.start("one", SHARED, 1).await.unwrap();
    let view = rig.node.kubelet.view(&pod, "main").unwrap();
    assert_eq!(view.envs["NVIDIA_VISIBLE_DEVICES"], state.gpus[0].uuid);
    for name in ["a", "b", "c"] {
        rig.node.start(name, SMALL, 1).await.unwrap();
    }
    rig.node.start("d", SMALL, 1).await.unwrap_err();
    assert_eq!(rig.node.kubelet.anomalies(), []);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn instances_are_shared_as_gpus_where_they_are_listed_as_such() {
    let mut state = State::h100(1);
    state.split(0, &[1, 1]);
    let stack =
        json!([{"policy": "timeslice", "parameters": {"resources": [{"name": WHOLE, "replicas": 3}]}}]);
    let rig = Rig::new(&state, &format!("migStrategy: single\nstack: {stack}")).await;
    let _daemon = rig.node.serve();
    rig.allocatable(&[(WHOLE, 6)]).await;
    // Two shares of one container lie on two instances.
    let pod = rig.node.start("two", WHOLE, 2).await.unwrap();
    let view = rig.node.kubelet.view(&pod, "main").unwrap();
    let uuids: Vec<&str> = view.envs["NVIDIA_VISIBLE_DEVICES"].split(',').collect();
    assert!(uuids.len() == 2 && uuids.iter().all(|uuid| uuid.starts_with("MIG-")), "{uuids:?}");
    assert_eq!(rig.node.kubelet.anomalies(), []);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn shares_of_instances_by_the_parameter_for_gpus_are_refused_with_the_form_that_works() {
    let mut state = State::h100(1);
    state.split(0, &[1, 1]);
    let rig = Rig::new(&state, "migStrategy: mixed").await;
    let daemon = rig.node.serve();
    rig.allocatable(&[(SMALL, 2)]).await;
    let stack = |parameters: Value| json!({"entries": [{"policy": "timeslice", "parameters": parameters}]});
    let refused = daemon.call("PUT", "/stack", &stack(json!({"resource": SMALL, "replicas": 3})));
    let detail = refused["detail"].as_str().unwrap_or_default();
    assert!(detail.contains("`resources: [{name: nvidia.com/mig-1g.10gb, replicas: 3}]`"), "{refused}");
    // Under another name they would be unshared without a word.
    let left_out = daemon.call("PUT", "/stack", &stack(json!({"replicas": 3})));
    let warning = left_out["warnings"][0].as_str().unwrap_or_default();
    assert!(
        warning
            .ends_with("`resources: [{name: nvidia.com/mig-1g.10gb, replicas: 3}]` shares their instances")
    );
    let node = daemon.call("GET", "/node", &Value::Null);
    assert_eq!(node["warnings"], json!([warning]), "{node}");
    let shared = daemon.call("PUT", "/stack", &stack(json!({"resources": [{"name": SMALL, "replicas": 3}]})));
    assert_eq!(shared.get("warnings"), None, "{shared}");
    rig.allocatable(&[(SMALL, 6)]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn parameters_that_match_no_gpu_are_a_warning() {
    let node = ProcessNode::new("gpus: sim:2xl4").await;
    let daemon = node.serve();
    node.kubelet.wait_allocatable(WHOLE, 2, SOON).await.unwrap();
    let stack = |only: Value| json!({"entries": [{"policy": "timeslice", "parameters": {"only": only}}]});
    let answer = daemon.call(
        "PUT",
        "/stack",
        &stack(json!([{"model": "*L4*"}, {"model": "*A100*"}, {"uuid": "GPU-9"}])),
    );
    let warnings: Vec<&str> =
        answer["warnings"].as_array().unwrap().iter().map(|w| w.as_str().unwrap()).collect();
    assert_eq!(warnings.len(), 2, "{warnings:?}");
    assert!(warnings[0].ends_with("only[1]: no GPU of this node matches {model: *A100*}"), "{warnings:?}");
    assert!(warnings[1].ends_with("only[2]: no GPU of this node matches {uuid: GPU-9}"), "{warnings:?}");
    // `*` also matches the beginning of a name.
    node.kubelet.wait_allocatable(SHARED, 8, SOON).await.unwrap();
    let (ok, detail) = check(&daemon, "policies");
    assert!(ok && detail == warnings.join("; "), "{detail}");
    until("the log's line", || daemon.log().matches("matches {model: *A100*}").count() == 1);
    let answer = daemon.call("PUT", "/stack", &stack(json!([{"model": "*L4*"}])));
    assert_eq!(answer.get("warnings"), None, "{answer}");
    assert_eq!(check(&daemon, "policies"), (true, String::new()));
}
