//! The pod resources API on `pod-resources/kubelet.sock`.

use crate::calls::Rpc;
use crate::devices::NO_NUMA_NODE;
use crate::life::Life;
use crate::pods::Pod;
use crate::proto::v1::pod_resources_lister_server::PodResourcesLister;
use crate::proto::v1::{
    AllocatableResourcesRequest, AllocatableResourcesResponse, ContainerDevices, ContainerResources,
    GetPodResourcesRequest, GetPodResourcesResponse, ListPodResourcesRequest, ListPodResourcesResponse,
    NumaNode, PodResources, TopologyInfo,
};
use crate::world::lock;
use std::{
    sync::{Arc, Mutex},
    time::Instant,
};
use tonic::{Request, Response, Status};

/// The kubelet's limits on this API: calls a second, and in a burst.
const CALLS_PER_SECOND: f64 = 100.0;
const BURST: f64 = 10.0;

pub(crate) struct PodResourcesService {
    life: Arc<Life>,
    bucket: Mutex<Bucket>,
}

struct Bucket {
    tokens: f64,
    filled: Instant,
}

impl PodResourcesService {
    pub(crate) fn new(life: Arc<Life>) -> Self {
        let bucket = Bucket { tokens: BURST, filled: Instant::now() };
        Self { life, bucket: Mutex::new(bucket) }
    }

    fn spend(&self) -> Result<(), Status> {
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

    async fn misbehave(&self) -> Result<(), Status> {
        let mut changes = self.life.world.changed.subscribe();
        while self.life.world.faults().list_hangs {
            if changes.changed().await.is_err() {
                break;
            }
        }
        if self.life.world.faults().list_fails {
            return Err(Status::internal("the pod resources service is unwell"));
        }
        Ok(())
    }

    fn finish<T>(&self, rpc: Rpc, began: Instant, answer: Result<T, Status>) -> Answer<T> {
        let failed = answer.is_err();
        self.life.world.record(rpc, "", began, failed);
        answer.map(Response::new)
    }
}

type Answer<T> = Result<Response<T>, Status>;

#[tonic::async_trait]
impl PodResourcesLister for PodResourcesService {
    async fn list(&self, _: Request<ListPodResourcesRequest>) -> Answer<ListPodResourcesResponse> {
        let began = Instant::now();
        let mut answer = self.spend();
        if answer.is_ok() {
            answer = self.misbehave().await;
        }
        let answer = answer.map(|()| ListPodResourcesResponse { pod_resources: self.life.list() });
        self.finish(Rpc::List, began, answer)
    }

    async fn get_allocatable_resources(
        &self,
        _: Request<AllocatableResourcesRequest>,
    ) -> Answer<AllocatableResourcesResponse> {
        let began = Instant::now();
        let answer = self.spend().map(|()| AllocatableResourcesResponse {
            devices: self.life.allocatable_devices(),
            ..AllocatableResourcesResponse::default()
        });
        self.finish(Rpc::GetAllocatableResources, began, answer)
    }

    async fn get(&self, request: Request<GetPodResourcesRequest>) -> Answer<GetPodResourcesResponse> {
        let began = Instant::now();
        let GetPodResourcesRequest { pod_name, pod_namespace } = request.into_inner();
        let answer = self.spend().and_then(|()| {
            let mut pods = self.life.list().into_iter();
            let pod = pods.find(|p| p.name == pod_name && p.namespace == pod_namespace);
            let missing =
                || Status::unknown(format!("pod {pod_name} in namespace {pod_namespace} not found"));
            let pod_resources = Some(pod.ok_or_else(missing)?);
            Ok(GetPodResourcesResponse { pod_resources })
        });
        self.finish(Rpc::Get, began, answer)
    }
}

impl Life {
    /// Active pods and what their containers hold; purges the dead on the way.
    fn list(&self) -> Vec<PodResources> {
        self.update_allocated_devices();
        self.world.touch();
        let active = self.active_uids();
        let pods: Vec<Pod> = {
            let pods = lock(&self.world.pods);
            active.iter().filter_map(|uid| pods.get(uid).cloned()).collect()
        };
        pods.iter().map(|pod| self.list_pod(pod)).collect()
    }

    fn list_pod(&self, pod: &Pod) -> PodResources {
        // Of the init containers only those that keep running are shown.
        let spec = &pod.spec;
        let sidecars = spec.init_containers.iter().filter(|c| c.restartable);
        let shown = sidecars.chain(&spec.containers);
        PodResources {
            name: spec.name.clone(),
            namespace: spec.namespace.clone(),
            containers: shown
                .map(|c| ContainerResources {
                    name: c.name.clone(),
                    devices: self.list_devices(&spec.uid, &c.name),
                    ..ContainerResources::default()
                })
                .collect(),
        }
    }

    /// One entry a device, as the kubelet does.
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
                devices.push(one_device(resource, id, nodes));
            }
        }
        drop(manager);
        self.world.shuffled(devices)
    }

    fn allocatable_devices(&self) -> Vec<ContainerDevices> {
        let manager = lock(&self.manager);
        let mut devices = Vec::new();
        for (resource, ids) in &manager.healthy {
            for id in ids {
                let nodes = manager.numa_nodes(resource, id);
                devices.push(one_device(resource, id.clone(), nodes));
            }
        }
        drop(manager);
        self.world.shuffled(devices)
    }
}

fn one_device(resource: &str, id: String, nodes: Vec<i64>) -> ContainerDevices {
    let nodes: Vec<_> =
        nodes.into_iter().filter(|id| *id != NO_NUMA_NODE).map(|id| NumaNode { id }).collect();
    ContainerDevices {
        resource_name: resource.to_owned(),
        device_ids: vec![id],
        topology: (!nodes.is_empty()).then_some(TopologyInfo { nodes }),
    }
}
