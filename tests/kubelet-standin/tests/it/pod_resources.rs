//! The pod resources API.

use crate::{Bench, GPU, SOON};
use hyper_util::rt::TokioIo;
use kubelet_standin::proto::v1::pod_resources_lister_client::PodResourcesListerClient;
use kubelet_standin::proto::v1::{
    AllocatableResourcesRequest, GetPodResourcesRequest, ListPodResourcesRequest, PodResources,
};
use kubelet_standin::{PodSpec, Rpc, Sources};
use std::time::{Duration, Instant};
use tokio::net::UnixStream;
use tonic::transport::{Channel, Endpoint, Error};

async fn dial(bench: &Bench) -> Result<PodResourcesListerClient<Channel>, Error> {
    let path = bench.kubelet.pod_resources_socket();
    let connector = tower::service_fn(move |_| {
        let path = path.clone();
        async move { UnixStream::connect(path).await.map(TokioIo::new) }
    });
    let channel = Endpoint::from_static("http://localhost").connect_with_connector(connector).await?;
    Ok(PodResourcesListerClient::new(channel))
}

pub(crate) async fn list(bench: &Bench) -> Vec<PodResources> {
    let mut client = dial(bench).await.unwrap();
    let answer = client.list(ListPodResourcesRequest {}).await.unwrap();
    answer.into_inner().pod_resources
}

fn names(pods: &[PodResources]) -> Vec<&str> {
    pods.iter().map(|p| p.name.as_str()).collect()
}

#[tokio::test]
async fn list_shows_active_pods_and_no_plain_init_containers() {
    let bench = Bench::new().await;
    let _plugin = bench.plugin("a.sock", GPU, &["a", "b", "c", "d"]).await;
    let spec = PodSpec::new("team", "p")
        .init("prepare", &[(GPU, 1)])
        .sidecar("proxy", &[(GPU, 1)])
        .container("main", &[(GPU, 2)])
        .container("idle", &[]);
    bench.kubelet.admit(spec.clone()).await.unwrap();
    let pods = list(&bench).await;
    assert_eq!((pods[0].name.as_str(), pods[0].namespace.as_str()), ("p", "team"));
    let containers = &pods[0].containers;
    let shown: Vec<_> = containers.iter().map(|c| (c.name.as_str(), c.devices.len())).collect();
    // One entry a device, as the kubelet writes them.
    assert_eq!(shown, [("proxy", 1), ("main", 2), ("idle", 0)]);
    bench.kubelet.finish(&spec.uid);
    assert!(list(&bench).await.is_empty());
    assert!(bench.kubelet.in_use(GPU).is_empty());
}

#[tokio::test]
async fn a_force_deleted_pod_leaves_list_while_it_still_runs() {
    let bench = Bench::new().await;
    let _plugin = bench.plugin("a.sock", GPU, &["a"]).await;
    let spec = PodSpec::new("default", "p").container("main", &[(GPU, 1)]);
    bench.kubelet.admit(spec.clone()).await.unwrap();
    bench.kubelet.run(&spec.uid).await.unwrap();
    bench.kubelet.force_delete(&spec.uid);
    assert!(list(&bench).await.is_empty());
    assert!(bench.kubelet.pod(&spec.uid).is_some());
}

#[tokio::test]
async fn after_a_restart_list_is_empty_or_partial_and_purges_nobody() {
    let bench = Bench::new().await;
    let _plugin = bench.plugin("a.sock", GPU, &["a", "b"]).await;
    let first = PodSpec::new("default", "first").container("main", &[(GPU, 1)]);
    let second = PodSpec::new("default", "second").container("main", &[(GPU, 1)]);
    bench.kubelet.admit(first.clone()).await.unwrap();
    bench.kubelet.admit(second).await.unwrap();
    let waiting = |known: Vec<String>| Sources::Waiting { known };
    bench.kubelet.restart_with(waiting(Vec::new())).await.unwrap();
    assert!(list(&bench).await.is_empty());
    bench.kubelet.restart_with(waiting(vec![first.uid])).await.unwrap();
    assert_eq!(names(&list(&bench).await), ["first"]);
    assert_eq!(bench.kubelet.in_use(GPU).len(), 2);
    bench.kubelet.sources_ready();
    assert_eq!(list(&bench).await.len(), 2);
}

#[tokio::test]
async fn get_and_allocatable_answer() {
    let bench = Bench::new().await;
    let _plugin = bench.plugin("a.sock", GPU, &["a", "b"]).await;
    let spec = PodSpec::new("default", "p").container("main", &[(GPU, 1)]);
    bench.kubelet.admit(spec).await.unwrap();
    let mut client = dial(&bench).await.unwrap();
    let request = AllocatableResourcesRequest {};
    let all = client.get_allocatable_resources(request).await.unwrap();
    assert_eq!(all.into_inner().devices.len(), 2);
    let request = |name: &str| GetPodResourcesRequest {
        pod_name: name.to_owned(),
        pod_namespace: "default".to_owned(),
    };
    let one = client.get(request("p")).await.unwrap().into_inner();
    assert_eq!(one.pod_resources.unwrap().containers[0].devices.len(), 1);
    client.get(request("q")).await.unwrap_err();
}

#[tokio::test]
async fn list_can_hang_fail_and_die() {
    let bench = Bench::new().await;
    let mut client = dial(&bench).await.unwrap();
    bench.kubelet.set_faults(|f| f.list_hangs = true);
    let call = client.list(ListPodResourcesRequest {});
    let hung = tokio::time::timeout(Duration::from_millis(100), call).await;
    assert!(hung.is_err());
    bench.kubelet.set_faults(|f| {
        f.list_hangs = false;
        f.list_fails = true;
    });
    client.list(ListPodResourcesRequest {}).await.unwrap_err();
    bench.kubelet.kill_pod_resources().await;
    assert!(bench.kubelet.pod_resources_socket().exists());
    dial(&bench).await.unwrap_err();
    bench.kubelet.set_faults(|f| f.list_fails = false);
    bench.kubelet.revive_pod_resources().await.unwrap();
    list(&bench).await;
    assert!(bench.kubelet.calls(Rpc::List, "").errors >= 1);
}

#[tokio::test]
async fn calls_are_limited_in_rate() {
    let bench = Bench::new().await;
    let mut client = dial(&bench).await.unwrap();
    // At once, since one after the other they may be slower than the limit.
    let calls: Vec<_> = (0..400)
        .map(|_| {
            let mut client = client.clone();
            tokio::spawn(async move { client.list(ListPodResourcesRequest {}).await })
        })
        .collect();
    let mut refused = 0;
    for call in calls {
        if let Err(status) = call.await.unwrap() {
            assert_eq!(status.code(), tonic::Code::ResourceExhausted);
            refused += 1;
        }
    }
    assert!(refused > 0);
    // And it recovers: the refused calls cost nothing.
    let deadline = Instant::now() + SOON;
    while client.list(ListPodResourcesRequest {}).await.is_err() {
        assert!(Instant::now() < deadline);
        tokio::task::yield_now().await;
    }
}
