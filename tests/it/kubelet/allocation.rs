//! Allocate and GetPreferredAllocation: grants, refusals, responses, malformed requests.

use crate::support::gpus::{SHARED, WHOLE, gpu, gpu_id};
use crate::support::kubelet_node::{KubeletNode, NodeOptions, cordon};
use crate::support::wait::SOON;
use berth_kernel::grants::allocate::RECORDS_PER_DEVICE;
use berth_kernel::grants::allocation::EndReason;
use berth_kernel::ids::names::GpuId;
use berth_kubelet::{DeviceListStrategy, Edits};
use hyper_util::rt::TokioIo;
use kubelet_standin::proto::v1beta1::device_plugin_client::DevicePluginClient;
use kubelet_standin::proto::v1beta1::{
    AllocateRequest, ContainerAllocateRequest, ContainerPreferredAllocationRequest,
    PreferredAllocationRequest,
};
use kubelet_standin::{AdmissionError, CheckpointMode, PodSpec, Rpc};
use std::collections::BTreeSet;
use tokio::net::UnixStream;
use tonic::Code;
use tonic::transport::{Channel, Endpoint};

/// The message that reaches the pod's status.
pub(crate) async fn refused(node: &KubeletNode, pod: PodSpec) -> String {
    match node.kubelet.admit(pod).await {
        Err(AdmissionError::Rejected { reason, message }) => {
            assert_eq!(reason, "UnexpectedAdmissionError");
            message
        }
        other => panic!("{other:?}"),
    }
}

fn pod(name: &str) -> PodSpec {
    PodSpec::new("default", name)
}

#[tokio::test]
async fn a_container_learns_its_gpus_and_its_allocation() {
    let node = NodeOptions::default().started().await;
    node.allocatable(WHOLE, 4).await;
    let spec = pod("p").container("main", &[(WHOLE, 2)]);
    let uid = spec.uid.clone();
    node.kubelet.admit(spec).await.unwrap();
    let view = node.kubelet.view(&uid, "main").unwrap();
    let live = node.live();
    let names: Vec<String> = live[0].devices.iter().map(ToString::to_string).collect();
    assert_eq!(view.envs["NVIDIA_VISIBLE_DEVICES"], names.join(","));
    let id = live[0].id.to_string();
    assert_eq!(view.envs["BERTH_ALLOCATION_ID_NVIDIA_COM_GPU"], id);
    // Both sources are read until they name the holder.
    node.wait("the holder", |l| {
        l.live.values().all(|a| {
            let holder = &a.holder;
            holder.pod.as_deref() == Some("p")
                && holder.namespace.as_deref() == Some("default")
                && holder.container.as_deref() == Some("main")
                && holder.pod_uid.as_deref() == Some(&uid)
        })
    })
    .await;
    node.assert_harmless();
}

#[tokio::test]
async fn shares_of_one_gpu_name_it_once() {
    let node = NodeOptions { gpus: 1, policy: Some("shares=4 env=TOLD_MODE:slow"), ..NodeOptions::default() }
        .started()
        .await;
    node.allocatable(SHARED, 4).await;
    let spec = pod("p").container("main", &[(SHARED, 3)]);
    let uid = spec.uid.clone();
    node.kubelet.admit(spec).await.unwrap();
    let view = node.kubelet.view(&uid, "main").unwrap();
    assert_eq!(view.envs["NVIDIA_VISIBLE_DEVICES"], "GPU-0");
    assert_eq!(view.envs["TOLD_MODE"], "slow");
    assert_eq!(node.live()[0].devices.len(), 3);
    node.assert_harmless();
}

/// An app container uses the devices of its init container again.
/// Report: https://github.com/kubernetes/kubernetes/issues/56022
#[tokio::test]
async fn an_app_container_is_granted_its_init_containers_devices_again() {
    let node = NodeOptions::default().started().await;
    node.allocatable(WHOLE, 4).await;
    let spec = pod("p")
        .init("fetch", &[(WHOLE, 2)])
        .container("main", &[(WHOLE, 1)])
        .container("side", &[(WHOLE, 1)]);
    let uid = spec.uid.clone();
    node.kubelet.admit(spec).await.unwrap();
    assert_eq!(node.live().len(), 3);
    node.reconcile().await;
    // One pod holds them all, so nothing is overlapped and nothing has ended.
    node.wait("settled overlaps", |l| l.live.len() == 3 && l.live.values().all(|a| !a.overlapped)).await;
    assert!(node.live().iter().all(|a| a.holder.pod_uid.as_deref() == Some(&uid)));
    node.assert_harmless();
}

#[tokio::test]
async fn init_devices_are_granted_again_on_a_gpu_that_became_unhealthy() {
    let node =
        NodeOptions { gpus: 2, timing: berth_kernel::ids::time::Timing::default(), ..NodeOptions::default() }
            .started()
            .await;
    node.allocatable(WHOLE, 2).await;
    let init = pod("p").init("fetch", &[(WHOLE, 1)]);
    let uid = init.uid.clone();
    node.kubelet.admit(init).await.unwrap();
    let id = node.kubelet.held(&uid, "fetch", WHOLE).pop_first().unwrap();
    let n = if id == "GPU-0" { 0 } else { 1 };
    node.scan_failing(&[n]).await;
    let mut client = dial_whole(&node).await;
    let answer = client.allocate(allocate(&[&id])).await;
    answer.expect("the kubelet re-uses an init container's devices whatever their health");
    let fresh = if n == 0 { "GPU-1" } else { "GPU-0" };
    node.scan_failing(&[0, 1]).await;
    let refused = client.allocate(allocate(&[fresh])).await.unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition);
}

/// Two pods get the same GPU.
/// Report: https://github.com/NVIDIA/gpu-operator/issues/1021
/// Report: https://github.com/NVIDIA/gpu-operator/issues/28
#[tokio::test]
async fn one_gpu_is_not_granted_twice_and_the_refusal_names_the_holder() {
    let node =
        NodeOptions { gpus: 1, policy: Some("whole shares=2"), ..NodeOptions::default() }.started().await;
    node.allocatable(WHOLE, 1).await;
    node.allocatable(SHARED, 2).await;
    let first = pod("first").container("main", &[(SHARED, 1)]);
    node.kubelet.admit(first).await.unwrap();
    // The list says so before the kubelet can promise it.
    node.kubelet.wait_allocatable(WHOLE, 0, SOON).await.unwrap();
    let mut client = dial_whole(&node).await;
    let status = client.allocate(allocate(&["GPU-0"])).await.unwrap_err();
    assert_eq!(status.code(), Code::ResourceExhausted);
    let text = status.message();
    let holder = node.live()[0].id.to_string();
    for part in ["GPU-0", WHOLE, SHARED, &holder, "berth allocation show"] {
        assert!(text.contains(part), "{part} is missing in {text:?}");
    }
    node.assert_harmless();
}

#[tokio::test]
async fn a_pass_before_the_refusal_finds_that_the_holder_has_ended() {
    let node = NodeOptions {
        gpus: 1,
        policy: Some("whole shares=2"),
        reconcile: berth_kubelet::ReconcileTiming {
            // No periodic scan: only the refusal's reconcile pass finds changes.
            list_interval: std::time::Duration::from_secs(3600),
            list_interval_cordoned: std::time::Duration::from_secs(3600),
            ..NodeOptions::default().reconcile
        },
        ..NodeOptions::default()
    }
    .started()
    .await;
    node.allocatable(SHARED, 2).await;
    let first = pod("first").container("main", &[(SHARED, 1)]);
    let uid = first.uid.clone();
    node.kubelet.admit(first).await.unwrap();
    node.wait("the holder's UID", |l| l.live.values().any(|a| a.holder.pod_uid.is_some())).await;
    node.kubelet.delete(&uid);
    let mut client = dial_whole(&node).await;
    let deadline = std::time::Instant::now() + SOON;
    // Each refusal runs one reconcile pass; the second pass, late enough, proves the end. On a busy machine the pass that
    // found the UID can be the first.
    while client.allocate(allocate(&["GPU-0"])).await.is_err() {
        assert!(std::time::Instant::now() < deadline);
        tokio::time::sleep(std::time::Duration::from_millis(60)).await;
    }
    assert!(node.kubelet.calls(Rpc::List, "").count >= 2);
}

#[tokio::test]
async fn a_cordoned_gpu_whose_pod_just_left_is_not_preferred() {
    let never = std::time::Duration::from_secs(3600);
    let reconcile = berth_kubelet::ReconcileTiming {
        list_interval: never,
        list_interval_cordoned: never,
        ..NodeOptions::default().reconcile
    };
    let node = NodeOptions { reconcile, ..NodeOptions::default() }.started().await;
    node.allocatable(WHOLE, 4).await;
    let first = pod("first").container("main", &[(WHOLE, 1)]);
    let uid = first.uid.clone();
    node.kubelet.admit(first).await.unwrap();
    let held = node.live()[0].devices[0].part.clone();
    node.kernel.execute(cordon(GpuId::of_whole(&held), "")).await.unwrap();
    // The kubelet counts its device as free at once; Berth learns of it in the next pass.
    node.kubelet.delete(&uid);
    for name in ["a", "b", "c"] {
        node.kubelet.admit(pod(name).container("main", &[(WHOLE, 1)])).await.unwrap();
    }
    let others = node.live().iter().filter(|a| a.devices[0].part != held).count();
    assert_eq!(others, 3);
    assert!(node.kubelet.calls(Rpc::GetPreferredAllocation, WHOLE).count >= 3);
}

#[tokio::test]
async fn refusals_reach_the_pod_with_name_and_advice() {
    let node = NodeOptions::default().started().await;
    node.allocatable(WHOLE, 4).await;
    let mut client = dial_whole(&node).await;
    node.kernel.execute(cordon(gpu_id(1), "fan noise")).await.unwrap();
    let status = client.allocate(allocate(&["GPU-1"])).await.unwrap_err();
    assert_eq!(status.code(), Code::FailedPrecondition);
    for part in ["GPU-1", WHOLE, "ada", "fan noise", "berth gpu uncordon GPU-1"] {
        assert!(status.message().contains(part), "{status}");
    }
    node.activate("whole deny=not-on-Sundays").await;
    let text = refused(&node, pod("p").container("main", &[(WHOLE, 1)])).await;
    for part in ["PermissionDenied", "scripted@", "not-on-Sundays", "berth policy list"] {
        assert!(text.contains(part), "{text}");
    }
    node.activate("whole deny=fault").await;
    let text = refused(&node, pod("q").container("main", &[(WHOLE, 1)])).await;
    for part in ["scripted@", "unreachable", "onFault"] {
        assert!(text.contains(part), "{text}");
    }
    assert!(node.live().is_empty());
    node.assert_harmless();
}

#[tokio::test]
async fn several_ways_of_naming_devices_work_at_once() {
    let edits = Edits {
        strategies: BTreeSet::from([
            DeviceListStrategy::Envvar,
            DeviceListStrategy::VolumeMounts,
            DeviceListStrategy::CdiAnnotations,
            DeviceListStrategy::CdiCri,
        ]),
        ..Edits::default()
    };
    let mut options = NodeOptions { policy: Some("whole shares=2"), edits, ..NodeOptions::default() };
    // Some pods are refused in this test.
    options.timing.breaker_window_ms = 0;
    let node = options.started().await;
    node.allocatable(WHOLE, 4).await;
    node.allocatable(SHARED, 8).await;
    // Two of our resources in one container: the environment keeps one, the others merge. The
    // kubelet may pick the same GPU for both, which is refused; the next pod has better luck.
    let mut admitted = None;
    for n in 0..16 {
        let spec = pod(&format!("p{n}")).container("main", &[(WHOLE, 1), (SHARED, 1)]);
        let uid = spec.uid.clone();
        if node.kubelet.admit(spec).await.is_ok() {
            admitted = Some(uid);
            break;
        }
        // What was granted before the refusal ends first, or the GPUs would run out.
        node.wait("the dropped grants' ends", |l| l.live.is_empty()).await;
    }
    let uid = admitted.expect("one of 16 pods gets two GPUs");
    let view = node.kubelet.view(&uid, "main").unwrap();
    // For each resource its CDI devices and its grant.
    assert_eq!(view.annotations.len(), 4);
    assert_eq!(view.mounts.len(), 2);
    assert_eq!(view.cdi_devices.len(), 2);
    assert!(view.envs.contains_key("BERTH_ALLOCATION_ID_NVIDIA_COM_GPU"));
    assert!(view.envs.contains_key("BERTH_ALLOCATION_ID_NVIDIA_COM_GPU_SHARED"));
    assert_eq!(view.envs["NVIDIA_VISIBLE_DEVICES"].split(',').count(), 1);
}

/// A client of our own on the socket that serves whole GPUs.
pub(crate) async fn dial_whole(node: &KubeletNode) -> DevicePluginClient<Channel> {
    let mut sockets = Vec::new();
    for entry in std::fs::read_dir(node.plugins_folder()).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        if name.starts_with("berth-") {
            sockets.push(path);
        }
    }
    sockets.sort();
    // With two resources the one that lists whole GPUs is found by asking.
    for path in sockets {
        let mut client = client(path).await;
        let request = PreferredAllocationRequest { container_requests: vec![prefer(&["GPU-0"], &[], 1)] };
        let answer = client.get_preferred_allocation(request).await.unwrap();
        if !answer.into_inner().container_responses[0].device_i_ds.is_empty() {
            return client;
        }
    }
    panic!("no socket serves whole GPUs");
}

pub(crate) async fn client(path: std::path::PathBuf) -> DevicePluginClient<Channel> {
    let connector = tower::service_fn(move |_| {
        let path = path.clone();
        async move { UnixStream::connect(path).await.map(TokioIo::new) }
    });
    let channel = Endpoint::from_static("http://localhost").connect_with_connector(connector).await.unwrap();
    DevicePluginClient::new(channel)
}

pub(crate) fn allocate(ids: &[&str]) -> AllocateRequest {
    AllocateRequest {
        container_requests: vec![ContainerAllocateRequest {
            devices_ids: ids.iter().map(|id| (*id).to_owned()).collect(),
        }],
    }
}

pub(crate) fn prefer(
    available: &[&str],
    required: &[&str],
    size: i32,
) -> ContainerPreferredAllocationRequest {
    let owned = |ids: &[&str]| ids.iter().map(|id| (*id).to_owned()).collect();
    ContainerPreferredAllocationRequest {
        available_device_i_ds: owned(available),
        must_include_device_i_ds: owned(required),
        allocation_size: size,
    }
}

#[tokio::test]
async fn invalid_requests_are_refused_without_effect() {
    let node = NodeOptions::default().started().await;
    node.allocatable(WHOLE, 4).await;
    let mut client = dial_whole(&node).await;
    let many: Vec<String> = (0..3000).map(|n| format!("GPU-{n}")).collect();
    let many: Vec<&str> = many.iter().map(String::as_str).collect();
    let long = "x".repeat(64);
    for (ids, says) in [
        (&[][..], "names no device"),
        (&["GPU-0", "GPU-0"][..], "twice"),
        (&["GPU-9"][..], "not in this plugin's list"),
        (&["GPU-0::1"][..], "not in this plugin's list"),
        (&["GPU 0"][..], "invalid device id"),
        (&[""][..], "invalid device id"),
        (&[long.as_str()][..], "invalid device id"),
        (&many[..], "at most 2048"),
    ] {
        let status = client.allocate(allocate(ids)).await.unwrap_err();
        assert_eq!(status.code(), Code::InvalidArgument, "{ids:?}");
        assert!(status.message().contains(says), "{status}");
    }
    let none = AllocateRequest::default();
    let status = client.allocate(none).await.unwrap_err();
    assert_eq!(status.code(), Code::InvalidArgument);
    let huge = "x".repeat(2 * 1024 * 1024);
    client.allocate(allocate(&[&huge])).await.unwrap_err();
    assert!(node.live().is_empty());
    let spec = pod("p").container("main", &[(WHOLE, 1)]);
    node.kubelet.admit(spec).await.unwrap();
    node.assert_harmless();
}

/// A placement that fails rejects every pod of the node.
/// Report: https://github.com/NVIDIA/k8s-device-plugin/issues/2038
/// Report: https://github.com/NVIDIA/k8s-device-plugin/issues/231
#[tokio::test]
async fn a_placement_is_never_an_error_for_reasons_of_placement() {
    let node = NodeOptions::default().started().await;
    node.allocatable(WHOLE, 4).await;
    let mut client = dial_whole(&node).await;
    for (request, expected) in [
        // Ids that left the list meanwhile are no reason to fail a pod.
        (prefer(&["GPU-0", "GPU-7", "GPU-1"], &[], 1), 1),
        (prefer(&["GPU-7"], &["GPU-7"], 1), 0),
        (prefer(&["GPU-0", "GPU-1"], &["GPU-1"], 2), 2),
        (prefer(&["GPU-0", "GPU-1"], &[], 9), 2),
        (prefer(&["GPU-0"], &[], 0), 0),
        (prefer(&[], &[], 1), 0),
        (prefer(&["GPU-0", "GPU-1", "GPU-2"], &["GPU-2"], 1), 1),
    ] {
        let request = PreferredAllocationRequest { container_requests: vec![request] };
        let answer = client.get_preferred_allocation(request.clone()).await;
        let answer = answer.unwrap().into_inner().container_responses;
        let ids: BTreeSet<&String> = answer[0].device_i_ds.iter().collect();
        assert_eq!(ids.len(), expected, "{request:?}");
        let asked = &request.container_requests[0];
        assert!(ids.iter().all(|id| asked.available_device_i_ds.contains(id)));
    }
    for malformed in
        [prefer(&["GPU-0", "GPU-0"], &[], 1), prefer(&["GPU-0"], &[], -1), prefer(&["G P U"], &[], 1)]
    {
        let request = PreferredAllocationRequest { container_requests: vec![malformed] };
        let status = client.get_preferred_allocation(request).await.unwrap_err();
        assert_eq!(status.code(), Code::InvalidArgument);
    }
}

#[tokio::test]
async fn a_restarted_container_costs_no_call() {
    let node = NodeOptions::default().started().await;
    node.allocatable(WHOLE, 4).await;
    let spec = pod("p").container("main", &[(WHOLE, 1)]);
    let uid = node.run(spec).await;
    let before = node.kubelet.view(&uid, "main");
    let again = node.kubelet.start_container(&uid, "main").await.unwrap();
    assert_eq!(Some(again), before);
    assert_eq!(node.kubelet.calls(Rpc::Allocate, WHOLE).count, 1);
    assert_eq!(node.kubelet.calls(Rpc::PreStartContainer, WHOLE).count, 0);
}

/// One call for containers that name these devices each.
fn together(containers: &[&[&str]]) -> AllocateRequest {
    let container_requests = containers.iter().flat_map(|ids| allocate(ids).container_requests).collect();
    AllocateRequest { container_requests }
}

#[tokio::test]
async fn containers_of_one_call_are_granted_together_or_not_at_all() {
    let node = NodeOptions::default().started().await;
    node.allocatable(WHOLE, 4).await;
    let mut client = dial_whole(&node).await;
    node.kernel.execute(cordon(gpu_id(3), "")).await.unwrap();
    for (second, code) in [("GPU-9", Code::InvalidArgument), ("GPU-3", Code::FailedPrecondition)] {
        let status = client.allocate(together(&[&["GPU-0"], &[second]])).await.unwrap_err();
        assert_eq!(status.code(), code);
        assert!(status.message().contains(second), "{status}");
        assert!(node.live().is_empty(), "{second}");
    }
    let answer = client.allocate(together(&[&["GPU-0"], &["GPU-1", "GPU-2"]])).await.unwrap().into_inner();
    let live = node.live();
    assert_eq!((live.len(), live[0].devices.len()), (1, 3));
    let of_container = |n: usize, key: &str| answer.container_responses[n].envs[key].clone();
    assert_eq!(of_container(0, "NVIDIA_VISIBLE_DEVICES"), "GPU-0");
    assert_eq!(of_container(1, "NVIDIA_VISIBLE_DEVICES"), "GPU-1,GPU-2");
    for n in [0, 1] {
        assert_eq!(of_container(n, "BERTH_ALLOCATION_ID_NVIDIA_COM_GPU"), live[0].id.to_string());
    }
}

#[tokio::test]
async fn a_device_that_containers_of_one_call_share_is_held_once() {
    let node = NodeOptions::default().started().await;
    node.allocatable(WHOLE, 4).await;
    let mut client = dial_whole(&node).await;
    let answer = client.allocate(together(&[&["GPU-0"][..]; 16])).await.unwrap().into_inner();
    assert_eq!(answer.container_responses.len(), 16);
    assert_eq!(node.live().len(), 1);
    let many = client.allocate(together(&[&["GPU-0"][..]; 17])).await.unwrap_err();
    assert_eq!(many.code(), Code::InvalidArgument);
}

#[tokio::test]
async fn without_evidence_the_same_gpus_are_granted_again_and_again_and_their_records_stay_few() {
    let node = NodeOptions::default().started().await;
    node.allocatable(WHOLE, 4).await;
    node.kubelet.set_faults(|f| f.checkpoint = CheckpointMode::Frozen);
    let mut client = dial_whole(&node).await;
    for n in 0..200 {
        client.allocate(allocate(&[&format!("GPU-{}", n % 4)])).await.unwrap();
        assert!(node.live().len() <= 4 * RECORDS_PER_DEVICE, "{} after {n}", node.live().len());
    }
    let snapshot = node.kernel.snapshot();
    assert!(snapshot.ended.iter().any(|past| past.end().reason == EndReason::Superseded));
    assert!((0..4).all(|n| snapshot.part(&gpu(n)).unwrap().held()), "nothing became free");
}

#[tokio::test]
async fn nothing_is_offered_before_the_start_requests_it() {
    let node = NodeOptions::default().scanned().await;
    let nothing = async |node: &KubeletNode| {
        // Longer than the batching of ledger changes before offers are evaluated.
        tokio::time::sleep(std::time::Duration::from_millis(300)).await;
        let offered = node.kernel.snapshot().resources();
        assert!(offered.is_empty(), "the baseline's offer would stay listed for a minute");
    };
    nothing(&node).await;
    // An activation that fails may be tried again, and the stack is empty until then.
    node.try_activate("shares=10 slow").await.unwrap_err();
    node.scan_failing(&[]).await;
    nothing(&node).await;
    node.activate("shares=10").await;
    let listed = |node: &KubeletNode| {
        node.kernel.snapshot().resources().iter().map(ToString::to_string).collect::<Vec<_>>()
    };
    assert_eq!(listed(&node), [SHARED]);
    // From then on offers follow the node.
    node.scan_without(&[3], &[]).await;
    node.scan_failing(&[]).await;
    node.activate("whole").await;
    node.wait("the new offer", |l| l.parts.values().all(|p| p.lines[0].resource.as_str() == WHOLE)).await;
}
