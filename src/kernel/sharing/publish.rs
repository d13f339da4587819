//! The devices that the scheduler can give to ResourceClaims: whole GPUs and MIG instances of the GPUs that are granted
//! through DRA. The shares of a GPU are not published yet.
//!
//! Names and limits are those of `resource.k8s.io/v1` (kubernetes `api/resource/v1/types.go`), the attributes' names those
//! of NVIDIA's DRA driver, so that its claims fit.

use crate::hardware::gpu::{Part, XID};
use crate::hardware::health::{Health, HealthState};
use crate::hardware::triage::Severity;
use crate::ids::names::{DeviceId, GpuId, PartId, Resource};
use crate::node::ledger::Ledger;
use crate::sharing::part_state::PartState;
use crate::sharing::via::KubeletApi;
use std::collections::BTreeMap;

/// Longest value of an attribute, bytes (`types.go`, `DeviceAttributeMaxValueLength`).
pub const ATTRIBUTE_BYTES_MAX: usize = 64;

/// One device of this node's ResourceSlices.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PublishedDevice {
    /// Its name in the slice.
    pub name: String,
    /// Its GPU.
    pub gpu: GpuId,
    /// The resource under which the ledger has it.
    pub resource: Resource,
    /// Its id in the ledger.
    pub device: DeviceId,
    /// Its attributes, by the names of the slice.
    pub attributes: BTreeMap<String, Attribute>,
    /// Its memory, MiB; 0 if it is unknown.
    pub memory_mib: u64,
    /// Why the scheduler is to give it to no further claim; empty if it may.
    pub taints: Vec<Taint>,
}

/// The value of an attribute.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Attribute {
    /// Text.
    Text(String),
    /// A version by semver 2.0.0, as the API server demands it.
    Version(String),
    /// A number.
    Number(i64),
}

/// Why a device is to be given to no further claim: the name of a taint with the effect `NoSchedule`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Taint {
    /// A cordon or drain.
    Cordoned,
    /// The GPU is to be granted through the device plugin API.
    Moving,
    /// It is withdrawn, or cannot be passed to a container at present.
    NotReady,
    /// An XID made the GPU unhealthy.
    Xid,
    /// The GPU is no longer on this node.
    GpuLost,
    /// Another error made the GPU unhealthy.
    Unhealthy,
}

impl Taint {
    /// Its key, after the driver's name and a slash.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Cordoned => "cordoned",
            Self::Moving => "moving",
            Self::NotReady => "not-ready",
            Self::Xid => "xid",
            Self::GpuLost => "gpu-lost",
            Self::Unhealthy => "unhealthy",
        }
    }
}

/// The versions of NVIDIA's driver that the attributes show.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Versions {
    /// The driver's, such as `535.54.03`.
    pub driver: Option<String>,
    /// The newest version of CUDA that the driver has.
    pub cuda: Option<String>,
}

/// What is published, and what is not although its GPU is granted through DRA.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Publication {
    /// The devices, in the order in which the scheduler tries them.
    pub devices: Vec<PublishedDevice>,
    /// Parts that are not published, and why.
    pub left_out: Vec<(PartId, &'static str)>,
}

/// The devices to publish.
#[must_use]
pub fn publication(ledger: &Ledger, versions: &Versions) -> Publication {
    let mut publication = Publication::default();
    for part in ledger.parts.values().filter(|part| is_granted_through_dra(ledger, part)) {
        if part.devices.is_empty() || ledger.is_excluded(part) {
            continue;
        }
        match published(ledger, part, versions) {
            Ok(device) => publication.devices.push(device),
            Err(why) => publication.left_out.push((part.part.id.clone(), why)),
        }
    }
    let order = |device: &PublishedDevice| {
        let part = ledger.part(&device.device.part).map(|part| &part.part);
        (
            part.map(|part| (part.gpu_index, part.mig.as_ref().map(|mig| mig.gpu_instance))),
            device.name.clone(),
        )
    };
    publication.devices.sort_by_key(order);
    publication
}

/// Why no device of a GPU can be published; `None` if one can.
#[must_use]
pub fn why_not_published(ledger: &Ledger, gpu: &GpuId) -> Option<&'static str> {
    let parts = ledger.parts_of(gpu).filter(|part| !part.devices.is_empty() && !ledger.is_excluded(part));
    let mut why = Some("nothing is offered on it");
    for part in parts {
        why = Some(why_not(part)?);
    }
    why
}

fn why_not(part: &PartState) -> Option<&'static str> {
    if resource_of_whole(part).is_none() {
        return Some("it is offered in shares, which are not published yet");
    }
    device_name(&part.part).is_none().then_some("its UUID is no DNS label")
}

/// The device of the ledger with this name in a slice.
#[must_use]
pub fn device_by_name(ledger: &Ledger, name: &str) -> Option<(Resource, DeviceId)> {
    let part = ledger.parts.values().find(|part| device_name(&part.part).as_deref() == Some(name))?;
    let resource = resource_of_whole(part)?;
    Some((resource, DeviceId::whole(&part.part.id)))
}

/// The name of a part in a slice: its UUID in lower case, as NVIDIA's driver forms it. `None` if it is no DNS label. With
/// at most 56 characters it is never too long for one.
#[must_use]
pub fn device_name(part: &Part) -> Option<String> {
    let name = part.id.as_str().to_ascii_lowercase();
    let is_inner = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    let is_label = name.bytes().all(is_inner) && !name.starts_with('-') && !name.ends_with('-');
    is_label.then_some(name)
}

/// A version that the API server takes: three numbers, without leading zeros. `None` for other texts.
#[must_use]
pub fn semantic_version(text: &str) -> Option<String> {
    let numbers = text.split('.').map(|number| number.parse::<u64>().ok());
    let mut numbers: Vec<u64> = numbers.collect::<Option<_>>()?;
    if numbers.len() > 3 {
        return None;
    }
    numbers.resize(3, 0);
    let texts: Vec<String> = numbers.iter().map(u64::to_string).collect();
    Some(texts.join("."))
}

fn is_granted_through_dra(ledger: &Ledger, part: &PartState) -> bool {
    ledger.gpu_of(part).is_some_and(|gpu| gpu.via.api == KubeletApi::Dra)
}

/// The resource of the part's whole device: an offered one, or else one that is held.
fn resource_of_whole(part: &PartState) -> Option<Resource> {
    let wholes = || part.devices.iter().filter(|((_, share), _)| share.is_none());
    let offered = wholes().find(|(_, device)| device.offered());
    let ((resource, _), _) = offered.or_else(|| wholes().find(|(_, device)| device.held()))?;
    Some(resource.clone())
}

fn published(
    ledger: &Ledger,
    part: &PartState,
    versions: &Versions,
) -> Result<PublishedDevice, &'static str> {
    let (Some(resource), Some(name), None) =
        (resource_of_whole(part), device_name(&part.part), why_not(part))
    else {
        return Err(why_not(part).unwrap_or_default());
    };
    Ok(PublishedDevice {
        name,
        gpu: part.part.gpu.clone(),
        attributes: attributes(part, &resource, versions),
        memory_mib: part.part.memory_mib,
        taints: taints(ledger, part, &resource),
        device: DeviceId::whole(&part.part.id),
        resource,
    })
}

fn attributes(state: &PartState, resource: &Resource, versions: &Versions) -> BTreeMap<String, Attribute> {
    let part = &state.part;
    let mut all = BTreeMap::new();
    let mut add = |name: &str, value: Option<Attribute>| {
        if let Some(value) = value {
            all.insert(name.to_owned(), value);
        }
    };
    let text = |value: &str| {
        let value = &value[..value.floor_char_boundary(ATTRIBUTE_BYTES_MAX)];
        (!value.is_empty()).then(|| Attribute::Text(value.to_owned()))
    };
    let version = |value: Option<&String>| value.and_then(|v| semantic_version(v)).map(Attribute::Version);
    let known = |key: &str| part.attributes.get(key);
    add("type", text(if part.is_whole_gpu() { "gpu" } else { "mig" }));
    add("uuid", text(part.id.as_str()));
    add("resource", text(resource.as_str()));
    add("productName", text(&part.model));
    add("brand", known("brand").and_then(|value| text(value)));
    add("architecture", known("architecture").and_then(|value| text(value)));
    add("cudaComputeCapability", version(known("compute.capability")));
    add("driverVersion", version(versions.driver.as_ref()));
    add("cudaDriverVersion", version(versions.cuda.as_ref()));
    add("resource.kubernetes.io/pciBusID", part.pci_bus.and_then(|bus| text(&bus.sysfs_name())));
    add("resource.kubernetes.io/numaNode", part.numa_node.map(|node| Attribute::Number(node.into())));
    if let Some(mig) = &part.mig {
        add("profile", text(&mig.profile));
        add("parentUUID", text(part.gpu.as_str()));
    }
    all
}

fn taints(ledger: &Ledger, part: &PartState, resource: &Resource) -> Vec<Taint> {
    let Some(gpu) = ledger.gpu_of(part) else { return vec![Taint::NotReady] };
    let mut taints = Vec::new();
    if !gpu.marks.is_empty() {
        taints.push(Taint::Cordoned);
    }
    if gpu.via.moving {
        taints.push(Taint::Moving);
    }
    let device = part.device(resource, None);
    let is_withdrawn =
        device.is_none_or(|device| !device.offered() || ledger.why_not_enforceable(part, device).is_some());
    let is_passed =
        ledger.device_access.no_strategy.is_none() && ledger.device_access.gives(KubeletApi::Dra, part);
    if is_withdrawn || !is_passed {
        taints.push(Taint::NotReady);
    }
    taints.extend(health_taint(part, &gpu.health));
    taints
}

fn health_taint(part: &PartState, health: &Health) -> Option<Taint> {
    if !part.present || health.state == HealthState::Vanished {
        return Some(Taint::GpuLost);
    }
    if health.state != HealthState::Unhealthy {
        return None;
    }
    let worst = health.judgements.iter().filter(|one| one.severity == Severity::Unhealthy);
    let is_xid = worst.filter_map(|one| one.reading.as_ref()).any(|reading| reading.source == XID);
    Some(if is_xid { Taint::Xid } else { Taint::Unhealthy })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::drain::marks::Author;
    use crate::hardware::device_access::DeviceAccess;
    use crate::hardware::gpu::Reading;
    use crate::hardware::judgement::TriagedReading;
    use crate::hardware::triage::TriageAnswer;
    use crate::node::command::Command;
    use crate::node::test_node::{Node, gpu_id, part};
    use crate::sharing::offer::{Consumes, OfferLine, PartOffer};
    use crate::sharing::via::Via;
    use std::sync::Arc;

    /// GPU-0 is offered whole, MIG-a as an instance, MIG-b in shares; all are granted through DRA.
    fn node() -> Node {
        let mut node = Node::new();
        node.ledger.gpus.values_mut().for_each(|state| Arc::make_mut(state).via = Via::new(KubeletApi::Dra));
        node.decide(&Command::SetDeviceAccess(DeviceAccess { by_cdi: true, ..DeviceAccess::default() }))
            .unwrap();
        let line = |resource: &str, count, consumes| {
            vec![OfferLine { resource: Resource::parse(resource).unwrap(), count, consumes }]
        };
        let slice = Consumes::Slice { memory_mib: 5_120, compute_percent: 50 };
        let offers = [
            ("GPU-0", line("nvidia.com/gpu", 1, Consumes::Whole)),
            ("MIG-a", line("nvidia.com/mig-1g.10gb", 1, Consumes::Whole)),
            ("MIG-b", line("nvidia.com/gpu.shared", 2, slice)),
        ];
        let offers = offers.map(|(name, lines)| (PartOffer { part: part(name), lines }, "test".into()));
        node.decide(&Command::Offer(offers.into())).unwrap();
        node
    }

    fn of(node: &Node) -> Publication {
        let versions = Versions { driver: Some("535.54.03".into()), cuda: Some("12.2".into()) };
        publication(&node.ledger, &versions)
    }

    fn taints_of(node: &Node, name: &str) -> Vec<Taint> {
        of(node).devices.into_iter().find(|device| device.name == name).unwrap().taints
    }

    #[test]
    fn whole_gpus_and_instances_are_published_with_their_attributes() {
        let node = node();
        let Publication { devices, left_out } = of(&node);
        let names: Vec<&str> = devices.iter().map(|device| device.name.as_str()).collect();
        assert_eq!(names, ["gpu-0", "mig-a"]);
        assert_eq!(left_out, [(part("MIG-b"), "it is offered in shares, which are not published yet")]);
        let text = |text: &str| Attribute::Text(text.into());
        let instance = &devices[1].attributes;
        assert_eq!(instance["type"], text("mig"));
        assert_eq!(instance["profile"], text("1g.10gb"));
        assert_eq!(instance["parentUUID"], text("GPU-1"));
        assert_eq!(devices[0].attributes["driverVersion"], Attribute::Version("535.54.3".into()));
        assert_eq!(devices[0].attributes["cudaDriverVersion"], Attribute::Version("12.2.0".into()));
        assert_eq!((devices[0].memory_mib, &devices[0].taints), (81_920, &Vec::new()));
        let (resource, device) = device_by_name(&node.ledger, "mig-a").unwrap();
        assert_eq!((resource.as_str(), device), ("nvidia.com/mig-1g.10gb", DeviceId::whole(&part("MIG-a"))));
        assert_eq!(device_by_name(&node.ledger, "mig-b"), None);
    }

    #[test]
    fn what_keeps_a_device_from_further_claims_is_a_taint_that_clears() {
        let mut node = node();
        let author = Author::api("ann".into(), String::new());
        let gpu = gpu_id("GPU-0");
        node.decide(&Command::Cordon { gpu: gpu.clone(), author: author.clone() }).unwrap();
        let api = KubeletApi::DevicePlugin;
        node.decide(&Command::SetVia { gpu: gpu.clone(), api, author: author.clone() }).unwrap();
        assert_eq!(taints_of(&node, "gpu-0"), [Taint::Cordoned, Taint::Moving]);
        let owners = crate::drain::marks::Owners::All;
        node.decide(&Command::Uncordon { gpu: gpu.clone(), owners }).unwrap();
        node.decide(&Command::SetVia { gpu: gpu.clone(), api: KubeletApi::Dra, author }).unwrap();
        let reading = Reading { part: part("GPU-0"), source: XID.into(), code: 79, detail: String::new() };
        let answer =
            TriageAnswer { severity: Severity::Unhealthy, reason: "xid".into(), again_after_s: None };
        let triaged = TriagedReading { reading, answer, by: "test".into() };
        node.decide(&Command::ApplyTriage(triaged)).unwrap();
        assert_eq!(taints_of(&node, "gpu-0"), [Taint::Xid]);
        let (by, why) = ("ann".into(), String::new());
        node.decide(&Command::MarkHealthy { gpu, by, why }).unwrap();
        assert_eq!(taints_of(&node, "gpu-0"), []);
        node.decide(&Command::Offer(vec![(PartOffer { part: part("GPU-0"), lines: vec![] }, "test".into())]))
            .unwrap();
        assert_eq!(taints_of(&node, "mig-a"), []);
        assert!(of(&node).devices.iter().all(|device| device.name != "gpu-0"), "it is offered no more");
    }

    #[test]
    fn versions_are_those_that_the_api_server_takes() {
        for (text, version) in [
            ("580.126.20", Some("580.126.20")),
            ("535.54.03", Some("535.54.3")),
            ("12.2", Some("12.2.0")),
            ("9", Some("9.0.0")),
            ("", None),
            ("1.2.3.4", None),
            ("470.x", None),
        ] {
            assert_eq!(semantic_version(text).as_deref(), version, "{text}");
        }
    }

    #[test]
    fn a_name_is_a_dns_label_or_there_is_none() {
        let name = |id: &str| device_name(&Part { id: part(id), ..Part::whole_gpu(gpu_id("GPU-0"), 0) });
        assert_eq!(name("GPU-1B2c").as_deref(), Some("gpu-1b2c"));
        assert_eq!(name("GPU-1_b"), None);
    }
}
