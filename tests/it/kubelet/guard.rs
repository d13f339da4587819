//! What the guard shows of containers, beside the kubelet's sources.

use crate::support::gpus::WHOLE;
use crate::support::guard::{StandInGuard, container, whole};
use crate::support::kubelet_node::{KubeletNode, NodeOptions, api_server_shows};
use crate::support::wait::SOON;
use berth_kernel::ids::names::GpuId;
use berth_kernel::node::command::Command;
use berth_kernel::node::ledger::Ledger;
use berth_proto::guard::{LimitReading, LimitState, LimitSupport, MemoryLimit, PodDeletions, Update};
use kubelet_standin::PodSpec;
use std::time::Duration;

/// A node whose kubelet's sources alone end no allocation for ten minutes.
async fn node() -> KubeletNode {
    let mut options = NodeOptions::default();
    options.timing.reply_settle_ms = 600_000;
    options.timing.passes_apart_ms = 600_000;
    options.reconcile.full_pass_interval = Duration::from_secs(600);
    let node = options.started().await;
    node.allocatable(WHOLE, 4).await;
    node
}

/// Runs a pod with one GPU, and returns its UID.
async fn run(node: &KubeletNode, name: &str) -> String {
    node.run(PodSpec::new("default", name).container("main", &[(WHOLE, 1)])).await
}

#[tokio::test]
async fn the_guard_names_a_holder_that_no_source_of_the_kubelet_names() {
    let node = node().await;
    node.kubelet.kill_pod_resources().await;
    let guard = StandInGuard::followed_by(&node.kernel);
    let mut connection = guard.accept().await;
    let uid = run(&node, "p").await;
    let view = node.kubelet.view(&uid, "main").unwrap();
    connection.send(whole(vec![container(&uid, "p", "main", &view)])).await;
    node.wait("the holder", |ledger| {
        ledger.live.values().all(|a| {
            let holder = &a.holder;
            holder.pod.as_deref() == Some("p") && holder.pod_uid.as_deref() == Some(&uid)
        })
    })
    .await;
}

#[tokio::test]
async fn an_allocation_ends_once_container_and_sandbox_have_ended_and_the_kubelet_released_it() {
    let node = node().await;
    let guard = StandInGuard::followed_by(&node.kernel);
    let mut connection = guard.accept().await;
    let (ends, stays) = (run(&node, "ends").await, run(&node, "stays").await);
    let shown = |uid: &String, pod| container(uid, pod, "main", &node.kubelet.view(uid, "main").unwrap());
    let (ending, staying) = (shown(&ends, "ends"), shown(&stays, "stays"));
    connection.send(whole(vec![ending.clone(), staying])).await;
    node.wait("both holders", |ledger| ledger.live.values().all(|a| a.holder.pod.is_some())).await;
    let removal =
        Update { removed_containers: vec![ending.id], removed_pods: vec![ends.clone()], ..Update::default() };
    connection.send(removal).await;
    node.kubelet.delete(&ends);
    node.wait("the end", |ledger| ledger.live.len() == 1).await;
    assert_eq!(node.live()[0].holder.pod_uid.as_ref(), Some(&stays));
}

#[tokio::test]
async fn a_guard_that_is_lost_is_away_until_it_shows_everything_again() {
    let node = node().await;
    let mut guard = StandInGuard::followed_by(&node.kernel);
    let mut connection = guard.accept().await;
    let uid = run(&node, "p").await;
    let shown = container(&uid, "p", "main", &node.kubelet.view(&uid, "main").unwrap());
    connection.send(whole(vec![shown.clone()])).await;
    node.wait("the holder", |ledger| ledger.live.values().all(|a| a.holder.pod.is_some())).await;
    let is_whole = |expected| {
        move |ledger: &Ledger| ledger.runtime.as_ref().is_some_and(|view| view.is_whole == expected)
    };
    drop(connection);
    node.wait("the loss", is_whole(false)).await;
    guard.status.wait_for(|status| !status.is_connected && !status.why.is_empty()).await.unwrap();
    let mut connection = guard.accept().await;
    connection.send(whole(vec![shown])).await;
    node.wait("the return", is_whole(true)).await;
    let seen = tokio::time::timeout(SOON, guard.status.wait_for(|status| status.is_connected)).await;
    assert_eq!(seen.unwrap().unwrap().runtime, "containerd 2.2.9");
    assert_eq!(node.live().len(), 1);
}

#[tokio::test]
async fn limits_that_were_read_back_are_enforced_and_unsupported_gpus_are_reported() {
    let node = node().await;
    let guard = StandInGuard::followed_by(&node.kernel);
    let mut connection = guard.accept().await;
    let uid = run(&node, "p").await;
    let mut shown = container(&uid, "p", "main", &node.kubelet.view(&uid, "main").unwrap());
    let gpu = node.live()[0].devices[0].part.clone();
    shown.limits = vec![MemoryLimit {
        gpu: gpu.to_string(),
        granted_mib: 4096,
        state: LimitState::Late.into(),
        times_changed: 2,
        reading: Some(LimitReading { limit_mib: 4096, used_mib: 7, wall_ms: node.kernel.now().wall_ms }),
        ..MemoryLimit::default()
    }];
    shown.is_privileged = true;
    let mut update = whole(vec![shown]);
    let status = update.status.as_mut().unwrap();
    status.limit_support = vec![
        LimitSupport { gpu: gpu.to_string(), why: String::new() },
        LimitSupport { gpu: "GPU-old".into(), why: "too old".into() },
        LimitSupport { gpu: "no GPU".into(), why: String::new() },
    ];
    connection.send(update).await;
    node.wait("the limit", |ledger| {
        let allocation = ledger.live.values().next().unwrap();
        let limits = ledger.memory_limits_of(allocation);
        limits.len() == 1
            && (limits[0].times_changed, limits[0].reading.unwrap().used_mib) == (2, 7)
            && ledger.is_memory_limited(allocation, &gpu)
            && ledger.container_of(allocation).unwrap().is_privileged
    })
    .await;
    let ledger = node.kernel.snapshot();
    let support = &ledger.runtime.as_ref().unwrap().limit_support;
    let why: Vec<_> = support.gpus.values().map(Option::as_deref).collect();
    assert_eq!((why.len(), support.gpus[&GpuId::parse("GPU-old").unwrap()].as_deref()), (2, Some("too old")));
}

#[tokio::test]
async fn a_release_of_the_driver_reaches_the_guard() {
    let node = node().await;
    let guard = StandInGuard::followed_by(&node.kernel);
    let mut connection = guard.accept().await;
    assert!(!connection.message().await.is_driver_released);
    let mut update = whole(Vec::new());
    update.status.as_mut().unwrap().has_driver_open = true;
    connection.send(update.clone()).await;
    let mut status = guard.status.clone();
    status.wait_for(|status| status.is_connected).await.unwrap();
    assert!(!guard.driver.wait_until_closed(Duration::ZERO), "the guard has the driver open");
    guard.driver.set_released(true);
    assert!(connection.message().await.is_driver_released);
    update.status.as_mut().unwrap().has_driver_open = false;
    connection.send(update).await;
    let waiting = guard.driver.clone();
    let closed = tokio::task::spawn_blocking(move || waiting.wait_until_closed(SOON)).await;
    assert!(closed.unwrap());
}

#[tokio::test]
async fn the_daemon_sends_the_guard_whether_pods_are_being_deleted() {
    let node = node().await;
    let guard = StandInGuard::followed_by(&node.kernel);
    let mut connection = guard.accept().await;
    connection.wait_for(PodDeletions::Unknown).await;
    for (deleting, expected) in [(false, PodDeletions::None), (true, PodDeletions::Some)] {
        let view = api_server_shows("uid-1", deleting);
        node.kernel.execute(Command::Pods(view)).await.unwrap();
        connection.wait_for(expected).await;
    }
}
