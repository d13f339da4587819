//! ResourceClaims (`resource.k8s.io/v1`) whose devices the kubelet has had prepared.

use std::collections::BTreeMap;

/// Most pods that an allocation of a claim names. A claim can be reserved for 256 (`ResourceClaimStatus.reservedFor`).
pub const CLAIM_PODS_MAX: usize = 8;

/// Whether it can be the UID of an object: it becomes part of a file's name.
#[must_use]
pub fn is_uid(uid: &str) -> bool {
    (1..=UID_BYTES_MAX).contains(&uid.len())
        && uid.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-')
}

/// The longest UID; those of the API server have 36 characters.
const UID_BYTES_MAX: usize = 64;

/// The identity of a claim.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Claim {
    /// Its UID: a later claim of the same name has another one.
    pub uid: String,
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
}

/// A pod that a claim is reserved for. It is in the claim's namespace.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ClaimPod {
    /// Its UID.
    pub uid: String,
    /// Its name.
    pub name: String,
}

/// The part of a claim that an allocation is for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClaimRequest {
    /// The claim.
    pub claim: Claim,
    /// The name of the claim in the specification of its pod, if it was made from a ResourceClaimTemplate.
    pub pod_claim_name: Option<String>,
    /// The request's name in the claim; if it has subrequests, a slash and the name of the allocated one follow.
    pub request: String,
    /// The first [`CLAIM_PODS_MAX`] pods that the claim is reserved for, as the API server showed them last.
    pub pods: Vec<ClaimPod>,
}

impl ClaimRequest {
    /// The request's name, without that of a subrequest.
    #[must_use]
    pub fn main_request(&self) -> &str {
        main_request(&self.request)
    }

    /// Whether the claim may be reserved for pods that are not recorded.
    #[must_use]
    pub fn may_have_more_pods(&self) -> bool {
        self.pods.len() >= CLAIM_PODS_MAX
    }
}

/// A claim as the API server has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClaimOfServer {
    /// Its identity.
    pub claim: Claim,
    /// See [`ClaimRequest::pod_claim_name`].
    pub pod_claim_name: Option<String>,
    /// The pods that it is reserved for.
    pub pods: Vec<ClaimPod>,
    /// The devices that the scheduler allocated, of all drivers and nodes.
    pub results: Vec<DeviceResult>,
}

/// One device that the scheduler allocated (`resource.k8s.io/v1`: `DeviceRequestAllocationResult`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceResult {
    /// The request, with the name of a subrequest after a slash.
    pub request: String,
    /// The driver.
    pub driver: String,
    /// The pool.
    pub pool: String,
    /// The device's name in its slice.
    pub device: String,
    /// Whether the request has admin access: the device may be held by another claim.
    pub admin_access: bool,
    /// The share of a device that several claims share.
    pub share_id: Option<String>,
    /// How much it takes of the capacities of such a device: a number, or bytes.
    pub consumed: BTreeMap<String, u64>,
}

impl DeviceResult {
    /// The request's name, without that of a subrequest.
    #[must_use]
    pub fn main_request(&self) -> &str {
        main_request(&self.request)
    }
}

/// The name of a request, without that of a subrequest. The scheduler allocates only one subrequest of each request, so this
/// name is unique within the devices of a claim.
pub(crate) fn main_request(name: &str) -> &str {
    name.split('/').next().unwrap_or_default()
}
