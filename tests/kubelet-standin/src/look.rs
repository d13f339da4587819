//! A look at everything: what the node status, a test or a demo would show.

use crate::anomalies::Anomaly;
use crate::calls::{CallStats, Rpc};
use crate::devices::Counts;
use crate::faults::Faults;
use crate::kubelet::Kubelet;
use crate::proto::v1beta1::{
    AllocateRequest, ContainerAllocateRequest, ContainerAllocateResponse,
    ContainerPreferredAllocationRequest, PreferredAllocationRequest,
};
use crate::world::lock;
use std::{
    collections::{BTreeMap, BTreeSet},
    path::PathBuf,
};
use tonic::Status;

impl Kubelet {
    /// Changes what goes wrong from now on.
    pub fn set_faults(&self, change: impl FnOnce(&mut Faults)) {
        change(&mut lock(&self.world().faults));
        self.world().touch();
    }

    /// What the plugin did wrong, in order.
    pub fn anomalies(&self) -> Vec<Anomaly> {
        lock(&self.world().anomalies).clone()
    }

    /// The same, and forgets it: for tests that do wrong on purpose.
    pub fn take_anomalies(&self) -> Vec<Anomaly> {
        std::mem::take(&mut lock(&self.world().anomalies))
    }

    /// How often a call happened and how long it took. The pod resources calls
    /// are under the resource name "".
    pub fn calls(&self, rpc: Rpc, resource: &str) -> CallStats {
        lock(&self.world().calls).get(rpc, resource)
    }

    /// Healthy devices: what the node status shows as allocatable. `None` where
    /// the kubelet reports no such resource or no kubelet runs.
    pub fn allocatable(&self, resource: &str) -> Option<usize> {
        self.counts(resource).map(|c| c.allocatable)
    }

    /// All devices: what the node status shows as capacity.
    pub fn capacity(&self, resource: &str) -> Option<usize> {
        self.counts(resource).map(|c| c.capacity)
    }

    fn counts(&self, resource: &str) -> Option<Counts> {
        let life = self.life()?;
        let grace = self.world().options.endpoint_grace;
        let mut manager = lock(&life.manager);
        let (counts, expired) = manager.counts(resource, grace);
        if expired {
            life.write_checkpoint(&manager);
        }
        counts
    }

    /// Resources that plugins have registered or the checkpoint remembers.
    pub fn resources(&self) -> BTreeSet<String> {
        let life = self.life();
        life.map(|life| lock(&life.manager).healthy.keys().cloned().collect()).unwrap_or_default()
    }

    /// `ListAndWatch` streams of this resource that the kubelet reads.
    pub fn streams(&self, resource: &str) -> usize {
        let life = self.life();
        life.map_or(0, |life| {
            let streams = lock(&life.streams);
            streams.iter().filter(|r| *r == resource).count()
        })
    }

    /// True while a plugin is registered for `resource`, its endpoint is not stopped
    /// and its stream lives.
    pub fn is_served(&self, resource: &str) -> bool {
        let Some(life) = self.life() else {
            return false;
        };
        let endpoint = lock(&life.manager).endpoints.get(resource).cloned();
        endpoint.is_some_and(|e| e.client.is_some() && e.stopped.is_none()) && self.streams(resource) > 0
    }

    /// The last device list of a resource: id and health.
    pub fn listed(&self, resource: &str) -> BTreeMap<String, String> {
        let Some(life) = self.life() else {
            return BTreeMap::new();
        };
        let manager = lock(&life.manager);
        let all = manager.all.get(resource).into_iter().flatten();
        all.map(|(id, d)| (id.clone(), d.health.clone())).collect()
    }

    /// What the plugin of a resource answers an Allocate of these ids, for no pod: the kubelet's books
    /// stay as they are.
    ///
    /// # Errors
    /// What the plugin refuses it with; `unavailable` where none is connected.
    pub async fn ask_allocate(
        &self,
        resource: &str,
        ids: &[String],
    ) -> Result<ContainerAllocateResponse, Status> {
        let unserved = || Status::unavailable(format!("no plugin serves {resource}"));
        let life = self.life().ok_or_else(unserved)?;
        let endpoint = lock(&life.manager).endpoints.get(resource).cloned();
        let mut api =
            endpoint.and_then(|endpoint| endpoint.client).and_then(|c| c.api()).ok_or_else(unserved)?;
        let container = ContainerAllocateRequest { devices_ids: ids.to_vec() };
        let request = AllocateRequest { container_requests: vec![container] };
        let mut answers = api.allocate(request).await?.into_inner().container_responses;
        answers.pop().ok_or_else(|| Status::internal("an answer for no container"))
    }

    /// Which of the ids in `of` the plugin of a resource prefers for a container of so many. No id where it offers no
    /// such answer, as its options say.
    ///
    /// # Errors
    /// If no plugin serves the resource, or its plugin refuses.
    pub async fn ask_preferred(
        &self,
        resource: &str,
        of: &[String],
        count: usize,
    ) -> Result<Vec<String>, Status> {
        let unserved = || Status::unavailable(format!("no plugin serves {resource}"));
        let life = self.life().ok_or_else(unserved)?;
        let endpoint = lock(&life.manager).endpoints.get(resource).cloned().ok_or_else(unserved)?;
        if !endpoint.options.is_some_and(|options| options.get_preferred_allocation_available) {
            return Ok(Vec::new());
        }
        let mut api = endpoint.client.and_then(|client| client.api()).ok_or_else(unserved)?;
        let container = ContainerPreferredAllocationRequest {
            available_device_i_ds: of.to_vec(),
            must_include_device_i_ds: Vec::new(),
            allocation_size: i32::try_from(count).unwrap_or(i32::MAX),
        };
        let request = PreferredAllocationRequest { container_requests: vec![container] };
        let mut answers = api.get_preferred_allocation(request).await?.into_inner().container_responses;
        answers
            .pop()
            .map(|answer| answer.device_i_ds)
            .ok_or_else(|| Status::internal("an answer for no container"))
    }

    /// Ids that the kubelet counts as in use.
    pub fn in_use(&self, resource: &str) -> BTreeSet<String> {
        let life = self.life();
        life.and_then(|life| lock(&life.manager).allocated.get(resource).cloned()).unwrap_or_default()
    }

    /// The socket on which plugins register.
    pub fn registration_socket(&self) -> PathBuf {
        self.world().device_plugins().join("kubelet.sock")
    }

    /// The socket of the pod resources API.
    pub fn pod_resources_socket(&self) -> PathBuf {
        self.world().pod_resources().join("kubelet.sock")
    }

    /// The checkpoint file.
    pub fn checkpoint_path(&self) -> PathBuf {
        self.world().device_plugins().join(crate::CHECKPOINT_FILE)
    }
}
