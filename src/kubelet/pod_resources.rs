//! The kubelet's pod resources API, as one call: who holds what, by name.

use super::wire::lazy_channel;
use super::wire::v1::pod_resources_lister_client::PodResourcesListerClient;
use super::wire::v1::{ListPodResourcesRequest, ListPodResourcesResponse};
use berth_kernel::names::{DeviceId, Resource};
use berth_kernel::reconcile::{ListedHolding, PodList};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::time::Duration;
use tonic::transport::Channel;

/// The kubelet's own clients take 16 MiB; a node of 250 pods answers well under one.
const ANSWER_BYTES_MAX: usize = 16 * 1024 * 1024;

/// `List` could not be asked.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum ListError {
    #[error("the kubelet's pod resources API did not answer within {ms} ms")]
    Slow { ms: u128 },
    #[error("the kubelet's pod resources API failed: {why}")]
    Failed { why: String },
}

/// Asks `List`. Dials when first used, and again after a kubelet restart.
#[derive(Clone, Debug)]
pub(super) struct PodResources {
    client: PodResourcesListerClient<Channel>,
    limit: Duration,
}

impl PodResources {
    pub(super) fn new(socket: &Path, limit: Duration) -> Self {
        let client =
            PodResourcesListerClient::new(lazy_channel(socket)).max_decoding_message_size(ANSWER_BYTES_MAX);
        Self { client, limit }
    }

    /// All active pods, and what their containers hold of `ours`. Asking makes the kubelet forget
    /// the devices of pods that ended.
    pub(super) async fn list(&self, ours: &BTreeSet<Resource>) -> Result<PodList, ListError> {
        let mut client = self.client.clone();
        let call = client.list(ListPodResourcesRequest {});
        let slow = ListError::Slow { ms: self.limit.as_millis() };
        let answer = tokio::time::timeout(self.limit, call).await.map_err(|_| slow)?;
        let answer = answer.map_err(|status| ListError::Failed { why: status.message().to_owned() })?;
        Ok(understand(answer.into_inner(), ours))
    }
}

fn understand(answer: ListPodResourcesResponse, ours: &BTreeSet<Resource>) -> PodList {
    let mut list = PodList::default();
    for pod in answer.pod_resources {
        for container in pod.containers {
            // The kubelet writes one entry a device, not one a resource.
            let mut by_resource: BTreeMap<Resource, BTreeSet<DeviceId>> = BTreeMap::new();
            for devices in container.devices {
                let Ok(resource) = Resource::parse(&devices.resource_name) else {
                    continue;
                };
                if ours.contains(&resource) {
                    // An id that cannot be ours is another plugin's.
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
