//! Which policies a node compiles, and when: those of the stack before it registers, others when they are used; and
//! which it refuses.

use crate::support::admin_fakes::module;
use crate::support::admin_node::AdminNode;
use crate::support::gpus::WHOLE;
use crate::support::process_node::{DaemonProcess, ProcessNode, berth, ended};
use crate::support::wait::{SOON, until};
use berth_kernel::ids::names::Digest;
use berth_kernel::node::ports::Store;
use berth_kernel::node::record::{Record, Write};
use berth_store::SledStore;
use serde_json::{Value, json};
use std::sync::atomic::Ordering;

const SPREAD: &[u8] = include_bytes!("../../../policies-wasm/prebuilt/spread.wasm");

/// Versions that were compiled on this node.
fn compiled(node: &ProcessNode) -> usize {
    let files = std::fs::read_dir(node.folder.path().join("state/policies")).unwrap();
    files.filter(|file| file.as_ref().unwrap().path().extension().is_some_and(|end| end == "cwasm")).count()
}

fn policies(daemon: &DaemonProcess) -> Vec<Value> {
    daemon.call("GET", "/policies", &Value::Null)["items"].as_array().unwrap().clone()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_policy_is_compiled_when_it_is_first_named() {
    let node = ProcessNode::new("gpus: sim:2xt4\nstack: [{ policy: exclusive }]").await;
    let daemon = node.serve();
    node.kubelet.wait_allocatable(WHOLE, 2, SOON).await.unwrap();
    assert_eq!(compiled(&node), 1);
    let all = policies(&daemon);
    assert_eq!(all.len(), 9);
    assert!(all.iter().all(|p| p["shipped"] == true && p["summary"].as_str().unwrap().ends_with('.')));

    let stack = json!({ "entries": [{ "policy": "binpack" }, { "policy": "exclusive" }] });
    assert!(daemon.call("PUT", "/stack", &stack)["revision"].is_u64());
    assert_eq!(compiled(&node), 2);
    node.start("a", WHOLE, 1).await.unwrap();
    // The recorder is behind the grant.
    let counts = || daemon.call("POST", "/replays", &json!({ "policy": "quota" }))["counts"].clone();
    until("the decision", || counts()["admit"].is_object());
    assert_eq!(counts()["admit"]["fails"], 0, "{}", counts());
    assert_eq!(compiled(&node), 3);
    let shadow = daemon.call("POST", "/shadows", &json!({ "policy": "spread" }));
    assert!(shadow["id"].is_u64(), "{shadow}");
    assert_eq!(compiled(&node), 4);
    daemon.stop();

    // The next start finds them compiled.
    let daemon = node.serve();
    node.kubelet.wait_allocatable(WHOLE, 2, SOON).await.unwrap();
    assert_eq!((compiled(&node), policies(&daemon).len()), (4, 9));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn policies_of_this_release_are_shipped_whatever_an_older_one_recorded() {
    let node = ProcessNode::new("gpus: sim:2xt4").await;
    let daemon = node.serve();
    node.kubelet.wait_allocatable(WHOLE, 2, SOON).await.unwrap();
    daemon.stop();

    // As a release leaves it that has none of them.
    let mut store = SledStore::open(&node.folder.path().join("state/store")).unwrap();
    let demoted: Vec<Write> = store
        .load()
        .unwrap()
        .into_iter()
        .filter_map(|record| match record {
            Record::Policy(mut version) => {
                version.shipped = false;
                version.origin.once_shipped = true;
                Some(Write::Put(Record::Policy(version)))
            }
            _ => None,
        })
        .collect();
    assert_eq!(demoted.len(), 9);
    store.append(&demoted).unwrap();
    drop(store);

    let daemon = node.serve();
    node.kubelet.wait_allocatable(WHOLE, 2, SOON).await.unwrap();
    let all = policies(&daemon);
    assert!(all.len() == 9 && all.iter().all(|policy| policy["shipped"] == true), "{all:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn uncompiled_policies_of_an_older_release_are_removed() {
    let node = ProcessNode::new("gpus: sim:2xt4").await;
    let daemon = node.serve();
    node.kubelet.wait_allocatable(WHOLE, 2, SOON).await.unwrap();
    daemon.stop();

    let mut store = SledStore::open(&node.folder.path().join("state/store")).unwrap();
    let older = store.load().unwrap().into_iter().find_map(|record| match record {
        Record::Policy(mut version) => {
            version.digest = Digest::parse(&"a".repeat(64)).unwrap();
            version.artifact = version.digest.clone();
            Some(version)
        }
        _ => None,
    });
    store.append(&[Write::Put(Record::Policy(older.unwrap()))]).unwrap();
    drop(store);

    let daemon = node.serve();
    node.kubelet.wait_allocatable(WHOLE, 2, SOON).await.unwrap();
    assert_eq!(policies(&daemon).len(), 9);
    assert!(!daemon.log().contains("ERROR"), "{}", daemon.log());
}

#[test]
fn a_policy_that_cannot_be_made_callable_is_neither_activated_nor_tried() {
    let node = AdminNode::new(2);
    node.upload(&module("share", "1")).expect(201);
    node.policies.busy.store(true, Ordering::SeqCst);
    let stack = json!({ "entries": [{ "policy": "share" }] }).to_string();
    let candidate = json!({ "policy": "share" }).to_string();
    let asked = [("PUT", "/api/v1/stack", &stack), ("POST", "/api/v1/shadows", &candidate)];
    for (method, path, body) in asked.into_iter().chain([("POST", "/api/v1/trials", &candidate)]) {
        let answer = node.json(method, path, body);
        let words = answer.problem(503, "busy");
        assert!(words.contains("policy share@") && words.contains("is being compiled"), "{path}: {words}");
        assert!(answer.headers.contains_key("retry-after"), "{path}");
    }
    assert_eq!(node.get("/api/v1/stack").expect(200)["revision"], 0);
    assert_eq!(node.get("/api/v1/shadows").expect(200)["items"], json!([]));
    node.policies.busy.store(false, Ordering::SeqCst);
    node.json("PUT", "/api/v1/stack", &stack).expect(200);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_version_that_a_shadow_uses_is_not_deleted() {
    let node = ProcessNode::new("gpus: sim:2xt4").await;
    let daemon = node.serve();
    node.kubelet.wait_allocatable(WHOLE, 2, SOON).await.unwrap();
    // Other bytes, the same policy: a custom section `x` of no bytes.
    let own = [SPREAD, &[0, 2, 1, b'x']].concat();
    let digest = daemon.push(&own)["digest"].as_str().unwrap().to_owned();
    let shadow = daemon.call("POST", "/shadows", &json!({ "policy": "spread", "digest": digest }));
    let path = format!("/policies/{digest}");
    let refused = daemon.call("DELETE", &path, &Value::Null);
    assert_eq!(refused["type"], "/problems/in-use", "{refused}");
    let words = format!("is used by shadow {}", shadow["id"]);
    assert!(refused["detail"].as_str().unwrap().contains(&words), "{refused}");
    daemon.call("DELETE", &format!("/shadows/{}", shadow["id"]), &Value::Null);
    daemon.call("DELETE", &path, &Value::Null);
    assert_eq!(policies(&daemon).len(), 9);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn parameters_of_a_policy_that_offers_nothing_are_read_before_the_first_pod() {
    let node = ProcessNode::new("gpus: sim:2xt4").await;
    let daemon = node.serve();
    node.kubelet.wait_allocatable(WHOLE, 2, SOON).await.unwrap();
    let before = daemon.call("GET", "/stack", &Value::Null)["revision"].clone();
    let cases = [
        ("quota", json!({ "defualt": { "devices": 1 } })),
        ("binpack", json!({ "resources": "nvidia.com/gpu" })),
        ("triage-xid", json!({ "xids": { "sixty": {} } })),
    ];
    for (policy, parameters) in cases {
        let stack = json!({ "entries": [{ "policy": policy, "parameters": parameters }] });
        let refused = daemon.call("PUT", "/stack", &stack);
        assert_eq!(refused["type"], "/problems/stack-fails", "{refused}");
        assert!(refused["detail"].as_str().unwrap().contains(policy), "{refused}");
    }
    assert_eq!(daemon.call("GET", "/stack", &Value::Null)["revision"], before);
    // And the same in a file.
    let wrong = format!("{}\nstack: [{{ policy: quota, parameters: {{ defualt: {{}} }} }}]", node.settings);
    let file = node.folder.path().join("wrong.yaml");
    std::fs::write(&file, wrong).unwrap();
    let check = |file: &std::path::Path| ended(berth().args(["config", "check"]).arg(file));
    let (code, words) = check(&file);
    assert!(code != Some(0) && words.contains("quota") && words.contains("defualt"), "{words}");
    // And for GPUs that only the node has.
    std::fs::write(&file, "stack: [{ policy: binpack, parameters: { resorces: [] } }]").unwrap();
    let (code, words) = check(&file);
    assert!(code != Some(0) && words.contains("binpack") && words.contains("resorces"), "{words}");
}
