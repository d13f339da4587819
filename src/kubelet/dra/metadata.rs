//! The files that containers of claims find with the attributes of their devices (KEP-5304; kubernetes
//! `k8s.io/dynamic-resource-allocation`, `api/metadata/doc.go`): one for each request of a claim.
//!
//! The names of their folders on the node say what was granted; by them the guard knows a container's allocations and memory
//! limits ([`berth_kernel::grants::annotation::folders`]).

use super::claims::published_name;
use berth_kernel::grants::allocation::Allocation;
use berth_kernel::grants::annotation::{GrantAnnotation, folders};
use berth_kernel::grants::claim::ClaimRequest;
use berth_kernel::node::ledger::Ledger;
use berth_kernel::sharing::publish::{Attribute, Versions, attributes_of};
use serde_json::{Map, Value, json};
use std::collections::BTreeSet;
use std::path::PathBuf;

/// The folder in a container (`api/metadata/types.go`: `ContainerDir`).
const CONTAINER_FOLDER: &str = "/var/run/kubernetes.io/dra-device-attributes";
/// The folder in a container with a file for each allocation.
const GRANTS_FOLDER: &str = "/var/run/berth/grants";
/// The versions of the object, the newest first: a reader takes the first that it knows.
const API_VERSIONS: [&str; 2] = ["metadata.resource.k8s.io/v1beta1", "metadata.resource.k8s.io/v1alpha1"];

/// The file of an allocation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct MetadataFile {
    /// Its path below the folder of the claim.
    pub(super) path: PathBuf,
    /// Its paths in the containers. The first one follows from the claim, whose author can have another claim's file mounted
    /// there in place of this one; the second one is this allocation's alone, so that the guard always finds the grant.
    pub(super) container_paths: [String; 2],
    pub(super) content: String,
}

/// The driver's name and the pool of its devices.
#[derive(Clone, Copy, Debug)]
pub(super) struct Publisher<'s> {
    pub(super) driver: &'s str,
    pub(super) pool: &'s str,
}

/// The file of an allocation among those of its claim: it has all devices of the request.
pub(super) fn file(
    ledger: &Ledger,
    allocation: &Allocation,
    of_claim: &[&Allocation],
    publisher: Publisher<'_>,
    versions: &Versions,
) -> Option<MetadataFile> {
    let request = allocation.origin.claim()?;
    let is_same_request = |one: &&&Allocation| {
        one.origin.claim().is_some_and(|own| own.main_request() == request.main_request())
    };
    let of_request: Vec<&Allocation> = of_claim.iter().filter(is_same_request).copied().collect();
    let grant = folders(&GrantAnnotation::of(ledger, allocation));
    let devices = devices(ledger, &of_request, publisher, versions);
    Some(MetadataFile {
        path: PathBuf::from(request.main_request()).join(grant).join("metadata.json"),
        container_paths: [
            container_path(request, publisher.driver),
            format!("{GRANTS_FOLDER}/{}.json", allocation.id),
        ],
        content: content(request, &devices),
    })
}

/// Where a container finds the file. The name of a claim from a template is generated, so its path has the claim's name in the
/// pod's specification instead.
fn container_path(request: &ClaimRequest, driver: &str) -> String {
    let folder = match &request.pod_claim_name {
        Some(name) => format!("resourceclaimtemplates/{name}"),
        None => format!("resourceclaims/{}", request.claim.name),
    };
    format!("{CONTAINER_FOLDER}/{folder}/{}/{driver}-metadata.json", request.main_request())
}

fn content(request: &ClaimRequest, devices: &[Value]) -> String {
    let claim = &request.claim;
    let object = |version: &str| {
        let mut object = json!({
            "apiVersion": version,
            "kind": "DeviceMetadata",
            "metadata": {"name": claim.name, "namespace": claim.namespace, "uid": claim.uid, "generation": 1},
            "requests": [{"name": request.request, "devices": devices}],
        });
        if let Some(name) = &request.pod_claim_name {
            object["podClaimName"] = Value::from(name.as_str());
        }
        object.to_string() + "\n"
    };
    API_VERSIONS.map(object).concat()
}

/// The devices by their names in the slices: shares of one GPU are one device.
fn devices(
    ledger: &Ledger,
    allocations: &[&Allocation],
    Publisher { driver, pool }: Publisher<'_>,
    versions: &Versions,
) -> Vec<Value> {
    let mut names = BTreeSet::new();
    let ids = allocations.iter().flat_map(|one| one.devices.iter().map(|id| (&one.resource, id)));
    let devices = ids.filter_map(|(resource, id)| {
        let name = published_name(ledger, id).filter(|name| names.insert(name.clone()))?;
        let attributes = attributes_of(ledger, resource, id, versions)?;
        let attributes: Map<String, Value> =
            attributes.into_iter().map(|(name, value)| (name, attribute(value))).collect();
        Some(json!({"driver": driver, "pool": pool, "name": name, "attributes": attributes}))
    });
    devices.collect()
}

fn attribute(value: Attribute) -> Value {
    match value {
        Attribute::Text(text) => json!({"string": text}),
        Attribute::Version(version) => json!({"version": version}),
        Attribute::Number(number) => json!({"int": number}),
    }
}
