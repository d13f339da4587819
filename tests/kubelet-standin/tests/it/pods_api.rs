//! The Pods API: a list, a mark, then what changes.

use crate::{Bench, GPU, SOON};
use hyper_util::rt::TokioIo;
use kubelet_standin::proto::core::Pod;
use kubelet_standin::proto::v1alpha1::pods_client::PodsClient;
use kubelet_standin::proto::v1alpha1::{
    EventType, GetPodRequest, ListPodsRequest, WatchPodsEvent, WatchPodsRequest,
};
use kubelet_standin::{PodSpec, Sources};
use prost::Message;
use tokio::net::UnixStream;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Streaming};

async fn client(bench: &Bench) -> PodsClient<Channel> {
    let socket = bench.folder.path().join("pods-api/pods-api.sock");
    let connector = tower::service_fn(move |_| {
        let socket = socket.clone();
        async move { UnixStream::connect(socket).await.map(TokioIo::new) }
    });
    PodsClient::new(
        Endpoint::from_static("http://localhost").connect_with_connector(connector).await.unwrap(),
    )
}

async fn next(events: &mut Streaming<WatchPodsEvent>) -> (EventType, String, Option<String>) {
    let event = tokio::time::timeout(SOON, events.message()).await.unwrap().unwrap().unwrap();
    let pod = Pod::decode(&*event.pod).unwrap();
    let phase = pod.status.and_then(|s| s.phase);
    (event.r#type(), pod.metadata.and_then(|m| m.uid).unwrap_or_default(), phase)
}

#[tokio::test]
async fn a_watch_shows_what_there_is_and_then_what_changes() {
    let bench = Bench::with(|o| o.pods_api = true).await;
    let _plugin = bench.plugin("a.sock", GPU, &["a"]).await;
    let spec = |name: &str| PodSpec::new("default", name).container("main", &[]);
    let (first, second) = (spec("a"), spec("b"));
    bench.kubelet.admit(first.clone()).await.unwrap();
    let mut client = client(&bench).await;
    let mut events = client.watch_pods(WatchPodsRequest {}).await.unwrap().into_inner();
    let pending = Some("Pending".to_owned());
    assert_eq!(next(&mut events).await, (EventType::Added, first.uid.clone(), pending.clone()));
    assert_eq!(next(&mut events).await.0, EventType::InitialSyncComplete);
    bench.kubelet.admit(second.clone()).await.unwrap();
    assert_eq!(next(&mut events).await, (EventType::Added, second.uid.clone(), pending));
    bench.kubelet.run(&second.uid).await.unwrap();
    let running = Some("Running".to_owned());
    assert_eq!(next(&mut events).await, (EventType::Modified, second.uid.clone(), running));
    // Its end is told with its name alone, and once; its object is still there.
    bench.kubelet.finish(&second.uid);
    assert_eq!(next(&mut events).await, (EventType::Deleted, second.uid.clone(), None));
    let listed = client.list_pods(ListPodsRequest {}).await.unwrap().into_inner().pods.len();
    assert_eq!(listed, 2);
    // A pod that is deleted by force is shown no more, and over only when its containers have stopped.
    bench.kubelet.run(&first.uid).await.unwrap();
    assert_eq!(next(&mut events).await.0, EventType::Modified);
    bench.kubelet.force_delete(&first.uid);
    let request = GetPodRequest { pod_uid: first.uid.clone() };
    assert_eq!(client.get_pod(request).await.unwrap_err().code(), Code::NotFound);
    bench.kubelet.delete(&first.uid);
    assert_eq!(next(&mut events).await, (EventType::Deleted, first.uid, None));
}

#[tokio::test]
async fn without_an_api_server_a_kubelet_shows_the_pods_of_its_files() {
    let bench = Bench::with(|o| o.pods_api = true).await;
    let (of_file, of_api) = (PodSpec::new("ns", "a").of_a_file(), PodSpec::new("ns", "b"));
    for spec in [&of_file, &of_api] {
        bench.kubelet.admit(spec.clone()).await.unwrap();
    }
    bench.kubelet.restart_with(Sources::Waiting { known: vec![of_file.uid.clone()] }).await.unwrap();
    let mut events = client(&bench).await.watch_pods(WatchPodsRequest {}).await.unwrap().into_inner();
    assert_eq!(next(&mut events).await.1, of_file.uid);
    assert_eq!(next(&mut events).await.0, EventType::InitialSyncComplete);
    bench.kubelet.sources_ready();
    let (kind, uid, _) = next(&mut events).await;
    assert_eq!((kind, uid), (EventType::Added, of_api.uid));
    bench.kubelet.set_faults(|f| f.pods_watches_dropped += 1);
    let end = tokio::time::timeout(SOON, events.message()).await.unwrap().unwrap_err();
    assert_eq!(end.code(), Code::ResourceExhausted);
}
