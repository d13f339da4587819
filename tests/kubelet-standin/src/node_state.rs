//! State that is kept across kubelet restarts.

use crate::{anomalies::Anomaly, calls::Calls, faults::Faults, pods::Pod, rng::Rng};
use crate::{calls::Rpc, kubelet::Options};
use std::{
    collections::BTreeMap,
    path::PathBuf,
    sync::{Mutex, MutexGuard, PoisonError},
    time::Instant,
};
use tokio::sync::watch;

/// Locks, ignoring poisoning by a panicked test thread: the data are plain values.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[derive(Debug)]
pub(crate) struct NodeState {
    pub(crate) options: Options,
    pub(crate) pods: Mutex<BTreeMap<String, Pod>>,
    pub(crate) faults: Mutex<Faults>,
    pub(crate) anomalies: Mutex<Vec<Anomaly>>,
    pub(crate) calls: Mutex<Calls>,
    pub(crate) rng: Mutex<Rng>,
    /// Incremented after every change that a test may wait for.
    pub(crate) changed: watch::Sender<u64>,
}

impl NodeState {
    pub(crate) fn new(options: Options) -> Self {
        Self {
            pods: Mutex::default(),
            faults: Mutex::default(),
            anomalies: Mutex::default(),
            calls: Mutex::default(),
            rng: Mutex::new(Rng::new(options.seed)),
            changed: watch::Sender::new(0),
            options,
        }
    }

    pub(crate) fn device_plugins(&self) -> PathBuf {
        self.options.kubelet_dir.join("device-plugins")
    }

    pub(crate) fn pod_resources(&self) -> PathBuf {
        self.options.root_dir.join("pod-resources")
    }

    pub(crate) fn pods_api(&self) -> PathBuf {
        self.options.root_dir.join("pods-api")
    }

    pub(crate) fn faults(&self) -> Faults {
        lock(&self.faults).clone()
    }

    pub(crate) fn report(&self, anomaly: Anomaly) {
        lock(&self.anomalies).push(anomaly);
        self.notify_changed();
    }

    pub(crate) fn record(&self, rpc: Rpc, resource: &str, began: Instant, failed: bool) {
        lock(&self.calls).record(rpc, resource, began.elapsed(), failed);
        self.notify_changed();
    }

    pub(crate) fn notify_changed(&self) {
        self.changed.send_modify(|n| *n = n.wrapping_add(1));
    }

    pub(crate) fn shuffled<T>(&self, items: impl IntoIterator<Item = T>) -> Vec<T> {
        let mut items: Vec<T> = items.into_iter().collect();
        lock(&self.rng).shuffle(&mut items);
        items
    }
}
