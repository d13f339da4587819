//! Registration, its traps, and the device list.

use crate::support::gpus::{SHARED, WHOLE, gpu_id, resource};
use crate::support::kubelet_node::{KubeletNode, NodeOptions, cordon};
use crate::support::wait::SOON;
use berth_kubelet::{ReconcileTiming, Registration};
use kubelet_standin::{HEALTHY, Kubelet, PodSpec, Rpc, Sources, TinyPlugin, UNHEALTHY};
use sha2::{Digest as _, Sha256};
use std::collections::BTreeSet;
use std::os::unix::fs::symlink;
use std::time::Duration;

/// Longer than any test here.
const MINUTE: Duration = Duration::from_secs(60);

async fn state(node: &KubeletNode, name: &str, wanted: Registration) {
    let mut all = node.running.as_ref().unwrap().registrations();
    let there = all.wait_for(|all| all.get(&resource(name)) == Some(&wanted));
    let there = tokio::time::timeout(SOON, there).await;
    assert!(there.is_ok(), "{name} was never {wanted:?}");
}

#[tokio::test]
async fn every_listed_resource_is_registered_on_a_socket_of_its_own() {
    let node = NodeOptions { policy: Some("whole shares=4"), ..NodeOptions::default() }.started().await;
    node.allocatable(WHOLE, 4).await;
    node.allocatable(SHARED, 16).await;
    state(&node, WHOLE, Registration::Registered).await;
    let names: BTreeSet<String> = std::fs::read_dir(node.plugins_folder())
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter(|name| name.starts_with("berth-"))
        .collect();
    let expected = [WHOLE, SHARED].map(|resource| {
        let hex = format!("{:x}", Sha256::digest(resource));
        format!("berth-{}.sock", &hex[..16])
    });
    assert_eq!(names, BTreeSet::from(expected));
    node.assert_harmless();
}

#[tokio::test]
async fn a_daemon_that_starts_first_waits_for_the_kubelet() {
    let mut node = NodeOptions::default().unstarted().await;
    node.start();
    obstacle(&node, "kubelet.sock does not exist; start the kubelet").await;
    node.kubelet.start().await.unwrap();
    node.allocatable(WHOLE, 4).await;
    node.assert_harmless();
}

#[tokio::test]
async fn a_refused_connection_is_retried_within_milliseconds() {
    let mut options = NodeOptions::default().with_timeouts(|t| {
        // Any wait but the one for a refused dial would be longer than the test.
        t.registration.register_retry = MINUTE;
        t.registration.connect_retry_later = MINUTE;
    });
    options.kubelet = |o| o.bind_gap = Duration::from_millis(150);
    let mut node = options.unstarted().await;
    node.start();
    // The socket is there for 150 ms before anybody listens.
    node.kubelet.start().await.unwrap();
    node.allocatable(WHOLE, 4).await;
    assert_eq!(node.kubelet.calls(Rpc::Register, WHOLE).errors, 0);
}

#[tokio::test]
async fn after_a_kubelet_restart_it_registers_at_once() {
    // The waits that protect a running kubelet are longer than the test: none may apply here.
    let options = NodeOptions::default().with_timeouts(|t| {
        t.disconnect.exit_seen_within = MINUTE;
        t.disconnect.settle = MINUTE;
        t.registration.register_retry = MINUTE;
    });
    let node = options.started().await;
    node.allocatable(WHOLE, 4).await;
    for _ in 0..5 {
        node.kubelet.restart().await.unwrap();
        node.allocatable(WHOLE, 4).await;
    }
    node.assert_harmless();
}

#[tokio::test]
async fn a_kubelet_that_stays_away_is_registered_with_when_it_returns() {
    let node = NodeOptions::default()
        .with_timeouts(|t| t.registration.connect_fast_for = Duration::from_millis(50))
        .started()
        .await;
    node.allocatable(WHOLE, 4).await;
    node.kubelet.stop().await;
    // Well past the eager dials, so that only the folder can tell of the return.
    tokio::time::sleep(Duration::from_millis(400)).await;
    node.kubelet.start().await.unwrap();
    node.allocatable(WHOLE, 4).await;
    node.assert_harmless();
}

/// A kubelet that takes its time to notice an end, and a daemon that waits far longer.
fn slow_to_disconnect() -> NodeOptions {
    NodeOptions { kubelet: |o| o.disconnect_gap = Duration::from_millis(150), ..NodeOptions::default() }
        .with_timeouts(|t| t.disconnect.settle = Duration::from_millis(1500))
}

/// A stream that the kubelet ended is never opened again by it, so that the plugin has to register again.
/// Report: https://github.com/kubernetes/kubernetes/issues/92958
#[tokio::test]
async fn a_lost_stream_of_a_running_kubelet_is_restored_safely() {
    let node = slow_to_disconnect().started().await;
    node.allocatable(WHOLE, 4).await;
    node.kubelet.drop_stream(WHOLE);
    node.kubelet.wait_allocatable(WHOLE, 0, SOON).await.unwrap();
    node.allocatable(WHOLE, 4).await;
    assert_eq!(node.kubelet.calls(Rpc::Register, WHOLE).count, 2);
    node.assert_harmless();
}

#[tokio::test]
async fn a_running_kubelet_with_a_new_socket_is_registered_with_safely() {
    let node = slow_to_disconnect().started().await;
    node.allocatable(WHOLE, 4).await;
    // With our own socket left in place, and then with it deleted.
    for wipe in [false, true] {
        let before = node.kubelet.calls(Rpc::Register, WHOLE).count;
        node.kubelet.recreate_socket(wipe).await.unwrap();
        let again = |k: &Kubelet| k.calls(Rpc::Register, WHOLE).count == before + 1;
        node.kubelet.wait_for("a registration behind the new socket", SOON, again).await.unwrap();
        node.allocatable(WHOLE, 4).await;
    }
    node.kubelet.drop_stream(WHOLE);
    node.kubelet.wait_allocatable(WHOLE, 0, SOON).await.unwrap();
    node.allocatable(WHOLE, 4).await;
    node.assert_harmless();
}

#[tokio::test]
async fn refused_registrations_are_tried_again_soon() {
    let mut node = NodeOptions::default().unstarted().await;
    node.kubelet.start().await.unwrap();
    node.kubelet.set_faults(|f| f.refuse_registrations = 3);
    node.start();
    cause(&node, "registrations are refused for now").await;
    node.allocatable(WHOLE, 4).await;
    assert_eq!(node.kubelet.calls(Rpc::Register, WHOLE).errors, 3);
    node.assert_harmless();
}

/// A node before its device plugins are started. Its kubelet accepts registrations, and never watches the devices.
pub(crate) async fn never_watched() -> KubeletNode {
    let node = NodeOptions::default()
        .with_timeouts(|t| t.registration.watch_within = Duration::from_millis(200))
        .unstarted()
        .await;
    node.kubelet.start().await.unwrap();
    node.kubelet.set_faults(|f| f.never_watch = true);
    node
}

#[tokio::test]
async fn a_kubelet_that_never_watches_is_registered_with_again() {
    let mut node = never_watched().await;
    node.start();
    node.kubelet
        .wait_for("a second Register", SOON, |k| k.calls(Rpc::Register, WHOLE).count >= 2)
        .await
        .unwrap();
    node.kubelet.set_faults(|f| f.never_watch = false);
    node.kubelet.wait_allocatable(WHOLE, 4, SOON).await.unwrap();
}

/// A kubelet takes a registration while it ends, and the devices are never requested.
#[tokio::test]
async fn a_kubelet_that_registers_and_ends_does_not_hold_up_the_next_one() {
    // Longer than the test.
    let node = NodeOptions::default().with_timeouts(|t| t.registration.watch_within = MINUTE).started().await;
    node.allocatable(WHOLE, 4).await;
    let registered = node.kubelet.calls(Rpc::Register, WHOLE).count;
    node.kubelet.set_faults(|f| f.never_watch = true);
    node.kubelet.restart().await.unwrap();
    let waiting = |k: &kubelet_standin::Kubelet| k.calls(Rpc::Register, WHOLE).count > registered;
    node.kubelet.wait_for("a registration without a stream", SOON, waiting).await.unwrap();
    node.kubelet.stop().await;
    node.kubelet.set_faults(|f| f.never_watch = false);
    node.kubelet.start().await.unwrap();
    node.allocatable(WHOLE, 4).await;
    node.assert_harmless();
}

/// A running kubelet may make its socket again before it calls the plugin. A second Register at once would make it drop
/// the plugin.
#[tokio::test]
async fn a_kubelet_that_calls_after_a_new_socket_is_registered_with_only_then() {
    let mut options = NodeOptions::default().with_timeouts(|t| t.registration.watch_within = MINUTE);
    options.kubelet = |o| o.disconnect_gap = Duration::from_millis(150);
    let mut node = options.unstarted().await;
    node.kubelet.start().await.unwrap();
    // Far longer than a registration takes.
    node.kubelet.set_faults(|f| f.watch_delay = Duration::from_millis(1_500));
    node.start();
    let registered = |k: &Kubelet| k.calls(Rpc::Register, WHOLE).count == 1;
    node.kubelet.wait_for("the registration", SOON, registered).await.unwrap();
    node.kubelet.recreate_socket(false).await.unwrap();
    let asked = |k: &Kubelet| k.calls(Rpc::ListAndWatch, WHOLE).count == 1;
    node.kubelet.wait_for("its stream", SOON, asked).await.unwrap();
    assert!(registered(&node.kubelet), "registered again before the kubelet asked");
    node.kubelet.set_faults(|f| f.watch_delay = Duration::ZERO);
    let again = |k: &Kubelet| k.calls(Rpc::Register, WHOLE).count == 2;
    node.kubelet.wait_for("a registration behind the new socket", SOON, again).await.unwrap();
    node.allocatable(WHOLE, 4).await;
    node.assert_harmless();
}

/// The folders of the kubelet and of berth are two, with a link to each other's sockets. Only events
/// of the folder that the link leads to can announce a restart in time.
#[tokio::test]
async fn a_kubelet_behind_a_symbolic_link_is_registered_with_and_its_restart_noticed() {
    let options = NodeOptions::default().with_timeouts(|t| {
        t.folder.check_interval = MINUTE;
        t.folder.recheck_interval = MINUTE;
    });
    let mut node = options.unstarted().await;
    let theirs = node.plugins_folder();
    let ours = tempfile::tempdir().unwrap();
    node.settings.device_plugins = ours.path().join("device-plugins");
    node.settings.root_dir = ours.path().to_owned();
    let here = node.plugins_folder();
    for folder in [&theirs, &here] {
        std::fs::create_dir_all(folder).unwrap();
    }
    let hex = format!("{:x}", Sha256::digest(WHOLE));
    let name = format!("berth-{}.sock", &hex[..16]);
    symlink(theirs.join("kubelet.sock"), here.join("kubelet.sock")).unwrap();
    symlink(here.join(&name), theirs.join(&name)).unwrap();
    node.start();
    let why = "is a symbolic link whose target does not exist";
    obstacle(&node, &format!("{} {why}", here.join("kubelet.sock").display())).await;
    node.kubelet.start().await.unwrap();
    node.allocatable(WHOLE, 4).await;
    for _ in 0..3 {
        node.kubelet.restart().await.unwrap();
        node.allocatable(WHOLE, 4).await;
    }
    node.assert_harmless();
}

/// Waits until the reason for waiting contains this.
async fn obstacle(node: &KubeletNode, says: &str) {
    let mut all = node.running.as_ref().unwrap().registrations();
    let there = all.wait_for(|all| {
        let state = all.get(&resource(WHOLE));
        matches!(state, Some(Registration::Waiting { obstacle }) if obstacle.contains(says))
    });
    let there = tokio::time::timeout(SOON, there).await.map(drop);
    let now = node.running.as_ref().unwrap().registrations().borrow().clone();
    assert!(there.is_ok(), "waited for {says:?}: {now:?}");
}

/// Waits until the resource is being registered, and the cause of the last failure contains this.
async fn cause(node: &KubeletNode, says: &str) {
    let mut all = node.running.as_ref().unwrap().registrations();
    let there = all.wait_for(|all| {
        let state = all.get(&resource(WHOLE));
        matches!(state, Some(Registration::Registering { cause: Some(cause) }) if cause.contains(says))
    });
    let there = tokio::time::timeout(SOON, there).await.map(drop);
    let now = node.running.as_ref().unwrap().registrations().borrow().clone();
    assert!(there.is_ok(), "waited for {says:?}: {now:?}");
}

/// Waits until another plugin is shown by this.
async fn contested(node: &KubeletNode, by: &str) {
    let mut all = node.running.as_ref().unwrap().registrations();
    let there = all.wait_for(|all| {
        let state = all.get(&resource(WHOLE));
        matches!(state, Some(Registration::Contested { evidence }) if evidence.contains(by))
    });
    let there = tokio::time::timeout(SOON, there).await.map(drop);
    let now = node.running.as_ref().unwrap().registrations().borrow().clone();
    assert!(there.is_ok(), "waited for {by:?}: {now:?}");
}

#[tokio::test]
async fn another_file_at_the_kubelets_socket_path_is_named_until_it_is_replaced() {
    let mut node = NodeOptions::default().unstarted().await;
    let path = node.settings.kubelet_socket();
    std::fs::create_dir_all(&path).unwrap();
    node.start();
    obstacle(&node, "kubelet.sock is a folder, not a socket; remove it").await;
    std::fs::remove_dir(&path).unwrap();
    std::fs::write(&path, "").unwrap();
    obstacle(&node, "kubelet.sock is a regular file, not a socket").await;
    std::fs::remove_file(&path).unwrap();
    let fifo = rustix::fs::FileType::Fifo;
    rustix::fs::mknodat(rustix::fs::CWD, &path, fifo, rustix::fs::Mode::RUSR, 0).unwrap();
    obstacle(&node, "kubelet.sock is a named pipe (FIFO), not a socket").await;
    std::fs::remove_file(&path).unwrap();
    node.kubelet.start().await.unwrap();
    node.allocatable(WHOLE, 4).await;
    node.assert_harmless();
}

#[test]
fn node_check_names_the_file_at_the_kubelets_socket_path() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("device-plugins/kubelet.sock");
    std::fs::create_dir_all(&path).unwrap();
    let check = || {
        let output = crate::support::process_node::berth()
            .args(["node", "check", "--gpus", "sim:1xt4", "--admin-listen", "127.0.0.1:0"])
            .arg("--state-dir")
            .arg(folder.path().join("state"))
            .arg("--kubelet-dir")
            .arg(folder.path())
            .stdout(std::process::Stdio::piped())
            .output()
            .unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        text.lines().find(|l| l.contains("kubelet socket")).unwrap_or_else(|| panic!("{text}")).to_owned()
    };
    let line = check();
    assert!(line.starts_with("FAIL") && line.contains("is a folder, not a socket"), "{line}");
    std::fs::remove_dir(&path).unwrap();
    let target = folder.path().join("live.sock");
    symlink(&target, &path).unwrap();
    let line = check();
    assert!(line.starts_with("WARN") && line.contains("link whose target does not exist"), "{line}");
    let _listener = std::os::unix::net::UnixListener::bind(&target).unwrap();
    let line = check();
    assert!(line.starts_with("ok") && line.contains("answers"), "{line}");
}

/// The kubelet ends the stream three times, each soon after the registration.
async fn lose_three_streams(node: &KubeletNode) {
    for _ in 0..3 {
        node.allocatable(WHOLE, 4).await;
        node.kubelet.drop_stream(WHOLE);
        node.kubelet.wait_allocatable(WHOLE, 0, SOON).await.unwrap();
    }
}

/// A plugin that another one contests notices its end soon, and not by the end of its pause.
fn checks_often() -> NodeOptions {
    NodeOptions::default().with_timeouts(|t| {
        t.loss.contested_check = Duration::from_millis(50);
        t.loss.contested_pause = 2 * SOON;
    })
}

/// Another device plugin for GPUs on the same node.
/// Report: https://github.com/Project-HAMi/HAMi/issues/2076
/// Report: https://github.com/NVIDIA/k8s-device-plugin/issues/455
#[tokio::test]
async fn a_plugin_on_nvidias_socket_is_a_rival_until_it_ends() {
    let options = checks_often().with_timeouts(|t| {
        // However busy the machine is, the losses count as quick ones.
        t.loss.quick_loss = Duration::from_secs(600);
    });
    let node = options.started().await;
    for ends in [true, false] {
        let rival = TinyPlugin::serve(&node.plugins_folder(), "nvidia-gpu.sock", WHOLE, &["GPU-0"]).unwrap();
        lose_three_streams(&node).await;
        contested(&node, "nvidia-gpu.sock, on which NVIDIA's device plugin serves nvidia.com/gpu").await;
        if ends {
            drop(rival);
        } else {
            // A new kubelet ends the pause, too: which plugin comes first is open again.
            node.kubelet.restart().await.unwrap();
        }
        node.allocatable(WHOLE, 4).await;
    }
    node.assert_harmless();
}

/// A kubelet ends the streams of the plugin again and again.
/// Report: https://github.com/NVIDIA/k8s-device-plugin/issues/368
#[tokio::test]
async fn a_kubelet_that_ends_streams_is_no_rival_and_registered_with_again() {
    // The first pause is seen, the others end by themselves.
    for pause in [Duration::from_secs(3600), Duration::from_millis(10)] {
        let options = NodeOptions::default().with_timeouts(|t| {
            t.loss.unexplained_pause = pause;
            t.loss.quick_loss = Duration::from_secs(600);
        });
        let node = options.started().await;
        // A file of an ended plugin, and a plugin of another resource, show nothing.
        drop(std::os::unix::net::UnixListener::bind(node.plugins_folder().join("nvidia-gpu.sock")).unwrap());
        let _other =
            TinyPlugin::serve(&node.plugins_folder(), "sriov.sock", "intel.com/nic", &["a"]).unwrap();
        lose_three_streams(&node).await;
        if pause > SOON {
            cause(&node, "ended the stream 3 times, each within 600 s of the registration").await;
            cause(&node, "other device plugins: sriov.sock").await;
            node.kubelet.restart().await.unwrap();
        }
        node.allocatable(WHOLE, 4).await;
        node.assert_harmless();
    }
}

/// A daemon of another state folder, or of an older release, puts its socket in the place of ours.
/// Report: https://github.com/NVIDIA/k8s-device-plugin/issues/255
#[tokio::test]
async fn a_socket_that_another_process_takes_over_is_noticed_and_served_again_once_that_has_ended() {
    let node = checks_often().started().await;
    node.allocatable(WHOLE, 4).await;
    let hex = format!("{:x}", Sha256::digest(WHOLE));
    let name = format!("berth-{}.sock", &hex[..16]);
    let second = TinyPlugin::serve(&node.plugins_folder(), &name, WHOLE, &["GPU-0"]).unwrap();
    second.register().await.unwrap();
    contested(&node, "as another berth daemon on this node does").await;
    drop(second);
    node.allocatable(WHOLE, 4).await;
    state(&node, WHOLE, Registration::Registered).await;
}

#[tokio::test]
async fn a_socket_that_another_process_serves_is_not_taken_over() {
    let mut node = checks_often().unstarted().await;
    node.kubelet.start().await.unwrap();
    let hex = format!("{:x}", Sha256::digest(WHOLE));
    let name = format!("berth-{}.sock", &hex[..16]);
    let first = TinyPlugin::serve(&node.plugins_folder(), &name, WHOLE, &["GPU-0"]).unwrap();
    first.register().await.unwrap();
    node.kubelet.wait_allocatable(WHOLE, 1, SOON).await.unwrap();
    node.start();
    contested(&node, "as another berth daemon on this node does").await;
    assert_eq!(node.kubelet.calls(Rpc::Register, WHOLE).count, 1, "only the first has registered");
    drop(first);
    node.allocatable(WHOLE, 4).await;
}

#[tokio::test]
async fn a_socket_that_was_deleted_is_served_again() {
    let node = NodeOptions::default().started().await;
    node.allocatable(WHOLE, 4).await;
    let hex = format!("{:x}", Sha256::digest(WHOLE));
    let socket = node.plugins_folder().join(format!("berth-{}.sock", &hex[..16]));
    std::fs::remove_file(&socket).unwrap();
    let again = |k: &Kubelet| k.calls(Rpc::Register, WHOLE).count == 2;
    node.kubelet.wait_for("another registration", SOON, again).await.unwrap();
    node.allocatable(WHOLE, 4).await;
    assert!(socket.exists());
    node.assert_harmless();
}

#[tokio::test]
async fn another_plugin_that_registers_temporarily_is_survived() {
    let node = NodeOptions::default().started().await;
    node.allocatable(WHOLE, 4).await;
    let folder = node.plugins_folder();
    let foreign = TinyPlugin::serve(&folder, "foreign.sock", WHOLE, &["x"]).unwrap();
    foreign.register().await.unwrap();
    drop(foreign);
    // Its end disconnects the plugin that has the name; Berth detects it and registers again.
    node.kubelet.drop_stream(WHOLE);
    node.allocatable(WHOLE, 4).await;
}

#[tokio::test]
async fn a_resource_leaves_the_kubelet_only_with_its_last_id() {
    let node = NodeOptions { policy: Some("whole shares=2"), ..NodeOptions::default() }.started().await;
    node.allocatable(SHARED, 8).await;
    let pod = PodSpec::new("default", "p").container("main", &[(SHARED, 1)]);
    let uid = pod.uid.clone();
    node.kubelet.admit(pod).await.unwrap();
    node.activate("whole").await;
    // One share is held, so it and the resource stay; the others leave after their time.
    node.kubelet.wait_capacity(SHARED, 1, SOON).await.unwrap();
    assert!(node.kubelet.is_served(SHARED));
    assert_eq!(node.kubelet.allocatable(SHARED), Some(1));
    node.kubelet.delete(&uid);
    node.kubelet.wait_for("the resource to leave", SOON, |k| !k.is_served(SHARED)).await.unwrap();
    node.allocatable(WHOLE, 4).await;
    // And it comes back on the same socket.
    node.activate("whole shares=2").await;
    node.allocatable(SHARED, 8).await;
    node.assert_harmless();
}

/// The kubelet still handles the end of the previous plugin when its successor registers, and drops both.
/// Report: https://github.com/kubernetes/kubernetes/issues/127803
#[tokio::test]
async fn a_restarted_daemon_is_not_dropped_with_its_predecessor() {
    let mut node = slow_to_disconnect().started().await;
    for _ in 0..3 {
        node.allocatable(WHOLE, 4).await;
        node.stop().await;
        node.start();
        node.kubelet.wait_allocatable(WHOLE, 0, SOON).await.unwrap();
    }
    node.allocatable(WHOLE, 4).await;
    node.assert_harmless();
}

#[tokio::test]
async fn a_stopped_daemon_leaves_no_healthy_device_behind() {
    let mut node = NodeOptions::default().started().await;
    node.allocatable(WHOLE, 4).await;
    node.stop().await;
    node.kubelet.wait_allocatable(WHOLE, 0, SOON).await.unwrap();
    assert_eq!(node.kubelet.capacity(WHOLE), Some(4));
}

#[tokio::test]
async fn a_stream_requested_while_the_daemon_stops_ends_at_once() {
    // The kubelet has time for its call before the socket is removed.
    let mut node =
        NodeOptions::default().with_timeouts(|t| t.disconnect.stop_within = SOON).unstarted().await;
    node.kubelet.start().await.unwrap();
    node.kubelet.set_faults(|f| f.watch_delay = Duration::from_millis(500));
    node.start();
    let registered = |k: &Kubelet| k.calls(Rpc::Register, WHOLE).count == 1;
    node.kubelet.wait_for("the registration", SOON, registered).await.unwrap();
    tokio::time::timeout(SOON / 2, node.stop()).await.unwrap();
    let left = |k: &Kubelet| k.calls(Rpc::ListAndWatch, WHOLE).count == 1 && k.streams(WHOLE) == 0;
    node.kubelet.wait_for("the end of its stream", SOON / 2, left).await.unwrap();
    node.kubelet.wait_allocatable(WHOLE, 0, SOON).await.unwrap();
    node.assert_harmless();
}

#[tokio::test]
async fn a_slow_registration_is_waited_for() {
    let mut node = NodeOptions::default().unstarted().await;
    node.kubelet.start().await.unwrap();
    node.kubelet.set_faults(|f| f.register_delay = Duration::from_millis(400));
    node.start();
    node.allocatable(WHOLE, 4).await;
    assert_eq!(node.kubelet.calls(Rpc::Register, WHOLE).count, 1);
    node.assert_harmless();
}

/// One GPU is to be taken out of use, and the node is not.
/// Report: https://github.com/Project-HAMi/HAMi/issues/2289
#[tokio::test]
async fn unhealthy_and_cordoned_gpus_are_listed_as_such() {
    // Only the test starts reconcile passes, since each pass resends the list.
    let reconcile =
        ReconcileTiming { full_pass_interval: Duration::from_secs(3600), ..NodeOptions::default().reconcile };
    let node = NodeOptions { reconcile, ..NodeOptions::default() }.started().await;
    node.allocatable(WHOLE, 4).await;
    node.reconcile().await;
    let sent = node.kubelet.calls(Rpc::ListMessage, WHOLE).count;
    node.scan_failing(&[]).await;
    node.scan_failing(&[2]).await;
    node.kubelet.wait_allocatable(WHOLE, 3, SOON).await.unwrap();
    assert_eq!(node.kubelet.listed(WHOLE)["GPU-2"], UNHEALTHY);
    node.kernel.execute(cordon(gpu_id(0), "")).await.unwrap();
    node.kubelet.wait_allocatable(WHOLE, 2, SOON).await.unwrap();
    assert_eq!(node.kubelet.listed(WHOLE)["GPU-0"], UNHEALTHY);
    assert_eq!(node.kubelet.listed(WHOLE)["GPU-1"], HEALTHY);
    assert_eq!(node.kubelet.capacity(WHOLE), Some(4));
    let messages = node.kubelet.calls(Rpc::ListMessage, WHOLE).count - sent;
    assert_eq!(messages, 2, "one message a change, none for a scan without changes");
    node.assert_harmless();
}

#[tokio::test]
async fn a_held_gpu_stays_listed_whatever_its_state() {
    let node = NodeOptions::default().started().await;
    node.allocatable(WHOLE, 4).await;
    let pod = PodSpec::new("default", "p").container("main", &[(WHOLE, 4)]);
    let uid = pod.uid.clone();
    node.kubelet.admit(pod).await.unwrap();
    node.scan_failing(&[0, 1, 2, 3]).await;
    node.kubelet.wait_allocatable(WHOLE, 0, SOON).await.unwrap();
    assert_eq!(node.kubelet.capacity(WHOLE), Some(4));
    // A missing one would be shown as healthy in the pod's status.
    let health = node.kubelet.reported_health(&uid, "main");
    assert_eq!(health.values().collect::<Vec<_>>(), [&UNHEALTHY; 4]);
    node.kubelet.restart().await.unwrap();
    node.kubelet.wait_capacity(WHOLE, 4, SOON).await.unwrap();
    node.assert_harmless();
}

#[tokio::test]
async fn numa_nodes_are_reported_if_there_are_any() {
    for numa in [true, false] {
        let node = NodeOptions { numa, ..NodeOptions::default() }.started().await;
        node.allocatable(WHOLE, 4).await;
        let pod = PodSpec::new("default", "p").container("main", &[(WHOLE, 2)]).numa(&[1]);
        let uid = pod.uid.clone();
        node.kubelet.admit(pod).await.unwrap();
        let held = node.kubelet.held(&uid, "main", WHOLE);
        if numa {
            assert_eq!(held.into_iter().collect::<Vec<_>>(), ["GPU-2", "GPU-3"]);
            // The aligned set was exactly what was needed, so no policy was called.
            let asked = node.kubelet.calls(Rpc::GetPreferredAllocation, WHOLE);
            assert_eq!(asked.count, 0);
        } else {
            assert_eq!(held.len(), 2);
        }
        node.assert_harmless();
    }
}

#[tokio::test]
async fn nothing_is_lost_over_a_restart_with_an_absent_api_server() {
    let node = NodeOptions::default().started().await;
    node.allocatable(WHOLE, 4).await;
    let pod = PodSpec::new("default", "p").container("main", &[(WHOLE, 1)]);
    node.run(pod).await;
    let waiting = Sources::Waiting { known: Vec::new() };
    node.kubelet.restart_with(waiting).await.unwrap();
    node.allocatable(WHOLE, 4).await;
    // Reconcile passes run and see an empty List; the checkpoint still names the pod.
    for _ in 0..4 {
        node.reconcile().await;
        tokio::time::sleep(Duration::from_millis(60)).await;
    }
    assert_eq!(node.live().len(), 1);
    node.assert_harmless();
}
