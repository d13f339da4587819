//! Claims as the API server has them, and what they ask of this node.

use berth_kernel::grants::claim::{ClaimOfServer, ClaimRequest, DeviceResult};
use berth_kernel::grants::prepare::{ClaimToPrepare, RequestToPrepare, allocations_of};
use berth_kernel::ids::names::{DeviceId, PartId, Resource};
use berth_kernel::node::command::StackAnswer;
use berth_kernel::node::ledger::Ledger;
use berth_kernel::policy::hooks::AdmitRequest;
use berth_kernel::sharing::offer::Consumes;
use berth_kernel::sharing::publish::{NamedDevice, Shares, device_by_name, device_name, shared_device_name};
use futures_util::future::BoxFuture;
use std::collections::{BTreeMap, BTreeSet};

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
    /// The whole part, or as many of its shares as the scheduler allocated.
    pub(super) ids: Vec<DeviceId>,
}

/// Shares that calls under way have chosen, so that no two calls choose the same ones.
pub(super) type ChosenShares = BTreeSet<(Resource, DeviceId)>;

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
    /// The offer has changed since the claim was allocated.
    #[error(
        "the claim was allocated {wanted} shares of the device {device}, which has {count} now: delete the pod, so that the \
         claim is allocated again"
    )]
    TooManyShares { device: String, wanted: u64, count: usize },
    /// The offer has changed between shares that set memory aside and shares that do not.
    #[error(
        "the claim was allocated another capacity than the device {0} has now: delete the pod, so that the claim is allocated \
         again"
    )]
    OtherCapacity(String),
}

/// The devices of a claim that this driver has on this node. The scheduler allocates a number of shares; this chooses which:
/// those that the claim holds already, or else free ones, preferably not in `chosen`.
pub(super) fn devices_here(
    ledger: &Ledger,
    claim: &ClaimOfServer,
    driver: &str,
    pool: &str,
    chosen: &ChosenShares,
) -> Result<Vec<ClaimedDevice>, BadClaim> {
    let here = || claim.results.iter().filter(|result| result.driver == driver && result.pool == pool);
    let mut results = BTreeMap::new();
    here().for_each(|result| *results.entry(key(result)).or_default() += 1);
    let held = held_devices(ledger, &claim.claim.uid);
    let mut choice = Choice { ledger, held, results, chosen, own: ChosenShares::new() };
    let devices: Vec<ClaimedDevice> = here().map(|result| choice.device(result)).collect::<Result<_, _>>()?;
    if devices.is_empty() {
        return Err(BadClaim::NoDevice { driver: driver.to_owned(), pool: pool.to_owned() });
    }
    Ok(devices)
}

/// The devices of one request that a claim holds under one name of a slice.
type HeldDevices = BTreeMap<(String, String), (Resource, Vec<DeviceId>)>;

/// The choice of a claim's devices.
struct Choice<'l> {
    ledger: &'l Ledger,
    /// What the claim holds and no result was given yet, by request and name.
    held: HeldDevices,
    /// How many results have no device yet, by request and name.
    results: BTreeMap<(String, String), usize>,
    /// What other calls have chosen.
    chosen: &'l ChosenShares,
    /// What this choice has taken.
    own: ChosenShares,
}

impl Choice<'_> {
    fn device(&mut self, result: &DeviceResult) -> Result<ClaimedDevice, BadClaim> {
        let key = key(result);
        let left = self.results.entry(key.clone()).or_default();
        *left = left.saturating_sub(1);
        let left = *left;
        // A claim keeps what it holds, also under a resource whose offer has changed since.
        let (resource, ids) = match self.held.get_mut(&key) {
            Some((resource, ids)) if ids.len() > left => {
                let wanted = held_by_result(self.ledger, resource, ids, result);
                let count = if left == 0 { ids.len() } else { wanted.clamp(1, ids.len() - left) };
                (resource.clone(), ids.drain(..count).collect())
            }
            _ => self.choose(result)?,
        };
        Ok(ClaimedDevice { result: result.clone(), resource, ids })
    }

    fn choose(&mut self, result: &DeviceResult) -> Result<(Resource, Vec<DeviceId>), BadClaim> {
        let device = result.device.clone();
        let (resource, part, shares) = match device_by_name(self.ledger, &device) {
            Some(NamedDevice::Whole(resource, id)) => return Ok((resource, vec![id])),
            Some(NamedDevice::Shared(resource, part, shares)) => (resource, part, shares),
            None => return Err(BadClaim::UnknownDevice(device)),
        };
        let Some(wanted) = shares.taken_by(&result.consumed) else {
            return Err(BadClaim::OtherCapacity(device));
        };
        let ids = self.choose_shares(&resource, &part, usize::try_from(wanted).unwrap_or(usize::MAX));
        if (ids.len() as u64) < wanted {
            return Err(BadClaim::TooManyShares { device, wanted, count: ids.len() });
        }
        Ok((resource, ids))
    }

    /// `count` offered shares, free ones first; fewer if the part has fewer. If a held one is among them, the kernel refuses
    /// the claim and names the holder.
    fn choose_shares(&mut self, resource: &Resource, part: &PartId, count: usize) -> Vec<DeviceId> {
        let devices = self.ledger.part(part).into_iter().flat_map(|state| &state.devices);
        let offered =
            devices.filter(|((of, share), device)| of == resource && share.is_some() && device.offered());
        let all = offered.map(|((_, share), device)| {
            let id = (resource.clone(), DeviceId { part: part.clone(), share: *share });
            (device.held(), self.chosen.contains(&id), id)
        });
        let mut shares: Vec<_> = all.filter(|(_, _, id)| !self.own.contains(id)).collect();
        shares.sort();
        shares.truncate(count);
        self.own.extend(shares.iter().map(|(_, _, id)| id.clone()));
        shares.into_iter().map(|(_, _, (_, id))| id).collect()
    }
}

fn key(result: &DeviceResult) -> (String, String) {
    (result.main_request().to_owned(), result.device.clone())
}

/// How many of the devices that a claim holds are of this result, by the size that they had when they were granted.
fn held_by_result(ledger: &Ledger, resource: &Resource, ids: &[DeviceId], result: &DeviceResult) -> usize {
    let first = ids.first().and_then(|id| ledger.part(&id.part)?.device(resource, id.share));
    let memory_mib = match first.map(|device| device.consumes) {
        Some(Consumes::Slice { memory_mib, .. }) => memory_mib,
        Some(Consumes::Whole) | None => 0,
    };
    let wanted = Shares { count: 0, memory_mib }.taken_by(&result.consumed);
    wanted.map_or(1, |wanted| usize::try_from(wanted).unwrap_or(usize::MAX))
}

fn held_devices(ledger: &Ledger, uid: &str) -> HeldDevices {
    let mut held = HeldDevices::new();
    for allocation in allocations_of(ledger, uid) {
        let request = allocation.origin.claim().map(ClaimRequest::main_request).unwrap_or_default();
        for id in &allocation.devices {
            let Some(name) = published_name(ledger, id) else { continue };
            let entry = held.entry((request.to_owned(), name));
            entry.or_insert_with(|| (allocation.resource.clone(), Vec::new())).1.push(id.clone());
        }
    }
    held
}

/// The name in a slice of a device of the ledger.
pub(super) fn published_name(ledger: &Ledger, id: &DeviceId) -> Option<String> {
    let part = &ledger.part(&id.part)?.part;
    if id.share.is_some() { shared_device_name(part) } else { device_name(part) }
}

/// What is to be granted: one request for each request of the claim, and for each resource if its devices are of several.
/// A request with admin access is granted nothing.
pub(super) fn to_prepare(claim: &ClaimOfServer, devices: &[ClaimedDevice]) -> ClaimToPrepare {
    let mut by_request: BTreeMap<(&str, &Resource), Vec<DeviceId>> = BTreeMap::new();
    for device in devices.iter().filter(|device| !device.result.admin_access) {
        let request = (device.result.request.as_str(), &device.resource);
        by_request.entry(request).or_default().extend(device.ids.iter().cloned());
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
    ClaimToPrepare {
        claim: claim.claim.clone(),
        pod_claim_name: claim.pod_claim_name.clone(),
        pods: claim.pods.clone(),
        requests: requests.collect(),
    }
}
