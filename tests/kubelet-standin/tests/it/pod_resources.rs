//! The pod resources API.

use crate::{Fixture, GPU, TIMEOUT};
use hyper_util::rt::TokioIo;
use kubelet_standin::proto::v1::pod_resources_lister_client::PodResourcesListerClient;
use kubelet_standin::proto::v1::{
    AllocatableResourcesRequest, GetPodResourcesRequest, ListPodResourcesRequest, PodResources,
};
use kubelet_standin::{PodSpec, Rpc, Sources};
use std::time::{Duration, Instant};
use tokio::net::UnixStream;
use tonic::transport::{Channel, Endpoint, Error};

async fn dial(fixture: &Fixture) -> Result<PodResourcesListerClient<Channel>, Error> {
    let path = fixture.kubelet.pod_resources_socket();
    let connector = tower::service_fn(move |_| {
        let path = path.clone();
        async move { UnixStream::connect(path).await.map(TokioIo::new) }
    });
    let channel = Endpoint::from_static("http://localhost").connect_with_connector(connector).await?;
    Ok(PodResourcesListerClient::new(channel))
}

pub(crate) async fn list(fixture: &Fixture) -> Vec<PodResources> {
    let mut client = dial(fixture).await.unwrap();
    let response = client.list(ListPodResourcesRequest {}).await.unwrap();
    response.into_inner().pod_resources
}

fn names(pods: &[PodResources]) -> Vec<&str> {
    pods.iter().map(|p| p.name.as_str()).collect()
}

#[tokio::test]
async fn list_contains_active_pods_without_plain_init_containers() {
    let fixture = Fixture::new().await;
    let _plugin = fixture.plugin("a.sock", GPU, &["a", "b", "c", "d"]).await;
    let spec = PodSpec::new("team", "p")
        .init("prepare", &[(GPU, 1)])
        .sidecar("proxy", &[(GPU, 1)])
        .container("main", &[(GPU, 2)])
        .container("idle", &[]);
    fixture.kubelet.admit(spec.clone()).await.unwrap();
    let pods = list(&fixture).await;
    assert_eq!((pods[0].name.as_str(), pods[0].namespace.as_str()), ("p", "team"));
    let containers = &pods[0].containers;
    let listed: Vec<_> = containers.iter().map(|c| (c.name.as_str(), c.devices.len())).collect();
    // One entry per device, as in the kubelet.
    assert_eq!(listed, [("proxy", 1), ("main", 2), ("idle", 0)]);
    fixture.kubelet.finish(&spec.uid);
    assert!(list(&fixture).await.is_empty());
    assert!(fixture.kubelet.in_use(GPU).is_empty());
}

#[tokio::test]
async fn list_omits_a_force_deleted_pod_that_still_runs() {
    let fixture = Fixture::new().await;
    let _plugin = fixture.plugin("a.sock", GPU, &["a"]).await;
    let spec = PodSpec::new("default", "p").container("main", &[(GPU, 1)]);
    fixture.kubelet.admit(spec.clone()).await.unwrap();
    fixture.kubelet.run(&spec.uid).await.unwrap();
    fixture.kubelet.force_delete(&spec.uid);
    assert!(list(&fixture).await.is_empty());
    assert!(fixture.kubelet.pod(&spec.uid).is_some());
}

#[tokio::test]
async fn after_a_restart_list_is_incomplete_and_purges_no_pod() {
    let fixture = Fixture::new().await;
    let _plugin = fixture.plugin("a.sock", GPU, &["a", "b"]).await;
    let first = PodSpec::new("default", "first").container("main", &[(GPU, 1)]);
    let second = PodSpec::new("default", "second").container("main", &[(GPU, 1)]);
    fixture.kubelet.admit(first.clone()).await.unwrap();
    fixture.kubelet.admit(second).await.unwrap();
    let waiting = |known: Vec<String>| Sources::Waiting { known };
    fixture.kubelet.restart_with(waiting(Vec::new())).await.unwrap();
    assert!(list(&fixture).await.is_empty());
    fixture.kubelet.restart_with(waiting(vec![first.uid])).await.unwrap();
    assert_eq!(names(&list(&fixture).await), ["first"]);
    assert_eq!(fixture.kubelet.in_use(GPU).len(), 2);
    fixture.kubelet.sources_ready();
    assert_eq!(list(&fixture).await.len(), 2);
}

#[tokio::test]
async fn get_and_get_allocatable_resources_work() {
    let fixture = Fixture::new().await;
    let _plugin = fixture.plugin("a.sock", GPU, &["a", "b"]).await;
    let spec = PodSpec::new("default", "p").container("main", &[(GPU, 1)]);
    fixture.kubelet.admit(spec).await.unwrap();
    let mut client = dial(&fixture).await.unwrap();
    let request = AllocatableResourcesRequest {};
    let response = client.get_allocatable_resources(request).await.unwrap();
    assert_eq!(response.into_inner().devices.len(), 2);
    let request = |name: &str| GetPodResourcesRequest {
        pod_name: name.to_owned(),
        pod_namespace: "default".to_owned(),
    };
    let response = client.get(request("p")).await.unwrap().into_inner();
    assert_eq!(response.pod_resources.unwrap().containers[0].devices.len(), 1);
    client.get(request("q")).await.unwrap_err();
}

#[tokio::test]
async fn list_can_hang_fail_and_be_unavailable() {
    let fixture = Fixture::new().await;
    let mut client = dial(&fixture).await.unwrap();
    fixture.kubelet.set_faults(|f| f.list_hangs = true);
    let call = client.list(ListPodResourcesRequest {});
    let result = tokio::time::timeout(Duration::from_millis(100), call).await;
    assert!(result.is_err());
    fixture.kubelet.set_faults(|f| {
        f.list_hangs = false;
        f.list_fails = true;
    });
    client.list(ListPodResourcesRequest {}).await.unwrap_err();
    fixture.kubelet.kill_pod_resources().await;
    assert!(fixture.kubelet.pod_resources_socket().exists());
    dial(&fixture).await.unwrap_err();
    fixture.kubelet.set_faults(|f| f.list_fails = false);
    fixture.kubelet.revive_pod_resources().await.unwrap();
    list(&fixture).await;
    assert!(fixture.kubelet.calls(Rpc::List, "").errors >= 1);
}

#[tokio::test]
async fn the_rate_of_calls_is_limited() {
    let fixture = Fixture::new().await;
    let mut client = dial(&fixture).await.unwrap();
    let deadline = Instant::now() + TIMEOUT;
    let mut refused = 0;
    // On a busy machine even concurrent calls may stay below the limit.
    while refused == 0 {
        assert!(Instant::now() < deadline);
        let calls: Vec<_> = (0..400)
            .map(|_| {
                let mut client = client.clone();
                tokio::spawn(async move { client.list(ListPodResourcesRequest {}).await })
            })
            .collect();
        for call in calls {
            if let Err(status) = call.await.unwrap() {
                assert_eq!(status.code(), tonic::Code::ResourceExhausted);
                refused += 1;
            }
        }
    }
    // Refused calls use no tokens, so calls succeed again.
    let deadline = Instant::now() + TIMEOUT;
    while client.list(ListPodResourcesRequest {}).await.is_err() {
        assert!(Instant::now() < deadline);
        tokio::task::yield_now().await;
    }
}
