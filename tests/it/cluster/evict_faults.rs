//! Problems of a drain that evicts: restarts, an API server that is away, hangs or refuses, pods that are replaced,
//! and orders that are changed.

use crate::cluster::evict::{Scene, evicted};
use crate::cluster::pods_source::{serve, watching};
use crate::support::admin_node::AdminNode;
use crate::support::api_writes::{Fault, Write};
use crate::support::wait::until_some;
use berth_admin::StartStep;
use serde_json::{Value, json};
use std::time::Duration;

/// Time for several requests of evictions, none of which may be sent.
const A_WHILE: Duration = Duration::from_millis(1500);

#[tokio::test(flavor = "multi_thread")]
async fn a_restart_in_the_middle_of_a_drain_loses_nothing() {
    let mut scene = Scene::new().await;
    let _kubelet = scene.kubelet_follows();
    let [kept, leaves] = scene.on_it.clone();
    scene.keep(&kept);
    scene.drain(&json!({"evict": true, "deadlineSeconds": 600, "reason": "fan"}));
    scene.until_holder(&kept, "disruptionBudget");
    until_some("the other one leaves", || scene.holder(&leaves).is_none().then_some(()));
    scene.daemon.child.kill().unwrap();
    scene.daemon.child.wait().unwrap();
    let asked = scene.server.world.asked_count();
    scene.daemon = serve(&scene.node, &scene.server);
    scene.until_holder(&kept, "disruptionBudget");
    assert!(scene.server.world.asked_count() > asked, "it is requested again");
    assert_eq!(scene.progress()["why"], "fan");
    scene.free(&kept);
    scene.until_state("drained");
    scene.others_are_left_alone();
}

#[tokio::test(flavor = "multi_thread")]
async fn an_api_server_that_becomes_unreachable_is_waited_for_and_reported() {
    let mut scene = Scene::new().await;
    let _kubelet = scene.kubelet_follows();
    let [kept, _] = scene.on_it.clone();
    scene.keep(&kept);
    scene.drain(&json!({"evict": true}));
    scene.until_holder(&kept, "disruptionBudget");
    scene.server.stop();
    let warning =
        until_some("it is reported", || scene.progress()["progress"]["warning"].as_str().map(str::to_owned));
    assert!(warning.contains("the API server cannot be used"), "{warning}");
    scene.free(&kept);
    scene.server.serve();
    scene.until_state("drained");
    scene.others_are_left_alone();
}

#[tokio::test(flavor = "multi_thread")]
async fn uncordoning_and_stopping_end_it_at_once() {
    let scene = Scene::new().await;
    let [kept, other] = &scene.on_it;
    scene.keep(kept);
    scene.keep(other);
    let drain = format!("/gpus/{}/drain", scene.gpu);
    for path in [drain.replace("/drain", "/cordon"), drain] {
        scene.drain(&json!({"evict": true}));
        scene.until_holder(kept, "disruptionBudget");
        scene.until_holder(other, "disruptionBudget");
        let gpu = scene.daemon.call("DELETE", &path, &Value::Null);
        assert!(gpu["drain"]["progress"].is_null(), "{gpu}");
        // At most one request was under way.
        let asked = scene.server.world.asked_count();
        tokio::time::sleep(A_WHILE).await;
        assert!(scene.server.world.asked_count() <= asked + 1);
        let devices = &gpu["parts"][0]["devices"];
        // Ids of the offer before the shares may still be on their way out.
        let well = |d: &Value| d["healthy"] == true || d["state"] == "leaving";
        assert!(devices.as_array().unwrap().iter().all(well), "{devices}");
    }
    scene.others_are_left_alone();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_that_hangs_is_given_up_with_the_drain() {
    let scene = Scene::new().await;
    scene.server.world.fault(Write::Evict, Some(Fault::Hang));
    scene.drain(&json!({"evict": true}));
    tokio::time::sleep(A_WHILE).await;
    // Nothing else waits for it.
    assert_eq!(scene.progress()["progress"]["holders"][0]["state"], "notAsked");
    scene.daemon.call("DELETE", &format!("/gpus/{}/cordon", scene.gpu), &Value::Null);
    scene.server.world.fault(Write::Evict, None);
    tokio::time::sleep(A_WHILE).await;
    // The eviction that was under way may have succeeded; that of the second pod was not requested.
    assert!(scene.server.world.asked_count() <= 1, "{}", scene.server.world.asked_count());
    // And the next drain works.
    let _kubelet = scene.kubelet_follows();
    scene.drain(&json!({"evict": true}));
    scene.until_state("drained");
    scene.others_are_left_alone();
}

#[tokio::test(flavor = "multi_thread")]
async fn another_pod_of_the_same_name_is_not_evicted() {
    let scene = Scene::new().await;
    let [first, _] = &scene.on_it;
    scene.keep(first);
    scene.drain(&json!({"evict": true}));
    scene.until_holder(first, "disruptionBudget");
    scene.server.world.replace_unseen(&first.uid, "uid-of-another");
    scene.free(first);
    until_some("the API server says no", || {
        let asked = scene.server.world.asked(&first.name);
        asked.contains(&evicted(first, 409)).then_some(())
    });
    scene.until_holder(first, "asked");
    assert!(!scene.server.world.terminating().contains(&"uid-of-another".to_owned()));
}

#[tokio::test(flavor = "multi_thread")]
async fn missing_rights_are_named_once_and_everything_else_continues() {
    let scene = Scene::new().await;
    for write in [Write::Evict, Write::Delete, Write::Event, Write::Status] {
        scene.server.world.fault(write, Some(Fault::Forbidden));
    }
    scene.drain(&json!({"evict": true, "deadlineSeconds": 1, "atDeadline": "delete"}));
    let [holder, _] = &scene.on_it;
    let message = |right: &str| {
        until_some(right, || {
            let message = scene.holder(holder)?["message"].as_str()?.to_owned();
            message.contains(right).then_some(())
        });
    };
    message("the daemon needs: delete pods; ClusterRole berth-delete");
    let logged = |what: &str| scene.daemon.log().matches(what).count();
    for right in ["create and patch events of events.k8s.io", "patch nodes/status"] {
        until_some(right, || (logged(right) == 1).then_some(()));
    }
    for reason in ["one", "two", "three"] {
        scene.daemon.call("PUT", &format!("/gpus/{}/cordon", scene.gpu), &json!({"reason": reason}));
        tokio::time::sleep(Duration::from_millis(300)).await;
    }
    for right in ["create and patch events of events.k8s.io", "patch nodes/status"] {
        assert_eq!(logged(right), 1, "{}", scene.daemon.log());
    }
    // The pods are watched as ever, and once the role may, they go.
    let _kubelet = scene.kubelet_follows();
    scene.server.world.fault(Write::Delete, None);
    scene.until_state("drained");
    scene.others_are_left_alone();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_daemon_without_its_api_server_after_a_restart_reports_that() {
    let mut scene = Scene::new().await;
    let [kept, _] = scene.on_it.clone();
    scene.keep(&kept);
    scene.drain(&json!({"evict": true}));
    scene.until_holder(&kept, "disruptionBudget");
    scene.daemon.child.kill().unwrap();
    scene.daemon.child.wait().unwrap();
    scene.daemon = scene.node.serve();
    let warning =
        until_some("it is reported", || scene.progress()["progress"]["warning"].as_str().map(str::to_owned));
    assert!(warning.contains("--kubeconfig"), "{warning}");
    let asked = scene.server.world.asked_count();
    tokio::time::sleep(A_WHILE).await;
    assert_eq!(scene.server.world.asked_count(), asked);
    scene.daemon.child.kill().unwrap();
    scene.daemon.child.wait().unwrap();
    scene.daemon = serve(&scene.node, &scene.server);
    watching(&scene.daemon);
    scene.until_holder(&kept, "disruptionBudget");
}

#[test]
fn evict_is_refused_without_an_api_server_and_has_a_warning_while_it_is_unreachable() {
    let node = AdminNode::new(1);
    node.allocate(0);
    let drain = "/api/v1/gpus/GPU-0/drain";
    let says = node.json("PUT", drain, r#"{"evict": true}"#).problem(409, "no-api-server");
    assert!(says.contains("--kubeconfig") && says.contains("service account"), "{says}");
    assert_eq!(node.get(drain).expect(200)["state"], "active", "nothing was changed");
    node.facts.lock().unwrap().api_server = Some(StartStep::Waiting("connection refused".into()));
    for wrong in
        [r#"{"atDeadline": "delete", "deadlineSeconds": 1}"#, r#"{"evict": true, "atDeadline": "delete"}"#]
    {
        node.json("PUT", drain, wrong).problem(422, "invalid");
    }
    let gpu = node.json("PUT", drain, r#"{"evict": true}"#).expect(200);
    let progress = &gpu["drain"]["progress"];
    assert!(progress["warning"].as_str().unwrap().ends_with("connection refused"), "{progress}");
    assert_eq!(progress["holders"][0]["state"], "notKnown");
    assert_eq!(gpu["parts"][0]["devices"][0]["healthy"], false, "held devices are listed Unhealthy");
    node.facts.lock().unwrap().api_server = Some(StartStep::Done);
    assert!(node.get(drain).expect(200)["progress"]["warning"].is_null());
    node.get("/api/v1/gpus/GPU-9/drain").problem(404, "unknown-gpu");
}
