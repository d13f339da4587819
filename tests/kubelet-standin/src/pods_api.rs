//! The Pods API on `pods-api/pods-api.sock`, where the options say that it is on.
//!
//! As in the kubelet: it shows the pods that this kubelet knows, which is not all of them while the API
//! server is away; `DELETED` means that a pod's containers have stopped for good, and a pod that was
//! deleted by force is missing before that.

use crate::calls::Rpc;
use crate::life::Life;
use crate::pods::{ContainerSpec, Phase, Pod};
use crate::proto::core;
use crate::proto::v1alpha1::pods_server::Pods;
use crate::proto::v1alpha1::{
    EventType, GetPodRequest, GetPodResponse, ListPodsRequest, ListPodsResponse, WatchPodsEvent,
    WatchPodsRequest,
};
use crate::world::lock;
use prost::Message;
use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Instant,
};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status};

/// Events that may wait for one client before it is dropped.
const EVENTS: usize = 100;
/// Where the file lies that a static pod is from.
const CONFIG_SOURCE: &str = "kubernetes.io/config.source";

pub(crate) struct PodsService(pub(crate) Arc<Life>);

type Answer<T> = Result<Response<T>, Status>;

#[tonic::async_trait]
impl Pods for PodsService {
    type WatchPodsStream = ReceiverStream<Result<WatchPodsEvent, Status>>;

    async fn watch_pods(&self, _: Request<WatchPodsRequest>) -> Answer<Self::WatchPodsStream> {
        let (send, events) = mpsc::channel(EVENTS);
        self.0.world.record(Rpc::WatchPods, "", Instant::now(), false);
        let life = Arc::clone(&self.0);
        tokio::spawn(async move {
            let _ = watch(&life, &send).await;
        });
        Ok(Response::new(ReceiverStream::new(events)))
    }

    async fn list_pods(&self, _: Request<ListPodsRequest>) -> Answer<ListPodsResponse> {
        let pods = self.0.shown_pods().into_values().map(|pod| pod.encode_to_vec()).collect();
        Ok(Response::new(ListPodsResponse { pods }))
    }

    async fn get_pod(&self, request: Request<GetPodRequest>) -> Answer<GetPodResponse> {
        let uid = request.into_inner().pod_uid;
        let pod = self.0.shown_pods().remove(&uid);
        let pod = pod.ok_or_else(|| Status::not_found(format!("pod with UID {uid} not found")))?;
        Ok(Response::new(GetPodResponse { pod: pod.encode_to_vec() }))
    }
}

/// The client has gone.
struct Gone;

async fn watch(life: &Life, send: &mpsc::Sender<Result<WatchPodsEvent, Status>>) -> Result<(), Gone> {
    let mut changes = life.world.changed.subscribe();
    let drops = life.world.faults().pods_watches_dropped;
    let mut shown = life.shown_pods();
    for pod in shown.values() {
        tell(send, EventType::Added, Some(pod)).await?;
    }
    tell(send, EventType::InitialSyncComplete, None).await?;
    // Whose end was told; and whose is still to be, though they are shown no more.
    let mut told = BTreeSet::new();
    let mut leaving: BTreeMap<String, core::Pod> = BTreeMap::new();
    while changes.changed().await.is_ok() {
        let faults = life.world.faults();
        if faults.pods_watches_dropped != drops {
            let _ = send.send(Err(Status::resource_exhausted("watch client channel closed"))).await;
            return Err(Gone);
        }
        let now = life.shown_pods();
        let before = std::mem::replace(&mut shown, now);
        leaving.extend(before.iter().filter(|(uid, _)| !shown.contains_key(*uid)).map(owned));
        let over: Vec<String> = leaving.keys().filter(|uid| !life.runs(uid)).cloned().collect();
        let mut events = Vec::new();
        for (uid, pod) in &shown {
            let known = before.get(uid);
            if is_over(pod) {
                if told.insert(uid.clone()) {
                    events.push((EventType::Deleted, minimal(pod)));
                }
            } else if known.is_none() {
                told.remove(uid);
                leaving.remove(uid);
                events.push((EventType::Added, pod.clone()));
            } else if known != Some(pod) {
                events.push((EventType::Modified, pod.clone()));
            }
        }
        for uid in over {
            if let Some(pod) = leaving.remove(&uid)
                && told.insert(uid)
            {
                events.push((EventType::Deleted, minimal(&pod)));
            }
        }
        for (kind, pod) in events.iter().filter(|_| !faults.pods_events_lost) {
            tell(send, *kind, Some(pod)).await?;
        }
    }
    Ok(())
}

fn owned((uid, pod): (&String, &core::Pod)) -> (String, core::Pod) {
    (uid.clone(), pod.clone())
}

async fn tell(
    send: &mpsc::Sender<Result<WatchPodsEvent, Status>>,
    kind: EventType,
    pod: Option<&core::Pod>,
) -> Result<(), Gone> {
    let pod = pod.map(Message::encode_to_vec).unwrap_or_default();
    send.send(Ok(WatchPodsEvent { r#type: kind.into(), pod })).await.map_err(|_| Gone)
}

fn is_over(pod: &core::Pod) -> bool {
    let phase = pod.status.as_ref().and_then(|s| s.phase.as_deref());
    matches!(phase, Some("Succeeded" | "Failed"))
}

/// What an end is told with.
fn minimal(pod: &core::Pod) -> core::Pod {
    let full = pod.metadata.clone().unwrap_or_default();
    let metadata = core::ObjectMeta {
        name: full.name,
        namespace: full.namespace,
        uid: full.uid,
        ..core::ObjectMeta::default()
    };
    core::Pod { metadata: Some(metadata), ..core::Pod::default() }
}

impl Life {
    /// Whether a pod's containers may still run.
    fn runs(&self, uid: &str) -> bool {
        let pods = lock(&self.world.pods);
        pods.get(uid).is_some_and(|pod| matches!(pod.phase, Phase::Pending | Phase::Running))
    }

    /// The pods that this kubelet knows, by UID.
    fn shown_pods(&self) -> BTreeMap<String, core::Pod> {
        let known = lock(&self.known);
        let pods = lock(&self.world.pods);
        let shown = pods.iter().filter(|(uid, pod)| known.contains(*uid) && !pod.force_deleted);
        shown.map(|(uid, pod)| (uid.clone(), wire(pod))).collect()
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
            creation_timestamp: Some(core::Time { seconds: Some(1_770_000_000), nanos: None }),
            annotations: source.into_iter().collect(),
            ..core::ObjectMeta::default()
        }),
        spec: Some(core::PodSpec {
            init_containers: spec.init_containers.iter().map(container).collect(),
            containers: spec.containers.iter().map(container).collect(),
        }),
        status: Some(core::PodStatus {
            phase: Some(phase.to_owned()),
            start_time: Some(core::Time { seconds: Some(1_770_000_001), nanos: None }),
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
