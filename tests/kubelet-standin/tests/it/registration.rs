//! Registration, lists, disconnects, restarts.

use crate::{Fixture, GPU, TIMEOUT, set};
use kubelet_standin::{Anomaly, HEALTHY, Kubelet, PodSpec, Rpc, Sources, TinyPlugin, UNHEALTHY};
use std::os::unix::net::{UnixListener, UnixStream};
use std::{
    fs,
    time::{Duration, Instant},
};
use tonic::Status;

#[tokio::test]
async fn a_start_deletes_sockets_and_nothing_else() {
    let fixture = Fixture::new().await;
    fixture.kubelet.stop().await;
    let stale = fixture.plugins().join("old.sock");
    drop(UnixListener::bind(&stale).unwrap());
    fs::write(fixture.plugins().join("notes"), "kept").unwrap();
    fs::create_dir(fixture.plugins().join("folder")).unwrap();
    assert!(stale.exists());
    fixture.kubelet.start().await.unwrap();
    assert!(!stale.exists());
    assert!(fixture.plugins().join("notes").exists());
    assert!(fixture.plugins().join("folder").exists());
    UnixStream::connect(fixture.kubelet.registration_socket()).unwrap();
}

#[tokio::test]
async fn register_refuses_wrong_versions_and_names_and_unreachable_plugins() {
    let fixture = Fixture::with(|o| o.dial_limit = Duration::from_millis(100)).await;
    let plugin = TinyPlugin::serve(&fixture.plugins(), "a.sock", GPU, &["a"]).unwrap();
    let refused = plugin.register_with_version("v1alpha1").await.unwrap_err();
    assert!(refused.message().contains("not supported"), "{refused}");
    let odd = TinyPlugin::serve(&fixture.plugins(), "b.sock", "gpu", &["a"]).unwrap();
    let refused = odd.register().await.unwrap_err();
    assert!(refused.message().contains("invalid"), "{refused}");
    fs::remove_file(fixture.plugins().join("a.sock")).unwrap();
    let refused = plugin.register().await.unwrap_err();
    assert!(refused.message().contains("dial"), "{refused}");
    assert_eq!(fixture.kubelet.calls(Rpc::Register, GPU).errors, 2);
    assert_eq!(fixture.kubelet.capacity(GPU), None);
}

#[tokio::test]
async fn register_returns_the_error_of_the_options_call() {
    let fixture = Fixture::new().await;
    let plugin = TinyPlugin::serve(&fixture.plugins(), "a.sock", GPU, &["a"]).unwrap();
    plugin.set_options(Err(Status::internal("not today")));
    let refused = plugin.register().await.unwrap_err();
    assert!(refused.message().contains("not today"), "{refused}");
    assert_eq!(fixture.kubelet.calls(Rpc::ListAndWatch, GPU).count, 0);
}

#[tokio::test]
async fn each_list_replaces_the_previous_one() {
    let fixture = Fixture::new().await;
    let plugin = fixture.plugin("a.sock", GPU, &["a", "b", "c"]).await;
    plugin.send_list(vec![TinyPlugin::device("a", HEALTHY), TinyPlugin::device("b", UNHEALTHY)]);
    fixture.kubelet.wait_capacity(GPU, 2, TIMEOUT).await.unwrap();
    assert_eq!(fixture.kubelet.allocatable(GPU), Some(1));
    assert_eq!(fixture.kubelet.anomalies(), []);
}

#[tokio::test]
async fn the_end_of_a_stream_makes_all_devices_unhealthy_and_later_removes_the_resource() {
    // The first grace period is longer than the test, so the resource stays. The test waits for the end of the second.
    for (grace_s, is_removed) in [(3600, false), (1, true)] {
        let grace = Duration::from_secs(grace_s);
        let fixture = Fixture::with(|o| o.endpoint_grace = grace).await;
        let plugin = fixture.plugin("a.sock", GPU, &["a", "b"]).await;
        let ended = Instant::now();
        plugin.end_streams();
        if is_removed {
            let removed = |k: &Kubelet| k.capacity(GPU).is_none();
            fixture.kubelet.wait_for("the removal of the resource", TIMEOUT, removed).await.unwrap();
            assert!(ended.elapsed() >= grace);
        } else {
            fixture.kubelet.wait_allocatable(GPU, 0, TIMEOUT).await.unwrap();
            assert_eq!(fixture.kubelet.capacity(GPU), Some(2));
            assert!(!fixture.kubelet.is_served(GPU));
        }
    }
}

#[tokio::test]
async fn the_end_of_an_old_stream_disconnects_the_new_client() {
    let fixture = Fixture::new().await;
    let old = fixture.plugin("old.sock", GPU, &["a"]).await;
    let new = fixture.plugin("new.sock", GPU, &["x", "y"]).await;
    let anomaly = Anomaly::RegisteredOverLiveStream { resource: GPU.to_owned() };
    assert_eq!(fixture.kubelet.anomalies(), [anomaly]);
    old.end_streams();
    fixture.kubelet.wait_allocatable(GPU, 0, TIMEOUT).await.unwrap();
    fixture.kubelet.wait_for("no stream", TIMEOUT, |k| k.streams(GPU) == 0).await.unwrap();
    // The newest registration was disconnected.
    assert!(!fixture.kubelet.is_served(GPU));
    drop(new);
}

#[tokio::test]
async fn without_the_race_the_newest_registration_stays_connected() {
    let fixture = Fixture::with(|o| o.name_keyed_race = false).await;
    let old = fixture.plugin("old.sock", GPU, &["a"]).await;
    let _new = fixture.plugin("new.sock", GPU, &["x", "y"]).await;
    old.end_streams();
    fixture.kubelet.wait_for("one stream", TIMEOUT, |k| k.streams(GPU) == 1).await.unwrap();
    assert_eq!(fixture.kubelet.allocatable(GPU), Some(2));
    assert!(fixture.kubelet.is_served(GPU));
}

#[tokio::test]
async fn registering_before_the_manager_is_notified_gets_a_dead_endpoint() {
    // On a busy machine a gap may be over before the plugin registers.
    for gap in [500, 15_000, 60_000].map(Duration::from_millis) {
        let fixture = Fixture::with(|o| o.disconnect_gap = gap).await;
        let plugin = fixture.plugin("a.sock", GPU, &["a"]).await;
        let dropped = Instant::now();
        fixture.kubelet.drop_stream(GPU);
        fixture.kubelet.wait_for("the end of the stream", TIMEOUT, |k| k.streams(GPU) == 0).await.unwrap();
        plugin.register().await.unwrap();
        if dropped.elapsed() >= gap {
            continue;
        }
        fixture
            .kubelet
            .wait_for("a stopped endpoint with an open stream", TIMEOUT, |k| {
                k.streams(GPU) == 1 && !k.is_served(GPU)
            })
            .await
            .unwrap();
        let anomaly = Anomaly::RegisteredWhileDisconnecting { resource: GPU.to_owned() };
        assert_eq!(fixture.kubelet.anomalies(), [anomaly]);
        return;
    }
    panic!("the plugin never registers within the gap");
}

#[tokio::test]
async fn after_a_failed_register_the_end_of_the_live_client_is_ignored() {
    let fixture = Fixture::new().await;
    let plugin = fixture.plugin("a.sock", GPU, &["a"]).await;
    let foreign = TinyPlugin::serve(&fixture.plugins(), "b.sock", GPU, &["z"]).unwrap();
    foreign.set_options(Err(Status::internal("no")));
    foreign.register().await.unwrap_err();
    plugin.end_streams();
    fixture.kubelet.wait_for("the end of the stream", TIMEOUT, |k| k.streams(GPU) == 0).await.unwrap();
    // No client was disconnected, so the device still counts as healthy.
    assert_eq!(fixture.kubelet.allocatable(GPU), Some(1));
}

#[tokio::test]
async fn after_a_restart_resources_are_zero_until_registered_again() {
    let fixture = Fixture::new().await;
    let plugin = fixture.plugin("a.sock", GPU, &["a", "b"]).await;
    let pod = PodSpec::new("default", "p").container("main", &[(GPU, 1)]);
    let uid = pod.uid.clone();
    fixture.kubelet.admit(pod).await.unwrap();
    let held = fixture.kubelet.held(&uid, "main", GPU);
    fixture.kubelet.restart().await.unwrap();
    assert_eq!(fixture.kubelet.capacity(GPU), Some(0));
    assert_eq!(fixture.kubelet.held(&uid, "main", GPU), held);
    // A pod that is admitted before the plugin registers again fails permanently.
    let early = PodSpec::new("default", "early").container("main", &[(GPU, 1)]);
    let error = fixture.kubelet.admit(early).await.unwrap_err();
    assert!(error.to_string().contains("no healthy devices present"));
    drop(plugin);
    let _again = fixture.plugin("a.sock", GPU, &["a", "b"]).await;
    assert_eq!(fixture.kubelet.in_use(GPU), held);
    assert_eq!(fixture.kubelet.anomalies(), []);
}

#[tokio::test]
async fn a_pending_pod_is_rejected_when_the_kubelet_returns_before_the_plugin() {
    let fixture = Fixture::new().await;
    let _plugin = fixture.plugin("a.sock", GPU, &["a"]).await;
    let running = PodSpec::new("default", "running").container("main", &[(GPU, 0)]);
    let pending = PodSpec::new("default", "pending").container("main", &[(GPU, 1)]);
    let uid = pending.uid.clone();
    fixture.kubelet.admit(running.clone()).await.unwrap();
    fixture.kubelet.run(&running.uid).await.unwrap();
    fixture.kubelet.admit(pending).await.unwrap();
    let waiting = Sources::Waiting { known: Vec::new() };
    fixture.kubelet.restart_with(waiting).await.unwrap();
    fixture.kubelet.sources_ready();
    let results = fixture.kubelet.readmit().await;
    assert_eq!(results.len(), 1);
    assert!(results[&uid].is_err());
}

#[tokio::test]
async fn clients_are_kept_when_the_socket_is_recreated() {
    let fixture = Fixture::new().await;
    let plugin = fixture.plugin("a.sock", GPU, &["a"]).await;
    fixture.kubelet.recreate_socket(false).await.unwrap();
    assert!(fixture.plugins().join("a.sock").exists());
    assert!(fixture.kubelet.is_served(GPU));
    fixture.kubelet.recreate_socket(true).await.unwrap();
    assert!(!fixture.plugins().join("a.sock").exists());
    assert!(fixture.kubelet.is_served(GPU));
    drop(plugin);
    let _other = fixture.plugin("b.sock", "nvidia.com/other", &["a"]).await;
}

#[tokio::test]
async fn registrations_can_be_refused_delayed_or_without_a_stream() {
    let fixture = Fixture::new().await;
    let plugin = TinyPlugin::serve(&fixture.plugins(), "a.sock", GPU, &["a"]).unwrap();
    fixture.kubelet.set_faults(|f| {
        f.refuse_registrations = 1;
        f.register_delay = Duration::from_millis(30);
        f.never_watch = true;
    });
    plugin.register().await.unwrap_err();
    plugin.register().await.unwrap();
    let calls = fixture.kubelet.calls(Rpc::Register, GPU);
    assert_eq!((calls.count, calls.errors), (2, 1));
    assert!(calls.longest >= Duration::from_millis(30));
    assert_eq!(fixture.kubelet.calls(Rpc::ListAndWatch, GPU).count, 0);
    assert_eq!(fixture.kubelet.capacity(GPU), None);
}

#[tokio::test]
async fn invalid_lists_are_anomalies() {
    let fixture = Fixture::new().await;
    let plugin = fixture.plugin("a.sock", GPU, &["a", "b"]).await;
    let pod = PodSpec::new("default", "p").container("main", &[(GPU, 2)]);
    let uid = pod.uid.clone();
    fixture.kubelet.admit(pod).await.unwrap();
    assert_eq!(fixture.kubelet.held(&uid, "main", GPU), set(["a", "b"]));
    let long = "x".repeat(64);
    plugin.send_list(vec![
        TinyPlugin::device("a", "Fine"),
        TinyPlugin::device(&long, HEALTHY),
        TinyPlugin::device(&long, HEALTHY),
    ]);
    fixture.kubelet.wait_for("anomalies", TIMEOUT, |k| k.anomalies().len() >= 5).await.unwrap();
    let anomalies = fixture.kubelet.take_anomalies();
    assert!(anomalies.contains(&Anomaly::WouldCrashHeld {
        resource: GPU.to_owned(),
        id: "b".to_owned(),
        pod_uid: uid.clone(),
    }));
    // A missing device is reported healthy, so plugins must keep lost devices in the list.
    assert_eq!(fixture.kubelet.reported_health(&uid, "main")["b"], HEALTHY);
    assert_eq!(fixture.kubelet.reported_health(&uid, "main")["a"], UNHEALTHY);
    assert_eq!(fixture.kubelet.anomalies(), []);
}
