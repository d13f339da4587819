//! Evidence of the sources: pods that ended unobserved, a kubelet that is away, unusable checkpoints, static pods,
//! init containers and sidecars.

use crate::support::client::agent;
use crate::support::gpus::{SHARED, WHOLE};
use crate::support::kubelet_node::{KubeletNode, NodeOptions};
use crate::support::process_node::{DaemonProcess, ProcessNode};
use crate::support::wait::{SOON, until};
use berth_kernel::grants::allocation::{Allocation, EndReason};
use berth_kernel::node::ledger::Ledger;
use berth_kubelet::checkpoint::{self, CheckpointError};
use kubelet_standin::{CheckpointMode, PodSpec, Sources};
use serde_json::Value;
use std::collections::BTreeSet;
use std::io::ErrorKind;
use std::os::unix::fs::PermissionsExt;
use std::time::Duration;

/// Longer than every wait that an end needs here (100 ms each), so that what has not ended by then
/// does not end.
const LONG_ENOUGH: Duration = Duration::from_millis(700);
const HOUR_MS: u64 = 3_600_000;

fn pod(name: &str) -> PodSpec {
    PodSpec::new("default", name)
}

async fn node_of_four() -> KubeletNode {
    let node = NodeOptions::default().started().await;
    node.allocatable(WHOLE, 4).await;
    node
}

fn holder_uids(live: &[Allocation]) -> BTreeSet<&str> {
    live.iter().filter_map(|a| a.holder.pod_uid.as_deref()).collect()
}

/// Runs reconcile passes until everything that can end has ended.
async fn let_passes_run(node: &KubeletNode) {
    for _ in 0..4 {
        node.reconcile().await;
        tokio::time::sleep(LONG_ENOUGH / 4).await;
    }
}

async fn of_known_pods(node: &KubeletNode, count: usize) {
    let known = |a: &Allocation| a.holder.pod.is_some() && a.holder.pod_uid.is_some();
    node.wait("the holders", |l| l.live.len() == count && l.live.values().all(|a| known(a))).await;
}

// Pods that go while berth is down.

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn after_a_start_ended_pods_are_released_and_running_ones_keep_their_devices() {
    let node = ProcessNode::new("gpus: sim:4xt4").await;
    let mut daemon = node.serve();
    node.kubelet.wait_allocatable(WHOLE, 4, SOON).await.unwrap();
    let stays = node.start("stays", WHOLE, 1).await.unwrap();
    let deleted = node.start("deleted", WHOLE, 1).await.unwrap();
    let finished = node.start("finished", WHOLE, 1).await.unwrap();
    let forced = node.start("forced", WHOLE, 1).await.unwrap();
    daemon.until("the holders", |live| {
        live.len() == 4
            && live.iter().all(|a| a["holder"]["pod"].is_string() && a["holder"]["podUid"].is_string())
    });
    let of = |live: &[Value], pod: &str| live.iter().find(|a| a["holder"]["pod"] == pod).cloned();
    let before = of(&daemon.live(), "stays").unwrap();
    daemon.child.kill().unwrap();
    daemon.child.wait().unwrap();

    node.kubelet.delete(&deleted);
    node.kubelet.finish(&finished);
    node.kubelet.force_delete(&forced);
    node.kubelet.wait_for("our end", SOON, |k| k.streams(WHOLE) == 0).await.unwrap();
    // The kubelet has not written since: its file still shows all four.
    let file = std::fs::read_to_string(node.kubelet.checkpoint_path()).unwrap();
    assert!([&deleted, &finished, &forced].iter().all(|uid| file.contains(uid.as_str())));

    let daemon = node.serve();
    daemon.until("three ends", |live| live.len() == 1);
    assert_eq!(of(&daemon.live(), "stays").unwrap()["id"], before["id"]);
    let ended = daemon.call("GET", "/allocations?state=ended", &Value::Null);
    let items = ended["items"].as_array().unwrap();
    assert!(items.len() == 3 && items.iter().all(|a| a["ended"]["reason"] == "released"), "{ended}");
    assert_eq!(node.kubelet.held(&stays, "main", WHOLE).len(), 1);
    node.kubelet.wait_allocatable(WHOLE, 4, SOON).await.unwrap();
    node.start("new", WHOLE, 3).await.unwrap();
    assert_eq!(node.kubelet.anomalies(), []);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pod_admitted_just_before_a_stop_is_named_after_the_start() {
    let node =
        ProcessNode::new("gpus: sim:2xt4\nstack: [{ policy: timeslice, parameters: { replicas: 4 } }]").await;
    let mut daemon = node.serve();
    node.kubelet.wait_allocatable(SHARED, 8, SOON).await.unwrap();
    // In its init phase: `List` does not show it, before or after.
    let spec = pod("init").init("prepare", &[(SHARED, 2)]).container("main", &[]);
    let uid = spec.uid.clone();
    node.kubelet.admit(spec).await.unwrap();
    daemon.child.kill().unwrap();
    daemon.child.wait().unwrap();
    let daemon = node.serve();
    daemon.until("its UID", |live| live.len() == 1 && live[0]["holder"]["podUid"] == uid.as_str());
    assert_eq!(daemon.live()[0]["holder"]["container"], "prepare");
    node.kubelet.delete(&uid);
    daemon.until("its end", <[Value]>::is_empty);
    assert_eq!(node.kubelet.anomalies(), []);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn after_a_restart_of_both_missing_pods_end_only_if_the_kubelet_kept_its_state() {
    for lost in [false, true] {
        let node = ProcessNode::new("gpus: sim:4xt4").await;
        let mut daemon = node.serve();
        node.kubelet.wait_allocatable(WHOLE, 4, SOON).await.unwrap();
        let uids = [node.start("a", WHOLE, 1).await.unwrap(), node.start("b", WHOLE, 1).await.unwrap()];
        daemon.until("the holders", |live| live.iter().all(|a| a["holder"]["podUid"].is_string()));
        daemon.child.kill().unwrap();
        daemon.child.wait().unwrap();
        node.kubelet.stop().await;
        uids.iter().for_each(|uid| node.kubelet.delete(uid));
        if lost {
            std::fs::remove_file(node.kubelet.checkpoint_path()).unwrap();
        }
        node.kubelet.start().await.unwrap();
        let daemon = node.serve();
        node.kubelet.wait_allocatable(WHOLE, 4, SOON).await.unwrap();
        if lost {
            // Ended pods and pods that a kubelet forgot look the same.
            tokio::time::sleep(LONG_ENOUGH).await;
            assert_eq!(daemon.live().len(), 2, "held");
            // The first pod that it shows proves that it knows which pods run.
            node.start("c", WHOLE, 1).await.unwrap();
            daemon.until("the others' end", |live| live.len() == 1 && live[0]["holder"]["pod"] == "c");
        } else {
            // The kubelet reads them from its checkpoint once more, and then removes them.
            daemon.until("their end", <[Value]>::is_empty);
        }
        assert_eq!(node.kubelet.anomalies(), []);
    }
}

// A kubelet that is away.

#[tokio::test]
async fn a_kubelet_that_is_down_for_an_hour_changes_no_allocation() {
    let node = node_of_four().await;
    let mut uids = Vec::new();
    for name in ["stays", "goes"] {
        uids.push(node.run(pod(name).container("main", &[(WHOLE, 1)])).await);
    }
    let init = pod("init").init("prepare", &[(WHOLE, 1)]).container("main", &[]);
    uids.push(init.uid.clone());
    node.kubelet.admit(init).await.unwrap();
    node.wait("the UIDs", |l| l.live.values().all(|a| a.holder.pod_uid.is_some())).await;
    let before = node.live();
    node.kubelet.stop().await;
    for _ in 0..6 {
        node.clock.skip(HOUR_MS / 6);
        let_passes_run(&node).await;
        assert_eq!(node.live().len(), 3, "no source could be read");
    }
    // Meanwhile one pod was deleted; its containers went with it.
    node.kubelet.delete(&uids[1]);
    // It comes back before its API server: `List` is empty, nothing is purged, the file is as it was.
    node.kubelet.start_with(Sources::Waiting { known: Vec::new() }).await.unwrap();
    node.allocatable(WHOLE, 4).await;
    node.clock.skip(HOUR_MS);
    let_passes_run(&node).await;
    assert_eq!(
        node.live().iter().map(|a| a.id).collect::<Vec<_>>(),
        before.iter().map(|a| a.id).collect::<Vec<_>>()
    );
    node.kubelet.sources_ready();
    node.wait("the end of the one that went", |l| l.live.len() == 2).await;
    let_passes_run(&node).await;
    assert_eq!(holder_uids(&node.live()), BTreeSet::from([uids[0].as_str(), uids[2].as_str()]));
    // The one that waited in its init phase is admitted again, with what it had.
    assert_eq!(node.kubelet.readmit().await[&uids[2]], Ok(()));
    node.assert_harmless();
}

#[tokio::test]
async fn the_last_state_of_an_absent_kubelet_ends_no_allocation() {
    // The socket file and the checkpoint of a kubelet that was killed stay behind, and look alive.
    let node = node_of_four().await;
    let uid = node.run(pod("p").container("main", &[(WHOLE, 2)])).await;
    of_known_pods(&node, 1).await;
    node.kubelet.stop().await;
    let empty = r#"{"Data":{"PodDeviceEntries":null,"RegisteredDevices":{}},"Checksum":0}"#;
    std::fs::write(node.kubelet.checkpoint_path(), empty).unwrap();
    node.clock.skip(HOUR_MS);
    let_passes_run(&node).await;
    assert_eq!(holder_uids(&node.live()), BTreeSet::from([uid.as_str()]));
}

// Checkpoints that cannot be used, or that are of another time.

#[tokio::test]
async fn a_checkpoint_of_another_format_ends_nothing_and_blocks_no_pod() {
    let node = node_of_four().await;
    let uid = node.run(pod("p").container("main", &[(WHOLE, 1)])).await;
    of_known_pods(&node, 1).await;
    node.kubelet.set_faults(|f| f.checkpoint = CheckpointMode::Reshaped);
    node.kubelet.delete(&uid);
    node.kubelet.admit(pod("other").container("main", &[(WHOLE, 1)])).await.unwrap();
    let_passes_run(&node).await;
    let folder = node.plugins_folder();
    let error = checkpoint::read(&folder, None).unwrap_err();
    assert!(matches!(error, CheckpointError::Format { .. }), "{error}");
    assert!(error.to_string().contains("this release knows"), "{error}");
    assert_eq!(node.live().len(), 2, "what cannot be understood ends nothing");
    node.kubelet.set_faults(|f| f.checkpoint = CheckpointMode::Normal);
    node.wait("the end after all", |l| l.live.len() == 1).await;
    node.assert_harmless();
}

#[tokio::test]
async fn a_wrong_checksum_matters_only_after_the_kubelet_starts_without_its_state() {
    let node = node_of_four().await;
    let mut uids = Vec::new();
    for name in ["a", "b"] {
        uids.push(node.run(pod(name).container("main", &[(WHOLE, 1)])).await);
    }
    of_known_pods(&node, 2).await;
    // The sum is over a Go value's printed form: it cannot be checked elsewhere, and the contents are right.
    node.kubelet.set_faults(|f| f.checkpoint = CheckpointMode::WrongSum);
    let third = node.run(pod("c").container("main", &[(WHOLE, 1)])).await;
    of_known_pods(&node, 3).await;
    node.kubelet.delete(&third);
    node.wait("the third's end", |l| l.live.len() == 2).await;
    // The kubelet, though, throws the file away and knows of no device; its pods run on.
    node.kubelet.restart_with(Sources::Waiting { known: Vec::new() }).await.unwrap();
    node.allocatable(WHOLE, 4).await;
    node.wait("the hold", |l| l.ends_withheld.is_some()).await;
    assert_eq!(holder_uids(&node.live()), uids.iter().map(String::as_str).collect());
    // It believes every GPU to be free; a pod that it sends to one that is in use requests another resource
    // and is refused, or requests the same resource and is granted beside the running one (I7).
    assert!(node.kubelet.in_use(WHOLE).is_empty());
    node.kubelet.sources_ready();
    let_passes_run(&node).await;
    assert_eq!(node.live().len(), 2, "`List` shows their pods, so they hold what they were given");
    node.assert_harmless();
}

#[test]
fn an_unreadable_checkpoint_is_reported_with_the_systems_error() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(checkpoint::CHECKPOINT_FILE);
    std::fs::write(&path, r#"{"Data":{"PodDeviceEntries":null},"Checksum":0}"#).unwrap();
    checkpoint::read(folder.path(), None).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o000)).unwrap();
    let error = unprivileged(|| checkpoint::read(folder.path(), None).unwrap_err());
    let CheckpointError::Io { source, .. } = &error else { panic!("{error}") };
    assert_eq!(source.kind(), ErrorKind::PermissionDenied);
    assert!(error.to_string().contains(path.to_str().unwrap()), "{error}");
}

/// In a thread that may not read every file, whichever user runs this.
fn unprivileged<T: Send>(work: impl FnOnce() -> T + Send) -> T {
    std::thread::scope(|scope| {
        let worker = scope.spawn(|| {
            use rustix::thread::{CapabilitySet, capabilities, set_capabilities};
            let mut sets = capabilities(None).unwrap();
            sets.effective -= CapabilitySet::DAC_OVERRIDE | CapabilitySet::DAC_READ_SEARCH;
            set_capabilities(None, sets).unwrap();
            work()
        });
        worker.join().unwrap()
    })
}

#[tokio::test]
async fn missing_evidence_is_reported_with_its_age_cause_and_number_of_allocations() {
    for (mode, cause) in [
        (CheckpointMode::Reshaped, "not in the format"),
        (CheckpointMode::Frozen, "did not write its checkpoint again"),
    ] {
        let node = node_of_four().await;
        let uid = node.run(pod("p").container("main", &[(WHOLE, 1)])).await;
        of_known_pods(&node, 1).await;
        node.kubelet.set_faults(|f| f.checkpoint = mode);
        node.reconcile().await;
        assert_eq!(node.kernel.snapshot().blocked_ends, None, "it may come in time");
        let noticed_ms = node.kernel.now().wall_ms;
        let of_cause = |l: &Ledger| {
            l.blocked_ends.as_ref().is_some_and(|blocked_ends| blocked_ends.cause.contains(cause))
        };
        node.reconcile_until(cause, HOUR_MS, of_cause).await;
        let blocked_ends = node.kernel.snapshot().blocked_ends.clone().unwrap();
        assert_eq!(blocked_ends.allocations, 1);
        assert!(blocked_ends.since_wall_ms <= noticed_ms, "since it was first noticed");
        node.kubelet.set_faults(|f| f.checkpoint = CheckpointMode::Normal);
        node.reconcile_until("the end of the report", 0, |l| l.blocked_ends.is_none()).await;
        node.kubelet.delete(&uid);
        node.wait("the end after all", |l| l.live.is_empty()).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_unreadable_checkpoint_is_reported() {
    let node = ProcessNode::new("gpus: sim:2xt4").await;
    let daemon = node.serve();
    node.kubelet.wait_allocatable(WHOLE, 2, SOON).await.unwrap();
    node.kubelet.set_faults(|f| f.checkpoint = CheckpointMode::Reshaped);
    node.start("a", WHOLE, 1).await.unwrap();
    let evidence = |daemon: &DaemonProcess| {
        let answer = daemon.call("GET", "/node", &Value::Null);
        let checks = answer["checks"].as_array().unwrap().clone();
        let check = checks.into_iter().find(|check| check["name"] == "evidence").unwrap();
        let detail = check["detail"].as_str().unwrap_or_default().to_owned();
        // The only allocation cannot end, and no API server shows its pod.
        assert_eq!(check["ok"], detail.is_empty(), "{answer}");
        detail
    };
    until("the warning", || evidence(&daemon).contains("1 allocation cannot end"));
    let message = evidence(&daemon);
    assert!(message.starts_with("since 20") && message.contains("not in the format"), "{message}");
    let metrics = daemon.base.replace("/api/v1", "/metrics");
    let metrics = agent(SOON).get(metrics).call().unwrap().body_mut().read_to_string().unwrap();
    assert!(metrics.contains("berth_allocations_stuck 1\n"), "{metrics}");
    assert!(metrics.contains("berth_check_warning{check=\"evidence\"} 1\n"), "{metrics}");
    node.kubelet.set_faults(|f| f.checkpoint = CheckpointMode::Normal);
    until("its end", || evidence(&daemon).is_empty());
}

// Static pods: from a file of the node, known to the kubelet without any API server.

#[tokio::test]
async fn static_pods_are_all_that_a_kubelet_without_its_api_server_shows_and_all_keep_their_devices() {
    let node = node_of_four().await;
    let of_file = node.run(pod("static").of_a_file().container("main", &[(WHOLE, 1)])).await;
    let of_api = node.run(pod("plain").container("main", &[(WHOLE, 1)])).await;
    of_known_pods(&node, 2).await;
    let alone = Sources::Waiting { known: vec![of_file.clone()] };
    node.kubelet.restart_with(alone).await.unwrap();
    node.allocatable(WHOLE, 4).await;
    let_passes_run(&node).await;
    let both = BTreeSet::from([of_file.as_str(), of_api.as_str()]);
    assert_eq!(holder_uids(&node.live()), both, "`List` shows the static pod alone");
    // Its file is taken away. Nothing is purged yet, so the checkpoint goes on naming it.
    node.kubelet.delete(&of_file);
    let_passes_run(&node).await;
    assert_eq!(holder_uids(&node.live()), both);
    node.kubelet.sources_ready();
    node.wait("its end", |l| l.live.len() == 1).await;
    assert_eq!(holder_uids(&node.live()), BTreeSet::from([of_api.as_str()]));
    // Put back, it has the same UID, and is a holder like any other.
    let again = node.run(pod("static").of_a_file().uid(&of_file).container("main", &[(WHOLE, 1)])).await;
    assert_eq!(again, of_file);
    of_known_pods(&node, 2).await;
    assert_eq!(holder_uids(&node.live()), both);
    node.assert_harmless();
}

// Init containers and sidecars.

#[tokio::test]
async fn an_init_containers_gpu_is_held_until_its_pod_ends_though_no_app_container_has_one() {
    let node = node_of_four().await;
    let uid = node.run(pod("p").init("prepare", &[(WHOLE, 1)]).container("main", &[])).await;
    // It is over, its app container runs, `List` shows the pod without devices: and yet the kubelet
    // gives its GPU to no other pod before this one ends.
    let_passes_run(&node).await;
    let live = node.live();
    assert_eq!(live.len(), 1);
    let holder = &live[0].holder;
    assert_eq!((holder.pod_uid.as_deref(), holder.container.as_deref()), (Some(&*uid), Some("prepare")));
    assert_eq!(holder.pod, None, "no source joins this UID to a name");
    assert_eq!(node.kubelet.in_use(WHOLE).len(), 1);
    node.kubelet.admit(pod("rest").container("main", &[(WHOLE, 3)])).await.unwrap();
    node.kubelet.admit(pod("more").container("main", &[(WHOLE, 1)])).await.unwrap_err();
    node.kubelet.finish(&uid);
    node.wait("its end", |l| l.live.values().all(|a| a.holder.pod_uid.as_deref() != Some(&uid))).await;
    let snapshot = node.kernel.snapshot();
    assert_eq!(snapshot.ended.back().unwrap().ended.reason, EndReason::Released);
    node.assert_harmless();
}

/// An init container needs more GPUs than its app container.
/// Report: https://github.com/kubernetes/kubernetes/issues/71312
#[tokio::test]
async fn an_app_container_with_fewer_devices_than_its_init_container_leaves_the_others_held() {
    let node = node_of_four().await;
    let spec = pod("p").init("prepare", &[(WHOLE, 3)]).container("main", &[(WHOLE, 1)]);
    let uid = node.run(spec).await;
    // One record each. That of the init container is named by the app container's pod.
    of_known_pods(&node, 2).await;
    let_passes_run(&node).await;
    let live = node.live();
    let of = |name: &str| live.iter().find(|a| a.holder.container.as_deref() == Some(name)).unwrap();
    assert_eq!((of("prepare").devices.len(), of("main").devices.len()), (3, 1));
    assert!(of("prepare").devices.contains(&of("main").devices[0]), "used again");
    assert_eq!((of("prepare").holder.pod.as_deref(), of("prepare").overlapped), (Some("p"), false));
    assert_eq!(node.kubelet.in_use(WHOLE).len(), 3);
    node.kubelet.delete(&uid);
    node.wait("both ends", |l| l.live.is_empty()).await;
    node.allocatable(WHOLE, 4).await;
    node.assert_harmless();
}

#[tokio::test]
async fn a_sidecar_is_shown_by_list_and_shares_nothing_with_the_app_container() {
    let node = node_of_four().await;
    let spec = pod("p")
        .init("fetch", &[(WHOLE, 1)])
        .sidecar("proxy", &[(WHOLE, 1)])
        .init("warm", &[(WHOLE, 1)])
        .container("main", &[(WHOLE, 1)]);
    let uid = spec.uid.clone();
    node.kubelet.admit(spec).await.unwrap();
    // Before its app container runs the pod is in `List` already, by its sidecar.
    let proxy = |a: &Allocation| a.holder.container.as_deref() == Some("proxy");
    node.wait("the sidecar's name", |l| l.live.values().any(|a| proxy(a) && a.holder.pod.is_some())).await;
    node.kubelet.run(&uid).await.unwrap();
    of_known_pods(&node, 4).await;
    let_passes_run(&node).await;
    let live = node.live();
    let devices = |name: &str| {
        let found = live.iter().find(|a| a.holder.container.as_deref() == Some(name)).unwrap();
        found.devices[0].clone()
    };
    assert_eq!(devices("fetch"), devices("proxy"), "what an init container had, the next one has");
    assert_eq!(devices("warm"), devices("main"));
    assert_ne!(devices("proxy"), devices("main"), "a sidecar runs beside the app container");
    assert!(live.iter().all(|a| !a.overlapped && a.holder.pod.as_deref() == Some("p")));
    node.kubelet.finish(&uid);
    node.wait("all ends", |l| l.live.is_empty()).await;
    node.assert_harmless();
}
