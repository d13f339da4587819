//! ResourceClaims (`resource.k8s.io/v1`) whose devices the kubelet has had prepared.

/// Most pods that an allocation of a claim names. A claim can be reserved for 256 (`ResourceClaimStatus.reservedFor`).
pub const CLAIM_PODS_MAX: usize = 8;

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
    /// The request's name in the claim, without that of a subrequest.
    pub request: String,
    /// The first [`CLAIM_PODS_MAX`] pods that the claim was reserved for when it was last prepared.
    pub pods: Vec<ClaimPod>,
}
