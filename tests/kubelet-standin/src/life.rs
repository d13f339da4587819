//! One kubelet process, from start to death.
//!
//! It runs on a tokio runtime of its own, so that stopping it drops every task and
//! closes every socket at once, as the end of a process does.

use crate::anomalies::Anomaly;
use crate::checkpoint;
use crate::client::Client;
use crate::devices::{Endpoint, Manager};
use crate::proto::v1beta1::Device;
use crate::world::{World, lock};
use crate::{HEALTHY, UNHEALTHY};
use std::{
    collections::{BTreeSet, HashMap},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::Instant,
};

/// The longest id that the API's own comment allows.
const DEVICE_ID_CHARS_MAX: usize = 63;

#[derive(Debug)]
pub(crate) struct Life {
    pub(crate) world: Arc<World>,
    pub(crate) manager: Mutex<Manager>,
    /// By resource name: the newest registration.
    pub(crate) clients: Mutex<HashMap<String, Arc<Client>>>,
    /// Resources with a `ListAndWatch` stream, one entry a stream.
    pub(crate) streams: Mutex<Vec<String>>,
    /// Resources whose connection is closed and whose manager has not been told.
    pub(crate) disconnecting: Mutex<Vec<String>>,
    /// UIDs the kubelet has heard of in this life.
    pub(crate) known: Mutex<BTreeSet<String>>,
    /// False once this process has ended: what is still under way changes nothing.
    pub(crate) alive: AtomicBool,
    /// The API server has answered once.
    pub(crate) sources_ready: AtomicBool,
    /// Pods are admitted one after another.
    pub(crate) admitting: tokio::sync::Mutex<()>,
}

impl Life {
    /// A kubelet that starts: empty but for what the checkpoint holds.
    pub(crate) fn begin(world: Arc<World>, known: BTreeSet<String>, sources_ready: bool) -> Self {
        let mut manager = Manager::default();
        // A checkpoint that cannot be read means an empty state, not a failure.
        if let Some(restored) = checkpoint::read(&world.device_plugins()) {
            manager.pod_devices = restored.pod_devices;
            manager.recompute_allocated();
            for resource in restored.resources {
                manager.healthy.insert(resource.clone(), BTreeSet::new());
                manager.unhealthy.insert(resource.clone(), BTreeSet::new());
                let stopped = Endpoint { client: None, options: None, stopped: Some(Instant::now()) };
                manager.endpoints.insert(resource, stopped);
            }
        }
        Self {
            world,
            manager: Mutex::new(manager),
            clients: Mutex::default(),
            streams: Mutex::default(),
            disconnecting: Mutex::default(),
            known: Mutex::new(known),
            alive: AtomicBool::new(true),
            sources_ready: AtomicBool::new(sources_ready),
            admitting: tokio::sync::Mutex::default(),
        }
    }

    pub(crate) fn is_sources_ready(&self) -> bool {
        self.sources_ready.load(Ordering::SeqCst)
    }

    /// Pods that this life knows and that have not ended.
    pub(crate) fn active_uids(&self) -> BTreeSet<String> {
        let known = lock(&self.known);
        let pods = lock(&self.world.pods);
        let active = pods.iter().filter(|(_, pod)| pod.is_active());
        active.map(|(uid, _)| uid.clone()).filter(|uid| known.contains(uid)).collect()
    }

    /// What the kubelet does before an admission and in `List`: forget the devices
    /// of pods that ended. Not before the API server has been heard.
    pub(crate) fn update_allocated_devices(&self) {
        if !self.is_sources_ready() {
            return;
        }
        let active = self.active_uids();
        lock(&self.manager).purge(&active);
    }

    /// A device list arrived on a stream.
    pub(crate) fn receive_list(&self, resource: &str, devices: Vec<Device>) {
        for anomaly in faults_of_list(resource, &devices) {
            self.world.report(anomaly);
        }
        let active = self.active_uids();
        let mut manager = lock(&self.manager);
        for anomaly in missing_ids(&manager, resource, &devices, &active) {
            self.world.report(anomaly);
        }
        manager.replace_list(resource, devices);
        self.write_checkpoint(&manager);
        drop(manager);
        self.world.touch();
    }

    pub(crate) fn is_alive(&self) -> bool {
        self.alive.load(Ordering::SeqCst)
    }

    pub(crate) fn write_checkpoint(&self, manager: &Manager) {
        if !self.is_alive() {
            return;
        }
        let mode = lock(&self.world.faults).checkpoint;
        checkpoint::write(&self.world, manager, mode);
    }

    /// Tells the manager that the plugin of `resource` left, by name.
    pub(crate) fn plugin_disconnected(&self, resource: &str) {
        lock(&self.manager).disconnected(resource);
        self.world.touch();
    }
}

fn faults_of_list(resource: &str, devices: &[Device]) -> Vec<Anomaly> {
    let mut found = Vec::new();
    let mut seen = BTreeSet::new();
    for device in devices {
        let resource = resource.to_owned();
        let id = device.id.clone();
        if !seen.insert(&device.id) {
            found.push(Anomaly::DoubledId { resource: resource.clone(), id: id.clone() });
        }
        if device.id.chars().count() > DEVICE_ID_CHARS_MAX {
            found.push(Anomaly::LongId { resource: resource.clone(), id: id.clone() });
        }
        if device.health != HEALTHY && device.health != UNHEALTHY {
            found.push(Anomaly::UnknownHealth { resource: resource.clone(), health: device.health.clone() });
        }
        let topology = device.topology.as_ref();
        if topology.is_some_and(|t| t.nodes.iter().any(|n| n.id < 0)) {
            found.push(Anomaly::NegativeNumaNode { resource, id });
        }
    }
    found
}

/// Ids that must not be missing from a list: those an Allocate names right now,
/// and those that a live pod holds.
fn missing_ids(
    manager: &Manager,
    resource: &str,
    devices: &[Device],
    active: &BTreeSet<String>,
) -> Vec<Anomaly> {
    let listed: BTreeSet<&str> = devices.iter().map(|d| d.id.as_str()).collect();
    let mut found = Vec::new();
    for (named, ids) in &manager.in_flight {
        if named == resource {
            let missing = ids.iter().filter(|id| !listed.contains(id.as_str()));
            found.extend(
                missing
                    .map(|id| Anomaly::WouldCrashInFlight { resource: resource.to_owned(), id: id.clone() }),
            );
        }
    }
    for (uid, containers) in &manager.pod_devices {
        if !active.contains(uid) {
            continue;
        }
        let held = containers.values().filter_map(|r| r.get(resource));
        let ids: BTreeSet<String> = held.flat_map(super::devices::Held::ids).collect();
        let missing = ids.into_iter().filter(|id| !listed.contains(id.as_str()));
        found.extend(missing.map(|id| Anomaly::WouldCrashHeld {
            resource: resource.to_owned(),
            id,
            pod_uid: uid.clone(),
        }));
    }
    found
}
