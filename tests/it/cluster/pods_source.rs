//! The API server as a source of pods: the whole daemon with the stand-in kubelet and a stand-in API server.

use crate::support::api_server::{ApiServer, NODE, pod};
use crate::support::gpus::WHOLE;
use crate::support::process_node::{DaemonProcess, ProcessNode};
use crate::support::wait::{SOON, until_some};
use kubelet_standin::PodSpec;
use serde_json::{Value, json};

const SETTINGS: &str = "gpus: sim:4xh100\n";

/// The kubelet has long to settle, so that only the API server proves an early end.
const SLOW_KUBELET: &str = "gpus: sim:4xh100
rounds: { listEveryMs: 100, roundEveryMs: 200 }
timing: { roundsApartMs: 300, kubeletSettleMs: 60000, replySettleMs: 60000 }
";

/// Two reconcile passes are never far enough apart in a test.
const ONE_PASS: &str = "gpus: sim:4xh100
rounds: { listEveryMs: 100, roundEveryMs: 200 }
timing: { roundsApartMs: 600000, kubeletSettleMs: 60000, replySettleMs: 60000 }
";

fn args(node: &ProcessNode, server: &ApiServer) -> Vec<String> {
    let file = server.kubeconfig(node.folder.path());
    vec!["--kubeconfig".into(), file.to_str().unwrap().into(), "--node-name".into(), NODE.into()]
}

pub(crate) fn serve(node: &ProcessNode, server: &ApiServer) -> DaemonProcess {
    let args = args(node, server);
    node.serve_with(&args.iter().map(String::as_str).collect::<Vec<_>>())
}

pub(crate) fn watching(daemon: &DaemonProcess) {
    until_some("the API server is watched", || {
        let answer = daemon.call("GET", "/node", &Value::Null);
        (answer["apiServer"]["done"] == json!(true)).then_some(())
    });
}

#[tokio::test(flavor = "multi_thread")]
async fn a_finished_pods_allocation_ends_after_one_pass_and_a_force_deleted_pods_does_not() {
    let server = ApiServer::start();
    let node = ProcessNode::of(ONE_PASS).await;
    let daemon = serve(&node, &server);
    node.kubelet.wait_allocatable(WHOLE, 4, SOON).await.unwrap();
    watching(&daemon);
    let mut uids = Vec::new();
    for name in ["forced", "finished"] {
        let uid = node.start(name, WHOLE, 1).await.unwrap();
        server.world.apply(pod("ns", name, &uid, &[(WHOLE, 1)]));
        server.world.change(&uid, |pod| pod["status"] = json!({"phase": "Running"}));
        uids.push(uid);
    }
    let known = |live: &[Value]| live.len() == 2 && live.iter().all(|a| a["holder"]["podUid"].is_string());
    until_some("both holders are known", || known(&daemon.live()).then_some(()));
    // The kubelet forgets it at once, and its containers run on.
    node.kubelet.force_delete(&uids[0]);
    server.world.delete(&uids[0]);
    server.world.change(&uids[1], |pod| pod["status"] = json!({"phase": "Succeeded"}));
    node.kubelet.delete(&uids[1]);
    server.world.delete(&uids[1]);
    until_some("the one that finished ends", || (daemon.live().len() == 1).then_some(()));
    // The pass that ended it did not see the other pod either.
    assert_eq!(daemon.live()[0]["holder"]["podUid"], json!(uids[0]));
}

#[tokio::test(flavor = "multi_thread")]
async fn an_allocation_of_a_force_deleted_pod_ends_after_two_passes_without_settling() {
    let server = ApiServer::start();
    let node = ProcessNode::of(SLOW_KUBELET).await;
    let daemon = serve(&node, &server);
    node.kubelet.wait_allocatable(WHOLE, 4, SOON).await.unwrap();
    watching(&daemon);
    let uid = node.start("train", WHOLE, 2).await.unwrap();
    server.world.apply(pod("ns", "train", &uid, &[(WHOLE, 2)]));
    until_some("its holder is known", || (daemon.live()[0]["holder"]["podUid"] == json!(uid)).then_some(()));
    node.kubelet.force_delete(&uid);
    server.world.delete(&uid);
    until_some("its allocation ends", || daemon.live().is_empty().then_some(()));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_kubeconfig_that_cannot_be_read_is_not_shown() {
    let node = ProcessNode::new(SETTINGS).await;
    let file = node.folder.path().join("kubeconfig");
    let text = "apiVersion: v1\nkind: Config\nusers:\n- name: u\n  user:\n    client-key-data: aGVsbG8=\n   token: eyJSECRET\n";
    std::fs::write(&file, text).unwrap();
    let daemon = node.serve_with(&["--kubeconfig", file.to_str().unwrap(), "--node-name", NODE]);
    let why = until_some("it says so", || {
        let answer = daemon.call("GET", "/node", &Value::Null);
        answer["apiServer"]["waiting"]
            .as_str()
            .filter(|w| w.contains("not a valid kubeconfig"))
            .map(str::to_owned)
    });
    assert!(!why.contains("eyJSECRET") && !why.contains("aGVsbG8"), "{why}");
    daemon.line(|line| line.contains("not a valid kubeconfig"));
    let log = daemon.log();
    assert!(!log.contains("eyJSECRET") && !log.contains("aGVsbG8"), "{log}");
}

#[tokio::test(flavor = "multi_thread")]
async fn another_clusters_api_server_is_not_used() {
    let server = ApiServer::start();
    let node = ProcessNode::new(SETTINGS).await;
    let file = server.kubeconfig(node.folder.path());
    let daemon = node.serve_with(&["--kubeconfig", file.to_str().unwrap(), "--node-name", "elsewhere"]);
    let why = until_some("it says so", || {
        let answer = daemon.call("GET", "/node", &Value::Null);
        answer["apiServer"]["waiting"].as_str().filter(|w| w.contains("elsewhere")).map(str::to_owned)
    });
    assert!(why.contains("--node-name"), "{why}");
    assert_eq!(server.world.lists(), 0, "no pod was asked for");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unreachable_api_server_is_reported_and_found_again() {
    let mut server = ApiServer::start();
    let node = ProcessNode::new(SETTINGS).await;
    let daemon = serve(&node, &server);
    node.kubelet.wait_allocatable(WHOLE, 4, SOON).await.unwrap();
    watching(&daemon);
    let uid = node.start("train", WHOLE, 1).await.unwrap();
    server.world.apply(pod("ns", "train", &uid, &[(WHOLE, 1)]));
    until_some("its holder is known", || (daemon.live()[0]["holder"]["podUid"] == json!(uid)).then_some(()));
    server.stop();
    until_some("it is reported", || {
        let answer = daemon.call("GET", "/node", &Value::Null);
        answer["apiServer"]["waiting"].as_str().map(str::to_owned)
    });
    // Meanwhile the kubelet serves and is served as ever.
    let other = node.start("meanwhile", WHOLE, 1).await.unwrap();
    node.kubelet.delete(&other);
    until_some("its end by two passes", || (daemon.live().len() == 1).then_some(()));
    server.world.delete(&uid);
    node.kubelet.delete(&uid);
    server.serve();
    watching(&daemon);
    until_some("the other one ends, too", || daemon.live().is_empty().then_some(()));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_missing_right_of_a_role_is_named() {
    let server = ApiServer::start();
    server.world.refuse(Some(403));
    let node = ProcessNode::new(SETTINGS).await;
    let daemon = serve(&node, &server);
    let why = until_some("it says so", || {
        let answer = daemon.call("GET", "/node", &Value::Null);
        answer["apiServer"]["waiting"]
            .as_str()
            .filter(|w| w.contains("refused by the test"))
            .map(str::to_owned)
    });
    assert!(why.contains("get nodes, list and watch pods"), "{why}");
    server.world.refuse(None);
    watching(&daemon);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_init_containers_pod_is_named_by_the_api_server() {
    let server = ApiServer::start();
    let node = ProcessNode::new(SETTINGS).await;
    let daemon = serve(&node, &server);
    node.kubelet.wait_allocatable(WHOLE, 4, SOON).await.unwrap();
    watching(&daemon);
    let spec = PodSpec::new("ns", "prepared").init("load", &[(WHOLE, 1)]).container("main", &[]);
    let uid = spec.uid.clone();
    server.world.apply(pod("ns", "prepared", &uid, &[]));
    node.kubelet.admit(spec).await.unwrap();
    let holder = until_some("its pod is named", || {
        let holder = daemon.live().first()?["holder"].clone();
        holder["pod"].is_string().then_some(holder)
    });
    assert_eq!(holder["pod"], json!("prepared"));
    assert_eq!(holder["podUid"], json!(uid));
    assert_eq!(holder["container"], json!("load"));
}

#[test]
fn node_check_shows_the_state_of_the_api_server() {
    let server = ApiServer::start();
    let folder = tempfile::tempdir().unwrap();
    let file = server.kubeconfig(folder.path());
    let check = |node: &str| {
        let state = folder.path().join("state");
        let output = crate::support::process_node::berth()
            .args([
                "node",
                "check",
                "--gpus",
                "sim:1xt4",
                "--admin-listen",
                "127.0.0.1:0",
                "--node-name",
                node,
            ])
            .arg("--state-dir")
            .arg(state)
            .arg("--kubeconfig")
            .arg(&file)
            .stdout(std::process::Stdio::piped())
            .output()
            .unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        text.lines().find(|l| l.contains("API server")).unwrap_or_else(|| panic!("{text}")).to_owned()
    };
    assert!(check(NODE).starts_with("ok"), "{}", check(NODE));
    let other = check("elsewhere");
    assert!(other.starts_with("WARN") && other.contains("--node-name"), "{other}");
}

#[tokio::test(flavor = "multi_thread")]
async fn allocations_of_pods_deleted_while_the_daemon_was_down_end_with_its_first_pass() {
    let server = ApiServer::start();
    let node = ProcessNode::of(SLOW_KUBELET).await;
    let daemon = serve(&node, &server);
    node.kubelet.wait_allocatable(WHOLE, 4, SOON).await.unwrap();
    let mut uids = Vec::new();
    for name in ["stays", "goes"] {
        let uid = node.start(name, WHOLE, 1).await.unwrap();
        server.world.apply(pod("ns", name, &uid, &[(WHOLE, 1)]));
        uids.push(uid);
    }
    let known = |live: &[Value]| live.len() == 2 && live.iter().all(|a| a["holder"]["podUid"].is_string());
    until_some("both holders are known", || known(&daemon.live()).then_some(()));
    drop(daemon);
    server.world.delete(&uids[1]);
    node.kubelet.delete(&uids[1]);
    let daemon = serve(&node, &server);
    until_some("one is left", || (daemon.live().len() == 1).then_some(()));
    assert_eq!(daemon.live()[0]["holder"]["podUid"], json!(uids[0]));
}

/// The guest's message is in the log and in an event; the log does not repeat it for each pod.
#[tokio::test(flavor = "multi_thread")]
async fn a_policy_that_fails_is_reported() {
    let server = ApiServer::start();
    let node = ProcessNode::new(SETTINGS).await;
    let daemon = serve(&node, &server);
    node.kubelet.wait_allocatable(WHOLE, 4, SOON).await.unwrap();
    watching(&daemon);
    let pushed = daemon.push(&crate::support::guests::guest("trap-with-words"));
    let name = pushed["name"].as_str().unwrap();
    let stack = daemon.call("PUT", "/stack", &json!({"entries": [{"policy": name}]}));
    assert_eq!(stack["entries"][0]["policy"], name, "{stack}");
    for pod in ["a", "b", "c"] {
        node.start(pod, WHOLE, 1).await.unwrap();
    }
    let notes =
        until_some("the event", || Some(server.world.notes("PolicyFault")).filter(|notes| !notes.is_empty()));
    assert!(
        notes[0].starts_with(&format!("policy {name}@")) && notes[0].contains("out of ideas"),
        "{notes:?}"
    );
    assert_eq!(notes.len(), 1, "one a minute: {notes:?}");
    daemon.line(|line| line.contains("a policy failed"));
    let log = daemon.log();
    let lines: Vec<_> = log.lines().filter(|line| line.contains("a policy failed")).collect();
    assert_eq!(lines.len(), 1, "{lines:?}");
    assert!(lines[0].contains("WARN") && lines[0].contains("out of ideas"), "{lines:?}");
    let record = daemon.call("GET", "/stack", &Value::Null)["entries"][0]["record"].clone();
    assert_eq!(record["hooks"]["place"]["faults"], 3, "{record}");
}
