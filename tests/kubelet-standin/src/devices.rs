//! The device manager's state: devices by resource, devices of pods, endpoints.
//!
//! Like the kubelet, it keeps three separate records, which can differ:
//! `healthy`/`unhealthy` (the last list), `pod_devices` (grants with the plugin's
//! responses) and `allocated` (ids in use; ids of a failed admission remain in it
//! until it is recomputed from `pod_devices`).

use crate::proto::v1beta1::{ContainerAllocateResponse, Device, DevicePluginOptions};
use crate::{HEALTHY, client::Client};
use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::Arc,
    time::{Duration, Instant},
};

/// The kubelet's key for a device without a NUMA node.
pub(crate) const NO_NUMA_NODE: i64 = -1;

pub(crate) type Ids = BTreeSet<String>;

/// The devices of one resource that one container holds.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Holding {
    /// Ids by NUMA node; an id with two nodes is under both.
    pub(crate) by_numa: BTreeMap<i64, Vec<String>>,
    /// The plugin's response, used at every start of the container.
    pub(crate) response: ContainerAllocateResponse,
}

impl Holding {
    pub(crate) fn ids(&self) -> Ids {
        self.by_numa.values().flatten().cloned().collect()
    }
}

/// Pod UID, container, resource.
pub(crate) type PodDevices = BTreeMap<String, BTreeMap<String, BTreeMap<String, Holding>>>;

/// A registered plugin, or one that was registered before.
#[derive(Clone, Debug)]
pub(crate) struct Endpoint {
    /// None after a kubelet restart, until the plugin registers again.
    pub(crate) client: Option<Arc<Client>>,
    pub(crate) options: Option<DevicePluginOptions>,
    /// When the plugin disconnected.
    pub(crate) stopped: Option<Instant>,
}

#[derive(Debug, Default)]
pub(crate) struct Manager {
    pub(crate) endpoints: HashMap<String, Endpoint>,
    pub(crate) all: HashMap<String, BTreeMap<String, Device>>,
    pub(crate) healthy: BTreeMap<String, Ids>,
    pub(crate) unhealthy: BTreeMap<String, Ids>,
    pub(crate) allocated: BTreeMap<String, Ids>,
    pub(crate) pod_devices: PodDevices,
    /// Devices of finished init containers of the pod being admitted, by resource.
    pub(crate) reusable: Option<(String, BTreeMap<String, Ids>)>,
    /// Ids of Allocate calls in progress.
    pub(crate) in_flight: Vec<(String, Ids)>,
}

impl Manager {
    /// Replaces the whole list of a resource.
    pub(crate) fn replace_list(&mut self, resource: &str, devices: Vec<Device>) {
        let (healthy, unhealthy): (Vec<_>, Vec<_>) = devices.iter().partition(|d| d.health == HEALTHY);
        let ids = |list: Vec<&Device>| list.into_iter().map(|d| d.id.clone()).collect();
        self.healthy.insert(resource.to_owned(), ids(healthy));
        self.unhealthy.insert(resource.to_owned(), ids(unhealthy));
        let by_id = devices.into_iter().map(|d| (d.id.clone(), d)).collect();
        self.all.insert(resource.to_owned(), by_id);
    }

    /// Disconnects the current plugin of `resource`, by name.
    pub(crate) fn disconnect(&mut self, resource: &str) {
        let Some(endpoint) = self.endpoints.get_mut(resource) else {
            return;
        };
        endpoint.stopped = Some(Instant::now());
        let lost = self.healthy.entry(resource.to_owned()).or_default();
        let lost = std::mem::take(lost);
        let unhealthy = self.unhealthy.entry(resource.to_owned()).or_default();
        unhealthy.extend(lost);
    }

    /// The device counts; `None` for a resource that the kubelet does not report. Removes the
    /// resource if its grace period has expired: the second value is true then.
    pub(crate) fn counts(&mut self, resource: &str, grace: Duration) -> (Option<Counts>, bool) {
        let expired = match self.endpoints.get(resource) {
            Some(endpoint) => endpoint.stopped.is_some_and(|at| at.elapsed() > grace),
            None => self.healthy.contains_key(resource),
        };
        if expired {
            self.endpoints.remove(resource);
            self.healthy.remove(resource);
            self.unhealthy.remove(resource);
            return (None, true);
        }
        let Some(healthy) = self.healthy.get(resource) else {
            return (None, false);
        };
        let counts = Counts {
            allocatable: healthy.len(),
            capacity: healthy.len() + self.unhealthy.get(resource).map_or(0, Ids::len),
        };
        (Some(counts), false)
    }

    /// Whether the device manager manages this resource.
    pub(crate) fn is_device_resource(&self, resource: &str) -> bool {
        self.healthy.contains_key(resource) || self.allocated.contains_key(resource)
    }

    pub(crate) fn held(&self, uid: &str, container: &str, resource: &str) -> Option<&Holding> {
        self.pod_devices.get(uid)?.get(container)?.get(resource)
    }

    pub(crate) fn insert(&mut self, uid: &str, container: &str, resource: &str, held: Holding) {
        let containers = self.pod_devices.entry(uid.to_owned()).or_default();
        let resources = containers.entry(container.to_owned()).or_default();
        resources.insert(resource.to_owned(), held);
    }

    /// Groups ids by NUMA node. An id that is not listed would crash the kubelet; it is
    /// reported when the list arrives.
    pub(crate) fn by_numa(&self, resource: &str, ids: &Ids) -> BTreeMap<i64, Vec<String>> {
        let mut by_numa: BTreeMap<i64, Vec<String>> = BTreeMap::new();
        for id in ids {
            let nodes = self.numa_nodes(resource, id);
            for node in nodes {
                by_numa.entry(node).or_default().push(id.clone());
            }
        }
        by_numa
    }

    /// The NUMA nodes of a device, never empty.
    pub(crate) fn numa_nodes(&self, resource: &str, id: &str) -> Vec<i64> {
        let device = self.all.get(resource).and_then(|all| all.get(id));
        let topology = device.and_then(|d| d.topology.as_ref());
        match topology {
            Some(topology) if !topology.nodes.is_empty() => topology.nodes.iter().map(|n| n.id).collect(),
            _ => vec![NO_NUMA_NODE],
        }
    }

    /// Recomputes the ids in use from the pods' devices.
    pub(crate) fn recompute_allocated(&mut self) {
        self.allocated.clear();
        for resources in self.pod_devices.values().flat_map(BTreeMap::values) {
            for (resource, held) in resources {
                let ids = self.allocated.entry(resource.clone()).or_default();
                ids.extend(held.ids());
            }
        }
    }

    /// Forgets the devices of pods that are not in `active`. Writes no checkpoint, so the
    /// file becomes stale.
    pub(crate) fn purge(&mut self, active: &BTreeSet<String>) {
        let before = self.pod_devices.len();
        self.pod_devices.retain(|uid, _| active.contains(uid));
        if self.pod_devices.len() != before {
            self.recompute_allocated();
        }
    }
}

/// The device counts in the node status.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Counts {
    pub(crate) allocatable: usize,
    pub(crate) capacity: usize,
}
