//! The state of one kubelet process, from its start to its end.
//!
//! The process runs on a tokio runtime of its own, so that stopping it drops every task
//! and closes every socket at once, as the end of a real process does.

use crate::anomalies::Anomaly;
use crate::checkpoint;
use crate::client::Client;
use crate::devices::{Endpoint, Manager};
use crate::node_state::{NodeState, lock};
use crate::proto::v1beta1::Device;
use crate::{HEALTHY, UNHEALTHY};
use std::{
    collections::{BTreeSet, HashMap},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::Instant,
};

/// The longest id according to the API's comment.
const DEVICE_ID_CHARS_MAX: usize = 63;

#[derive(Debug)]
pub(crate) struct KubeletState {
    pub(crate) node: Arc<NodeState>,
    pub(crate) manager: Mutex<Manager>,
    /// The newest registration by resource name.
    pub(crate) clients: Mutex<HashMap<String, Arc<Client>>>,
    /// Resources with a `ListAndWatch` stream, one entry per stream.
    pub(crate) streams: Mutex<Vec<String>>,
    /// Resources with a closed connection whose manager is not notified yet.
    pub(crate) disconnecting: Mutex<Vec<String>>,
    /// UIDs that this process knows.
    pub(crate) known: Mutex<BTreeSet<String>>,
    /// False after the end of this process: running tasks then change nothing.
    pub(crate) alive: AtomicBool,
    /// True after the API server has answered once.
    pub(crate) sources_ready: AtomicBool,
    /// Held while a pod is admitted: pods are admitted one after another.
    pub(crate) admitting: tokio::sync::Mutex<()>,
}

impl KubeletState {
    /// The state of a starting kubelet: only the checkpoint's content.
    pub(crate) fn begin(node: Arc<NodeState>, known: BTreeSet<String>, sources_ready: bool) -> Self {
        let mut manager = Manager::default();
        // An unreadable checkpoint leaves the state empty.
        if let Some(restored) = checkpoint::read(&node.device_plugins()) {
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
            node,
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

    /// The active pods that this process knows.
    pub(crate) fn active_uids(&self) -> BTreeSet<String> {
        let known = lock(&self.known);
        let pods = lock(&self.node.pods);
        let active = pods.iter().filter(|(_, pod)| pod.is_active());
        active.map(|(uid, _)| uid.clone()).filter(|uid| known.contains(uid)).collect()
    }

    /// Forgets the devices of ended pods, as the kubelet does before an admission and in
    /// `List`. Does nothing before the API server has answered.
    pub(crate) fn update_allocated_devices(&self) {
        if !self.is_sources_ready() {
            return;
        }
        // Locked first: a pod that `hold` records between the two would be forgotten.
        let mut manager = lock(&self.manager);
        manager.purge(&self.active_uids());
    }

    /// Applies a device list that was received on a stream.
    pub(crate) fn receive_list(&self, resource: &str, devices: Vec<Device>) {
        for anomaly in list_anomalies(resource, &devices) {
            self.node.report(anomaly);
        }
        let active = self.active_uids();
        let mut manager = lock(&self.manager);
        for anomaly in missing_id_anomalies(&manager, resource, &devices, &active) {
            self.node.report(anomaly);
        }
        manager.replace_list(resource, devices);
        self.write_checkpoint(&manager);
        drop(manager);
        self.node.notify_changed();
    }

    pub(crate) fn is_alive(&self) -> bool {
        self.alive.load(Ordering::SeqCst)
    }

    pub(crate) fn write_checkpoint(&self, manager: &Manager) {
        if !self.is_alive() {
            return;
        }
        let mode = lock(&self.node.faults).checkpoint;
        checkpoint::write(&self.node, manager, mode);
    }

    /// Notifies the manager that the plugin of `resource` disconnected, by name.
    pub(crate) fn plugin_disconnected(&self, resource: &str) {
        lock(&self.manager).disconnect(resource);
        self.node.notify_changed();
    }
}

fn list_anomalies(resource: &str, devices: &[Device]) -> Vec<Anomaly> {
    let mut anomalies = Vec::new();
    let mut seen = BTreeSet::new();
    for device in devices {
        let resource = resource.to_owned();
        let id = device.id.clone();
        if !seen.insert(&device.id) {
            anomalies.push(Anomaly::DuplicateId { resource: resource.clone(), id: id.clone() });
        }
        if device.id.chars().count() > DEVICE_ID_CHARS_MAX {
            anomalies.push(Anomaly::LongId { resource: resource.clone(), id: id.clone() });
        }
        if device.health != HEALTHY && device.health != UNHEALTHY {
            anomalies
                .push(Anomaly::UnknownHealth { resource: resource.clone(), health: device.health.clone() });
        }
        let topology = device.topology.as_ref();
        if topology.is_some_and(|t| t.nodes.iter().any(|n| n.id < 0)) {
            anomalies.push(Anomaly::NegativeNumaNode { resource, id });
        }
    }
    anomalies
}

/// Reports ids that must not be missing from a list: those of an Allocate in progress, and
/// those that an active pod holds.
fn missing_id_anomalies(
    manager: &Manager,
    resource: &str,
    devices: &[Device],
    active: &BTreeSet<String>,
) -> Vec<Anomaly> {
    let listed: BTreeSet<&str> = devices.iter().map(|d| d.id.as_str()).collect();
    let mut anomalies = Vec::new();
    for (named, ids) in &manager.in_flight {
        if named == resource {
            let missing = ids.iter().filter(|id| !listed.contains(id.as_str()));
            anomalies.extend(
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
        let ids: BTreeSet<String> = held.flat_map(super::devices::Holding::ids).collect();
        let missing = ids.into_iter().filter(|id| !listed.contains(id.as_str()));
        anomalies.extend(missing.map(|id| Anomaly::WouldCrashHeld {
            resource: resource.to_owned(),
            id,
            pod_uid: uid.clone(),
        }));
    }
    anomalies
}
