//! The merged Allocate responses with which a container starts.

use crate::calls::Rpc;
use crate::client::go_error;
use crate::devices::{Holding, Ids};
use crate::kubelet_state::KubeletState;
use crate::node_state::lock;
use crate::pods::{ContainerSpec, PodSpec};
use crate::proto::v1beta1::{DeviceSpec, Mount, PreStartContainerRequest};
use std::{
    collections::{BTreeMap, BTreeSet},
    time::{Duration, Instant},
};

/// The kubelet's only deadline on a call to a plugin.
const PRE_START_LIMIT: Duration = Duration::from_secs(30);

/// The parts of a container that device plugins determine, as the runtime gets them.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ContainerView {
    /// Environment. If two resources set a key, the first one wins.
    pub envs: BTreeMap<String, String>,
    /// Mounts, one per container path.
    pub mounts: Vec<Mount>,
    /// Device nodes, one per container path.
    pub devices: Vec<DeviceSpec>,
    /// Annotations. If two resources set a key, the first one wins.
    pub annotations: BTreeMap<String, String>,
    /// Fully qualified CDI device names.
    pub cdi_devices: BTreeSet<String>,
    /// Held ids, by resource.
    pub held: BTreeMap<String, BTreeSet<String>>,
}

impl ContainerView {
    fn add(&mut self, resource: &str, held: &Holding) {
        let response = &held.response;
        for (key, value) in &response.envs {
            let entry = self.envs.entry(key.clone());
            entry.or_insert_with(|| value.clone());
        }
        for (key, value) in &response.annotations {
            let entry = self.annotations.entry(key.clone());
            entry.or_insert_with(|| value.clone());
        }
        for mount in &response.mounts {
            let path = &mount.container_path;
            if !self.mounts.iter().any(|m| m.container_path == *path) {
                self.mounts.push(mount.clone());
            }
        }
        for device in &response.devices {
            let path = &device.container_path;
            if !self.devices.iter().any(|d| d.container_path == *path) {
                self.devices.push(device.clone());
            }
        }
        let names = response.cdi_devices.iter().map(|d| d.name.clone());
        self.cdi_devices.extend(names);
        self.held.insert(resource.to_owned(), held.ids());
    }
}

impl KubeletState {
    /// Starts a container: calls PreStartContainer where required, and Allocate where
    /// nothing is cached. Returns the merged view.
    pub(crate) async fn start_container(
        &self,
        spec: &PodSpec,
        is_init: bool,
        container: &ContainerSpec,
    ) -> Result<ContainerView, String> {
        let mut is_uncached = false;
        for (resource, required) in self.node.shuffled(container.resources.clone()) {
            if required == 0 || !lock(&self.manager).is_device_resource(&resource) {
                continue;
            }
            self.pre_start(&spec.uid, &container.name, &resource).await?;
            let manager = lock(&self.manager);
            is_uncached |= manager.held(&spec.uid, &container.name, &resource).is_none();
        }
        if is_uncached {
            let _admission = self.admitting.lock().await;
            self.allocate_container(spec, is_init, container).await?;
        }
        Ok(self.view(&spec.uid, &container.name).unwrap_or_default())
    }

    /// The merged view of the cached responses, in a random order of resources.
    pub(crate) fn view(&self, uid: &str, container: &str) -> Option<ContainerView> {
        let held = {
            let manager = lock(&self.manager);
            manager.pod_devices.get(uid)?.get(container)?.clone()
        };
        let mut view = ContainerView::default();
        for (resource, held) in self.node.shuffled(held) {
            view.add(&resource, &held);
        }
        Some(view)
    }

    async fn pre_start(&self, uid: &str, container: &str, resource: &str) -> Result<(), String> {
        let (endpoint, held) = {
            let manager = lock(&self.manager);
            let held = manager.held(uid, container, resource).map(Holding::ids);
            (manager.endpoints.get(resource).cloned(), held)
        };
        // From five minutes after the plugin's disconnect, the resource's containers cannot restart.
        let endpoint = endpoint
            .ok_or_else(|| format!("endpoint not found in cache for a registered resource: {resource}"))?;
        if !endpoint.options.is_some_and(|o| o.pre_start_required) {
            return Ok(());
        }
        let held: Ids = held.ok_or_else(|| {
            format!("no devices found allocated in local cache for pod {uid}, container {container}, resource {resource}")
        })?;
        let api = endpoint.client.as_ref().and_then(|c| c.api());
        let mut api = api
            .filter(|_| endpoint.stopped.is_none())
            .ok_or_else(|| format!("endpoint {resource} has been stopped"))?;
        let request = PreStartContainerRequest { devices_ids: self.node.shuffled(held) };
        let began = Instant::now();
        let result = tokio::time::timeout(PRE_START_LIMIT, api.pre_start_container(request)).await;
        let failed = !matches!(result, Ok(Ok(_)));
        self.node.record(Rpc::PreStartContainer, resource, began, failed);
        let error = match result {
            Ok(Ok(_)) => return Ok(()),
            Ok(Err(status)) => go_error(&status),
            Err(_) => "context deadline exceeded".to_owned(),
        };
        Err(format!("device plugin PreStartContainer rpc failed with err: {error}"))
    }
}
