//! The devices that the scheduler can allocate to ResourceClaims: GPUs and MIG instances that are granted through DRA, whole
//! or in shares. All shares of a part are one device, and each claim takes some of them.
//!
//! Names and limits are those of `resource.k8s.io/v1` (kubernetes `api/resource/v1/types.go`), the attributes' names those
//! of NVIDIA's DRA driver, so that its claims fit.

use crate::evidence::limits::Enforcement;
use crate::hardware::gpu::{Part, XID};
use crate::hardware::health::{Health, HealthState};
use crate::hardware::triage::Severity;
use crate::ids::names::{DeviceId, GpuId, PartId, Resource, is_dns_label};
use crate::node::ledger::Ledger;
use crate::sharing::nvlink_groups::NvlinkGroups;
use crate::sharing::offer::Consumes;
use crate::sharing::part_state::{Device, PartState, Taken};
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
    /// Its GPU or MIG instance.
    pub part: PartId,
    /// The resource under which the ledger has it.
    pub resource: Resource,
    /// Its attributes, by the names of the slice.
    pub attributes: BTreeMap<String, Attribute>,
    /// What claims can have of it.
    pub capacity: Capacity,
    /// The name of the counter that keeps the scheduler from allocating two devices of this part at a time; `None` if the part
    /// has only this device.
    pub counter: Option<String>,
    /// Whether another device of this part is held, so that this one cannot be granted.
    pub is_other_held: bool,
    /// Why the scheduler is to give it to no further claim; empty if it may.
    pub taints: Vec<Taint>,
}

/// What claims can have of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Capacity {
    /// One claim has all of it.
    Whole {
        /// MiB; 0 if it is unknown.
        memory_mib: u64,
    },
    /// Each claim has some shares.
    Shared(Shares),
}

/// The shares of one resource on a part. Claims request memory if each share sets some aside, and a number of shares
/// otherwise. Only one of the two is published: with both, claims that request a number and claims that request memory
/// could together be allocated more than the part has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shares {
    /// How many fit on the part.
    pub count: u32,
    /// The memory that each sets aside, MiB; 0 if it sets none aside.
    pub memory_mib: u64,
}

/// The capacity that claims request of shares that set memory aside, bytes.
pub const MEMORY: &str = "memory";
/// The capacity that claims request of shares that set no memory aside.
pub const SHARES: &str = "shares";

impl Shares {
    /// How many shares a claim takes that was allocated this much of each capacity: at least one. `None` if it was allocated
    /// another capacity than these shares have.
    #[must_use]
    pub fn taken_by(&self, consumed: &BTreeMap<String, u64>) -> Option<u64> {
        if consumed.is_empty() {
            return Some(1);
        }
        let amount = |name: &str| consumed.get(name).copied();
        let shares = match self.memory_mib.checked_mul(1024 * 1024) {
            None | Some(0) => amount(SHARES),
            Some(bytes) => amount(MEMORY).map(|memory| memory.div_ceil(bytes)),
        };
        shares.map(|shares| shares.max(1))
    }
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

/// The devices to publish, by the index of the GPU and the name.
#[must_use]
pub fn publication(ledger: &Ledger, versions: &Versions) -> Vec<PublishedDevice> {
    let parts = ledger.parts.values().filter(|part| is_granted_through_dra(ledger, part));
    let groups = NvlinkGroups::of(ledger);
    let mut devices: Vec<_> = parts.flat_map(|part| published(ledger, part, versions, &groups)).collect();
    let order = |device: &PublishedDevice| {
        let part = ledger.part(&device.part).map(|part| &part.part);
        let place = part.map(|part| (part.gpu_index, part.mig.as_ref().map(|mig| mig.gpu_instance)));
        (place, device.name.clone())
    };
    devices.sort_by_key(order);
    devices
}

/// Why no claim can be granted this GPU; `None` if a claim can. `no_shares`: why no shares are published; `None` if they are.
#[must_use]
pub fn why_no_claims(ledger: &Ledger, gpu: &GpuId, no_shares: Option<&str>) -> Option<String> {
    let parts = ledger.parts_of(gpu).filter(|part| !part.devices.is_empty() && !ledger.is_excluded(part));
    let mut why = Some("nothing is offered on it".to_owned());
    for part in parts {
        why = Some(why_no_claims_of(ledger, part, no_shares)?);
    }
    why
}

fn why_no_claims_of(ledger: &Ledger, part: &PartState, no_shares: Option<&str>) -> Option<String> {
    if device_name(&part.part).is_none() {
        return Some("its UUID is no DNS label".to_owned());
    }
    if resource_of_whole(part).is_some() {
        return None;
    }
    let Some((_, shares)) = shares(ledger, part) else { return Some("nothing is offered on it".to_owned()) };
    let why_no_limit = || ledger.why_not_limitable(part);
    if ledger.rules.enforcement == Enforcement::Require
        && shares.memory_mib > 0
        && let Some(why) = why_no_limit()
    {
        return Some(format!(
            "it is offered in shares that set memory aside, which `enforce.memory: require` grants only where that can be enforced: \
             {why}"
        ));
    }
    no_shares.map(|why| format!("it is offered in shares, which are not published: {why}"))
}

/// A device by its name in a slice.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NamedDevice {
    /// A whole part.
    Whole(Resource, DeviceId),
    /// Some shares of a part.
    Shared(Resource, PartId, Shares),
}

/// The device of the ledger with this name in a slice.
#[must_use]
pub fn device_by_name(ledger: &Ledger, name: &str) -> Option<NamedDevice> {
    let of_part = name.strip_suffix(SHARED_SUFFIX).unwrap_or(name);
    let part = ledger.parts.values().find(|part| device_name(&part.part).as_deref() == Some(of_part))?;
    let id = part.part.id.clone();
    if of_part == name {
        return Some(NamedDevice::Whole(resource_of_whole(part)?, DeviceId::whole(&id)));
    }
    let (resource, shares) = shares(ledger, part)?;
    Some(NamedDevice::Shared(resource, id, shares))
}

/// The end of the names of devices that claims share. With the name of the longest part they have 63 characters, as many
/// as a DNS label may have.
const SHARED_SUFFIX: &str = "-shared";

/// The name of a part's shares in a slice. `None` if the part has no name.
#[must_use]
pub fn shared_device_name(part: &Part) -> Option<String> {
    Some(device_name(part)? + SHARED_SUFFIX)
}

/// The name of a part in a slice: its UUID in lower case, as NVIDIA's driver forms it. `None` if it is no DNS label. With
/// at most 56 characters it is never too long for one.
#[must_use]
pub fn device_name(part: &Part) -> Option<String> {
    let name = part.id.as_str().to_ascii_lowercase();
    is_dns_label(&name).then_some(name)
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

/// The resource of the part's shares, and what claims can have of them: an offered one, or else one that is held. Of
/// several resources with shares it is the first by name, since a claim names none.
fn shares(ledger: &Ledger, part: &PartState) -> Option<(Resource, Shares)> {
    let lines = part.lines.iter().filter_map(|line| match line.consumes {
        Consumes::Slice { memory_mib, .. } => Some((line, memory_mib)),
        Consumes::Whole => None,
    });
    // The line has the size of a share. A share that was granted before the size changed keeps its own until it is free.
    if let Some((line, memory_mib)) = lines.min_by_key(|(line, _)| &line.resource) {
        let (mut taken, mut count) = (Taken::default(), 0);
        while count < line.count {
            taken = taken.plus(line.consumes);
            if taken.excess(ledger.memory_to_grant_mib(part)).is_some() {
                break;
            }
            count += 1;
        }
        return Some((line.resource.clone(), Shares { count, memory_mib }));
    }
    let held = || part.devices.iter().filter(|((_, share), device)| share.is_some() && device.held());
    let ((resource, _), first) = held().next()?;
    let memory_mib = match first.consumes {
        Consumes::Slice { memory_mib, .. } => memory_mib,
        Consumes::Whole => 0,
    };
    let count = held().filter(|((other, _), _)| other == resource).count();
    Some((resource.clone(), Shares { count: u32::try_from(count).unwrap_or(u32::MAX), memory_mib }))
}

/// The whole part, its shares, or both.
fn published(
    ledger: &Ledger,
    part: &PartState,
    versions: &Versions,
    groups: &NvlinkGroups,
) -> Vec<PublishedDevice> {
    // A destroyed MIG instance does not come back.
    let is_destroyed = !part.present && !part.part.is_whole_gpu() && !part.held();
    let is_left_out = is_destroyed || ledger.is_excluded(part);
    let Some(name) = device_name(&part.part).filter(|_| !is_left_out) else { return Vec::new() };
    let device = |name, resource: Resource, capacity| PublishedDevice {
        name,
        gpu: part.part.gpu.clone(),
        part: part.part.id.clone(),
        attributes: attributes(part, &resource, matches!(capacity, Capacity::Shared(_)), versions, groups),
        capacity,
        counter: None,
        is_other_held: part.devices.iter().any(|((_, share), device)| {
            device.held() && share.is_some() != matches!(capacity, Capacity::Shared(_))
        }),
        taints: taints(ledger, part, &resource, matches!(capacity, Capacity::Shared(_))),
        resource,
    };
    let memory_mib = part.part.memory_mib;
    let whole = resource_of_whole(part).map(|r| device(name.clone(), r, Capacity::Whole { memory_mib }));
    // Shares of which none fits are not published.
    let shares = shares(ledger, part).filter(|(_, shares)| shares.count > 0);
    let shared = shares.map(|(r, shares)| device(name.clone() + SHARED_SUFFIX, r, Capacity::Shared(shares)));
    let mut devices: Vec<_> = whole.into_iter().chain(shared).collect();
    if devices.len() > 1 {
        devices.iter_mut().for_each(|device| device.counter = Some(name.clone()));
    }
    devices
}

/// The attributes of a device that an allocation holds, as its slice has them; `None` for a part that is not known.
#[must_use]
pub fn attributes_of(
    ledger: &Ledger,
    resource: &Resource,
    id: &DeviceId,
    versions: &Versions,
) -> Option<BTreeMap<String, Attribute>> {
    let groups = NvlinkGroups::of(ledger);
    Some(attributes(ledger.part(&id.part)?, resource, id.share.is_some(), versions, &groups))
}

fn attributes(
    state: &PartState,
    resource: &Resource,
    is_shared: bool,
    versions: &Versions,
    groups: &NvlinkGroups,
) -> BTreeMap<String, Attribute> {
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
    // Never `gpu` for shares: the DeviceClass of NVIDIA's driver selects by it, and its claims are to get whole GPUs.
    let kind = if part.is_whole_gpu() { "gpu" } else { "mig" };
    add("type", text(if is_shared { "shared" } else { kind }));
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
    // NVLink does not connect MIG instances.
    if part.is_whole_gpu() {
        add("nvlinkPair", groups.pair(&part.gpu).map(Attribute::Number));
        add("nvlinkQuad", groups.quad(&part.gpu).map(Attribute::Number));
    }
    if let Some(mig) = &part.mig {
        add("profile", text(&mig.profile));
        add("parentUUID", text(part.gpu.as_str()));
    }
    all
}

fn taints(ledger: &Ledger, part: &PartState, resource: &Resource, is_shared: bool) -> Vec<Taint> {
    let Some(gpu) = ledger.gpu_of(part) else { return vec![Taint::NotReady] };
    let mut taints = Vec::new();
    if !gpu.marks.is_empty() {
        taints.push(Taint::Cordoned);
    }
    if gpu.via.moving {
        taints.push(Taint::Moving);
    }
    let is_grantable =
        |device: &Device| device.offered() && ledger.why_not_enforceable(part, device).is_none();
    let is_of_kind = |of: &Resource, share: Option<u32>| of == resource && share.is_some() == is_shared;
    let is_withdrawn =
        !part.devices.iter().any(|((of, share), device)| is_of_kind(of, *share) && is_grantable(device));
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
    use crate::node::rules::Rules;
    use crate::node::test_node::{Node, gpu_id, part, shared};
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

    fn of(node: &Node) -> Vec<PublishedDevice> {
        let versions = Versions { driver: Some("535.54.03".into()), cuda: Some("12.2".into()) };
        publication(&node.ledger, &versions)
    }

    fn taints_of(node: &Node, name: &str) -> Vec<Taint> {
        of(node).into_iter().find(|device| device.name == name).unwrap().taints
    }

    #[test]
    fn gpus_instances_and_shares_are_published_with_their_attributes() {
        let node = node();
        let devices = of(&node);
        let names: Vec<&str> = devices.iter().map(|device| device.name.as_str()).collect();
        assert_eq!(names, ["gpu-0", "mig-a", "mig-b-shared"]);
        let text = |text: &str| Attribute::Text(text.into());
        let instance = &devices[1].attributes;
        assert_eq!(instance["type"], text("mig"));
        assert_eq!(instance["profile"], text("1g.10gb"));
        assert_eq!(instance["parentUUID"], text("GPU-1"));
        assert_eq!(devices[0].attributes["driverVersion"], Attribute::Version("535.54.3".into()));
        assert_eq!(devices[0].attributes["cudaDriverVersion"], Attribute::Version("12.2.0".into()));
        assert_eq!(devices[0].capacity, Capacity::Whole { memory_mib: 81_920 });
        assert_eq!(devices[2].attributes["type"], text("shared"));
        assert_eq!(devices[2].attributes["profile"], text("1g.10gb"));
        assert_eq!(devices[2].capacity, Capacity::Shared(Shares { count: 2, memory_mib: 5_120 }));
        assert!(devices.iter().all(|device| device.taints.is_empty() && device.counter.is_none()));
        let mig = Resource::parse("nvidia.com/mig-1g.10gb").unwrap();
        let whole = NamedDevice::Whole(mig, DeviceId::whole(&part("MIG-a")));
        assert_eq!(device_by_name(&node.ledger, "mig-a"), Some(whole));
        assert_eq!(device_by_name(&node.ledger, "mig-a-shared"), None);
        assert_eq!(device_by_name(&node.ledger, "mig-b"), None);
        let Some(NamedDevice::Shared(resource, of, shares)) = device_by_name(&node.ledger, "mig-b-shared")
        else {
            panic!("mig-b-shared is not published")
        };
        assert_eq!((resource.as_str(), of, shares.count), ("nvidia.com/gpu.shared", part("MIG-b"), 2));
    }

    /// Three shares of 40 GiB do not fit on 80 GiB, and a GPU that is offered whole as well is two devices.
    #[test]
    fn as_many_shares_are_published_as_fit_beside_the_whole_gpu() {
        let mut node = node();
        let resource = |name: &str| Resource::parse(name).unwrap();
        let slice = Consumes::Slice { memory_mib: 40_960, compute_percent: 0 };
        let lines = vec![
            OfferLine { resource: resource("nvidia.com/gpu"), count: 1, consumes: Consumes::Whole },
            OfferLine { resource: resource("nvidia.com/gpu.shared"), count: 3, consumes: slice },
        ];
        node.decide(&Command::Offer(vec![(PartOffer { part: part("GPU-0"), lines }, "test".into())]))
            .unwrap();
        let devices = of(&node);
        let shares = Capacity::Shared(Shares { count: 2, memory_mib: 40_960 });
        let shown: Vec<_> = devices[..2].iter().map(|one| (one.name.as_str(), one.capacity)).collect();
        assert_eq!(shown, [("gpu-0", Capacity::Whole { memory_mib: 81_920 }), ("gpu-0-shared", shares)]);
        assert!(devices[..2].iter().all(|device| device.counter.as_deref() == Some("gpu-0")));
    }

    fn offer(node: &mut Node, lines: Vec<OfferLine>) {
        node.decide(&Command::Offer(vec![(PartOffer { part: part("GPU-0"), lines }, "test".into())]))
            .unwrap();
    }

    fn shares_of(count: u32, memory_mib: u64) -> Vec<OfferLine> {
        let consumes = Consumes::Slice { memory_mib, compute_percent: 0 };
        vec![OfferLine { resource: shared(), count, consumes }]
    }

    /// GPU-0 is offered in four shares of 20 GiB, and a claim holds one when that changes.
    #[test]
    fn shares_have_the_size_of_the_offer_and_stay_while_they_are_held() {
        let mut node = node();
        let published = |node: &Node| -> Vec<_> {
            let of_gpu = of(node).into_iter().filter(|device| device.part == part("GPU-0"));
            of_gpu.map(|one| (one.capacity, one.taints, one.is_other_held)).collect()
        };
        offer(&mut node, shares_of(4, 20_480));
        node.grant("GPU-0", Some(0), "uid-1", "main");
        offer(&mut node, shares_of(8, 10_240));
        let eight = Capacity::Shared(Shares { count: 8, memory_mib: 10_240 });
        assert_eq!(published(&node), [(eight, vec![], false)]);
        let resource = Resource::parse("nvidia.com/gpu").unwrap();
        offer(&mut node, vec![OfferLine { resource, count: 1, consumes: Consumes::Whole }]);
        let held = Capacity::Shared(Shares { count: 1, memory_mib: 20_480 });
        let whole = Capacity::Whole { memory_mib: 81_920 };
        assert_eq!(published(&node), [(whole, vec![], true), (held, vec![Taint::NotReady], false)]);
    }

    #[test]
    fn a_gpu_that_no_claim_can_be_granted_says_why() {
        let mut node = node();
        let why =
            |node: &Node, gpu: &str| why_no_claims(&node.ledger, &gpu_id(gpu), Some("an old scheduler"));
        assert_eq!(why(&node, "GPU-0"), None, "it is offered whole");
        assert_eq!(why(&node, "GPU-1"), None, "one of its instances is");
        offer(&mut node, shares_of(4, 4_096));
        assert!(why(&node, "GPU-0").unwrap().ends_with("not published: an old scheduler"));
        assert_eq!(why_no_claims(&node.ledger, &gpu_id("GPU-0"), None), None);
        let rules = Rules { enforcement: Enforcement::Require, ..Rules::default() };
        node.ledger.rules = Arc::new(rules);
        assert!(why_no_claims(&node.ledger, &gpu_id("GPU-0"), None).unwrap().contains("enforce.memory"));
        offer(&mut node, Vec::new());
        assert_eq!(why(&node, "GPU-0").as_deref(), Some("nothing is offered on it"));
    }

    #[test]
    fn a_claim_takes_shares_by_their_memory_or_by_their_number() {
        let gib = |n: u64| n * 1024 * 1024 * 1024;
        let consumed = |name: &str, amount: u64| BTreeMap::from([(name.to_owned(), amount)]);
        let of_memory = Shares { count: 4, memory_mib: 20 * 1024 };
        for (memory, shares) in
            [(gib(20), 1), (gib(20) + 1, 2), (gib(80), 4), (0, 1), (u64::MAX, 858_993_460)]
        {
            assert_eq!(of_memory.taken_by(&consumed(MEMORY, memory)), Some(shares), "{memory} bytes");
        }
        assert_eq!(of_memory.taken_by(&consumed(SHARES, 3)), None);
        assert_eq!(of_memory.taken_by(&BTreeMap::new()), Some(1));
        let counted = Shares { count: 4, memory_mib: 0 };
        assert_eq!(counted.taken_by(&consumed(SHARES, 3)), Some(3));
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
        assert!(of(&node).iter().all(|device| device.name != "gpu-0"), "it is offered no more");
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
