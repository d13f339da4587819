//! Registration, lists, disconnects, restarts.

use crate::{Bench, GPU, SOON, set};
use kubelet_standin::{Anomaly, HEALTHY, PodSpec, Rpc, Sources, TinyPlugin, UNHEALTHY};
use std::os::unix::net::{UnixListener, UnixStream};
use std::{fs, time::Duration};
use tonic::Status;

#[tokio::test]
async fn a_start_deletes_sockets_and_nothing_else() {
    let bench = Bench::new().await;
    bench.kubelet.stop().await;
    let stale = bench.plugins().join("old.sock");
    drop(UnixListener::bind(&stale).unwrap());
    fs::write(bench.plugins().join("notes"), "kept").unwrap();
    fs::create_dir(bench.plugins().join("folder")).unwrap();
    assert!(stale.exists());
    bench.kubelet.start().await.unwrap();
    assert!(!stale.exists());
    assert!(bench.plugins().join("notes").exists());
    assert!(bench.plugins().join("folder").exists());
    UnixStream::connect(bench.kubelet.registration_socket()).unwrap();
}

#[tokio::test]
async fn register_refuses_wrong_versions_and_names_and_unreachable_plugins() {
    let bench = Bench::with(|o| o.dial_limit = Duration::from_millis(100)).await;
    let plugin = TinyPlugin::serve(&bench.plugins(), "a.sock", GPU, &["a"]).unwrap();
    let refused = plugin.register_as("v1alpha1").await.unwrap_err();
    assert!(refused.message().contains("not supported"), "{refused}");
    let odd = TinyPlugin::serve(&bench.plugins(), "b.sock", "gpu", &["a"]).unwrap();
    let refused = odd.register().await.unwrap_err();
    assert!(refused.message().contains("invalid"), "{refused}");
    fs::remove_file(bench.plugins().join("a.sock")).unwrap();
    let refused = plugin.register().await.unwrap_err();
    assert!(refused.message().contains("dial"), "{refused}");
    assert_eq!(bench.kubelet.calls(Rpc::Register, GPU).errors, 2);
    assert_eq!(bench.kubelet.capacity(GPU), None);
}

#[tokio::test]
async fn register_returns_the_error_of_the_options_call() {
    let bench = Bench::new().await;
    let plugin = TinyPlugin::serve(&bench.plugins(), "a.sock", GPU, &["a"]).unwrap();
    plugin.options(Err(Status::internal("not today")));
    let refused = plugin.register().await.unwrap_err();
    assert!(refused.message().contains("not today"), "{refused}");
    assert_eq!(bench.kubelet.calls(Rpc::ListAndWatch, GPU).count, 0);
}

#[tokio::test]
async fn each_list_replaces_the_one_before() {
    let bench = Bench::new().await;
    let plugin = bench.plugin("a.sock", GPU, &["a", "b", "c"]).await;
    plugin.list(vec![TinyPlugin::device("a", HEALTHY), TinyPlugin::device("b", UNHEALTHY)]);
    bench.kubelet.wait_capacity(GPU, 2, SOON).await.unwrap();
    assert_eq!(bench.kubelet.allocatable(GPU), Some(1));
    assert_eq!(bench.kubelet.anomalies(), []);
}

#[tokio::test]
async fn the_end_of_a_stream_makes_all_unhealthy_and_then_removes_the_resource() {
    let bench = Bench::with(|o| o.endpoint_grace = Duration::from_secs(2)).await;
    let plugin = bench.plugin("a.sock", GPU, &["a", "b"]).await;
    plugin.end_streams();
    bench.kubelet.wait_allocatable(GPU, 0, SOON).await.unwrap();
    assert_eq!(bench.kubelet.capacity(GPU), Some(2));
    assert!(!bench.kubelet.is_served(GPU));
    bench.kubelet.wait_for("the resource to go", SOON, |k| k.capacity(GPU).is_none()).await.unwrap();
}

#[tokio::test]
async fn the_end_of_an_old_stream_disconnects_the_new_client() {
    let bench = Bench::new().await;
    let old = bench.plugin("old.sock", GPU, &["a"]).await;
    let new = bench.plugin("new.sock", GPU, &["x", "y"]).await;
    let poison = Anomaly::RegisteredOverLiveStream { resource: GPU.to_owned() };
    assert_eq!(bench.kubelet.anomalies(), [poison]);
    old.end_streams();
    bench.kubelet.wait_allocatable(GPU, 0, SOON).await.unwrap();
    bench.kubelet.wait_for("no stream", SOON, |k| k.streams(GPU) == 0).await.unwrap();
    // The newest registration is poisoned: nothing of it is left.
    assert!(!bench.kubelet.is_served(GPU));
    drop(new);
}

#[tokio::test]
async fn without_the_race_the_newest_registration_lives_on() {
    let bench = Bench::with(|o| o.name_keyed_race = false).await;
    let old = bench.plugin("old.sock", GPU, &["a"]).await;
    let _new = bench.plugin("new.sock", GPU, &["x", "y"]).await;
    old.end_streams();
    bench.kubelet.wait_for("one stream", SOON, |k| k.streams(GPU) == 1).await.unwrap();
    assert_eq!(bench.kubelet.allocatable(GPU), Some(2));
    assert!(bench.kubelet.is_served(GPU));
}

#[tokio::test]
async fn registering_between_close_and_notice_gets_a_dead_endpoint() {
    let bench = Bench::with(|o| o.disconnect_gap = Duration::from_millis(500)).await;
    let plugin = bench.plugin("a.sock", GPU, &["a"]).await;
    bench.kubelet.drop_stream(GPU);
    bench.kubelet.wait_for("the stream to end", SOON, |k| k.streams(GPU) == 0).await.unwrap();
    plugin.register().await.unwrap();
    bench
        .kubelet
        .wait_for("a dead endpoint behind a live stream", SOON, |k| k.streams(GPU) == 1 && !k.is_served(GPU))
        .await
        .unwrap();
    let poison = Anomaly::RegisteredWhileDisconnecting { resource: GPU.to_owned() };
    assert_eq!(bench.kubelet.anomalies(), [poison]);
}

#[tokio::test]
async fn a_failed_register_makes_the_kubelet_deaf_to_the_live_clients_end() {
    let bench = Bench::new().await;
    let plugin = bench.plugin("a.sock", GPU, &["a"]).await;
    let foreign = TinyPlugin::serve(&bench.plugins(), "b.sock", GPU, &["z"]).unwrap();
    foreign.options(Err(Status::internal("no")));
    foreign.register().await.unwrap_err();
    plugin.end_streams();
    bench.kubelet.wait_for("the stream to end", SOON, |k| k.streams(GPU) == 0).await.unwrap();
    // Nobody was disconnected, so the device still counts as healthy.
    assert_eq!(bench.kubelet.allocatable(GPU), Some(1));
}

#[tokio::test]
async fn after_a_restart_resources_are_zero_until_registered_again() {
    let bench = Bench::new().await;
    let plugin = bench.plugin("a.sock", GPU, &["a", "b"]).await;
    let pod = PodSpec::new("default", "p").container("main", &[(GPU, 1)]);
    let uid = pod.uid.clone();
    bench.kubelet.admit(pod).await.unwrap();
    let held = bench.kubelet.held(&uid, "main", GPU);
    bench.kubelet.restart().await.unwrap();
    assert_eq!(bench.kubelet.capacity(GPU), Some(0));
    assert_eq!(bench.kubelet.held(&uid, "main", GPU), held);
    // A pod that comes before the plugin is back fails for good.
    let early = PodSpec::new("default", "early").container("main", &[(GPU, 1)]);
    let error = bench.kubelet.admit(early).await.unwrap_err();
    assert!(error.to_string().contains("no healthy devices present"));
    drop(plugin);
    let _again = bench.plugin("a.sock", GPU, &["a", "b"]).await;
    assert_eq!(bench.kubelet.in_use(GPU), held);
    assert_eq!(bench.kubelet.anomalies(), []);
}

#[tokio::test]
async fn a_pending_pod_is_rejected_when_the_kubelet_returns_before_the_plugin() {
    let bench = Bench::new().await;
    let _plugin = bench.plugin("a.sock", GPU, &["a"]).await;
    let running = PodSpec::new("default", "running").container("main", &[(GPU, 0)]);
    let pending = PodSpec::new("default", "pending").container("main", &[(GPU, 1)]);
    let uid = pending.uid.clone();
    bench.kubelet.admit(running.clone()).await.unwrap();
    bench.kubelet.run(&running.uid).await.unwrap();
    bench.kubelet.admit(pending).await.unwrap();
    let waiting = Sources::Waiting { known: Vec::new() };
    bench.kubelet.restart_with(waiting).await.unwrap();
    bench.kubelet.sources_ready();
    let answers = bench.kubelet.readmit().await;
    assert_eq!(answers.len(), 1);
    assert!(answers[&uid].is_err());
}

#[tokio::test]
async fn a_recreated_socket_keeps_the_clients() {
    let bench = Bench::new().await;
    let plugin = bench.plugin("a.sock", GPU, &["a"]).await;
    bench.kubelet.recreate_socket(false).await.unwrap();
    assert!(bench.plugins().join("a.sock").exists());
    assert!(bench.kubelet.is_served(GPU));
    bench.kubelet.recreate_socket(true).await.unwrap();
    assert!(!bench.plugins().join("a.sock").exists());
    assert!(bench.kubelet.is_served(GPU));
    drop(plugin);
    let _other = bench.plugin("b.sock", "nvidia.com/other", &["a"]).await;
}

#[tokio::test]
async fn registrations_can_be_refused_slowed_and_left_without_a_watch() {
    let bench = Bench::new().await;
    let plugin = TinyPlugin::serve(&bench.plugins(), "a.sock", GPU, &["a"]).unwrap();
    bench.kubelet.set_faults(|f| {
        f.refuse_registrations = 1;
        f.register_delay = Duration::from_millis(30);
        f.never_watch = true;
    });
    plugin.register().await.unwrap_err();
    plugin.register().await.unwrap();
    let calls = bench.kubelet.calls(Rpc::Register, GPU);
    assert_eq!((calls.count, calls.errors), (2, 1));
    assert!(calls.longest >= Duration::from_millis(30));
    assert_eq!(bench.kubelet.calls(Rpc::ListAndWatch, GPU).count, 0);
    assert_eq!(bench.kubelet.capacity(GPU), None);
}

#[tokio::test]
async fn bad_lists_are_anomalies() {
    let bench = Bench::new().await;
    let plugin = bench.plugin("a.sock", GPU, &["a", "b"]).await;
    let pod = PodSpec::new("default", "p").container("main", &[(GPU, 2)]);
    let uid = pod.uid.clone();
    bench.kubelet.admit(pod).await.unwrap();
    assert_eq!(bench.kubelet.held(&uid, "main", GPU), set(["a", "b"]));
    let long = "x".repeat(64);
    plugin.list(vec![
        TinyPlugin::device("a", "Fine"),
        TinyPlugin::device(&long, HEALTHY),
        TinyPlugin::device(&long, HEALTHY),
    ]);
    bench.kubelet.wait_for("anomalies", SOON, |k| k.anomalies().len() >= 5).await.unwrap();
    let found = bench.kubelet.take_anomalies();
    assert!(found.contains(&Anomaly::WouldCrashHeld {
        resource: GPU.to_owned(),
        id: "b".to_owned(),
        pod_uid: uid.clone(),
    }));
    // An omitted device is reported healthy, which is why lost ones stay listed.
    assert_eq!(bench.kubelet.reported_health(&uid, "main")["b"], HEALTHY);
    assert_eq!(bench.kubelet.reported_health(&uid, "main")["a"], UNHEALTHY);
    assert_eq!(bench.kubelet.anomalies(), []);
}
