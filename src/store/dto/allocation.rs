//! The serialized form of allocations.

use berth_kernel::grants::allocation::{
    self as kernel, DEVICES_PER_ALLOCATION_MAX, Decision, End, EndReason, GrantOrigin, Limits,
};
use berth_kernel::grants::claim;
use berth_kernel::ids::names::{AllocationId, DeviceId, PartId, Resource, SHARE_NUMBER_MAX};
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// See [`kernel::Allocation`].
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub(in super::super) struct Allocation {
    resource: String,
    devices: Vec<PartDevices>,
    granted_ms: u64,
    /// Absent: the device plugin granted it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    claim: Option<Claim>,
    #[serde(with = "Holder", default, skip_serializing_if = "kernel::Holder::is_unknown")]
    holder: kernel::Holder,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    overlapped: bool,
    by: Vec<String>,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    reason: String,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    environment: Vec<(String, String)>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    memory_mib: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    compute_percent: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    ended: Option<Ended>,
}

/// Consecutive devices of one part. 2048 devices on 16 GPUs have at most 2048 x 6 bytes of share
/// numbers and 16 x 90 of names: 13.4 KiB.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct PartDevices {
    part: String,
    shares: Vec<Shares>,
}

/// `[first, count]`, a share number, or `null` for the whole part.
#[derive(Serialize, Deserialize)]
#[serde(untagged)]
enum Shares {
    Run(u32, u32),
    Single(u32),
    Whole(()),
}

/// See [`claim::ClaimRequest`].
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Claim {
    uid: String,
    namespace: String,
    name: String,
    #[serde(rename = "podClaimName", default, skip_serializing_if = "Option::is_none")]
    pod_claim_name: Option<String>,
    request: String,
    /// UID and name of each.
    pods: Vec<(String, String)>,
}

impl Claim {
    fn from_kernel(request: &claim::ClaimRequest) -> Self {
        let claim::Claim { uid, namespace, name } = request.claim.clone();
        let pods = request.pods.iter().map(|pod| (pod.uid.clone(), pod.name.clone())).collect();
        let (pod_claim_name, request) = (request.pod_claim_name.clone(), request.request.clone());
        Self { uid, namespace, name, pod_claim_name, request, pods }
    }

    fn into_kernel(self) -> GrantOrigin {
        let pods = self.pods.into_iter().map(|(uid, name)| claim::ClaimPod { uid, name });
        GrantOrigin::Claim(Arc::new(claim::ClaimRequest {
            claim: claim::Claim { uid: self.uid, namespace: self.namespace, name: self.name },
            pod_claim_name: self.pod_claim_name,
            request: self.request,
            pods: pods.collect(),
        }))
    }
}

#[derive(Serialize, Deserialize)]
#[serde(remote = "kernel::Holder", deny_unknown_fields)]
struct Holder {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    namespace: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pod: Option<String>,
    #[serde(rename = "uid", default, skip_serializing_if = "Option::is_none")]
    pod_uid: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    container: Option<String>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Ended {
    #[serde(with = "Reason")]
    reason: EndReason,
    ms: u64,
}

#[derive(Serialize, Deserialize)]
#[serde(remote = "EndReason", rename_all = "camelCase")]
enum Reason {
    Released,
    NeverStarted,
    PodGone,
    Superseded,
    Operator,
}

impl Allocation {
    pub(in super::super) fn from_kernel(a: &kernel::Allocation) -> Self {
        Self {
            resource: a.resource.to_string(),
            devices: group_devices(&a.devices),
            granted_ms: a.granted_wall_ms,
            claim: a.origin.claim().map(Claim::from_kernel),
            holder: a.holder.clone(),
            overlapped: a.overlapped,
            by: a.decision.by.iter().map(ToString::to_string).collect(),
            reason: a.decision.reason.clone(),
            environment: a.decision.environment.clone(),
            memory_mib: a.decision.limits.memory_mib,
            compute_percent: a.decision.limits.compute_percent,
            ended: a.ended.as_ref().map(|end| Ended { reason: end.reason, ms: end.wall_ms }),
        }
    }

    pub(in super::super) fn into_kernel(self, id: AllocationId) -> Result<kernel::Allocation, String> {
        Ok(kernel::Allocation {
            id,
            resource: Resource::parse(&self.resource).map_err(|e| e.to_string())?,
            devices: ungroup_devices(self.devices)?,
            granted_wall_ms: self.granted_ms,
            origin: self.claim.map_or(GrantOrigin::DevicePlugin, Claim::into_kernel),
            holder: self.holder,
            overlapped: self.overlapped,
            decision: Decision {
                by: self.by.into_iter().map(Into::into).collect(),
                reason: self.reason,
                environment: self.environment,
                limits: Limits { memory_mib: self.memory_mib, compute_percent: self.compute_percent },
            },
            ended: self.ended.map(|ended| End { reason: ended.reason, wall_ms: ended.ms }),
        })
    }
}

/// Keeps the order of the devices, sorted or not.
fn group_devices(devices: &[DeviceId]) -> Vec<PartDevices> {
    devices
        .chunk_by(|a, b| a.part == b.part)
        .map(|group| PartDevices { part: group[0].part.to_string(), shares: runs(group) })
        .collect()
}

fn runs(group: &[DeviceId]) -> Vec<Shares> {
    group
        .chunk_by(|a, b| {
            let next = a.share.and_then(|n| n.checked_add(1));
            next.is_some() && next == b.share
        })
        .flat_map(|run| match (run[0].share, u32::try_from(run.len())) {
            // Two numbers are shorter than a run of two.
            (Some(first), Ok(count)) if count > 2 => vec![Shares::Run(first, count)],
            _ => {
                let single = |d: &DeviceId| d.share.map_or(Shares::Whole(()), Shares::Single);
                run.iter().map(single).collect()
            }
        })
        .collect()
}

fn ungroup_devices(groups: Vec<PartDevices>) -> Result<Vec<DeviceId>, String> {
    let mut devices = Vec::new();
    for group in groups {
        let part = PartId::parse(&group.part).map_err(|e| e.to_string())?;
        for shares in group.shares {
            let (first, count) = match shares {
                Shares::Whole(()) => {
                    devices.push(DeviceId::whole(&part));
                    continue;
                }
                Shares::Single(n) => (n, 1),
                Shares::Run(first, count) => (first, count),
            };
            // Checked before the devices are allocated: a damaged count must not exhaust memory.
            let end = first.checked_add(count);
            if end.is_none_or(|end| end > SHARE_NUMBER_MAX + 1) {
                return Err(format!("{part} has no {count} shares from {first} on"));
            }
            if devices.len() + count as usize > DEVICES_PER_ALLOCATION_MAX {
                return Err(format!("more than {DEVICES_PER_ALLOCATION_MAX} devices"));
            }
            devices.extend((first..first + count).map(|n| DeviceId::share(&part, n)));
        }
    }
    Ok(devices)
}
