//! The Pods API on `pods-api/pods-api.sock`, if enabled in the options.
//!
//! As in the kubelet, it lists the pods that this kubelet knows, which is not all of them while the API
//! server is unavailable; `DELETED` means that a pod's containers have stopped permanently, and a
//! force-deleted pod is missing before that.

use crate::calls::Rpc;
use crate::kubelet_state::KubeletState;
use crate::node_state::lock;
use crate::pods::{ContainerSpec, Phase, Pod};
use crate::proto::core;
use crate::proto::v1alpha1::pods_server::Pods;
use crate::proto::v1alpha1::{
    EventType, GetPodRequest, GetPodResponse, ListPodsRequest, ListPodsResponse, WatchPodsEvent,
    WatchPodsRequest,
};
use prost::Message;
use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Instant,
};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status};

/// Events that are queued for one client.
const EVENTS_MAX: usize = 100;
/// The annotation with the source of a static pod.
const CONFIG_SOURCE: &str = "kubernetes.io/config.source";

pub(crate) struct PodsService(pub(crate) Arc<KubeletState>);

type RpcResult<T> = Result<Response<T>, Status>;

#[tonic::async_trait]
impl Pods for PodsService {
    type WatchPodsStream = ReceiverStream<Result<WatchPodsEvent, Status>>;

    async fn watch_pods(&self, _: Request<WatchPodsRequest>) -> RpcResult<Self::WatchPodsStream> {
        let (send, events) = mpsc::channel(EVENTS_MAX);
        self.0.node.record(Rpc::WatchPods, "", Instant::now(), false);
        let state = Arc::clone(&self.0);
        tokio::spawn(async move {
            let _ = watch(&state, &send).await;
        });
        Ok(Response::new(ReceiverStream::new(events)))
    }

    async fn list_pods(&self, _: Request<ListPodsRequest>) -> RpcResult<ListPodsResponse> {
        let pods = self.0.listed_pods().into_values().map(|pod| pod.encode_to_vec()).collect();
        Ok(Response::new(ListPodsResponse { pods }))
    }

    async fn get_pod(&self, request: Request<GetPodRequest>) -> RpcResult<GetPodResponse> {
        let uid = request.into_inner().pod_uid;
        let pod = self.0.listed_pods().remove(&uid);
        let pod = pod.ok_or_else(|| Status::not_found(format!("pod with UID {uid} not found")))?;
        Ok(Response::new(GetPodResponse { pod: pod.encode_to_vec() }))
    }
}

/// The client has disconnected.
struct Disconnected;

async fn watch(
    state: &KubeletState,
    send: &mpsc::Sender<Result<WatchPodsEvent, Status>>,
) -> Result<(), Disconnected> {
    let mut changes = state.node.changed.subscribe();
    let drops = state.node.faults().pods_watches_dropped;
    let mut listed = state.listed_pods();
    for pod in listed.values() {
        send_event(send, EventType::Added, Some(pod)).await?;
    }
    send_event(send, EventType::InitialSyncComplete, None).await?;
    // UIDs whose end was reported, and pods that are no longer listed but whose end was not reported yet.
    let mut reported = BTreeSet::new();
    let mut departed: BTreeMap<String, core::Pod> = BTreeMap::new();
    while changes.changed().await.is_ok() {
        let faults = state.node.faults();
        if faults.pods_watches_dropped != drops {
            let _ = send.send(Err(Status::resource_exhausted("watch client channel closed"))).await;
            return Err(Disconnected);
        }
        let now = state.listed_pods();
        let before = std::mem::replace(&mut listed, now);
        departed.extend(before.iter().filter(|(uid, _)| !listed.contains_key(*uid)).map(to_owned_entry));
        let ended: Vec<String> = departed.keys().filter(|uid| !state.may_run(uid)).cloned().collect();
        let mut events = Vec::new();
        for (uid, pod) in &listed {
            let previous = before.get(uid);
            if has_ended(pod) {
                if reported.insert(uid.clone()) {
                    events.push((EventType::Deleted, deletion_pod(pod)));
                }
            } else if previous.is_none() {
                reported.remove(uid);
                departed.remove(uid);
                events.push((EventType::Added, pod.clone()));
            } else if previous != Some(pod) {
                events.push((EventType::Modified, pod.clone()));
            }
        }
        for uid in ended {
            if let Some(pod) = departed.remove(&uid)
                && reported.insert(uid)
            {
                events.push((EventType::Deleted, deletion_pod(&pod)));
            }
        }
        for (kind, pod) in events.iter().filter(|_| !faults.pods_events_lost) {
            send_event(send, *kind, Some(pod)).await?;
        }
    }
    Ok(())
}

fn to_owned_entry((uid, pod): (&String, &core::Pod)) -> (String, core::Pod) {
    (uid.clone(), pod.clone())
}

async fn send_event(
    send: &mpsc::Sender<Result<WatchPodsEvent, Status>>,
    kind: EventType,
    pod: Option<&core::Pod>,
) -> Result<(), Disconnected> {
    let pod = pod.map(Message::encode_to_vec).unwrap_or_default();
    send.send(Ok(WatchPodsEvent { r#type: kind.into(), pod })).await.map_err(|_| Disconnected)
}

fn has_ended(pod: &core::Pod) -> bool {
    let phase = pod.status.as_ref().and_then(|s| s.phase.as_deref());
    matches!(phase, Some("Succeeded" | "Failed"))
}

/// The pod in a `DELETED` event.
fn deletion_pod(pod: &core::Pod) -> core::Pod {
    let full = pod.metadata.clone().unwrap_or_default();
    let metadata = core::ObjectMeta {
        name: full.name,
        namespace: full.namespace,
        uid: full.uid,
        ..core::ObjectMeta::default()
    };
    core::Pod { metadata: Some(metadata), ..core::Pod::default() }
}

impl KubeletState {
    /// Whether a pod's containers may still run.
    fn may_run(&self, uid: &str) -> bool {
        let pods = lock(&self.node.pods);
        pods.get(uid).is_some_and(|pod| matches!(pod.phase, Phase::Pending | Phase::Running))
    }

    /// The pods that this kubelet knows, by UID.
    fn listed_pods(&self) -> BTreeMap<String, core::Pod> {
        let known = lock(&self.known);
        let pods = lock(&self.node.pods);
        let listed = pods.iter().filter(|(uid, pod)| known.contains(*uid) && !pod.force_deleted);
        listed.map(|(uid, pod)| (uid.clone(), wire(pod))).collect()
    }
}

fn wire(pod: &Pod) -> core::Pod {
    let spec = &pod.spec;
    let source = spec.is_static.then(|| (CONFIG_SOURCE.to_owned(), "file".to_owned()));
    let phase = match &pod.phase {
        Phase::Pending => "Pending",
        Phase::Running => "Running",
        Phase::Succeeded => "Succeeded",
        Phase::Failed { .. } => "Failed",
    };
    core::Pod {
        metadata: Some(core::ObjectMeta {
            name: Some(spec.name.clone()),
            namespace: Some(spec.namespace.clone()),
            uid: Some(spec.uid.clone()),
            labels: spec.labels.clone().into_iter().collect(),
            creation_timestamp: Some(core::Time { seconds: Some(1_770_000_000), nanos: None }),
            annotations: source.into_iter().collect(),
            ..core::ObjectMeta::default()
        }),
        spec: Some(core::PodSpec {
            init_containers: spec.init_containers.iter().map(container).collect(),
            containers: spec.containers.iter().map(container).collect(),
            ..core::PodSpec::default()
        }),
        status: Some(core::PodStatus {
            phase: Some(phase.to_owned()),
            start_time: pod.admitted.then_some(core::Time { seconds: Some(1_770_000_001), nanos: None }),
            ..core::PodStatus::default()
        }),
    }
}

fn container(spec: &ContainerSpec) -> core::Container {
    let quantity = |count: &usize| core::Quantity { string: Some(count.to_string()) };
    let limits = spec.resources.iter().map(|(name, count)| (name.clone(), quantity(count)));
    core::Container {
        name: Some(spec.name.clone()),
        resources: Some(core::ResourceRequirements { limits: limits.collect() }),
        ..core::Container::default()
    }
}
