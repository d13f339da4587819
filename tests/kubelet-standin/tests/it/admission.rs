//! Selection, Allocate, reuse by later containers, failures, and merged responses.

use crate::{Fixture, GPU, SHARED, TIMEOUT, set};
use kubelet_standin::proto::v1beta1::{ContainerAllocateResponse, Device, NumaNode, TopologyInfo};
use kubelet_standin::{AdmissionError, Anomaly, HEALTHY, Phase, PodSpec, Rpc, TinyPlugin, UNHEALTHY};
use std::{collections::BTreeSet, sync::Arc, time::Instant};
use tonic::Status;

fn pod(name: &str) -> PodSpec {
    PodSpec::new("default", name)
}

#[tokio::test]
async fn the_plugins_preference_is_limited_to_available_devices() {
    let fixture = Fixture::new().await;
    let plugin = fixture.plugin("a.sock", GPU, &["a", "b", "c", "d"]).await;
    plugin.on_prefer(|_| Ok(vec!["c".into(), "nonsense".into()]));
    let spec = pod("p").container("main", &[(GPU, 2)]);
    let uid = spec.uid.clone();
    fixture.kubelet.admit(spec).await.unwrap();
    let held = fixture.kubelet.held(&uid, "main", GPU);
    // The plugin preferred too few, so the kubelet chose another one.
    assert!(held.contains("c") && held.len() == 2, "{held:?}");
    let request = &plugin.preferred_requests()[0].container_requests[0];
    assert_eq!((request.allocation_size, request.available_device_i_ds.len()), (2, 4));
    assert_eq!(fixture.kubelet.anomalies(), []);
}

#[tokio::test]
async fn an_error_of_get_preferred_allocation_fails_the_pod() {
    let fixture = Fixture::new().await;
    let plugin = fixture.plugin("a.sock", GPU, &["a", "b"]).await;
    plugin.on_prefer(|_| Err(Status::invalid_argument("cannot say")));
    let spec = pod("p").container("main", &[(GPU, 1)]);
    let uid = spec.uid.clone();
    let error = fixture.kubelet.admit(spec).await.unwrap_err();
    let AdmissionError::Rejected { reason, message } = error else {
        panic!("{error}");
    };
    assert_eq!(reason, "UnexpectedAdmissionError");
    assert_eq!(
        message,
        "Allocate failed due to device plugin GetPreferredAllocation rpc failed with err: rpc error: code = InvalidArgument desc = cannot say, which is unexpected"
    );
    assert!(matches!(fixture.kubelet.pod(&uid).unwrap().phase, Phase::Failed { .. }));
    assert_eq!(fixture.kubelet.calls(Rpc::Allocate, GPU).count, 0);
}

#[tokio::test]
async fn an_error_of_allocate_is_in_the_pods_message() {
    let fixture = Fixture::new().await;
    let plugin = fixture.plugin("a.sock", GPU, &["a"]).await;
    plugin.on_allocate(|_| Err(Status::failed_precondition("GPU a is cordoned")));
    let error = fixture.kubelet.admit(pod("p").container("main", &[(GPU, 1)])).await;
    assert_eq!(
        error.unwrap_err().to_string(),
        "UnexpectedAdmissionError: Allocate failed due to rpc error: code = FailedPrecondition desc = GPU a is cordoned, which is unexpected"
    );
    assert_eq!(fixture.kubelet.in_use(GPU), BTreeSet::new());
}

#[tokio::test]
async fn too_many_devices_are_refused_without_a_call_to_the_plugin() {
    let fixture = Fixture::new().await;
    let plugin = fixture.plugin("a.sock", GPU, &["a"]).await;
    let error = fixture.kubelet.admit(pod("p").container("main", &[(GPU, 2)])).await;
    let text = error.unwrap_err().to_string();
    assert!(text.contains("Requested: 2, Available: 1"), "{text}");
    assert!(plugin.preferred_requests().is_empty() && plugin.allocated_ids().is_empty());
}

fn on_node(id: &str, node: i64) -> Device {
    Device {
        id: id.to_owned(),
        health: HEALTHY.to_owned(),
        topology: Some(TopologyInfo { nodes: vec![NumaNode { id: node }] }),
    }
}

#[tokio::test]
async fn aligned_devices_are_chosen_without_a_call_if_all_are_needed() {
    let fixture = Fixture::new().await;
    let plugin = fixture.plugin("a.sock", GPU, &["a"]).await;
    plugin.send_list(vec![on_node("a", 0), on_node("b", 0), on_node("c", 1), on_node("d", 1)]);
    fixture.kubelet.wait_allocatable(GPU, 4, TIMEOUT).await.unwrap();
    let exact = pod("exact").container("main", &[(GPU, 2)]).numa(&[1]);
    let uid = exact.uid.clone();
    fixture.kubelet.admit(exact).await.unwrap();
    assert_eq!(fixture.kubelet.held(&uid, "main", GPU), set(["c", "d"]));
    assert!(plugin.preferred_requests().is_empty());
    // Fewer devices than are aligned: the plugin chooses among the aligned ones.
    let choice = pod("choice").container("main", &[(GPU, 1)]).numa(&[0]);
    fixture.kubelet.admit(choice).await.unwrap();
    let request = plugin.preferred_requests()[0].container_requests[0].clone();
    let available: BTreeSet<_> = request.available_device_i_ds.into_iter().collect();
    assert_eq!(available, set(["a", "b"]));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_app_container_gets_the_init_containers_devices_whatever_their_health() {
    let fixture = Fixture::new().await;
    let plugin = Arc::new(fixture.plugin("a.sock", GPU, &["a", "b", "c"]).await);
    let (weak, kubelet) = (Arc::downgrade(&plugin), fixture.kubelet.clone());
    // During the init container's Allocate, its two devices become unhealthy.
    plugin.on_allocate(move |ids| {
        if ids.len() == 2 {
            let health = |id: &str| {
                if ids.iter().any(|i| i == id) { UNHEALTHY } else { HEALTHY }
            };
            let list = ["a", "b", "c"].map(|id| TinyPlugin::device(id, health(id)));
            weak.upgrade().unwrap().send_list(list.into());
            spin_until(|| kubelet.allocatable(GPU) == Some(1));
        }
        Ok(ContainerAllocateResponse::default())
    });
    let spec =
        pod("p").init("fetch", &[(GPU, 2)]).container("main", &[(GPU, 1)]).container("side", &[(GPU, 1)]);
    let uid = spec.uid.clone();
    fixture.kubelet.admit(spec).await.unwrap();
    let first = fixture.kubelet.held(&uid, "fetch", GPU);
    let main = fixture.kubelet.held(&uid, "main", GPU);
    let side = fixture.kubelet.held(&uid, "side", GPU);
    assert_eq!(main.union(&side).cloned().collect::<BTreeSet<_>>(), first);
    assert!(main.is_disjoint(&side));
    assert_eq!(fixture.kubelet.calls(Rpc::Allocate, GPU).count, 3);
    assert_eq!(fixture.kubelet.anomalies(), []);
}

/// Waits in the plugin's callbacks, which are not async. The other tasks of this
/// worker, including the list's sender, move to another worker meanwhile.
fn spin_until(condition: impl Fn() -> bool) {
    let deadline = Instant::now() + TIMEOUT;
    tokio::task::block_in_place(|| {
        while !condition() {
            assert!(Instant::now() < deadline, "the condition was not met within {TIMEOUT:?}");
            std::thread::yield_now();
        }
    });
}

#[tokio::test]
async fn a_sidecars_devices_are_not_reused() {
    let fixture = Fixture::new().await;
    let _plugin = fixture.plugin("a.sock", GPU, &["a", "b"]).await;
    let spec = pod("p").sidecar("proxy", &[(GPU, 1)]).container("main", &[(GPU, 1)]);
    let uid = spec.uid.clone();
    fixture.kubelet.admit(spec).await.unwrap();
    let proxy = fixture.kubelet.held(&uid, "proxy", GPU);
    assert!(proxy.is_disjoint(&fixture.kubelet.held(&uid, "main", GPU)));
}

#[tokio::test]
async fn a_failed_second_resource_leaves_a_grant_without_a_checkpoint_entry() {
    let fixture = Fixture::new().await;
    let gpu = fixture.plugin("a.sock", GPU, &["a"]).await;
    let shared = fixture.plugin("b.sock", SHARED, &["a::0"]).await;
    let both = [(GPU, 1), (SHARED, 1)];
    gpu.on_allocate(|_| Ok(ContainerAllocateResponse::default()));
    shared.on_allocate(|_| Err(Status::internal("no")));
    let mut leaked = None;
    for n in 0..32 {
        let before = std::fs::read(fixture.kubelet.checkpoint_path()).unwrap();
        let spec = pod(&format!("p{n}")).container("main", &both);
        let uid = spec.uid.clone();
        fixture.kubelet.admit(spec).await.unwrap_err();
        let after = std::fs::read(fixture.kubelet.checkpoint_path()).unwrap();
        assert_eq!(before, after, "a failed admission writes no checkpoint");
        if !fixture.kubelet.held(&uid, "main", GPU).is_empty() {
            leaked = Some(uid);
            break;
        }
    }
    let leaked = leaked.expect("one of 32 orders allocates the whole GPU first");
    assert_eq!(fixture.kubelet.in_use(GPU), set(["a"]));
    // The next admission purges the failed pod and releases the device.
    fixture.kubelet.admit(pod("next").container("main", &[(GPU, 1)])).await.unwrap();
    assert!(fixture.kubelet.held(&leaked, "main", GPU).is_empty());
}

#[tokio::test]
async fn environments_of_two_resources_merge_and_the_first_wins() {
    let mut winners = BTreeSet::new();
    for seed in 0..16 {
        let fixture = Fixture::with(|o| o.seed = seed).await;
        let _gpu = fixture.plugin("a.sock", GPU, &["a"]).await;
        let _shared = fixture.plugin("b.sock", SHARED, &["b"]).await;
        let spec = pod("p").container("main", &[(GPU, 1), (SHARED, 1)]);
        let uid = spec.uid.clone();
        fixture.kubelet.admit(spec).await.unwrap();
        winners.insert(fixture.kubelet.view(&uid, "main").unwrap().envs["TINY"].clone());
    }
    assert_eq!(winners, set(["a", "b"]));
}

#[tokio::test]
async fn a_restarted_container_gets_the_cached_response_without_a_call() {
    let fixture = Fixture::new().await;
    let plugin = fixture.plugin("a.sock", GPU, &["a"]).await;
    let spec = pod("p").container("main", &[(GPU, 1)]);
    fixture.kubelet.admit(spec.clone()).await.unwrap();
    fixture.kubelet.run(&spec.uid).await.unwrap();
    let view = fixture.kubelet.start_container(&spec.uid, "main").await.unwrap();
    assert_eq!(view.envs["TINY"], "a");
    assert_eq!(plugin.allocated_ids().len(), 1);
}

#[tokio::test]
async fn a_container_cannot_restart_after_its_resource_is_removed() {
    let fixture = Fixture::with(|o| o.endpoint_grace = std::time::Duration::ZERO).await;
    let plugin = fixture.plugin("a.sock", GPU, &["a"]).await;
    let spec = pod("p").container("main", &[(GPU, 1)]);
    fixture.kubelet.admit(spec.clone()).await.unwrap();
    plugin.end_streams();
    fixture
        .kubelet
        .wait_for("the removal of the resource", TIMEOUT, |k| k.capacity(GPU).is_none())
        .await
        .unwrap();
    let error = fixture.kubelet.start_container(&spec.uid, "main").await;
    assert!(error.unwrap_err().to_string().contains("endpoint not found"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_id_removed_during_its_allocate_would_crash_the_kubelet() {
    let fixture = Fixture::new().await;
    let plugin = Arc::new(fixture.plugin("a.sock", GPU, &["a"]).await);
    let (weak, kubelet) = (Arc::downgrade(&plugin), fixture.kubelet.clone());
    plugin.on_allocate(move |_| {
        let list = vec![TinyPlugin::device("b", UNHEALTHY)];
        weak.upgrade().unwrap().send_list(list);
        spin_until(|| !kubelet.anomalies().is_empty());
        Ok(ContainerAllocateResponse::default())
    });
    let spec = pod("p").container("main", &[(GPU, 1)]);
    fixture.kubelet.admit(spec).await.unwrap();
    assert_eq!(
        fixture.kubelet.take_anomalies(),
        [Anomaly::WouldCrashInFlight { resource: GPU.to_owned(), id: "a".to_owned() }]
    );
}
