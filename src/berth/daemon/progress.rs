//! The progress of the start, for readiness and the API.

use crate::config::Config;
use berth_admin::{FileStack, NodeFacts, Registration, Step};
use berth_cluster::ApiServer;
use berth_core::counters::Counters;
use berth_kernel::gpu::Inventory;
use berth_kubelet::{self, Registrations};
use parking_lot::Mutex;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;

/// Interval of the runtime's heartbeat.
const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(1);

/// The state of the daemon's parts, updated during the start and read by requests.
#[derive(Default)]
pub struct Progress {
    facts: Mutex<NodeFacts>,
    registrations: Mutex<Option<watch::Receiver<Registrations>>>,
    cluster: Mutex<Option<watch::Receiver<berth_cluster::ApiServerStatus>>>,
}

impl Progress {
    /// The state before the start.
    #[must_use]
    pub fn new(config: &Config) -> Self {
        let progress = Self::default();
        {
            let mut facts = progress.facts.lock();
            config.node_name.clone_into(&mut facts.name);
            facts.mps = config.edits.mps_sockets().into_keys().collect();
            facts.api_server = (config.api_server != ApiServer::Off).then(Step::default);
        }
        progress
    }

    /// The facts that the API shows.
    #[must_use]
    pub fn facts(&self) -> NodeFacts {
        let mut facts = self.facts.lock().clone();
        if let Some(registrations) = self.registrations.lock().as_ref() {
            facts.registrations = registrations
                .borrow()
                .iter()
                .map(|(resource, state)| Registration {
                    resource: resource.clone(),
                    state: registration_step(state),
                })
                .collect();
            let waiting = facts.registrations.iter().find_map(|r| match &r.state {
                Step::Waiting(reason) => Some(format!("{}: {reason}", r.resource)),
                Step::Done => None,
            });
            facts.kubelet = waiting.map_or(Step::Done, Step::Waiting);
        }
        if let Some(status) = self.cluster.lock().as_ref() {
            facts.api_server = match &*status.borrow() {
                berth_cluster::ApiServerStatus::Off => None,
                berth_cluster::ApiServerStatus::Watching => Some(Step::Done),
                berth_cluster::ApiServerStatus::Connecting { last_error } => {
                    Some(Step::Waiting(last_error.clone().unwrap_or_else(|| "connecting".into())))
                }
            };
        }
        facts
    }

    /// Sets the result of the first scan of the GPUs.
    pub fn set_gpus(&self, source: String, inventory: &Inventory) {
        let mut facts = self.facts.lock();
        facts.gpu_source = source;
        facts.driver_version.clone_from(&inventory.driver_version);
        facts.cuda_version.clone_from(&inventory.cuda_version);
        facts.gpus = Step::Done;
    }

    /// Sets the error with which a scan of the GPUs failed.
    pub fn set_gpus_error(&self, error: String) {
        self.facts.lock().gpus = Step::Waiting(error);
    }

    /// Sets the state of the adoption of running pods.
    pub fn set_adoption(&self, step: Step) {
        self.facts.lock().adoption = step;
    }

    /// Sets the resolved stack of the file.
    pub fn set_file_stack(&self, stack: FileStack) {
        self.facts.lock().file_stack = stack;
    }

    /// Sets the state of the node's labels.
    pub fn set_labels(&self, step: Step) {
        self.facts.lock().labels = Some(step);
    }

    /// Sets why policies of the active stack are not callable; `None` if they are.
    pub fn set_uncallable(&self, reason: Option<String>) {
        self.facts.lock().uncallable = reason;
    }

    /// Sets the channel with the state of the connection to the API server.
    pub fn set_cluster_status(&self, status: watch::Receiver<berth_cluster::ApiServerStatus>) {
        *self.cluster.lock() = Some(status);
    }

    /// Sets the channel with the state of the registrations.
    pub fn set_registrations(&self, registrations: watch::Receiver<Registrations>) {
        *self.registrations.lock() = Some(registrations);
    }
}

/// The heartbeat of the runtime that answers the kubelet, each second. Without it no worker is free for an Allocate either.
pub(super) async fn run_heartbeat(figures: Arc<Counters>) {
    let mut every = tokio::time::interval(HEARTBEAT_INTERVAL);
    loop {
        drop(figures.front.begin());
        every.tick().await;
    }
}

fn registration_step(state: &berth_kubelet::Registration) -> Step {
    match state {
        berth_kubelet::Registration::Registered => Step::Done,
        berth_kubelet::Registration::Waiting { obstacle } => {
            Step::Waiting(obstacle.clone().unwrap_or_else(|| "there is no kubelet yet".into()))
        }
        berth_kubelet::Registration::Registering { trouble: None } => Step::Waiting("registering".into()),
        berth_kubelet::Registration::Registering { trouble: Some(error) } => Step::Waiting(error.clone()),
        berth_kubelet::Registration::Contested => Step::Waiting(
            "another device plugin registers the same resource: remove it from this node".into(),
        ),
    }
}
