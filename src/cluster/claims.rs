//! Reads ResourceClaims for the kubelet's calls.

use super::quantity::amount;
use berth_kernel::grants::claim::{Claim, ClaimOfServer, ClaimPod, DeviceResult};
use berth_kernel::ids::names::is_dns_label;
use berth_kube::{RequestError, request};
use k8s_openapi::api::resource::v1::{DeviceRequestAllocationResult, ResourceClaim};
use kube::{Api, Client};
use tokio::sync::watch;

/// The resource of the consumers of a claim that are pods (`resource.k8s.io/v1`: `ResourceClaimConsumerReference`).
const PODS: &str = "pods";

/// Reads claims once the daemon is connected to the API server.
#[derive(Clone)]
pub struct Claims {
    client: watch::Receiver<Option<Client>>,
}

impl Claims {
    pub(super) fn new(client: watch::Receiver<Option<Client>>) -> Self {
        Self { client }
    }

    /// The claim with this name; `None` if there is none. Waits for the first connection.
    ///
    /// # Errors
    /// Why there is no answer.
    pub async fn read(&self, namespace: &str, name: &str) -> Result<Option<ClaimOfServer>, String> {
        let mut client = self.client.clone();
        let client = match client.wait_for(Option::is_some).await {
            Ok(client) => client.clone(),
            Err(_) => None,
        };
        let client = client.ok_or("no API server is configured, or the daemon stops")?;
        let claims: Api<ResourceClaim> = Api::namespaced(client, namespace);
        match request(claims.get(name), "get resourceclaims (ClusterRole berth-dra)").await {
            Ok(claim) => Ok(Some(convert(claim))),
            Err(error) if error.code() == 404 => Ok(None),
            Err(RequestError { why, .. }) => Err(why),
        }
    }
}

/// The annotation of a claim that was made from a template, with its name in the pod's specification
/// (`resource.k8s.io/v1`: `PodResourceClaimAnnotation`).
const POD_CLAIM_NAME: &str = "resource.kubernetes.io/pod-claim-name";

fn convert(claim: ResourceClaim) -> ClaimOfServer {
    let status = claim.status.unwrap_or_default();
    let pods = status.reserved_for.unwrap_or_default().into_iter();
    let pods = pods.filter(|consumer| consumer.resource == PODS && consumer.api_group.is_none());
    let mut annotations = claim.metadata.annotations.unwrap_or_default();
    ClaimOfServer {
        // Anyone who creates a claim can set it, and it becomes part of a path.
        pod_claim_name: annotations.remove(POD_CLAIM_NAME).filter(|name| is_dns_label(name)),
        claim: Claim {
            uid: claim.metadata.uid.unwrap_or_default(),
            namespace: claim.metadata.namespace.unwrap_or_default(),
            name: claim.metadata.name.unwrap_or_default(),
        },
        pods: pods.map(|pod| ClaimPod { uid: pod.uid, name: pod.name }).collect(),
        results: status
            .allocation
            .and_then(|allocation| allocation.devices?.results)
            .unwrap_or_default()
            .into_iter()
            .map(convert_result)
            .collect(),
    }
}

fn convert_result(result: DeviceRequestAllocationResult) -> DeviceResult {
    let consumed = result.consumed_capacity.unwrap_or_default().into_iter();
    // An unreadable amount becomes `u64::MAX`: no device has so much, so the claim is not prepared.
    let consumed = consumed.map(|(name, quantity)| (name, amount(&quantity.0).unwrap_or(u64::MAX)));
    DeviceResult {
        request: result.request,
        driver: result.driver,
        pool: result.pool,
        device: result.device,
        admin_access: result.admin_access.unwrap_or(false),
        share_id: result.share_id,
        consumed: consumed.collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// A claim as kubernetes 1.36 shows it.
    #[test]
    fn an_allocated_claim_has_its_devices_and_pods() {
        let claim = json!({
            "metadata": {"name": "gpu", "namespace": "ml", "uid": "1-2",
                         "annotations": {"resource.kubernetes.io/pod-claim-name": "a-gpu"}},
            "spec": {},
            "status": {
                "allocation": {"devices": {"results": [
                    {"request": "gpu/big", "driver": "gpu.nvidia.com", "pool": "n1", "device": "gpu-1"},
                    {"request": "look", "driver": "gpu.nvidia.com", "pool": "n1", "device": "gpu-1", "adminAccess": true},
                    {"request": "part", "driver": "gpu.nvidia.com", "pool": "n1", "device": "gpu-2-shared", "shareID": "7-8",
                     "consumedCapacity": {"memory": "20Gi", "other": "a lot"}},
                ]}},
                "reservedFor": [
                    {"resource": "pods", "name": "train", "uid": "3-4"},
                    {"apiGroup": "scheduling.k8s.io", "resource": "podgroups", "name": "group", "uid": "5-6"},
                ],
            },
        });
        let read = convert(serde_json::from_value(claim).unwrap());
        assert_eq!((read.claim.uid.as_str(), read.claim.namespace.as_str()), ("1-2", "ml"));
        assert_eq!(read.pod_claim_name.as_deref(), Some("a-gpu"));
        assert_eq!(read.pods, [ClaimPod { uid: "3-4".into(), name: "train".into() }]);
        let results: Vec<_> =
            read.results.iter().map(|result| (result.request.as_str(), result.admin_access)).collect();
        assert_eq!(results, [("gpu/big", false), ("look", true), ("part", false)]);
        let consumed = [("memory".to_owned(), 20 << 30), ("other".to_owned(), u64::MAX)];
        assert_eq!(
            (&read.results[2].share_id, &read.results[2].consumed),
            (&Some("7-8".into()), &consumed.into())
        );
        assert_eq!(convert(ResourceClaim::default()).results, []);
        let forged = json!({"metadata": {"annotations": {"resource.kubernetes.io/pod-claim-name": "../../x"}}, "spec": {}});
        assert_eq!(convert(serde_json::from_value(forged).unwrap()).pod_claim_name, None);
    }
}
