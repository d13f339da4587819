//! Effects of policies on pods: placements that are followed, faults that fail no pod, offers that are refused,
//! denials that withdraw a resource for a while.

use crate::kubelet::allocation::refused;
use crate::support::batches::batches;
use crate::support::gpus::{SHARED, WHOLE, gpu, gpu_id};
use crate::support::kubelet_node::{KubeletNode, NodeOptions};
use crate::support::wait::SOON;
use berth_admin::{AdminServer, NodeFacts, StartStep};
use berth_core::ActivateError;
use berth_http::{RunningServer, Settings};
use berth_kernel::evidence::pods::{Pod, PodContainer, PodsSource, PodsView, Stage};
use berth_kernel::hardware::gpu::Reading;
use berth_kernel::hardware::health::HealthState;
use berth_kernel::ids::names::Resource;
use berth_kernel::node::command::Command;
use berth_kernel::policy::hooks::FaultKind;
use kubelet_standin::{PodSpec, Rpc};
use serde_json::Value;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;
use tempfile::TempDir;

fn pod(name: &str) -> PodSpec {
    PodSpec::new("default", name).container("main", &[(WHOLE, 1)])
}

async fn held_by_one(node: &KubeletNode, name: &str) -> String {
    let spec = pod(name);
    let uid = spec.uid.clone();
    node.kubelet.admit(spec).await.unwrap();
    node.kubelet.held(&uid, "main", WHOLE).pop_first().unwrap()
}

#[tokio::test]
async fn the_kubelet_requests_a_placement_and_follows_the_policy() {
    let node =
        NodeOptions { gpus: 8, policy: Some("whole place=last"), ..NodeOptions::default() }.started().await;
    node.allocatable(WHOLE, 8).await;
    // The kubelet picks at random without a preference.
    for n in (3..8).rev() {
        assert_eq!(held_by_one(&node, &format!("p{n}")).await, format!("GPU-{n}"));
    }
    let asked = node.kubelet.calls(Rpc::GetPreferredAllocation, WHOLE);
    assert_eq!((asked.count, asked.errors), (5, 0));
    node.assert_harmless();
}

#[tokio::test]
async fn a_policy_that_fails_in_the_hook_place_fails_no_pod() {
    for (script, kind) in [("whole place=fault", FaultKind::Trap), ("whole place=foreign", FaultKind::Answer)]
    {
        let node = NodeOptions { gpus: 8, policy: Some(script), ..NodeOptions::default() }.started().await;
        node.allocatable(WHOLE, 8).await;
        // More than suspend it.
        for n in 0..7 {
            held_by_one(&node, &format!("p{n}")).await;
        }
        let asked = node.kubelet.calls(Rpc::GetPreferredAllocation, WHOLE);
        assert_eq!((asked.count, asked.errors), (7, 0), "{script}");
        let record = node.kernel.entry_stats(0, &node.kernel.snapshot().stack.entries[0]);
        assert!(record.faults().contains_key(&kind), "{script}: {record:?}");
        assert_eq!(node.live().len(), 7, "{script}");
        node.assert_harmless();
    }
}

#[tokio::test]
async fn two_resources_that_each_take_the_whole_part_are_refused() {
    let node = NodeOptions { gpus: 2, policy: Some("whole"), ..NodeOptions::default() }.started().await;
    node.allocatable(WHOLE, 2).await;
    let before = node.kernel.snapshot().stack.clone();
    let refused = node.try_activate("twice").await.unwrap_err();
    assert!(matches!(refused, ActivateError::Fails { passing: false, .. }), "{refused:?}");
    let text = refused.to_string();
    for part in ["scripted@", "GPU-0", "two resources that each take the whole part", "not activated"] {
        assert!(text.contains(part), "{part} is missing in {text:?}");
    }
    assert_eq!(node.kernel.snapshot().stack, before);
    node.kubelet.admit(pod("p")).await.unwrap();
    assert_eq!(node.kubelet.capacity(SHARED), None);
    node.assert_harmless();
}

/// The admin API over a node.
struct Api {
    running: RunningServer,
    token: String,
    _folder: TempDir,
}

impl Api {
    fn over(node: &KubeletNode) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let token_file = folder.path().join("token");
        let settings = Settings {
            listen: "127.0.0.1:0".parse().unwrap(),
            health_listen: None,
            token_file: token_file.clone(),
            access: berth_http::AdminAccess::default(),
            reviewer: None,
            tls_poll_interval: berth_http::TLS_POLL_INTERVAL,
        };
        let facts = || NodeFacts { gpus: StartStep::Done, ..NodeFacts::default() };
        let server = AdminServer::bind(settings).unwrap();
        let running = server.run(node.core.clone(), Arc::new(facts), batches(&node.kernel)).unwrap();
        let token = std::fs::read_to_string(token_file).unwrap().trim().to_owned();
        Self { running, token, _folder: folder }
    }

    fn node(&self) -> Value {
        let agent: ureq::Agent =
            ureq::Agent::config_builder().proxy(None).timeout_global(Some(SOON)).build().into();
        let url = format!("http://{}/api/v1/node", self.running.address);
        let call = agent.get(&url).header("Authorization", format!("Bearer {}", self.token)).call();
        serde_json::from_str(&call.unwrap().body_mut().read_to_string().unwrap()).unwrap()
    }

    /// The check `gpus` of readiness: whether it passes, and its message.
    fn gpus_check(&self) -> (bool, String) {
        let node = self.node();
        let check = node["checks"].as_array().unwrap().iter().find(|check| check["name"] == "gpus").unwrap();
        (check["ok"].as_bool().unwrap(), check["detail"].as_str().unwrap_or_default().to_owned())
    }

    /// What the node's page says of the breaker of whole GPUs.
    fn breaker(&self) -> Option<String> {
        let node = self.node();
        let all = node["resources"].as_array().unwrap();
        let whole = all.iter().find(|r| r["resource"] == WHOLE).unwrap_or_else(|| panic!("{node}"));
        whole["breaker"].as_str().map(String::from)
    }
}

async fn denied_three_times(node: &KubeletNode) {
    node.activate("whole deny=not-today").await;
    let began = Instant::now();
    for n in 0..3 {
        let text = refused(node, pod(&format!("denied{n}"))).await;
        assert!(text.contains("not-today"), "{text}");
    }
    assert!(began.elapsed().as_secs() < 60, "this machine is too slow to be denied thrice in a minute");
}

/// Pods that are refused at admission are created again by the thousand.
/// Report: https://github.com/NVIDIA/k8s-device-plugin/issues/1223
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn three_denials_withdraw_a_resource_and_then_one_device_is_listed_again() {
    let mut options = NodeOptions { policy: Some("whole"), ..NodeOptions::default() };
    // The clock of the test is the only one that ends a pause.
    options.timing.breaker_pause_ms = 3_600_000;
    options.timing.breaker_pause_max_ms = 2 * 3_600_000;
    let node = options.started().await;
    let api = Api::over(&node);
    node.allocatable(WHOLE, 4).await;
    assert_eq!(api.breaker(), None);
    denied_three_times(&node).await;
    node.kubelet.wait_allocatable(WHOLE, 0, SOON).await.unwrap();
    assert_eq!(node.kubelet.capacity(WHOLE), Some(4));
    let words = api.breaker().unwrap();
    assert!(words.contains(WHOLE) && words.contains("withdrawn for 3600 s"), "{words}");
    // Half-open: one device, and its denial opens it again. No source shows whose pods are denied, so that the pause
    // does not grow.
    node.clock.skip(3_600_000);
    node.kubelet.wait_allocatable(WHOLE, 1, SOON).await.unwrap();
    assert!(api.breaker().unwrap().contains("one device is listed again"));
    refused(&node, pod("once-more")).await;
    node.kubelet.wait_allocatable(WHOLE, 0, SOON).await.unwrap();
    assert!(api.breaker().unwrap().contains("withdrawn for 3600 s"));
    // The denials were those of the former stack.
    node.activate("whole").await;
    node.kubelet.wait_allocatable(WHOLE, 4, SOON).await.unwrap();
    assert_eq!(api.breaker(), None);
    node.kubelet.admit(pod("lucky")).await.unwrap();
    node.assert_harmless();
}

/// A policy's fault does not depend on the requesting pod: the pause doubles until a request succeeds.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_failing_policy_withdraws_a_resource_for_longer_and_longer() {
    let mut options = NodeOptions { policy: Some("whole deny=fault"), ..NodeOptions::default() };
    options.timing.breaker_pause_ms = 3_600_000;
    options.timing.breaker_pause_max_ms = 2 * 3_600_000;
    let node = options.started().await;
    let api = Api::over(&node);
    node.allocatable(WHOLE, 4).await;
    for n in 0..3 {
        refused(&node, pod(&format!("failed{n}"))).await;
    }
    node.kubelet.wait_allocatable(WHOLE, 0, SOON).await.unwrap();
    node.clock.skip(3_600_000);
    node.kubelet.wait_allocatable(WHOLE, 1, SOON).await.unwrap();
    refused(&node, pod("once-more")).await;
    node.kubelet.wait_allocatable(WHOLE, 0, SOON).await.unwrap();
    assert!(api.breaker().unwrap().contains("withdrawn for 7200 s"));
}

/// One tenant's denials must not withdraw the GPUs of the others.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn denials_of_the_pods_of_one_namespace_withdraw_nothing() {
    let node = NodeOptions { policy: Some("whole"), ..NodeOptions::default() }.started().await;
    let api = Api::over(&node);
    node.allocatable(WHOLE, 4).await;
    let waiting = Pod {
        uid: "waits".into(),
        namespace: "tenant".into(),
        name: "waits".into(),
        labels: Vec::new(),
        is_static: false,
        owner: None,
        stage: Stage::Waiting,
        deletion_wall_ms: None,
        created_wall_ms: 0,
        containers: vec![PodContainer {
            name: "main".into(),
            requests: vec![(Resource::parse(WHOLE).unwrap(), 1)],
        }],
        bypass: None,
        has_claims: false,
        named_claims: Vec::new(),
    };
    let view = PodsView {
        source: PodsSource::ApiServer,
        current: true,
        listed_mono_ms: 0,
        pods: [(waiting.uid.clone(), Arc::new(waiting))].into(),
        deleted: VecDeque::new(),
        finished: VecDeque::new(),
    };
    node.kernel.execute(Command::Pods(view)).await.unwrap();
    denied_three_times(&node).await;
    denied_three_times(&node).await;
    assert_eq!(api.breaker(), None);
    assert_eq!(node.kubelet.allocatable(WHOLE), Some(4));
    // A policy that fails withdraws them, whichever pod asks.
    node.activate("whole deny=fault").await;
    for n in 0..3 {
        refused(&node, pod(&format!("failed{n}"))).await;
    }
    node.kubelet.wait_allocatable(WHOLE, 0, SOON).await.unwrap();
    node.assert_harmless();
}

/// A bad triage policy and one harmless XID withdraw every GPU; the rollback must bring them back.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_the_policy_that_judged_them_unhealthy_the_gpus_are_judged_again() {
    let node = NodeOptions { policy: Some("whole"), ..NodeOptions::default() }.started().await;
    let api = Api::over(&node);
    node.allocatable(WHOLE, 4).await;
    assert_eq!(api.gpus_check(), (true, String::new()));
    node.activate("whole triage=unhealthy").await;
    let xid = |n, code| Reading { part: gpu(n), source: "xid".into(), code, detail: "it failed".into() };
    for n in 0..4 {
        node.kernel.submit_reading(xid(n, 13)).unwrap();
    }
    node.allocatable(WHOLE, 0).await;
    let (is_ok, detail) = api.gpus_check();
    assert!(!is_ok && api.node()["ready"] == false, "{detail}");
    for part in [
        "0 of 4 GPUs",
        "scripted@aaaaaaaaaaaa",
        "`berth policy rollback`",
        "`berth gpu mark-healthy 0 1 2 3`",
    ] {
        assert!(detail.contains(part), "{part} is missing in {detail:?}");
    }
    // One of them has an error that counts without the policy.
    node.kernel.submit_reading(xid(3, 48)).unwrap();
    node.activate("whole").await;
    node.allocatable(WHOLE, 3).await;
    assert_eq!(api.gpus_check(), (true, String::new()));
    let health = &node.kernel.snapshot().gpus[&gpu_id(3)].health;
    assert_eq!((health.state, health.reason.as_str()), (HealthState::Unhealthy, "XID 48: it failed"));
    node.assert_harmless();
}

#[tokio::test]
async fn a_release_brings_a_withdrawn_resource_back() {
    let mut options = NodeOptions { policy: Some("whole"), ..NodeOptions::default() };
    options.timing.breaker_pause_ms = 3_600_000;
    options.timing.breaker_pause_max_ms = 3_600_000;
    let node = options.started().await;
    node.allocatable(WHOLE, 4).await;
    let holder = pod("holder");
    let uid = node.run(holder).await;
    denied_three_times(&node).await;
    // What is held stays healthy.
    node.kubelet.wait_allocatable(WHOLE, 1, SOON).await.unwrap();
    assert_eq!(node.kernel.snapshot().breakers.len(), 1);
    node.kubelet.delete(&uid);
    node.kubelet.wait_allocatable(WHOLE, 4, SOON).await.unwrap();
    assert!(node.kernel.snapshot().breakers.is_empty());
    node.assert_harmless();
}
