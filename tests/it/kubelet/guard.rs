//! What the guard shows of containers, beside the kubelet's sources.

use crate::support::gpus::WHOLE;
use crate::support::guard::{StandInGuard, container, whole};
use crate::support::kubelet_node::{KubeletNode, NodeOptions};
use crate::support::wait::SOON;
use berth_kernel::evidence::pods::{Pod, PodsSource, PodsView, Stage};
use berth_kernel::node::command::Command;
use berth_kernel::node::ledger::Ledger;
use berth_proto::guard::{PodDeletions, Update};
use kubelet_standin::PodSpec;
use std::sync::Arc;
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

/// A view of one pod, by the API server.
fn view(is_deleting: bool) -> PodsView {
    let pod = Pod {
        uid: "uid-1".into(),
        namespace: "default".into(),
        name: "p".into(),
        labels: Vec::new(),
        is_static: false,
        owner: None,
        stage: Stage::Admitted,
        deletion_wall_ms: is_deleting.then_some(1),
        created_wall_ms: 0,
        containers: Vec::new(),
        bypass: None,
    };
    let mut view = PodsView::empty(PodsSource::ApiServer);
    view.current = true;
    view.pods.insert(pod.uid.clone(), Arc::new(pod));
    view
}

#[tokio::test]
async fn the_daemon_sends_the_guard_whether_pods_are_being_deleted() {
    let node = node().await;
    let guard = StandInGuard::followed_by(&node.kernel);
    let mut connection = guard.accept().await;
    connection.wait_for(PodDeletions::Unknown).await;
    for (deleting, expected) in [(false, PodDeletions::None), (true, PodDeletions::Some)] {
        node.kernel.execute(Command::Pods(view(deleting))).await.unwrap();
        connection.wait_for(expected).await;
    }
}
