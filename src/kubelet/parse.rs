//! Parses the kubelet's requests into validated types.
//!
//! The kubelet sends none of the requests that are rejected here. Those of other clients must not reach
//! the kernel.

use super::wire::v1beta1::{ContainerAllocateRequest, ContainerPreferredAllocationRequest};
use berth_kernel::grants::allocation::DEVICES_PER_ALLOCATION_MAX;
use berth_kernel::ids::names::{BadName, DeviceId, Resource};
use berth_kernel::node::ledger::Ledger;
use berth_kernel::policy::hooks::{AdmitRequest, PlaceRequest};
use std::collections::BTreeSet;

/// Why a request is invalid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum BadRequest {
    #[error("the request names no container")]
    NoContainer,
    #[error("the request names {given} containers; at most {limit} are allowed")]
    TooManyContainers { given: usize, limit: usize },
    #[error("the request for {resource} names no device")]
    NoDevice { resource: Resource },
    #[error("the request for {resource} names {given} devices; at most {limit} are allowed")]
    TooManyDevices { resource: Resource, given: usize, limit: usize },
    #[error("the request for {resource} contains an invalid device id")]
    InvalidId {
        resource: Resource,
        #[source]
        source: BadName,
    },
    #[error("the request for {resource} names device {id} twice")]
    DuplicateDevice { resource: Resource, id: DeviceId },
    #[error("no device {id} under {resource}: it is not in this plugin's list")]
    UnknownDevice { resource: Resource, id: DeviceId },
    #[error("the request for {resource} has the invalid allocation size {size}")]
    InvalidSize { resource: Resource, size: i32 },
}

/// Parses an Allocate request: the union of its containers' devices, which is granted, and the devices of
/// each container. All are listed, unique and sorted; each container has at least one.
///
/// The API allows several containers of one pod per call. A device of two of them is granted once.
pub(super) fn allocate_request(
    ledger: &Ledger,
    resource: &Resource,
    requests: &[ContainerAllocateRequest],
) -> Result<(AdmitRequest, Vec<Vec<DeviceId>>), BadRequest> {
    let mut granted = BTreeSet::new();
    let mut containers = Vec::new();
    for request in requests {
        let devices = parse_ids(resource, &request.devices_ids)?;
        if devices.is_empty() {
            return Err(BadRequest::NoDevice { resource: resource.clone() });
        }
        if let Some(id) = devices.iter().find(|id| ledger.device(resource, id).is_none()) {
            return Err(BadRequest::UnknownDevice { resource: resource.clone(), id: id.clone() });
        }
        containers.push(devices.iter().cloned().collect());
        granted.extend(devices);
    }
    check_count(resource, granted.len())?;
    let request =
        AdmitRequest { resource: resource.clone(), devices: granted.into_iter().collect(), claim: None };
    Ok((request, containers))
}

/// Parses a GetPreferredAllocation request of one container. Valid ids that are no longer listed are
/// ignored: an error would fail the pod, and the kubelet's list may be outdated.
pub(super) fn preferred_request(
    ledger: &Ledger,
    resource: &Resource,
    request: &ContainerPreferredAllocationRequest,
) -> Result<PlaceRequest, BadRequest> {
    let required = parse_ids(resource, &request.must_include_device_i_ds)?;
    let mut available = parse_ids(resource, &request.available_device_i_ds)?;
    available.extend(required.iter().cloned());
    let size = usize::try_from(request.allocation_size)
        .map_err(|_| BadRequest::InvalidSize { resource: resource.clone(), size: request.allocation_size })?;
    let is_listed = |id: &DeviceId| ledger.device(resource, id).is_some();
    Ok(PlaceRequest {
        resource: resource.clone(),
        available: available.into_iter().filter(is_listed).collect(),
        required: required.into_iter().filter(is_listed).collect(),
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

fn parse_ids(resource: &Resource, given: &[String]) -> Result<BTreeSet<DeviceId>, BadRequest> {
    check_count(resource, given.len())?;
    let mut ids = BTreeSet::new();
    for text in given {
        let id = DeviceId::parse(text)
            .map_err(|source| BadRequest::InvalidId { resource: resource.clone(), source })?;
        if !ids.insert(id.clone()) {
            return Err(BadRequest::DuplicateDevice { resource: resource.clone(), id });
        }
    }
    Ok(ids)
}
