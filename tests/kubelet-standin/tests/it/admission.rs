//! Selection, Allocate, sharing, failure, merging.

use crate::{Bench, GPU, SHARED, SOON, set};
use kubelet_standin::proto::v1beta1::{ContainerAllocateResponse, Device, NumaNode, TopologyInfo};
use kubelet_standin::{AdmissionError, Anomaly, HEALTHY, Phase, PodSpec, Rpc, TinyPlugin, UNHEALTHY};
use std::{collections::BTreeSet, sync::Arc, time::Instant};
use tonic::Status;

fn pod(name: &str) -> PodSpec {
    PodSpec::new("default", name)
}

#[tokio::test]
async fn the_plugin_is_asked_and_its_answer_cut_to_what_is_available() {
    let bench = Bench::new().await;
    let plugin = bench.plugin("a.sock", GPU, &["a", "b", "c", "d"]).await;
    plugin.on_prefer(|_| Ok(vec!["c".into(), "nonsense".into()]));
    let spec = pod("p").container("main", &[(GPU, 2)]);
    let uid = spec.uid.clone();
    bench.kubelet.admit(spec).await.unwrap();
    let held = bench.kubelet.held(&uid, "main", GPU);
    // Too few were answered, so the kubelet took another one by itself.
    assert!(held.contains("c") && held.len() == 2, "{held:?}");
    let asked = &plugin.asked()[0].container_requests[0];
    assert_eq!((asked.allocation_size, asked.available_device_i_ds.len()), (2, 4));
    assert_eq!(bench.kubelet.anomalies(), []);
}

#[tokio::test]
async fn an_error_of_get_preferred_allocation_fails_the_pod() {
    let bench = Bench::new().await;
    let plugin = bench.plugin("a.sock", GPU, &["a", "b"]).await;
    plugin.on_prefer(|_| Err(Status::invalid_argument("cannot say")));
    let spec = pod("p").container("main", &[(GPU, 1)]);
    let uid = spec.uid.clone();
    let error = bench.kubelet.admit(spec).await.unwrap_err();
    let AdmissionError::Rejected { reason, message } = error else {
        panic!("{error}");
    };
    assert_eq!(reason, "UnexpectedAdmissionError");
    assert_eq!(
        message,
        "Allocate failed due to device plugin GetPreferredAllocation rpc failed with err: rpc error: code = InvalidArgument desc = cannot say, which is unexpected"
    );
    assert!(matches!(bench.kubelet.pod(&uid).unwrap().phase, Phase::Failed { .. }));
    assert_eq!(bench.kubelet.calls(Rpc::Allocate, GPU).count, 0);
}

#[tokio::test]
async fn an_error_of_allocate_reaches_the_pod_in_the_kubelets_words() {
    let bench = Bench::new().await;
    let plugin = bench.plugin("a.sock", GPU, &["a"]).await;
    plugin.on_allocate(|_| Err(Status::failed_precondition("GPU a is cordoned")));
    let error = bench.kubelet.admit(pod("p").container("main", &[(GPU, 1)])).await;
    assert_eq!(
        error.unwrap_err().to_string(),
        "UnexpectedAdmissionError: Allocate failed due to rpc error: code = FailedPrecondition desc = GPU a is cordoned, which is unexpected"
    );
    assert_eq!(bench.kubelet.in_use(GPU), BTreeSet::new());
}

#[tokio::test]
async fn too_many_devices_are_refused_without_asking_the_plugin() {
    let bench = Bench::new().await;
    let plugin = bench.plugin("a.sock", GPU, &["a"]).await;
    let error = bench.kubelet.admit(pod("p").container("main", &[(GPU, 2)])).await;
    let text = error.unwrap_err().to_string();
    assert!(text.contains("Requested: 2, Available: 1"), "{text}");
    assert!(plugin.asked().is_empty() && plugin.allocated().is_empty());
}

fn on_node(id: &str, node: i64) -> Device {
    Device {
        id: id.to_owned(),
        health: HEALTHY.to_owned(),
        topology: Some(TopologyInfo { nodes: vec![NumaNode { id: node }] }),
    }
}

#[tokio::test]
async fn aligned_devices_are_taken_without_asking_when_all_of_them_are_needed() {
    let bench = Bench::new().await;
    let plugin = bench.plugin("a.sock", GPU, &["a"]).await;
    plugin.list(vec![on_node("a", 0), on_node("b", 0), on_node("c", 1), on_node("d", 1)]);
    bench.kubelet.wait_allocatable(GPU, 4, SOON).await.unwrap();
    let exact = pod("exact").container("main", &[(GPU, 2)]).numa(&[1]);
    let uid = exact.uid.clone();
    bench.kubelet.admit(exact).await.unwrap();
    assert_eq!(bench.kubelet.held(&uid, "main", GPU), set(["c", "d"]));
    assert!(plugin.asked().is_empty());
    // Fewer than are aligned: now the plugin is asked, about the aligned ones only.
    let choice = pod("choice").container("main", &[(GPU, 1)]).numa(&[0]);
    bench.kubelet.admit(choice).await.unwrap();
    let asked = plugin.asked()[0].container_requests[0].clone();
    let available: BTreeSet<_> = asked.available_device_i_ds.into_iter().collect();
    assert_eq!(available, set(["a", "b"]));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_app_container_gets_the_init_containers_devices_whatever_their_health() {
    let bench = Bench::new().await;
    let plugin = Arc::new(bench.plugin("a.sock", GPU, &["a", "b", "c"]).await);
    let (weak, kubelet) = (Arc::downgrade(&plugin), bench.kubelet.clone());
    // While the init container's two are granted, exactly those fall ill.
    plugin.on_allocate(move |ids| {
        if ids.len() == 2 {
            let health = |id: &str| {
                if ids.iter().any(|i| i == id) { UNHEALTHY } else { HEALTHY }
            };
            let list = ["a", "b", "c"].map(|id| TinyPlugin::device(id, health(id)));
            weak.upgrade().unwrap().list(list.into());
            spin_until(|| kubelet.allocatable(GPU) == Some(1));
        }
        Ok(ContainerAllocateResponse::default())
    });
    let spec =
        pod("p").init("fetch", &[(GPU, 2)]).container("main", &[(GPU, 1)]).container("side", &[(GPU, 1)]);
    let uid = spec.uid.clone();
    bench.kubelet.admit(spec).await.unwrap();
    let first = bench.kubelet.held(&uid, "fetch", GPU);
    let main = bench.kubelet.held(&uid, "main", GPU);
    let side = bench.kubelet.held(&uid, "side", GPU);
    assert_eq!(main.union(&side).cloned().collect::<BTreeSet<_>>(), first);
    assert!(main.is_disjoint(&side));
    assert_eq!(bench.kubelet.calls(Rpc::Allocate, GPU).count, 3);
    assert_eq!(bench.kubelet.anomalies(), []);
}

/// For the plugin's own callbacks, which are not async. The other tasks of this
/// worker, the list's sender among them, move to another one meanwhile.
fn spin_until(holds: impl Fn() -> bool) {
    let deadline = Instant::now() + SOON;
    tokio::task::block_in_place(|| {
        while !holds() {
            assert!(Instant::now() < deadline, "waited {SOON:?} in vain");
            std::thread::yield_now();
        }
    });
}

#[tokio::test]
async fn a_sidecar_keeps_its_devices_to_itself() {
    let bench = Bench::new().await;
    let _plugin = bench.plugin("a.sock", GPU, &["a", "b"]).await;
    let spec = pod("p").sidecar("proxy", &[(GPU, 1)]).container("main", &[(GPU, 1)]);
    let uid = spec.uid.clone();
    bench.kubelet.admit(spec).await.unwrap();
    let proxy = bench.kubelet.held(&uid, "proxy", GPU);
    assert!(proxy.is_disjoint(&bench.kubelet.held(&uid, "main", GPU)));
}

#[tokio::test]
async fn a_second_resource_that_fails_leaves_a_grant_that_nobody_sees() {
    let bench = Bench::new().await;
    let gpu = bench.plugin("a.sock", GPU, &["a"]).await;
    let shared = bench.plugin("b.sock", SHARED, &["a::0"]).await;
    let both = [(GPU, 1), (SHARED, 1)];
    gpu.on_allocate(|_| Ok(ContainerAllocateResponse::default()));
    shared.on_allocate(|_| Err(Status::internal("no")));
    let mut leaked = None;
    for n in 0..32 {
        let before = std::fs::read(bench.kubelet.checkpoint_path()).unwrap();
        let spec = pod(&format!("p{n}")).container("main", &both);
        let uid = spec.uid.clone();
        bench.kubelet.admit(spec).await.unwrap_err();
        let after = std::fs::read(bench.kubelet.checkpoint_path()).unwrap();
        assert_eq!(before, after, "a failed admission writes no checkpoint");
        if !bench.kubelet.held(&uid, "main", GPU).is_empty() {
            leaked = Some(uid);
            break;
        }
    }
    let leaked = leaked.expect("one of 32 orders asks for the whole GPU first");
    assert_eq!(bench.kubelet.in_use(GPU), set(["a"]));
    // The next admission finds the pod dead and takes the device back.
    bench.kubelet.admit(pod("next").container("main", &[(GPU, 1)])).await.unwrap();
    assert!(bench.kubelet.held(&leaked, "main", GPU).is_empty());
}

#[tokio::test]
async fn two_resources_environments_merge_and_the_first_met_wins() {
    let mut winners = BTreeSet::new();
    for seed in 0..16 {
        let bench = Bench::with(|o| o.seed = seed).await;
        let _gpu = bench.plugin("a.sock", GPU, &["a"]).await;
        let _shared = bench.plugin("b.sock", SHARED, &["b"]).await;
        let spec = pod("p").container("main", &[(GPU, 1), (SHARED, 1)]);
        let uid = spec.uid.clone();
        bench.kubelet.admit(spec).await.unwrap();
        winners.insert(bench.kubelet.view(&uid, "main").unwrap().envs["TINY"].clone());
    }
    assert_eq!(winners, set(["a", "b"]));
}

#[tokio::test]
async fn a_restarted_container_gets_the_cached_answer_without_a_call() {
    let bench = Bench::new().await;
    let plugin = bench.plugin("a.sock", GPU, &["a"]).await;
    let spec = pod("p").container("main", &[(GPU, 1)]);
    bench.kubelet.admit(spec.clone()).await.unwrap();
    bench.kubelet.run(&spec.uid).await.unwrap();
    let view = bench.kubelet.start_container(&spec.uid, "main").await.unwrap();
    assert_eq!(view.envs["TINY"], "a");
    assert_eq!(plugin.allocated().len(), 1);
}

#[tokio::test]
async fn a_container_restarts_no_more_once_its_resource_is_gone() {
    let bench = Bench::with(|o| o.endpoint_grace = std::time::Duration::ZERO).await;
    let plugin = bench.plugin("a.sock", GPU, &["a"]).await;
    let spec = pod("p").container("main", &[(GPU, 1)]);
    bench.kubelet.admit(spec.clone()).await.unwrap();
    plugin.end_streams();
    bench.kubelet.wait_for("the resource to go", SOON, |k| k.capacity(GPU).is_none()).await.unwrap();
    let error = bench.kubelet.start_container(&spec.uid, "main").await;
    assert!(error.unwrap_err().to_string().contains("endpoint not found"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_id_that_leaves_during_its_allocate_would_crash_the_kubelet() {
    let bench = Bench::new().await;
    let plugin = Arc::new(bench.plugin("a.sock", GPU, &["a"]).await);
    let (weak, kubelet) = (Arc::downgrade(&plugin), bench.kubelet.clone());
    plugin.on_allocate(move |_| {
        let list = vec![TinyPlugin::device("b", UNHEALTHY)];
        weak.upgrade().unwrap().list(list);
        spin_until(|| !kubelet.anomalies().is_empty());
        Ok(ContainerAllocateResponse::default())
    });
    let spec = pod("p").container("main", &[(GPU, 1)]);
    bench.kubelet.admit(spec).await.unwrap();
    assert_eq!(
        bench.kubelet.take_anomalies(),
        [Anomaly::WouldCrashInFlight { resource: GPU.to_owned(), id: "a".to_owned() }]
    );
}
