//! Reconcile passes: what ends an allocation, and above all what does not.

use crate::support::gpus::{SHARED, WHOLE, gpu_id};
use crate::support::kubelet_node::{KubeletNode, NodeOptions, cordon};
use crate::support::wait::SOON;
use berth_kernel::drain::marks::Owners;
use berth_kernel::grants::allocation::EndReason;
use berth_kernel::node::command::Command;
use berth_kubelet::{AdoptError, ReconcileTiming};
use kubelet_standin::{CheckpointMode, PodSpec, Rpc, Sources, TinyPlugin};
use std::os::unix::fs::MetadataExt;
use std::time::{Duration, Instant};

/// Longer than every wait that an end needs here (100 ms each), so that what has not ended by then
/// does not end.
const LONG_ENOUGH: Duration = Duration::from_millis(700);

fn pod(name: &str) -> PodSpec {
    PodSpec::new("default", name)
}

async fn node_with_pod() -> (KubeletNode, String) {
    let node = NodeOptions::default().started().await;
    node.allocatable(WHOLE, 4).await;
    let spec = pod("p").container("main", &[(WHOLE, 1)]);
    let uid = node.run(spec).await;
    node.wait("the holder", |l| {
        l.live.values().all(|a| a.holder.pod.is_some() && a.holder.pod_uid.is_some())
    })
    .await;
    (node, uid)
}

async fn ended(node: &KubeletNode, reason: EndReason) {
    node.wait("the end", |l| l.live.is_empty() && l.ended.iter().any(|past| past.ended.reason == reason))
        .await;
}

#[tokio::test]
async fn a_pod_that_ended_releases_its_devices() {
    for finish in [true, false] {
        let (node, uid) = node_with_pod().await;
        match finish {
            true => node.kubelet.finish(&uid),
            false => node.kubelet.delete(&uid),
        }
        ended(&node, EndReason::Released).await;
        node.allocatable(WHOLE, 4).await;
        node.assert_harmless();
    }
}

#[tokio::test]
async fn while_nothing_is_allocated_list_is_called_rarely() {
    let never = Duration::from_secs(3600);
    let reconcile = ReconcileTiming { full_pass_interval: never, ..NodeOptions::default().reconcile };
    let node = NodeOptions { reconcile, ..NodeOptions::default() }.started().await;
    node.allocatable(WHOLE, 4).await;
    let list_calls = || node.kubelet.calls(Rpc::List, "").count;
    let wait_until_called = async |what: &str, often: bool| {
        let began = Instant::now();
        loop {
            let before = list_calls();
            tokio::time::sleep(LONG_ENOUGH).await;
            let calls = list_calls() - before;
            // The list interval is 50 ms.
            if if often { calls >= 3 } else { calls == 0 } {
                break;
            }
            assert!(began.elapsed() < SOON, "{what}: {calls} calls of `List` in {LONG_ENOUGH:?}");
        }
    };
    wait_until_called("nothing is allocated", false).await;
    // Without a new checkpoint, as on a full disk, only the ledger changes.
    node.kubelet.set_faults(|f| f.checkpoint = CheckpointMode::Frozen);
    node.kernel.execute(cordon(gpu_id(0), "")).await.unwrap();
    wait_until_called("a GPU is cordoned", true).await;
    node.kernel.execute(Command::Uncordon { gpu: gpu_id(0), owners: Owners::All }).await.unwrap();
    wait_until_called("it is no longer cordoned", false).await;
    node.kubelet.set_faults(|f| f.checkpoint = CheckpointMode::Normal);
    let spec = pod("p").container("main", &[(WHOLE, 1)]);
    let uid = spec.uid.clone();
    node.kubelet.admit(spec).await.unwrap();
    wait_until_called("a GPU is allocated", true).await;
    node.kubelet.run(&uid).await.unwrap();
    node.kubelet.finish(&uid);
    node.wait("the end", |l| l.live.is_empty()).await;
    wait_until_called("the allocation has ended", false).await;
    // A grant of another plugin changes only the checkpoint, and each new checkpoint leads to a `List`.
    let before = list_calls();
    let checkpoint = node.kubelet.checkpoint_path();
    let written = checkpoint.with_extension("new");
    std::fs::copy(&checkpoint, &written).unwrap();
    std::fs::rename(&written, &checkpoint).unwrap();
    node.kubelet.wait_for("a call of `List`", SOON, |_| list_calls() > before).await.unwrap();
    node.assert_harmless();
}

#[tokio::test]
async fn a_grant_that_the_kubelet_dropped_ends_as_never_started() {
    let node = NodeOptions { policy: Some("whole shares=2"), ..NodeOptions::default() }.started().await;
    node.allocatable(WHOLE, 4).await;
    node.allocatable(SHARED, 8).await;
    // Whichever resource comes first is granted; the other one has too few.
    let mut dropped = false;
    for n in 0..16 {
        let name = format!("p{n}");
        let spec = pod(&name).container("main", &[(WHOLE, 1), (SHARED, 9)]);
        node.kubelet.admit(spec).await.unwrap_err();
        if !node.live().is_empty() {
            dropped = true;
            break;
        }
    }
    assert!(dropped, "one of 16 orders asks for the whole GPU first");
    node.wait("the end", |l| l.live.is_empty()).await;
    // The grant changes the shares' list, and the kubelet writes its checkpoint at every list: if it
    // does so before it forgets the pod that it just refused, a pass can see the pod's UID.
    for past in node.kernel.snapshot().ended.iter() {
        let caught = past.pod_uid().is_some();
        let reason = if caught { EndReason::Released } else { EndReason::NeverStarted };
        assert_eq!(past.ended.reason, reason, "{past:?}");
    }
    assert!(!node.kernel.snapshot().ended.is_empty());
    node.assert_harmless();
}

#[tokio::test]
async fn a_pod_in_its_init_phase_is_not_shown_by_list_and_keeps_its_devices() {
    let node = NodeOptions::default().started().await;
    node.allocatable(WHOLE, 4).await;
    let spec = pod("p").init("prepare", &[(WHOLE, 1)]).container("main", &[]);
    let uid = spec.uid.clone();
    node.kubelet.admit(spec).await.unwrap();
    for _ in 0..5 {
        node.reconcile().await;
        tokio::time::sleep(LONG_ENOUGH / 5).await;
    }
    let live = node.live();
    assert_eq!(live.len(), 1);
    assert_eq!(live[0].holder.pod_uid.as_deref(), Some(uid.as_str()));
    assert_eq!(live[0].holder.container.as_deref(), Some("prepare"));
    node.assert_harmless();
}

#[tokio::test]
async fn an_unreadable_source_ends_nothing() {
    for mode in [
        CheckpointMode::Frozen,
        CheckpointMode::Garbage,
        CheckpointMode::Truncated,
        CheckpointMode::Symlink,
        CheckpointMode::Folder,
    ] {
        let (node, uid) = node_with_pod().await;
        node.kubelet.set_faults(|f| f.checkpoint = mode);
        node.kubelet.delete(&uid);
        tokio::time::sleep(LONG_ENOUGH).await;
        assert_eq!(node.live().len(), 1, "{mode:?}");
        // And everything else continues.
        let other = pod("other").container("main", &[(WHOLE, 1)]);
        node.kubelet.admit(other).await.unwrap();
        node.kubelet.set_faults(|f| f.checkpoint = CheckpointMode::Normal);
        node.wait("the end after all", |l| l.live.len() == 1).await;
        node.assert_harmless();
    }
}

#[tokio::test]
async fn a_checkpoint_from_before_the_grant_proves_nothing() {
    let node = NodeOptions::default().started().await;
    node.allocatable(WHOLE, 4).await;
    node.kubelet.set_faults(|f| f.checkpoint = CheckpointMode::Frozen);
    // `List` does not show it, the old file does not name it, and yet it runs.
    let spec = pod("p").init("prepare", &[(WHOLE, 1)]);
    let uid = spec.uid.clone();
    node.kubelet.admit(spec).await.unwrap();
    tokio::time::sleep(LONG_ENOUGH).await;
    node.reconcile().await;
    node.reconcile().await;
    assert_eq!(node.live().len(), 1);
    node.kubelet.set_faults(|f| f.checkpoint = CheckpointMode::Normal);
    node.reconcile().await;
    node.wait("the holder", |l| l.live.values().all(|a| a.holder.pod_uid.as_deref() == Some(&uid))).await;
}

#[tokio::test]
async fn a_checkpoint_of_a_newer_kubelet_is_still_understood() {
    let (node, uid) = node_with_pod().await;
    node.kubelet.set_faults(|f| f.checkpoint = CheckpointMode::Newer);
    node.kubelet.delete(&uid);
    ended(&node, EndReason::Released).await;
}

#[tokio::test]
async fn without_list_nothing_ends_and_pods_are_still_admitted() {
    let (node, uid) = node_with_pod().await;
    node.kubelet.kill_pod_resources().await;
    node.kubelet.delete(&uid);
    tokio::time::sleep(LONG_ENOUGH).await;
    assert_eq!(node.live().len(), 1);
    let other = pod("other").container("main", &[(WHOLE, 1)]);
    node.kubelet.admit(other).await.unwrap();
    node.kubelet.revive_pod_resources().await.unwrap();
    node.wait("the end after all", |l| l.live.len() == 1).await;
    node.kubelet.set_faults(|f| f.list_hangs = true);
    let third = pod("third").container("main", &[(WHOLE, 1)]);
    node.kubelet.admit(third).await.unwrap();
    node.kubelet.set_faults(|f| f.list_hangs = false);
    node.assert_harmless();
}

#[tokio::test]
async fn an_empty_or_partial_list_after_a_restart_ends_nothing() {
    let node = NodeOptions::default().started().await;
    node.allocatable(WHOLE, 4).await;
    let mut uids = Vec::new();
    for name in ["a", "b", "c"] {
        let spec = pod(name).container("main", &[(WHOLE, 1)]);
        uids.push(spec.uid.clone());
        node.kubelet.admit(spec).await.unwrap();
        node.kubelet.run(uids.last().unwrap()).await.unwrap();
    }
    node.wait("the holders", |l| l.live.len() == 3 && l.live.values().all(|a| a.holder.pod.is_some())).await;
    for known in [vec![], vec![uids[0].clone()]] {
        let waiting = Sources::Waiting { known };
        node.kubelet.restart_with(waiting).await.unwrap();
        node.allocatable(WHOLE, 4).await;
        tokio::time::sleep(LONG_ENOUGH).await;
        assert_eq!(node.live().len(), 3);
    }
    node.kubelet.sources_ready();
    node.kubelet.delete(&uids[0]);
    node.wait("the end of one", |l| l.live.len() == 2).await;
    node.assert_harmless();
}

/// The kubelet's checkpoint was deleted while pods run.
/// Report: https://github.com/kubernetes/kubernetes/issues/116125
#[tokio::test]
async fn a_kubelet_that_lost_its_checkpoint_does_not_cost_every_pod_its_gpu() {
    let node = NodeOptions::default().started().await;
    node.allocatable(WHOLE, 4).await;
    for name in ["a", "b"] {
        let spec = pod(name).container("main", &[(WHOLE, 1)]);
        node.run(spec).await;
    }
    node.wait("the holders", |l| l.live.values().all(|a| a.holder.pod_uid.is_some())).await;
    node.kubelet.stop().await;
    std::fs::remove_file(node.kubelet.checkpoint_path()).unwrap();
    let waiting = Sources::Waiting { known: Vec::new() };
    node.kubelet.start_with(waiting).await.unwrap();
    node.allocatable(WHOLE, 4).await;
    node.wait("the hold", |l| l.ends_withheld.is_some()).await;
    assert_eq!(node.live().len(), 2);
}

#[tokio::test]
async fn a_pass_makes_the_kubelet_write_its_checkpoint_again() {
    let (node, uid) = node_with_pod().await;
    let written = |node: &KubeletNode| {
        let file = std::fs::metadata(node.kubelet.checkpoint_path()).unwrap();
        (file.ino(), file.ctime(), file.ctime_nsec())
    };
    let before = written(&node);
    let text = std::fs::read_to_string(node.kubelet.checkpoint_path()).unwrap();
    assert!(text.contains(&uid));
    let lists = node.kubelet.calls(Rpc::List, "").count;
    node.reconcile().await;
    // The pass waits only briefly for the new checkpoint.
    node.kubelet.wait_for("a new checkpoint", SOON, |_| written(&node) != before).await.unwrap();
    assert!(node.kubelet.calls(Rpc::List, "").count > lists);
    node.assert_harmless();
}

#[tokio::test]
async fn devices_of_running_pods_are_adopted_before_the_first_registration() {
    let mut node = NodeOptions::default().unstarted().await;
    node.kubelet.start().await.unwrap();
    let ids = ["GPU-0", "GPU-1", "GPU-2", "GPU-3"];
    let before = TinyPlugin::serve(&node.plugins_folder(), "nvidia-gpu.sock", WHOLE, &ids).unwrap();
    before.register().await.unwrap();
    node.kubelet.wait_allocatable(WHOLE, 4, SOON).await.unwrap();
    let spec = pod("p").container("main", &[(WHOLE, 2)]);
    let uid = spec.uid.clone();
    node.kubelet.admit(spec).await.unwrap();
    let held = node.kubelet.held(&uid, "main", WHOLE);
    drop(before);
    node.kubelet.wait_allocatable(WHOLE, 0, SOON).await.unwrap();
    let front = node.device_plugins();
    assert_eq!(front.adopt().await.unwrap(), 1);
    let live = node.live();
    let adopted: Vec<String> = live[0].devices.iter().map(ToString::to_string).collect();
    assert_eq!(adopted, held.into_iter().collect::<Vec<_>>());
    assert_eq!(live[0].holder.pod_uid.as_deref(), Some(uid.as_str()));
    node.running = Some(front.start());
    node.allocatable(WHOLE, 4).await;
    // Its holder lives, so the adopted allocation does; then it ends like any other.
    tokio::time::sleep(LONG_ENOUGH).await;
    assert_eq!(node.live().len(), 1);
    node.kubelet.delete(&uid);
    ended(&node, EndReason::Released).await;
    node.assert_harmless();
}

#[tokio::test]
async fn no_checkpoint_is_fine_and_an_unreadable_one_stops_the_adoption() {
    let node = NodeOptions::default().unstarted().await;
    assert_eq!(node.device_plugins().adopt().await.unwrap(), 0);
    std::fs::create_dir_all(node.kubelet.checkpoint_path()).unwrap();
    let error = node.device_plugins().adopt().await.unwrap_err();
    assert!(matches!(error, AdoptError::Checkpoint(_)));
    assert!(error.to_string().contains("--skip-adoption"));
    std::fs::remove_dir(node.kubelet.checkpoint_path()).unwrap();
    std::fs::write(node.kubelet.checkpoint_path(), "{\"Data\":").unwrap();
    node.device_plugins().adopt().await.unwrap_err();
    assert!(node.live().is_empty());
}
