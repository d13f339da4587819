//! The kubelet's Pods API as a source of pods: what its messages prove, and what their absence does not.

use crate::support::gpus::WHOLE;
use crate::support::kubelet_node::{KubeletNode, NodeOptions};
use crate::support::wait::SOON;
use berth_kernel::evidence::pods::{PODS_MAX, PodsSource, PodsView, Stage};
use berth_kernel::grants::allocation::EndReason;
use berth_kernel::ids::time::Timing;
use berth_kernel::node::command::Command;
use berth_kernel::node::ledger::Ledger;
use berth_kubelet::Timeouts;
use kubelet_standin::{Kubelet, PodSpec, Rpc, Sources, TinyPlugin};
use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

const HOUR_MS: u64 = 3_600_000;
/// Far longer than polls and watches need here.
const LONG_ENOUGH: Duration = Duration::from_millis(500);

fn pod(name: &str) -> PodSpec {
    PodSpec::new("default", name)
}

fn retry_soon(timeouts: &mut Timeouts) {
    timeouts.pods_api.retry = Duration::from_millis(20);
    timeouts.pods_api.retry_max = Duration::from_millis(50);
}

/// A kubelet with the API, on a node where two reconcile passes alone end nothing within an hour.
fn slow() -> NodeOptions {
    let timing = Timing {
        passes_apart_ms: HOUR_MS,
        kubelet_settle_ms: HOUR_MS,
        reply_settle_ms: HOUR_MS,
        ..NodeOptions::default().timing
    };
    NodeOptions { timing, kubelet: |options| options.pods_api = true, ..NodeOptions::default() }
        .with_timeouts(retry_soon)
}

async fn slow_node() -> KubeletNode {
    let node = slow().started().await;
    node.allocatable(WHOLE, 4).await;
    node.wait("the pods", shown).await;
    node
}

fn view(ledger: &Ledger) -> Option<&PodsView> {
    ledger.pods.as_deref()
}

fn shown(ledger: &Ledger) -> bool {
    view(ledger).is_some_and(|v| v.current && v.source == PodsSource::Kubelet)
}

async fn run(node: &KubeletNode, spec: PodSpec) -> String {
    let uid = node.run(spec).await;
    node.wait("the holder", |l| l.live.values().any(|a| a.holder.pod_uid.as_deref() == Some(&uid))).await;
    node.wait("the pod", |l| view(l).is_some_and(|v| v.pods.contains_key(&uid))).await;
    uid
}

#[tokio::test]
async fn the_allocation_of_a_pod_with_stopped_containers_ends_with_the_next_pass() {
    let node = slow_node().await;
    for finish in [true, false] {
        let uid = run(&node, pod("p").container("main", &[(WHOLE, 2)])).await;
        match finish {
            true => node.kubelet.finish(&uid),
            false => node.kubelet.delete(&uid),
        }
        node.wait("the end", |l| l.live.is_empty()).await;
        let snapshot = node.kernel.snapshot();
        assert_eq!(snapshot.ended.back().unwrap().ended.reason, EndReason::Released);
        assert!(view(&snapshot).unwrap().deleted.contains(&uid));
    }
    node.assert_harmless();
}

#[tokio::test]
async fn a_pod_that_was_deleted_by_force_holds_its_gpu_until_its_containers_stop() {
    let node = slow_node().await;
    let uid = run(&node, pod("p").container("main", &[(WHOLE, 1)])).await;
    node.kubelet.force_delete(&uid);
    // `List` shows it no more, the checkpoint will not, and the Pods API has lost it as well.
    for _ in 0..4 {
        node.reconcile().await;
        tokio::time::sleep(LONG_ENOUGH / 4).await;
    }
    assert_eq!(node.live().len(), 1, "no source showed that it stopped");
    node.kubelet.delete(&uid);
    node.wait("the end", |l| l.live.is_empty()).await;
    node.assert_harmless();
}

#[tokio::test]
async fn an_init_containers_pod_is_named_by_it() {
    let node = slow_node().await;
    let spec = pod("prepared").init("load", &[(WHOLE, 1)]).container("main", &[]);
    let uid = spec.uid.clone();
    node.kubelet.admit(spec).await.unwrap();
    node.wait("its name", |l| l.live.values().all(|a| a.holder.pod.as_deref() == Some("prepared"))).await;
    let holder = node.live()[0].holder.clone();
    assert_eq!((holder.pod_uid, holder.container.as_deref()), (Some(uid.clone()), Some("load")));
    let is_admitted = |l: &Ledger| {
        view(l).is_some_and(|v| v.pods.get(&uid).is_some_and(|pod| pod.stage == Stage::Admitted))
    };
    node.wait("its admission", is_admitted).await;
    let snapshot = node.kernel.snapshot();
    let shown = &view(&snapshot).unwrap().pods[&uid];
    assert_eq!((shown.stage, shown.containers[0].requests[0].1), (Stage::Admitted, 1));
    assert!(!shown.is_static);
    node.assert_harmless();
}

#[tokio::test]
async fn a_kubelet_without_its_api_server_shows_only_static_pods_and_ends_no_allocation() {
    let node = slow_node().await;
    let of_file = run(&node, pod("static").of_a_file().container("main", &[(WHOLE, 1)])).await;
    let of_api = run(&node, pod("plain").container("main", &[(WHOLE, 1)])).await;
    node.kubelet.restart_with(Sources::Waiting { known: vec![of_file.clone()] }).await.unwrap();
    node.allocatable(WHOLE, 4).await;
    node.wait("the new list", |l| shown(l) && view(l).is_some_and(|v| v.pods.len() == 1)).await;
    assert!(view(&node.kernel.snapshot()).unwrap().pods[&of_file].is_static);
    for _ in 0..4 {
        node.reconcile().await;
        tokio::time::sleep(LONG_ENOUGH / 4).await;
    }
    assert_eq!(node.live().len(), 2, "a pod that is missing is not over");
    node.kubelet.sources_ready();
    node.wait("both pods", |l| view(l).is_some_and(|v| v.pods.contains_key(&of_api))).await;
    // What went while the kubelet was away is left to reconcile passes: its end was not observed.
    node.kubelet.stop().await;
    node.wait("its silence", |l| view(l).is_some_and(|v| !v.current)).await;
    node.kubelet.delete(&of_api);
    node.kubelet.start().await.unwrap();
    node.allocatable(WHOLE, 4).await;
    node.wait("its list", shown).await;
    node.reconcile().await;
    assert_eq!(node.live().len(), 2);
    let gone = |l: &Ledger| l.live.values().all(|a| a.holder.pod_uid.as_deref() == Some(&of_file));
    node.reconcile_until("the end of the pod", HOUR_MS, gone).await;
    node.assert_harmless();
}

#[tokio::test]
async fn a_dropped_watch_and_lost_events_are_recovered() {
    let again = Duration::from_millis(300);
    let node = slow().with_timeouts(|t| t.pods_api.resync = again).started().await;
    node.allocatable(WHOLE, 4).await;
    let first = run(&node, pod("a").container("main", &[(WHOLE, 1)])).await;
    node.kubelet.set_faults(|f| f.pods_watches_dropped += 1);
    let second = run(&node, pod("b").container("main", &[(WHOLE, 1)])).await;
    // From here on no events are sent, and yet what a new watch shows first is true.
    node.kubelet.set_faults(|f| f.pods_events_lost = true);
    node.kubelet.delete(&first);
    node.wait("the resync", |l| view(l).is_some_and(|v| v.pods.len() == 1)).await;
    let third = run(&node, pod("c").container("main", &[(WHOLE, 1)])).await;
    let snapshot = node.kernel.snapshot();
    let pods = &view(&snapshot).unwrap().pods;
    assert!(pods.contains_key(&second) && pods.contains_key(&third) && !pods.contains_key(&first));
    node.assert_harmless();
}

#[tokio::test]
async fn above_the_limit_of_pods_none_is_shown_running_or_ended() {
    let again = Duration::from_millis(300);
    let node = slow().with_timeouts(|t| t.pods_api.resync = again).started().await;
    node.allocatable(WHOLE, 4).await;
    let holds = run(&node, pod("holds").container("main", &[(WHOLE, 1)])).await;
    let others: Vec<_> = (0..PODS_MAX).map(|n| pod(&format!("other-{n}"))).collect();
    let last = others[0].uid.clone();
    // Reported one by one, each would be compared with all of them.
    node.kubelet.set_faults(|f| f.pods_events_lost = true);
    for other in others {
        node.kubelet.admit(other).await.unwrap();
    }
    node.kubelet.set_faults(|f| f.pods_events_lost = false);
    let silent = |v: &PodsView| !v.current && v.listed_mono_ms == 0 && v.pods.is_empty();
    node.wait("that there are too many", |l| view(l).is_some_and(silent)).await;
    node.reconcile().await;
    assert_eq!(node.live().len(), 1, "a pod that is not shown is not over");
    node.kubelet.delete(&last);
    node.wait("the pods again", |l| shown(l) && view(l).is_some_and(|v| v.pods.len() == PODS_MAX)).await;
    assert!(view(&node.kernel.snapshot()).unwrap().pods.contains_key(&holds));
    node.assert_harmless();
}

#[tokio::test]
async fn without_a_pods_api_it_is_not_mentioned() {
    // Off, as kubelets are by default; and a kubelet that serves something else on that socket.
    for other in [false, true] {
        let mut node = NodeOptions::default().with_timeouts(retry_soon).unstarted().await;
        let folder = node.settings.root_dir.join("pods-api");
        std::fs::create_dir_all(&folder).unwrap();
        let elsewhere = other.then(|| TinyPlugin::serve(&folder, "pods-api.sock", WHOLE, &["a"]).unwrap());
        node.kubelet.start().await.unwrap();
        node.start();
        node.allocatable(WHOLE, 4).await;
        let uid = pod("p").uid;
        node.kubelet.admit(pod("p").uid(&uid).container("main", &[(WHOLE, 1)])).await.unwrap();
        node.wait("its UID", |l| l.live.values().all(|a| a.holder.pod_uid.is_some())).await;
        node.kubelet.delete(&uid);
        node.wait("the end by reconcile passes", |l| l.live.is_empty()).await;
        assert_eq!(node.kernel.snapshot().pods, None);
        assert_eq!(node.kubelet.calls(Rpc::WatchPods, "").count, 0);
        node.assert_harmless();
        drop(elsewhere);
    }
}

#[tokio::test]
async fn a_pods_api_that_is_enabled_later_is_found() {
    let mut node = slow().unstarted().await;
    node.start();
    tokio::time::sleep(LONG_ENOUGH / 5).await;
    assert_eq!(node.kernel.snapshot().pods, None);
    node.kubelet.start().await.unwrap();
    node.wait("the pods", shown).await;
    let watches = |k: &Kubelet| k.calls(Rpc::WatchPods, "").count == 1;
    node.kubelet.wait_for("one watch", SOON, watches).await.unwrap();
}

#[tokio::test]
async fn the_api_servers_view_takes_precedence_until_it_is_disconnected() {
    let node = slow_node().await;
    let of_api = |current| PodsView {
        source: PodsSource::ApiServer,
        current,
        listed_mono_ms: 1,
        pods: BTreeMap::new(),
        deleted: VecDeque::new(),
        finished: std::collections::VecDeque::new(),
    };
    node.kernel.execute(Command::Pods(of_api(true))).await.unwrap();
    let source = |l: &Ledger| view(l).map(|v| v.source);
    assert_eq!(source(&node.kernel.snapshot()), Some(PodsSource::ApiServer));
    let spec = pod("p").container("main", &[(WHOLE, 1)]);
    let uid = node.run(spec).await;
    tokio::time::sleep(LONG_ENOUGH / 2).await;
    assert_eq!(source(&node.kernel.snapshot()), Some(PodsSource::ApiServer), "it is not shouted down");
    node.kernel.execute(Command::Pods(of_api(false))).await.unwrap();
    node.wait("the kubelet's view", |l| shown(l) && view(l).is_some_and(|v| v.pods.contains_key(&uid))).await;
    node.assert_harmless();
}
