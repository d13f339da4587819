//! The record of a prepared claim beside the files that its containers find. A daemon whose store was lost adopts the claim
//! from it, since the kubelet does not have a claim prepared again while its containers run.

use berth_core::KernelHandle;
use berth_core::keeper::CommandError;
use berth_kernel::evidence::part_use::limits;
use berth_kernel::grants::allocation::{Allocation, Decision, GrantOrigin, LIVE_ALLOCATIONS_MAX, Limits};
use berth_kernel::grants::claim::{CLAIM_PODS_MAX, Claim, ClaimPod, ClaimRequest, is_uid};
use berth_kernel::ids::names::{AllocationId, BadName, DeviceId, Resource, is_dns_label};
use berth_kernel::node::change::Change;
use berth_kernel::node::command::Command;
use berth_kernel::node::ledger::Ledger;
use berth_kernel::policy::decider::Decider;
use serde::{Deserialize, Serialize};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The record's name in the folder of the claim.
pub(super) const FILE: &str = "claim.json";
/// The largest record, bytes: that of a claim with some 200 shares. The store accepts a record of this size and keeps the same
/// facts in fewer bytes, so every record that is read can be adopted.
const BYTES_MAX: usize = 16 * 1024;

/// A claim with its allocations.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Record {
    uid: String,
    namespace: String,
    name: String,
    pod_claim_name: Option<String>,
    /// UIDs and names.
    pods: Vec<(String, String)>,
    allocations: Vec<AllocationRecord>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct AllocationRecord {
    id: String,
    request: String,
    resource: String,
    devices: Vec<String>,
    granted_wall_ms: u64,
    environment: Vec<(String, String)>,
    memory_mib: Option<u64>,
    compute_percent: Option<u32>,
}

/// The record of a claim with these allocations; `None` if it would be larger than [`BYTES_MAX`].
pub(super) fn content(ledger: &Ledger, allocations: &[&Allocation]) -> Option<String> {
    let ClaimRequest { claim, pod_claim_name, pods, .. } = allocations.first()?.origin.claim()?;
    let allocation = |allocation: &&Allocation| {
        let Limits { memory_mib, compute_percent } =
            limits(ledger, allocation, false).map(|(limits, _)| limits).unwrap_or_default();
        AllocationRecord {
            id: allocation.id.to_string(),
            request: allocation.origin.claim().map(|own| own.request.clone()).unwrap_or_default(),
            resource: allocation.resource.to_string(),
            devices: allocation.devices.iter().map(ToString::to_string).collect(),
            granted_wall_ms: allocation.granted_wall_ms,
            environment: allocation.decision.environment.clone(),
            memory_mib,
            compute_percent,
        }
    };
    let record = Record {
        uid: claim.uid.clone(),
        namespace: claim.namespace.clone(),
        name: claim.name.clone(),
        pod_claim_name: pod_claim_name.clone(),
        pods: pods.iter().map(|pod| (pod.uid.clone(), pod.name.clone())).collect(),
        allocations: allocations.iter().map(allocation).collect(),
    };
    serde_json::to_string(&record).ok().filter(|text| text.len() <= BYTES_MAX)
}

impl Record {
    fn into_allocations(self) -> Result<Vec<Allocation>, String> {
        let Self { uid, namespace, name, pod_claim_name, pods, allocations } = self;
        let pods = pods.into_iter().take(CLAIM_PODS_MAX).map(|(uid, name)| ClaimPod { uid, name });
        let pods: Vec<_> = pods.collect();
        let claim = Claim { uid, namespace, name };
        let text = |error: BadName| error.to_string();
        let allocation = |record: AllocationRecord| {
            if !record.request.split('/').all(is_dns_label) {
                return Err(format!("{:?} is not the name of a request", record.request));
            }
            let (claim, pod_claim_name, pods) = (claim.clone(), pod_claim_name.clone(), pods.clone());
            let request = ClaimRequest { claim, pod_claim_name, request: record.request, pods };
            let origin = GrantOrigin::Claim(Arc::new(request));
            let mut devices: Vec<_> = record
                .devices
                .iter()
                .map(|id| DeviceId::parse(id).map_err(text))
                .collect::<Result<_, _>>()?;
            if devices.is_empty() {
                return Err("an allocation has no devices".to_owned());
            }
            devices.sort();
            devices.dedup();
            let limits = Limits { memory_mib: record.memory_mib, compute_percent: record.compute_percent };
            Ok(Allocation {
                id: AllocationId::parse(&record.id).map_err(text)?,
                resource: Resource::parse(&record.resource).map_err(text)?,
                devices,
                granted_wall_ms: record.granted_wall_ms,
                holder: origin.holder(),
                origin,
                overlapped: false,
                decision: Decision {
                    by: vec![Decider::Adopted],
                    reason: "held when the daemon started".into(),
                    environment: record.environment,
                    limits,
                },
                ended: None,
            })
        };
        allocations.into_iter().map(allocation).collect()
    }
}

/// Adopts the claims of these records that the ledger does not know. Called before devices are offered. Returns how many
/// allocations were adopted.
///
/// # Errors
/// If they could not be recorded.
pub async fn adopt_claims(grants: PathBuf, kernel: &KernelHandle) -> Result<usize, CommandError> {
    let found = tokio::task::spawn_blocking(move || read_all(&grants)).await.unwrap_or_default();
    let mut adopted = 0;
    for allocation in found {
        let id = allocation.id;
        let applied = kernel.execute(Command::AdoptClaims(vec![allocation])).await?;
        if applied.entry.changes.iter().any(|change| matches!(change, Change::Granted(_))) {
            adopted += 1;
        } else if !applied.snapshot.live.contains_key(&id) {
            tracing::info!(
                allocation = %id,
                "the allocation of a claim's record was not adopted: it has ended, or its devices are held by others"
            );
        }
    }
    Ok(adopted)
}

/// The allocations of all records. A record that cannot be read is passed over, so the devices of its claim may be offered as
/// free.
fn read_all(grants: &Path) -> Vec<Allocation> {
    let entries = fs::read_dir(grants).into_iter().flatten().filter_map(Result::ok);
    let read = |entry: fs::DirEntry| {
        let path = entry.path().join(FILE);
        let record = match berth_files::read(&path, BYTES_MAX as u64) {
            Ok(bytes) => serde_json::from_slice::<Record>(&bytes).map_err(|error| error.to_string()),
            // A folder of a claim whose record was too large.
            Err(_) if !path.exists() => return Vec::new(),
            Err(error) => Err(error.to_string()),
        };
        let folder = entry.file_name();
        let record = record.and_then(|record| match record.uid.as_str() == folder && is_uid(&record.uid) {
            true => Ok(record),
            false => Err("its UID is not the name of its folder".to_owned()),
        });
        let allocations = record.and_then(Record::into_allocations);
        allocations.unwrap_or_else(|error| {
            let path = path.display();
            tracing::warn!(
                %path, error,
                "the record of a prepared claim cannot be read, so its devices may be granted again: delete the pods of the claim"
            );
            Vec::new()
        })
    };
    entries.flat_map(read).take(LIVE_ALLOCATIONS_MAX).collect()
}
