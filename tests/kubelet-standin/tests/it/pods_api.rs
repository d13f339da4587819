//! The Pods API: a list, its end marker, then changes.

use crate::{Fixture, GPU, TIMEOUT};
use hyper_util::rt::TokioIo;
use kubelet_standin::proto::core::Pod;
use kubelet_standin::proto::v1alpha1::pods_client::PodsClient;
use kubelet_standin::proto::v1alpha1::{
    EventType, GetPodRequest, ListPodsRequest, WatchPodsEvent, WatchPodsRequest,
};
use kubelet_standin::{PodSpec, Sources};
use prost::Message;
use std::time::Duration;
use tokio::net::UnixStream;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Streaming};

async fn client(fixture: &Fixture) -> PodsClient<Channel> {
    let socket = fixture.folder.path().join("pods-api/pods-api.sock");
    let connector = tower::service_fn(move |_| {
        let socket = socket.clone();
        async move { UnixStream::connect(socket).await.map(TokioIo::new) }
    });
    PodsClient::new(
        Endpoint::from_static("http://localhost").connect_with_connector(connector).await.unwrap(),
    )
}

async fn next(events: &mut Streaming<WatchPodsEvent>) -> (EventType, String, Option<String>) {
    let event = tokio::time::timeout(TIMEOUT, events.message()).await.unwrap().unwrap().unwrap();
    let pod = Pod::decode(&*event.pod).unwrap();
    let phase = pod.status.and_then(|s| s.phase);
    (event.r#type(), pod.metadata.and_then(|m| m.uid).unwrap_or_default(), phase)
}

/// The next event that is not that of an admission, which may be part of the event before it.
async fn next_but_admission(events: &mut Streaming<WatchPodsEvent>) -> (EventType, String, Option<String>) {
    let event = next(events).await;
    match (event.0, event.2.as_deref()) {
        (EventType::Modified, Some("Pending")) => next(events).await,
        _ => event,
    }
}

#[tokio::test]
async fn a_pod_has_a_start_time_once_it_is_admitted() {
    // Within an hour nothing is admitted.
    for (admission_wait, is_started) in [(Duration::from_secs(3600), false), (Duration::ZERO, true)] {
        let fixture = Fixture::with(|o| {
            o.pods_api = true;
            o.admission_wait = admission_wait;
        })
        .await;
        let _plugin = fixture.plugin("a.sock", GPU, &["a"]).await;
        let mut events = client(&fixture).await.watch_pods(WatchPodsRequest {}).await.unwrap().into_inner();
        assert_eq!(next(&mut events).await.0, EventType::InitialSyncComplete);
        let spec = PodSpec::new("ns", "a").label("tier", "gold").container("main", &[(GPU, 1)]);
        let admission = fixture.kubelet.admit(spec);
        let event = async {
            loop {
                let event = tokio::time::timeout(TIMEOUT, events.message()).await.unwrap().unwrap().unwrap();
                let pod = Pod::decode(&*event.pod).unwrap();
                assert_eq!(pod.metadata.unwrap().labels["tier"], "gold");
                if pod.status.unwrap().start_time.is_some() == is_started {
                    break;
                }
            }
        };
        if is_started {
            admission.await.unwrap();
            event.await;
        } else {
            tokio::select! { _ = admission => panic!("it is admitted"), () = event => {} }
        }
    }
}

#[tokio::test]
async fn a_watch_sends_the_existing_pods_and_then_changes() {
    let fixture = Fixture::with(|o| o.pods_api = true).await;
    let _plugin = fixture.plugin("a.sock", GPU, &["a"]).await;
    let spec = |name: &str| PodSpec::new("default", name).container("main", &[]);
    let (first, second) = (spec("a"), spec("b"));
    fixture.kubelet.admit(first.clone()).await.unwrap();
    let mut client = client(&fixture).await;
    let mut events = client.watch_pods(WatchPodsRequest {}).await.unwrap().into_inner();
    let pending = Some("Pending".to_owned());
    assert_eq!(next(&mut events).await, (EventType::Added, first.uid.clone(), pending.clone()));
    assert_eq!(next(&mut events).await.0, EventType::InitialSyncComplete);
    fixture.kubelet.admit(second.clone()).await.unwrap();
    assert_eq!(next(&mut events).await, (EventType::Added, second.uid.clone(), pending));
    fixture.kubelet.run(&second.uid).await.unwrap();
    let running = Some("Running".to_owned());
    assert_eq!(next_but_admission(&mut events).await, (EventType::Modified, second.uid.clone(), running));
    // The end is reported once, without a status; the pod's object still exists.
    fixture.kubelet.finish(&second.uid);
    assert_eq!(next(&mut events).await, (EventType::Deleted, second.uid.clone(), None));
    let listed = client.list_pods(ListPodsRequest {}).await.unwrap().into_inner().pods.len();
    assert_eq!(listed, 2);
    // A force-deleted pod is not listed, and reported as deleted when its containers have stopped.
    fixture.kubelet.run(&first.uid).await.unwrap();
    assert_eq!(next(&mut events).await.0, EventType::Modified);
    fixture.kubelet.force_delete(&first.uid);
    let request = GetPodRequest { pod_uid: first.uid.clone() };
    assert_eq!(client.get_pod(request).await.unwrap_err().code(), Code::NotFound);
    fixture.kubelet.delete(&first.uid);
    assert_eq!(next(&mut events).await, (EventType::Deleted, first.uid, None));
}

#[tokio::test]
async fn without_an_api_server_a_kubelet_lists_static_pods_only() {
    let fixture = Fixture::with(|o| o.pods_api = true).await;
    let (static_pod, api_pod) = (PodSpec::new("ns", "a").of_a_file(), PodSpec::new("ns", "b"));
    for spec in [&static_pod, &api_pod] {
        fixture.kubelet.admit(spec.clone()).await.unwrap();
    }
    fixture.kubelet.restart_with(Sources::Waiting { known: vec![static_pod.uid.clone()] }).await.unwrap();
    let mut events = client(&fixture).await.watch_pods(WatchPodsRequest {}).await.unwrap().into_inner();
    assert_eq!(next(&mut events).await.1, static_pod.uid);
    assert_eq!(next(&mut events).await.0, EventType::InitialSyncComplete);
    fixture.kubelet.sources_ready();
    let (kind, uid, _) = next(&mut events).await;
    assert_eq!((kind, uid), (EventType::Added, api_pod.uid));
    fixture.kubelet.set_faults(|f| f.pods_watches_dropped += 1);
    let end = tokio::time::timeout(TIMEOUT, events.message()).await.unwrap().unwrap_err();
    assert_eq!(end.code(), Code::ResourceExhausted);
}
