//! Builds nodes for a policy's native unit tests.

mod brute;
mod lines;
mod random;

pub use brute::{assert_best, fullness, in_use, steady};
pub(crate) use lines::log;
pub use lines::logged;
pub use random::{Random, random_node, random_questions};

use crate::{
    AdmitRequest, Allocation, Attribute, Candidate, Consumes, Device, DeviceState, DrainState, FrontEnd,
    Health, Holder, Link, Node, OfferLine, Part, Path, PlaceRequest, Placement, Request, Slice,
};

/// Builds a [`Node`] piece by piece. Panics on indices that do not exist: it is for tests.
#[derive(Clone, Debug)]
pub struct NodeBuilder {
    node: Node,
}

/// A built node, with functions that build requests for it.
#[derive(Clone, Debug)]
pub struct Built {
    /// The node itself.
    pub node: Node,
}

impl Default for NodeBuilder {
    fn default() -> Self {
        Self::new()
    }
}

impl NodeBuilder {
    /// A node without GPUs.
    #[must_use]
    pub fn new() -> Self {
        let node = Node {
            parts: Vec::new(),
            links: Vec::new(),
            resources: Vec::new(),
            devices: Vec::new(),
            allocations: Vec::new(),
        };
        Self { node }
    }

    /// Adds `count` healthy idle GPUs, `GPU-0` and so on, the second half of them on NUMA node 1.
    #[must_use]
    pub fn gpus(mut self, count: u32, model: &str, memory_mib: u64) -> Self {
        let first = u32::try_from(self.node.parts.len()).expect("few parts");
        for index in first..first + count {
            self.node.parts.push(Part {
                id: format!("GPU-{index}"),
                vendor: "nvidia".into(),
                model: model.into(),
                gpu_index: index,
                parent: None,
                mig_enabled: false,
                memory_mib,
                numa_node: Some(u32::from((index - first) * 2 >= count)),
                health: Health::Healthy,
                drain: DrainState::Active,
                attributes: Vec::new(),
                processes: 0,
                memory_used_mib: 0,
                idle_seconds: 3600,
                offered: Vec::new(),
            });
        }
        self
    }

    /// Puts a GPU into MIG mode and adds `count` instances of `profile`.
    #[must_use]
    pub fn mig(mut self, gpu: u32, profile: &str, count: u32, memory_mib: u64) -> Self {
        self.part_mut(gpu).mig_enabled = true;
        for n in 0..count {
            let mut instance = self.part_mut(gpu).clone();
            instance.id = format!("MIG-{gpu}-{n}");
            instance.parent = Some(gpu);
            instance.mig_enabled = false;
            instance.memory_mib = memory_mib;
            instance.attributes = vec![Attribute { key: "mig.profile".into(), value: profile.into() }];
            self.node.parts.push(instance);
        }
        self
    }

    /// Changes one part.
    #[must_use]
    pub fn part(mut self, index: u32, change: impl FnOnce(&mut Part)) -> Self {
        change(self.part_mut(index));
        self
    }

    /// Offers a part as `count` free devices of a resource.
    #[must_use]
    pub fn devices(mut self, part: u32, resource: &str, count: u32, consumes: Consumes) -> Self {
        let known = self.node.resources.iter().position(|name| name == resource);
        let resource_index = known.unwrap_or_else(|| {
            self.node.resources.push(resource.into());
            self.node.resources.len() - 1
        });
        self.part_mut(part).offered.push(OfferLine { resource: resource.into(), count, consumes });
        for _ in 0..count {
            self.node.devices.push(Device {
                part,
                resource: u32::try_from(resource_index).expect("few resources"),
                state: DeviceState::Free,
                consumes,
            });
        }
        self
    }

    /// Grants devices, all of one resource, to one container. Other devices of a part that is held as a
    /// whole are withdrawn, and so is the whole device of a part with a held share.
    #[must_use]
    pub fn hold(self, devices: &[u32]) -> Self {
        let number = self.node.allocations.len();
        self.hold_as(devices, Some(("default", &format!("pod-{number}"))))
    }

    /// Like [`Self::hold`], for a pod given by namespace and name; `None`: the holder is not known yet.
    /// Devices that are already held may be granted again, as the kubelet does for the container after an
    /// init container.
    #[must_use]
    pub fn hold_as(mut self, devices: &[u32], holder: Option<(&str, &str)>) -> Self {
        let device = |index: u32| usize::try_from(index).expect("a device index");
        for &index in devices {
            let held = &mut self.node.devices[device(index)];
            held.state = DeviceState::Held;
            let (part, whole) = (held.part, held.consumes == Consumes::Whole);
            self.part_mut(part).idle_seconds = 0;
            for other in &mut self.node.devices {
                let excluded = whole || other.consumes == Consumes::Whole;
                if other.part == part && other.state == DeviceState::Free && excluded {
                    other.state = DeviceState::Withdrawn;
                }
            }
        }
        for older in &mut self.node.allocations {
            older.overlapped |= older.devices.iter().any(|index| devices.contains(index));
        }
        let number = self.node.allocations.len();
        self.node.allocations.push(Allocation {
            id: format!("allocation-{number}"),
            resource: self.node.devices[device(devices[0])].resource,
            devices: devices.to_vec(),
            holder: holder.map(|(namespace, pod)| Holder {
                namespace: namespace.into(),
                pod: pod.into(),
                container: "main".into(),
                pod_uid: None,
            }),
            age_seconds: 60,
            overlapped: false,
        });
        self
    }

    /// Links two parts.
    #[must_use]
    pub fn link(mut self, a: u32, b: u32, path: Path, nvlinks: u32) -> Self {
        self.node.links.push(Link { a, b, path, nvlinks });
        self
    }

    /// The node.
    #[must_use]
    pub fn build(self) -> Built {
        Built { node: self.node }
    }

    fn part_mut(&mut self, index: u32) -> &mut Part {
        let index = usize::try_from(index).expect("a part index");
        &mut self.node.parts[index]
    }
}

/// What one of `count` equal shares of a part with `memory_mib` consumes.
#[must_use]
pub fn share(count: u32, memory_mib: u64) -> Consumes {
    Consumes::Slice(Slice { memory_mib: memory_mib / u64::from(count), compute_percent: 100 / count })
}

/// Checks that a schema has exactly the keys of `example`, in which every parameter is set, and refuses
/// others: a schema with fewer or more keys than the policy accepts is misleading.
///
/// # Panics
/// If it does not.
pub fn assert_schema_matches(schema: &str, example: &str) {
    type Object = serde_json::Map<String, serde_json::Value>;
    let schema: Object = serde_json::from_str(schema).expect("the schema is a JSON object");
    let example: Object = serde_json::from_str(example).expect("the example is a JSON object");
    assert_eq!(schema["additionalProperties"], false, "unknown keys are refused");
    let described: Vec<_> = schema["properties"].as_object().expect("an object").keys().collect();
    assert_eq!(described, example.keys().collect::<Vec<_>>());
}

/// Checks the rules of every placement: the requested number of devices, each once, all of them
/// available, including the required ones.
///
/// # Panics
/// If it does not.
pub fn assert_sound(request: &PlaceRequest, placement: &Placement) {
    let mut devices = placement.devices.clone();
    devices.sort_unstable();
    devices.dedup();
    let size = usize::try_from(request.size).expect("a size");
    assert!(devices.len() == size && placement.devices.len() == size, "{placement:?} for {request:?}");
    assert!(devices.iter().all(|device| request.available.contains(device)), "{placement:?} for {request:?}");
    assert!(request.required.iter().all(|device| devices.contains(device)), "{placement:?} for {request:?}");
}

impl Built {
    /// A request for a resource, without candidates.
    #[must_use]
    pub fn request(&self, resource: &str) -> Request {
        let index = self.node.resources.iter().position(|name| name == resource);
        Request {
            front_end: FrontEnd::DevicePlugin,
            resource: u32::try_from(index.expect("a resource of the node")).expect("few"),
            candidates: Vec::new(),
            config: None,
            claim: None,
        }
    }

    /// A request to choose `size` of all free devices of a resource.
    #[must_use]
    pub fn place_request(&self, resource: &str, size: u32) -> PlaceRequest {
        let request = self.request(resource);
        let free = |device: &Device| device.resource == request.resource && device.state == DeviceState::Free;
        let available = (0..).zip(&self.node.devices).filter(|(_, device)| free(device));
        PlaceRequest {
            available: available.map(|(index, _)| index).collect(),
            required: Vec::new(),
            size,
            request,
        }
    }

    /// A request to admit these devices, all of one resource. The candidates are given by namespace and
    /// name.
    #[must_use]
    pub fn admit_request(&self, devices: &[u32], candidates: &[(&str, &str)]) -> AdmitRequest {
        let first = usize::try_from(devices[0]).expect("a device index");
        let resource = usize::try_from(self.node.devices[first].resource).expect("few");
        let mut request = self.request(&self.node.resources[resource]);
        request.candidates = candidates.iter().map(|(namespace, pod)| candidate(namespace, pod)).collect();
        AdmitRequest { request, devices: devices.to_vec() }
    }
}

fn candidate(namespace: &str, pod: &str) -> Candidate {
    Candidate {
        namespace: namespace.into(),
        pod: pod.into(),
        pod_uid: format!("uid-of-{pod}"),
        container: "main".into(),
        labels: Vec::new(),
    }
}
