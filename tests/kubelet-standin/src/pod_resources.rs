//! The pod resources API on `pod-resources/kubelet.sock`.

use crate::calls::Rpc;
use crate::devices::NO_NUMA_NODE;
use crate::kubelet_state::KubeletState;
use crate::node_state::lock;
use crate::pods::Pod;
use crate::proto::v1::pod_resources_lister_server::PodResourcesLister;
use crate::proto::v1::{
    AllocatableResourcesRequest, AllocatableResourcesResponse, ContainerDevices, ContainerResources,
    GetPodResourcesRequest, GetPodResourcesResponse, ListPodResourcesRequest, ListPodResourcesResponse,
    NumaNode, PodResources, TopologyInfo,
};
use std::{
    sync::{Arc, Mutex},
    time::Instant,
};
use tonic::{Request, Response, Status};

/// The kubelet's rate limit of this API.
const CALLS_PER_SECOND: f64 = 100.0;
const BURST: f64 = 10.0;

pub(crate) struct PodResourcesService {
    state: Arc<KubeletState>,
    bucket: Mutex<Bucket>,
}

struct Bucket {
    tokens: f64,
    filled: Instant,
}

impl PodResourcesService {
    pub(crate) fn new(state: Arc<KubeletState>) -> Self {
        let bucket = Bucket { tokens: BURST, filled: Instant::now() };
        Self { state, bucket: Mutex::new(bucket) }
    }

    fn take_token(&self) -> Result<(), Status> {
        let mut bucket = lock(&self.bucket);
        let since = bucket.filled.elapsed().as_secs_f64();
        bucket.filled = Instant::now();
        bucket.tokens = (bucket.tokens + since * CALLS_PER_SECOND).min(BURST);
        if bucket.tokens < 1.0 {
            return Err(Status::resource_exhausted("rejected by rate limit"));
        }
        bucket.tokens -= 1.0;
        Ok(())
    }

    async fn apply_faults(&self) -> Result<(), Status> {
        let mut changes = self.state.node.changed.subscribe();
        while self.state.node.faults().list_hangs {
            if changes.changed().await.is_err() {
                break;
            }
        }
        if self.state.node.faults().list_fails {
            return Err(Status::internal("the pod resources service fails as configured"));
        }
        Ok(())
    }

    fn finish<T>(&self, rpc: Rpc, began: Instant, result: Result<T, Status>) -> RpcResult<T> {
        self.state.node.record(rpc, "", began, result.is_err());
        result.map(Response::new)
    }
}

type RpcResult<T> = Result<Response<T>, Status>;

#[tonic::async_trait]
impl PodResourcesLister for PodResourcesService {
    async fn list(&self, _: Request<ListPodResourcesRequest>) -> RpcResult<ListPodResourcesResponse> {
        let began = Instant::now();
        let mut result = self.take_token();
        if result.is_ok() {
            result = self.apply_faults().await;
        }
        let result = result.map(|()| ListPodResourcesResponse { pod_resources: self.state.list() });
        self.finish(Rpc::List, began, result)
    }

    async fn get_allocatable_resources(
        &self,
        _: Request<AllocatableResourcesRequest>,
    ) -> RpcResult<AllocatableResourcesResponse> {
        let began = Instant::now();
        let result = self.take_token().map(|()| AllocatableResourcesResponse {
            devices: self.state.allocatable_devices(),
            ..AllocatableResourcesResponse::default()
        });
        self.finish(Rpc::GetAllocatableResources, began, result)
    }

    async fn get(&self, request: Request<GetPodResourcesRequest>) -> RpcResult<GetPodResourcesResponse> {
        let began = Instant::now();
        let GetPodResourcesRequest { pod_name, pod_namespace } = request.into_inner();
        let result = self.take_token().and_then(|()| {
            let mut pods = self.state.list().into_iter();
            let pod = pods.find(|p| p.name == pod_name && p.namespace == pod_namespace);
            let missing =
                || Status::unknown(format!("pod {pod_name} in namespace {pod_namespace} not found"));
            let pod_resources = Some(pod.ok_or_else(missing)?);
            Ok(GetPodResourcesResponse { pod_resources })
        });
        self.finish(Rpc::Get, began, result)
    }
}

impl KubeletState {
    /// Active pods and the devices of their containers. Purges ended pods first.
    fn list(&self) -> Vec<PodResources> {
        self.update_allocated_devices();
        self.node.notify_changed();
        let active = self.active_uids();
        let pods: Vec<Pod> = {
            let pods = lock(&self.node.pods);
            active.iter().filter_map(|uid| pods.get(uid).cloned()).collect()
        };
        pods.iter().map(|pod| self.list_pod(pod)).collect()
    }

    fn list_pod(&self, pod: &Pod) -> PodResources {
        // Of the init containers, only restartable ones are listed.
        let spec = &pod.spec;
        let sidecars = spec.init_containers.iter().filter(|c| c.restartable);
        let listed = sidecars.chain(&spec.containers);
        PodResources {
            name: spec.name.clone(),
            namespace: spec.namespace.clone(),
            containers: listed
                .map(|c| ContainerResources {
                    name: c.name.clone(),
                    devices: self.list_devices(&spec.uid, &c.name),
                    ..ContainerResources::default()
                })
                .collect(),
        }
    }

    /// One entry per device, as in the kubelet.
    fn list_devices(&self, uid: &str, container: &str) -> Vec<ContainerDevices> {
        let manager = lock(&self.manager);
        let containers = manager.pod_devices.get(uid);
        let Some(resources) = containers.and_then(|c| c.get(container)) else {
            return Vec::new();
        };
        let mut devices = Vec::new();
        for (resource, held) in resources {
            for id in held.ids() {
                let nodes = held.by_numa.iter().filter(|(_, ids)| ids.contains(&id));
                let nodes = nodes.map(|(node, _)| *node).collect();
                devices.push(device_entry(resource, id, nodes));
            }
        }
        drop(manager);
        self.node.shuffled(devices)
    }

    fn allocatable_devices(&self) -> Vec<ContainerDevices> {
        let manager = lock(&self.manager);
        let mut devices = Vec::new();
        for (resource, ids) in &manager.healthy {
            for id in ids {
                let nodes = manager.numa_nodes(resource, id);
                devices.push(device_entry(resource, id.clone(), nodes));
            }
        }
        drop(manager);
        self.node.shuffled(devices)
    }
}

fn device_entry(resource: &str, id: String, nodes: Vec<i64>) -> ContainerDevices {
    let nodes: Vec<_> =
        nodes.into_iter().filter(|id| *id != NO_NUMA_NODE).map(|id| NumaNode { id }).collect();
    ContainerDevices {
        resource_name: resource.to_owned(),
        device_ids: vec![id],
        topology: (!nodes.is_empty()).then_some(TopologyInfo { nodes }),
    }
}
