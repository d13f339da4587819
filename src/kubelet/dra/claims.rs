//! Claims as the API server has them, and what they ask of this node.

use berth_kernel::grants::claim::{ClaimOfServer, DeviceResult};
use berth_kernel::grants::prepare::{ClaimToPrepare, RequestToPrepare, allocations_of};
use berth_kernel::ids::names::{DeviceId, Resource};
use berth_kernel::node::command::StackAnswer;
use berth_kernel::node::ledger::Ledger;
use berth_kernel::policy::hooks::AdmitRequest;
use berth_kernel::sharing::publish::{device_by_name, device_name};
use futures_util::future::BoxFuture;
use std::collections::BTreeMap;

/// Reads claims from the API server.
pub trait ClaimReader: Send + Sync {
    /// The claim with this name; `None` if there is none. Without an answer, why.
    fn read<'r>(
        &'r self,
        namespace: &'r str,
        name: &'r str,
    ) -> BoxFuture<'r, Result<Option<ClaimOfServer>, String>>;
}

/// A device of a claim.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ClaimedDevice {
    pub(super) result: DeviceResult,
    pub(super) resource: Resource,
    pub(super) id: DeviceId,
}

/// Why a claim cannot be prepared, whatever is held.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum BadClaim {
    /// The name belongs to another claim now, or to none.
    #[error("the API server has no claim {0} with this UID: the pod's claim was deleted")]
    Gone(String),
    /// Nothing of the claim is here.
    #[error("the claim has no device of the driver {driver} in the pool {pool}")]
    NoDevice { driver: String, pool: String },
    /// The ledger does not have the device.
    #[error("the node publishes no device {0}: delete the pod, so that the claim is allocated again")]
    UnknownDevice(String),
    /// A share, which this release does not publish.
    #[error("the device {0} is allocated as a share, and the node publishes whole devices only")]
    Share(String),
}

/// The devices of a claim that this driver has on this node.
pub(super) fn devices_here(
    ledger: &Ledger,
    claim: &ClaimOfServer,
    driver: &str,
    pool: &str,
) -> Result<Vec<ClaimedDevice>, BadClaim> {
    let held = held_devices(ledger, &claim.claim.uid);
    let here = claim.results.iter().filter(|result| result.driver == driver && result.pool == pool);
    let device = |result: &DeviceResult| {
        if result.share_id.is_some() {
            return Err(BadClaim::Share(result.device.clone()));
        }
        // A claim keeps what it holds, also under a resource whose offer has changed since.
        let known = held.get(&result.device).cloned().or_else(|| device_by_name(ledger, &result.device));
        let (resource, id) = known.ok_or_else(|| BadClaim::UnknownDevice(result.device.clone()))?;
        Ok(ClaimedDevice { result: result.clone(), resource, id })
    };
    let devices: Vec<ClaimedDevice> = here.map(device).collect::<Result<_, _>>()?;
    if devices.is_empty() {
        return Err(BadClaim::NoDevice { driver: driver.to_owned(), pool: pool.to_owned() });
    }
    Ok(devices)
}

/// The devices that a claim holds, by their names in the slices.
fn held_devices(ledger: &Ledger, uid: &str) -> BTreeMap<String, (Resource, DeviceId)> {
    let devices = allocations_of(ledger, uid)
        .into_iter()
        .flat_map(|allocation| allocation.devices.iter().map(|id| (allocation.resource.clone(), id.clone())));
    let named = devices
        .filter_map(|(resource, id)| Some((device_name(&ledger.part(&id.part)?.part)?, (resource, id))));
    named.collect()
}

/// What is to be granted: one request for each request of the claim, and for each resource if its devices are of several.
/// A request with admin access is granted nothing.
pub(super) fn to_prepare(claim: &ClaimOfServer, devices: &[ClaimedDevice]) -> ClaimToPrepare {
    let mut by_request: BTreeMap<(&str, &Resource), Vec<DeviceId>> = BTreeMap::new();
    for device in devices.iter().filter(|device| !device.result.admin_access) {
        let request = (device.result.main_request(), &device.resource);
        by_request.entry(request).or_default().push(device.id.clone());
    }
    let requests = by_request.into_iter().map(|((name, resource), mut devices)| {
        devices.sort();
        devices.dedup();
        RequestToPrepare {
            name: name.to_owned(),
            devices: AdmitRequest { resource: resource.clone(), devices, claim: None },
            answer: StackAnswer::NotCalled,
        }
    });
    ClaimToPrepare { claim: claim.claim.clone(), pods: claim.pods.clone(), requests: requests.collect() }
}
