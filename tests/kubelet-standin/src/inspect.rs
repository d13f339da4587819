//! Queries of the stand-in's state, and direct calls to its plugins.

use crate::anomalies::Anomaly;
use crate::calls::{CallStats, Rpc};
use crate::devices::Counts;
use crate::faults::Faults;
use crate::kubelet::Kubelet;
use crate::node_state::lock;
use crate::proto::v1beta1::{
    AllocateRequest, ContainerAllocateRequest, ContainerAllocateResponse,
    ContainerPreferredAllocationRequest, PreferredAllocationRequest,
};
use std::{
    collections::{BTreeMap, BTreeSet},
    path::PathBuf,
};
use tonic::Status;

impl Kubelet {
    /// Changes the faults.
    pub fn set_faults(&self, change: impl FnOnce(&mut Faults)) {
        change(&mut lock(&self.node().faults));
        self.node().notify_changed();
    }

    /// The plugins' anomalies, in order.
    pub fn anomalies(&self) -> Vec<Anomaly> {
        lock(&self.node().anomalies).clone()
    }

    /// Removes and returns the anomalies, for tests that cause them intentionally.
    pub fn take_anomalies(&self) -> Vec<Anomaly> {
        std::mem::take(&mut lock(&self.node().anomalies))
    }

    /// The statistics of a call. The pod resources calls have the resource name "".
    pub fn calls(&self, rpc: Rpc, resource: &str) -> CallStats {
        lock(&self.node().calls).get(rpc, resource)
    }

    /// The number of healthy devices: allocatable in the node status. `None` if the
    /// kubelet does not report the resource, or does not run.
    pub fn allocatable(&self, resource: &str) -> Option<usize> {
        self.counts(resource).map(|c| c.allocatable)
    }

    /// The number of all devices: capacity in the node status.
    pub fn capacity(&self, resource: &str) -> Option<usize> {
        self.counts(resource).map(|c| c.capacity)
    }

    fn counts(&self, resource: &str) -> Option<Counts> {
        let state = self.state()?;
        let grace = self.node().options.endpoint_grace;
        let mut manager = lock(&state.manager);
        let (counts, expired) = manager.counts(resource, grace);
        if expired {
            state.write_checkpoint(&manager);
        }
        counts
    }

    /// Resources that plugins have registered or the checkpoint contains.
    pub fn resources(&self) -> BTreeSet<String> {
        let state = self.state();
        state.map(|state| lock(&state.manager).healthy.keys().cloned().collect()).unwrap_or_default()
    }

    /// The number of open `ListAndWatch` streams of this resource.
    pub fn streams(&self, resource: &str) -> usize {
        let state = self.state();
        state.map_or(0, |state| {
            let streams = lock(&state.streams);
            streams.iter().filter(|r| *r == resource).count()
        })
    }

    /// Whether a plugin is registered for `resource`, its endpoint is not stopped and its
    /// stream is open.
    pub fn is_served(&self, resource: &str) -> bool {
        let Some(state) = self.state() else {
            return false;
        };
        let endpoint = lock(&state.manager).endpoints.get(resource).cloned();
        endpoint.is_some_and(|e| e.client.is_some() && e.stopped.is_none()) && self.streams(resource) > 0
    }

    /// The last device list of a resource: id and health.
    pub fn listed(&self, resource: &str) -> BTreeMap<String, String> {
        let Some(state) = self.state() else {
            return BTreeMap::new();
        };
        let manager = lock(&state.manager);
        let all = manager.all.get(resource).into_iter().flatten();
        all.map(|(id, d)| (id.clone(), d.health.clone())).collect()
    }

    /// Calls Allocate of the resource's plugin for these ids, without a pod and without changing the
    /// kubelet's state.
    ///
    /// # Errors
    /// The plugin's error; `unavailable` if no plugin is connected.
    pub async fn call_plugin_allocate(
        &self,
        resource: &str,
        ids: &[String],
    ) -> Result<ContainerAllocateResponse, Status> {
        let unavailable = || Status::unavailable(format!("no plugin serves {resource}"));
        let state = self.state().ok_or_else(unavailable)?;
        let endpoint = lock(&state.manager).endpoints.get(resource).cloned();
        let mut api =
            endpoint.and_then(|endpoint| endpoint.client).and_then(|c| c.api()).ok_or_else(unavailable)?;
        let container = ContainerAllocateRequest { devices_ids: ids.to_vec() };
        let request = AllocateRequest { container_requests: vec![container] };
        let mut responses = api.allocate(request).await?.into_inner().container_responses;
        responses.pop().ok_or_else(|| Status::internal("the response has no container"))
    }

    /// The `count` ids of `available` that the resource's plugin prefers for one container; none if the plugin's
    /// options do not offer GetPreferredAllocation.
    ///
    /// # Errors
    /// The plugin's error; `unavailable` if no plugin is connected.
    pub async fn call_plugin_preferred(
        &self,
        resource: &str,
        available: &[String],
        count: usize,
    ) -> Result<Vec<String>, Status> {
        let unavailable = || Status::unavailable(format!("no plugin serves {resource}"));
        let state = self.state().ok_or_else(unavailable)?;
        let endpoint = lock(&state.manager).endpoints.get(resource).cloned().ok_or_else(unavailable)?;
        if !endpoint.options.is_some_and(|options| options.get_preferred_allocation_available) {
            return Ok(Vec::new());
        }
        let mut api = endpoint.client.and_then(|client| client.api()).ok_or_else(unavailable)?;
        let container = ContainerPreferredAllocationRequest {
            available_device_i_ds: available.to_vec(),
            must_include_device_i_ds: Vec::new(),
            allocation_size: i32::try_from(count).unwrap_or(i32::MAX),
        };
        let request = PreferredAllocationRequest { container_requests: vec![container] };
        let mut responses = api.get_preferred_allocation(request).await?.into_inner().container_responses;
        responses
            .pop()
            .map(|response| response.device_i_ds)
            .ok_or_else(|| Status::internal("the response has no container"))
    }

    /// The ids that the kubelet counts as in use.
    pub fn in_use(&self, resource: &str) -> BTreeSet<String> {
        let state = self.state();
        state.and_then(|state| lock(&state.manager).allocated.get(resource).cloned()).unwrap_or_default()
    }

    /// The socket on which plugins register.
    pub fn registration_socket(&self) -> PathBuf {
        self.node().device_plugins().join("kubelet.sock")
    }

    /// The socket of the plugin that serves `resource`.
    pub fn plugin_socket(&self, resource: &str) -> Option<PathBuf> {
        let state = self.state()?;
        let client = lock(&state.clients).get(resource).cloned();
        client.map(|client| client.socket().to_owned())
    }

    /// The socket of the pod resources API.
    pub fn pod_resources_socket(&self) -> PathBuf {
        self.node().pod_resources().join("kubelet.sock")
    }

    /// The checkpoint file.
    pub fn checkpoint_path(&self) -> PathBuf {
        self.node().device_plugins().join(crate::CHECKPOINT_FILE)
    }
}
