//! Traps of the kubelet: GPUs that vanish, pods that are admitted again, unreported releases, a pod resources API
//! that refuses.

use crate::support::gpus::{SHARED, WHOLE, gpu_id};
use crate::support::kubelet_node::{KubeletNode, NodeOptions, cordon};
use crate::support::wait::SOON;
use berth_core::keeper::CommandError;
use berth_kernel::grants::allocation::EndReason;
use berth_kernel::ids::names::GpuId;
use berth_kernel::ids::time::Timing;
use berth_kernel::node::command::Command;
use berth_kernel::node::refusal::Refusal;
use berth_kubelet::ReconcileTiming;
use kubelet_standin::{HEALTHY, Kubelet, Phase, PodSpec, Rpc, UNHEALTHY};
use std::time::Duration;

/// Far longer than any wait of the node's timing.
const HOUR_MS: u64 = 3_600_000;

fn pod(name: &str) -> PodSpec {
    PodSpec::new("default", name)
}

/// No periodic passes: the test starts each reconcile pass.
fn no_periodic_passes() -> ReconcileTiming {
    let never = Duration::from_secs(3600);
    ReconcileTiming {
        list_interval: never,
        list_interval_cordoned: never,
        full_pass_interval: never,
        ..NodeOptions::default().reconcile
    }
}

/// Admits a pod with so many whole GPUs and starts it.
async fn run(node: &KubeletNode, name: &str, count: usize) -> String {
    node.run(pod(name).container("main", &[(WHOLE, count)])).await
}

#[tokio::test]
async fn a_vanished_gpu_stays_listed_until_it_is_back() {
    let node = NodeOptions::default().started().await;
    node.allocatable(WHOLE, 4).await;
    let uid = run(&node, "p", 3).await;
    let held = node.kubelet.held(&uid, "main", WHOLE);
    // One that the pod holds and the one that is free.
    let free = (0..4).find(|n| !held.contains(&format!("GPU-{n}"))).unwrap();
    let taken = (0..4).find(|n| *n != free).unwrap();
    node.scan_without(&[free, taken], &[]).await;
    node.kubelet.wait_allocatable(WHOLE, 2, SOON).await.unwrap();
    let listed = node.kubelet.listed(WHOLE);
    assert_eq!(listed.len(), 4, "{listed:?}");
    for n in [free, taken] {
        assert_eq!(listed[&format!("GPU-{n}")], UNHEALTHY, "{listed:?}");
    }
    // A missing one would be shown as healthy in the pod's status.
    assert_eq!(node.kubelet.reported_health(&uid, "main")[&format!("GPU-{taken}")], UNHEALTHY);
    // A new kubelet learns of it in the same way.
    node.kubelet.restart().await.unwrap();
    node.allocatable(WHOLE, 2).await;
    assert_eq!(node.kubelet.capacity(WHOLE), Some(4));
    node.scan_failing(&[]).await;
    node.kubelet.wait_allocatable(WHOLE, 4, SOON).await.unwrap();
    assert!(node.kubelet.listed(WHOLE).values().all(|health| health == HEALTHY));
    assert_eq!(node.live().len(), 1, "its pod held it all the time");
    node.assert_harmless();
}

#[tokio::test]
async fn the_ids_of_a_vanished_gpu_leave_the_list_only_by_forget() {
    let node = NodeOptions { policy: Some("whole shares=2"), ..NodeOptions::default() }.started().await;
    node.allocatable(WHOLE, 4).await;
    node.allocatable(SHARED, 8).await;
    node.scan_without(&[3], &[]).await;
    node.kubelet.wait_allocatable(WHOLE, 3, SOON).await.unwrap();
    // The shares of the other GPUs are no longer offered, and leave after their time.
    node.activate("whole").await;
    node.clock.skip(HOUR_MS);
    node.kubelet.wait_capacity(SHARED, 2, SOON).await.unwrap();
    assert_eq!(node.kubelet.capacity(WHOLE), Some(4));
    assert_eq!(node.kubelet.listed(WHOLE)["GPU-3"], UNHEALTHY);
    node.kernel.execute(Command::Forget { gpu: gpu_id(3) }).await.unwrap();
    node.kubelet.wait_capacity(WHOLE, 3, SOON).await.unwrap();
    let refused = node.kernel.execute(Command::Forget { gpu: gpu_id(2) }).await.unwrap_err();
    assert!(matches!(refused, CommandError::Refused(Refusal::StillThere { .. })), "{refused}");
    node.assert_harmless();
}

/// A pod from before a restart of the kubelet is rejected because its devices are not back.
/// Report: https://github.com/kubernetes/kubernetes/issues/128043
#[tokio::test]
async fn a_pending_pod_is_admitted_again_after_a_kubelet_restart() {
    let node = NodeOptions::default().started().await;
    node.allocatable(WHOLE, 4).await;
    let spec = pod("p").container("main", &[(WHOLE, 2)]);
    let uid = spec.uid.clone();
    node.kubelet.admit(spec).await.unwrap();
    let before = node.live();
    let held = node.kubelet.held(&uid, "main", WHOLE);
    // A cordon takes nothing from who holds it: an Unhealthy device would fail the pod.
    node.kernel.execute(cordon(GpuId::of_whole(&before[0].devices[0].part), "")).await.unwrap();
    node.kubelet.restart().await.unwrap();
    node.allocatable(WHOLE, 4).await;
    let answers = node.kubelet.readmit().await;
    assert_eq!(answers.into_iter().collect::<Vec<_>>(), [(uid.clone(), Ok(()))]);
    assert_eq!(node.kubelet.pod(&uid).unwrap().phase, Phase::Pending);
    assert_eq!(node.kubelet.held(&uid, "main", WHOLE), held);
    // Its checkpoint remembered the answer, so no Allocate followed.
    assert_eq!(node.kubelet.calls(Rpc::Allocate, WHOLE).count, 1);
    node.kubelet.run(&uid).await.unwrap();
    let id = before[0].id.to_string();
    assert_eq!(node.kubelet.view(&uid, "main").unwrap().envs["BERTH_ALLOCATION_ID_NVIDIA_COM_GPU"], id);
    assert_eq!(node.live().iter().map(|a| a.id).collect::<Vec<_>>(), [before[0].id]);
    node.assert_harmless();
}

#[tokio::test]
async fn a_pod_that_a_kubelet_without_state_admits_again_is_granted_the_same_devices_again() {
    // Longer than the kubelet takes to write its checkpoint, also beside other tests.
    let timing = Timing { reply_settle_ms: 3_000, ..NodeOptions::default().timing };
    let node = NodeOptions { gpus: 1, timing, ..NodeOptions::default() }.started().await;
    node.allocatable(WHOLE, 1).await;
    let spec = pod("p").container("main", &[(WHOLE, 1)]);
    let uid = spec.uid.clone();
    node.kubelet.admit(spec).await.unwrap();
    let first = node.live()[0].id;
    node.wait("its holder", |l| l.live[&first].holder.pod.is_some()).await;
    node.kubelet.stop().await;
    std::fs::remove_file(node.kubelet.checkpoint_path()).unwrap();
    node.kubelet.start().await.unwrap();
    node.allocatable(WHOLE, 1).await;
    assert_eq!(node.kubelet.readmit().await[&uid], Ok(()));
    assert_eq!(node.kubelet.calls(Rpc::Allocate, WHOLE).count, 2);
    node.wait("the first grant's end", |l| !l.live.contains_key(&first)).await;
    let live = node.live();
    assert_eq!(live.len(), 1);
    assert_eq!(
        node.kubelet.view(&uid, "main").unwrap().envs["BERTH_ALLOCATION_ID_NVIDIA_COM_GPU"],
        live[0].id.to_string()
    );
    node.wait("its holder", |l| {
        l.live.values().all(|a| a.holder.pod_uid.as_deref() == Some(&uid) && !a.overlapped)
    })
    .await;
    node.assert_harmless();
}

#[tokio::test]
async fn i7_a_new_pod_is_granted_devices_whose_release_was_missed() {
    let node =
        NodeOptions { gpus: 1, reconcile: no_periodic_passes(), ..NodeOptions::default() }.started().await;
    node.allocatable(WHOLE, 1).await;
    let old = run(&node, "old", 1).await;
    node.reconcile_until("the first holder", 0, |l| l.live.values().all(|a| a.holder.pod_uid.is_some()))
        .await;
    let first = node.live()[0].id;
    node.kubelet.delete(&old);
    let new = run(&node, "new", 1).await;
    let view = node.kubelet.view(&new, "main").unwrap();
    let live = node.live();
    assert_eq!(live.len(), 2, "no pass has run yet");
    let newest = live.last().unwrap();
    assert!(live[0].id == first && live[0].overlapped && !newest.overlapped, "{live:#?}");
    assert_eq!(view.envs["BERTH_ALLOCATION_ID_NVIDIA_COM_GPU"], newest.id.to_string());
    node.reconcile_until("the older one's end", 0, |l| l.live.len() == 1).await;
    let snapshot = node.kernel.snapshot();
    let ended = snapshot.ended.back().unwrap();
    assert_eq!((ended.id, ended.ended.reason), (first, EndReason::Superseded));
    node.reconcile_until("the new holder", 0, |l| {
        l.live.values().all(|a| a.id != first && a.holder.pod_uid.as_deref() == Some(&new))
    })
    .await;
    node.assert_harmless();
}

/// A pod is deleted by force and still runs, and its GPU goes to another.
/// Report: https://github.com/kubernetes/kubernetes/issues/104099
/// Report: https://github.com/kubernetes/kubernetes/issues/141471
#[tokio::test]
async fn a_force_deleted_pods_allocation_ends_after_two_separate_passes() {
    let timing = Timing { passes_apart_ms: HOUR_MS, ..NodeOptions::default().timing };
    let node =
        NodeOptions { timing, reconcile: no_periodic_passes(), ..NodeOptions::default() }.started().await;
    node.allocatable(WHOLE, 4).await;
    let uid = run(&node, "p", 1).await;
    node.reconcile_until("the holder", 0, |l| {
        l.live.values().all(|a| a.holder.pod.is_some() && a.holder.pod_uid.is_some())
    })
    .await;
    // Its containers run on, and neither source shows it any more.
    node.kubelet.force_delete(&uid);
    node.clock.skip(HOUR_MS);
    node.reconcile_until("the first miss", 0, |l| l.sightings.values().all(|s| s.missed_mono_ms.is_some()))
        .await;
    for _ in 0..3 {
        node.reconcile().await;
        assert_eq!(node.live().len(), 1, "passes without a pause between them count as one");
    }
    node.clock.skip(HOUR_MS);
    node.reconcile_until("the end", 0, |l| l.live.is_empty()).await;
    let ended = node.kernel.snapshot().ended.back().unwrap().ended.clone();
    assert_eq!(ended.reason, EndReason::Released);
    node.assert_harmless();
}

#[tokio::test]
async fn a_failed_list_ends_nothing_and_is_repeated() {
    let node = NodeOptions::default().started().await;
    node.allocatable(WHOLE, 4).await;
    let uid = run(&node, "p", 1).await;
    node.wait("the holder", |l| l.live.values().all(|a| a.holder.pod.is_some())).await;
    node.kubelet.set_faults(|f| f.list_fails = true);
    node.kubelet.delete(&uid);
    // An admission makes the kubelet forget the pod that left, so its checkpoint shows it no more.
    run(&node, "other", 1).await;
    let failed = node.kubelet.calls(Rpc::List, "").errors;
    let polls = |k: &Kubelet| k.calls(Rpc::List, "").errors >= failed + 10;
    node.kubelet.wait_for("polls that fail", SOON, polls).await.unwrap();
    for _ in 0..3 {
        node.clock.skip(HOUR_MS);
        node.reconcile().await;
    }
    assert_eq!(node.live().len(), 2, "a checkpoint alone ends nothing");
    node.kubelet.set_faults(|f| f.list_fails = false);
    node.wait("the end after all", |l| l.live.len() == 1 && l.live.values().all(|a| a.holder.pod.is_some()))
        .await;
    assert_eq!(node.live()[0].holder.pod.as_deref(), Some("other"));
    node.assert_harmless();
}
