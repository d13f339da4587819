//! Client of the kubelet's pod resources API: the `List` call, which names each device's pod and container.

use super::socket_path::NoConnection;
use super::wire::lazy_channel;
use super::wire::v1::pod_resources_lister_client::PodResourcesListerClient;
use super::wire::v1::{ListPodResourcesRequest, ListPodResourcesResponse};
use berth_kernel::evidence::kubelet_view::{ListedHolding, PodList};
use berth_kernel::ids::names::{DeviceId, Resource};
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::time::Duration;
use tonic::transport::Channel;

/// The limit of the kubelet's own clients. The response of a node with 250 pods is well under 1 MiB.
const RESPONSE_BYTES_MAX: usize = 16 * 1024 * 1024;

/// Why `List` failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum ListError {
    #[error("the kubelet's pod resources API did not answer within {ms} ms")]
    Timeout { ms: u128 },
    #[error("the kubelet's pod resources API is not available: {0}")]
    Unreachable(NoConnection),
    #[error("the kubelet's pod resources API failed: {message}")]
    Failed { message: String },
}

/// Calls `List`. Dials when first used, and again after a kubelet restart.
#[derive(Clone, Debug)]
pub(super) struct PodResources {
    socket: PathBuf,
    client: PodResourcesListerClient<Channel>,
    limit: Duration,
}

impl PodResources {
    pub(super) fn new(socket: PathBuf, limit: Duration) -> Self {
        let channel = lazy_channel(&socket);
        let client = PodResourcesListerClient::new(channel).max_decoding_message_size(RESPONSE_BYTES_MAX);
        Self { socket, client, limit }
    }

    /// All active pods, and the devices of `resources` that their containers hold. The call makes the
    /// kubelet forget the devices of pods that ended.
    pub(super) async fn list(&self, resources: &BTreeSet<Resource>) -> Result<PodList, ListError> {
        let mut client = self.client.clone();
        let call = client.list(ListPodResourcesRequest {});
        let timed_out = ListError::Timeout { ms: self.limit.as_millis() };
        let response = tokio::time::timeout(self.limit, call).await.map_err(|_| timed_out)?;
        let response = response.map_err(|status| match NoConnection::of_call(&self.socket, &status) {
            Some(reason) => ListError::Unreachable(reason),
            None => ListError::Failed { message: status.message().to_owned() },
        })?;
        Ok(parse_response(response.into_inner(), resources))
    }
}

fn parse_response(response: ListPodResourcesResponse, resources: &BTreeSet<Resource>) -> PodList {
    let mut list = PodList::default();
    for pod in response.pod_resources {
        for container in pod.containers {
            // The kubelet sends one entry per device, not one per resource.
            let mut by_resource: BTreeMap<Resource, BTreeSet<DeviceId>> = BTreeMap::new();
            for devices in container.devices {
                let Ok(resource) = Resource::parse(&devices.resource_name) else {
                    continue;
                };
                if resources.contains(&resource) {
                    // An id that Berth cannot have listed is another plugin's.
                    let ids = devices.device_ids.iter();
                    let ids = ids.filter_map(|id| DeviceId::parse(id).ok());
                    by_resource.entry(resource).or_default().extend(ids);
                }
            }
            let held = by_resource.into_iter().filter(|(_, ids)| !ids.is_empty());
            list.held.extend(held.map(|(resource, ids)| ListedHolding {
                namespace: pod.namespace.clone(),
                pod: pod.name.clone(),
                container: container.name.clone(),
                resource,
                devices: ids.into_iter().collect(),
            }));
        }
        list.pods.insert((pod.namespace, pod.name));
    }
    list
}
