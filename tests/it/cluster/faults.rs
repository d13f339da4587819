//! The crate `cluster` alone, with a stand-in API server that refuses, hangs and forgets.

use crate::cluster::pods_source::{serve, watching};
use crate::support::api_server::{ApiServer, NODE, Read, Unread, pod};
use crate::support::batches::batches;
use crate::support::gpus::{WHOLE, resource};
use crate::support::kubelet_node::{KubeletNode, NodeOptions};
use crate::support::process_node::ProcessNode;
use crate::support::wait::{SOON, until_some};
use berth_cluster::ApiServer as Reach;
use berth_cluster::{self, ApiServerStatus, Settings};
use berth_kernel::evidence::pods::PodsView;
use berth_kernel::grants::pod_candidates::candidates;
use berth_kube::Connection;
use serde_json::json;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

pub(crate) fn settings(server: &ApiServer, folder: &Path) -> Settings {
    let reach = Reach::Kubeconfig(server.kubeconfig(folder));
    let wait = Duration::from_millis(50);
    let connection = Connection { retry_interval: wait, ..Connection::new(reach.clone()) };
    Settings { connection, reconnect_wait_max: wait, ..Settings::new(reach, NODE.into()) }
}

/// The pods as the ledger has them.
pub(crate) fn view(node: &KubeletNode) -> Option<Arc<PodsView>> {
    node.kernel.snapshot().pods.clone()
}

pub(crate) async fn soon<T>(what: &str, mut find: impl FnMut() -> Option<T>) -> T {
    let end = Instant::now() + SOON;
    loop {
        if let Some(found) = find() {
            return found;
        }
        assert!(Instant::now() < end, "never: {what}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hanging_watch_disconnects_the_source_until_one_answers() {
    let (server, folder) = (ApiServer::start(), tempfile::tempdir().unwrap());
    let node = NodeOptions::default().unstarted().await;
    let (watch_timeout, read_timeout) = (Duration::from_secs(1), Duration::from_millis(1500));
    let mut settings = settings(&server, folder.path());
    (settings.connection.watch_timeout, settings.connection.read_timeout) = (watch_timeout, read_timeout);
    server.world.apply(pod("ns", "first", "a-1", &[]));
    let running = berth_cluster::start(settings, node.kernel.clone(), batches(&node.kernel));
    running.allow_connection();
    let link = running.link();
    soon("it watches", || (*link.borrow() == ApiServerStatus::Watching).then_some(())).await;
    // The watch that is under way says nothing more and does not end, either.
    server.world.read_fault(Read::Pods, Some(Unread::Hang));
    server.world.delete("a-1");
    server.world.apply(pod("ns", "second", "a-2", &[]));
    soon("the source is silent", || view(&node).filter(|view| !view.current)).await;
    soon("it says so", || {
        matches!(&*link.borrow(), ApiServerStatus::Connecting { last_error: Some(_) }).then_some(())
    })
    .await;
    let known = view(&node).unwrap();
    assert!(known.pods.contains_key("a-1") && known.deleted.is_empty(), "nothing is made up meanwhile");
    // The watches that are tried now hang as well, and are given up, too.
    let hung = server.world.unread();
    soon("watches are given up and tried again", || (server.world.unread() >= hung + 2).then_some(())).await;
    server.world.read_fault(Read::Pods, None);
    let caught_up = |view: &Arc<PodsView>| view.current && view.pods.keys().eq(["a-2"]);
    let view = soon("it is connected again", || view(&node).filter(caught_up)).await;
    assert_eq!(view.deleted, ["a-1"], "by the event, not by a list that lacks it");
    soon("it says so", || (*link.borrow() == ApiServerStatus::Watching).then_some(())).await;
    drop(running);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pod_that_may_call_allocate_next_is_submitted_at_once_and_others_are_batched() {
    let (server, folder) = (ApiServer::start(), tempfile::tempdir().unwrap());
    let node = NodeOptions::default().unstarted().await;
    // Longer than this test waits for anything.
    let settings = Settings { batch_window: 10 * SOON, ..settings(&server, folder.path()) };
    server.world.apply(pod("ns", "first", "a-1", &[(WHOLE, 1)]));
    let running = berth_cluster::start(settings, node.kernel.clone(), batches(&node.kernel));
    running.allow_connection();
    let has = |uid: &str| view(&node).is_some_and(|view| view.pods.contains_key(uid));
    soon("the first list", || has("a-1").then_some(())).await;
    // Neither of them can be requested from this node's plugin.
    server.world.apply(pod("ns", "plain", "b-1", &[]));
    server.world.apply(pod("ns", "network", "b-2", &[("example.com/nic", 1)]));
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert!(!has("b-1") && !has("b-2"), "no request waits for them");
    server.world.apply(pod("ns", "second", "a-2", &[(WHOLE, 2)]));
    soon("the second pod", || has("a-2").then_some(())).await;
    assert!(has("b-1") && has("b-2"), "what was gathered comes along");
    let asking = candidates(&node.kernel.snapshot(), &resource(WHOLE), 2);
    assert_eq!(asking.iter().map(|c| c.pod.uid.as_str()).collect::<Vec<_>>(), ["a-2"]);
    drop(running);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_condition_is_not_written_before_its_last_transition_is_known() {
    let (server, folder) = (ApiServer::start(), tempfile::tempdir().unwrap());
    let node = NodeOptions::default().unstarted().await;
    let (condition, then) = ("GPUUnavailable", "2020-02-02T02:02:02Z");
    server.world.state.lock().unwrap().writes.conditions.insert(
        condition.into(),
        json!({"type": condition, "status": "False", "reason": "GPUsAvailable", "message": "",
            "lastTransitionTime": then, "lastHeartbeatTime": then}),
    );
    server.world.read_fault(Read::Node, Some(Unread::Refuse(500)));
    let running =
        berth_cluster::start(settings(&server, folder.path()), node.kernel.clone(), batches(&node.kernel));
    running.allow_connection();
    soon("the node is requested again", || (server.world.unread() >= 3).then_some(())).await;
    assert_eq!(server.world.state.lock().unwrap().writes.patches, 0, "a moment is not guessed");
    server.world.read_fault(Read::Node, None);
    let written = soon("the condition", || {
        server.world.condition(condition).filter(|c| c["lastHeartbeatTime"] != then)
    });
    let written = written.await;
    assert_eq!((&written["lastTransitionTime"], &written["status"]), (&json!(then), &json!("False")));
    drop(running);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_kubeconfig_that_runs_a_program_for_its_credentials_is_refused_and_nothing_is_run() {
    let (server, folder) = (ApiServer::start(), tempfile::tempdir().unwrap());
    let file = server.kubeconfig(folder.path());
    let ran = folder.path().join("ran");
    let mut config: serde_json::Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    let exec = json!({"apiVersion": "client.authentication.k8s.io/v1", "command": "touch",
        "args": [ran.to_str().unwrap(), "eyJSECRET"], "interactiveMode": "Never"});
    let gcp = json!({"name": "gcp", "config": {"cmd-path": "touch", "cmd-args": ran.to_str().unwrap()}});
    for user in [json!({"exec": exec}), json!({"auth-provider": gcp})] {
        config["users"][0]["user"] = user;
        std::fs::write(&file, config.to_string()).unwrap();
        let settings = Settings::new(Reach::Kubeconfig(file.clone()), NODE.into());
        let refused = berth_cluster::connect(&settings).await.err().expect("it was taken");
        let words = berth_cluster::error_chain(&refused);
        assert!(words.contains("from a program (touch)") && words.contains("tokenFile"), "{words}");
        assert!(!words.contains("eyJSECRET"), "{words}");
        assert!(!ran.exists(), "it was run");
    }
    // With a token of its own nothing would be run.
    config["users"][0]["user"] = json!({"exec": exec, "token": "t"});
    std::fs::write(&file, config.to_string()).unwrap();
    berth_cluster::connect(&Settings::new(Reach::Kubeconfig(file), NODE.into())).await.unwrap();
    assert!(!ran.exists(), "it was run");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lasting_error_is_logged_once() {
    let server = ApiServer::start();
    let node = ProcessNode::new("gpus: sim:4xh100\n").await;
    for code in [403, 500] {
        server.world.read_fault(Read::Pods, Some(Unread::Refuse(code)));
        let before = server.world.unread();
        let daemon = serve(&node, &server);
        until_some("it is tried again", || (server.world.unread() >= before + 3).then_some(()));
        server.world.read_fault(Read::Pods, None);
        watching(&daemon);
        let is_about_it = |line: &str| {
            line.contains("refused by the test")
                || line.contains("kube_runtime")
                || line.contains("kube_client")
        };
        daemon.line(is_about_it);
        let log = daemon.log();
        assert_eq!(log.lines().filter(|line| is_about_it(line)).count(), 1, "{code}: {log}");
    }
}
