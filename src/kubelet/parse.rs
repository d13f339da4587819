//! Requests of the kubelet, parsed at the door into types that cannot be wrong.
//!
//! The kubelet sends none of what is refused here; whatever does must not reach the kernel.

use super::wire::v1beta1::{ContainerAllocateRequest, ContainerPreferredAllocationRequest};
use berth_kernel::allocation::DEVICES_PER_ALLOCATION_MAX;
use berth_kernel::ledger::Ledger;
use berth_kernel::names::{BadName, DeviceId, Resource};
use berth_kernel::policy::{AdmitRequest, PlaceRequest};
use std::collections::BTreeSet;

/// A request that means nothing.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum BadRequest {
    #[error("the request names no container")]
    NoContainer,
    #[error("the request names {given} containers; at most {limit} are taken")]
    TooManyContainers { given: usize, limit: usize },
    #[error("the request for {resource} names no device")]
    NoDevice { resource: Resource },
    #[error("the request for {resource} names {given} devices; at most {limit} are taken")]
    TooManyDevices { resource: Resource, given: usize, limit: usize },
    #[error("the request for {resource} contains an invalid device id")]
    BadId {
        resource: Resource,
        #[source]
        source: BadName,
    },
    #[error("the request for {resource} names device {id} twice")]
    Doubled { resource: Resource, id: DeviceId },
    #[error("no device {id} under {resource}: it is not in this plugin's list")]
    Unknown { resource: Resource, id: DeviceId },
    #[error("the request for {resource} wants {size} devices")]
    BadSize { resource: Resource, size: i32 },
}

/// One Allocate: what is granted, which is what its containers name together, and what each of them names. Known
/// devices, each once, sorted, at least one a container.
///
/// The API lets a call name several containers, which then are of one pod; a device that two of them name is
/// granted once.
pub(super) fn admit(
    ledger: &Ledger,
    resource: &Resource,
    requests: &[ContainerAllocateRequest],
) -> Result<(AdmitRequest, Vec<Vec<DeviceId>>), BadRequest> {
    let mut all = BTreeSet::new();
    let mut containers = Vec::new();
    for request in requests {
        let devices = ids(resource, &request.devices_ids)?;
        if devices.is_empty() {
            return Err(BadRequest::NoDevice { resource: resource.clone() });
        }
        if let Some(id) = devices.iter().find(|id| ledger.device(resource, id).is_none()) {
            return Err(BadRequest::Unknown { resource: resource.clone(), id: id.clone() });
        }
        containers.push(devices.iter().cloned().collect());
        all.extend(devices);
    }
    check_count(resource, all.len())?;
    let request = AdmitRequest { resource: resource.clone(), devices: all.into_iter().collect() };
    Ok((request, containers))
}

/// GetPreferredAllocation for one container. Well-formed ids that are not listed any more are left
/// out rather than refused: an error here fails the pod, and the kubelet may be one list behind.
pub(super) fn place(
    ledger: &Ledger,
    resource: &Resource,
    request: &ContainerPreferredAllocationRequest,
) -> Result<PlaceRequest, BadRequest> {
    let required = ids(resource, &request.must_include_device_i_ds)?;
    let mut available = ids(resource, &request.available_device_i_ds)?;
    available.extend(required.iter().cloned());
    let size = usize::try_from(request.allocation_size)
        .map_err(|_| BadRequest::BadSize { resource: resource.clone(), size: request.allocation_size })?;
    let known = |id: &DeviceId| ledger.device(resource, id).is_some();
    Ok(PlaceRequest {
        resource: resource.clone(),
        available: available.into_iter().filter(known).collect(),
        required: required.into_iter().filter(known).collect(),
        size,
    })
}

fn check_count(resource: &Resource, given: usize) -> Result<(), BadRequest> {
    let limit = DEVICES_PER_ALLOCATION_MAX;
    match given > limit {
        true => Err(BadRequest::TooManyDevices { resource: resource.clone(), given, limit }),
        false => Ok(()),
    }
}

fn ids(resource: &Resource, given: &[String]) -> Result<BTreeSet<DeviceId>, BadRequest> {
    check_count(resource, given.len())?;
    let mut ids = BTreeSet::new();
    for text in given {
        let id = DeviceId::parse(text)
            .map_err(|source| BadRequest::BadId { resource: resource.clone(), source })?;
        if !ids.insert(id.clone()) {
            return Err(BadRequest::Doubled { resource: resource.clone(), id });
        }
    }
    Ok(ids)
}
