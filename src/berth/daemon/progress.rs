//! How far the start has come, for readiness and the API.

use crate::config::Config;
use berth_admin::{FileStack, NodeFacts, Registration, Step};
use berth_cluster::ApiServer;
use berth_core::figures::Figures;
use berth_kernel::gpu::Inventory;
use berth_kubelet::{self, Registrations};
use parking_lot::Mutex;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;

/// How often the runtime shows that it runs.
const BEAT: Duration = Duration::from_secs(1);

/// Filled while the daemon comes up; read at each request that shows it.
#[derive(Default)]
pub struct Progress {
    facts: Mutex<NodeFacts>,
    registrations: Mutex<Option<watch::Receiver<Registrations>>>,
    cluster: Mutex<Option<watch::Receiver<berth_cluster::ApiServerStatus>>>,
}

impl Progress {
    /// Nothing is done yet.
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

    /// What the API shows.
    #[must_use]
    pub fn facts(&self) -> NodeFacts {
        let mut facts = self.facts.lock().clone();
        if let Some(registrations) = self.registrations.lock().as_ref() {
            facts.registrations = registrations
                .borrow()
                .iter()
                .map(|(resource, state)| Registration { resource: resource.clone(), state: step_of(state) })
                .collect();
            let waiting = facts.registrations.iter().find_map(|r| match &r.state {
                Step::Waiting(why) => Some(format!("{}: {why}", r.resource)),
                Step::Done => None,
            });
            facts.kubelet = waiting.map_or(Step::Done, Step::Waiting);
        }
        if let Some(link) = self.cluster.lock().as_ref() {
            facts.api_server = match &*link.borrow() {
                berth_cluster::ApiServerStatus::Off => None,
                berth_cluster::ApiServerStatus::Watching => Some(Step::Done),
                berth_cluster::ApiServerStatus::Connecting { last_error } => {
                    Some(Step::Waiting(last_error.clone().unwrap_or_else(|| "connecting".into())))
                }
            };
        }
        facts
    }

    /// The GPUs were scanned.
    pub fn gpus_found(&self, source: String, inventory: &Inventory) {
        let mut facts = self.facts.lock();
        facts.gpu_source = source;
        facts.driver_version.clone_from(&inventory.driver_version);
        facts.cuda_version.clone_from(&inventory.cuda_version);
        facts.gpus = Step::Done;
    }

    /// The GPUs cannot be scanned, and why.
    pub fn gpus_wait(&self, why: String) {
        self.facts.lock().gpus = Step::Waiting(why);
    }

    /// What pods hold was taken over, or cannot be, and why.
    pub fn adoption(&self, step: Step) {
        self.facts.lock().adoption = step;
    }

    /// The stack of the file, resolved.
    pub fn file_stack(&self, stack: FileStack) {
        self.facts.lock().file_stack = stack;
    }

    /// The state of the node's labels.
    pub fn labels(&self, step: Step) {
        self.facts.lock().labels = Some(step);
    }

    /// Policies of the active stack cannot be called, and why; or they can.
    pub fn uncallable(&self, why: Option<String>) {
        self.facts.lock().uncallable = why;
    }

    /// The API server is asked, or not.
    pub fn cluster(&self, link: watch::Receiver<berth_cluster::ApiServerStatus>) {
        *self.cluster.lock() = Some(link);
    }

    /// The kubelet front end runs.
    pub fn registering(&self, registrations: watch::Receiver<Registrations>) {
        *self.registrations.lock() = Some(registrations);
    }
}

/// A sign of life of the runtime on which the kubelet is answered, each second: where none of its workers comes
/// to it, none comes to an Allocate.
pub(super) async fn beat(figures: Arc<Figures>) {
    let mut every = tokio::time::interval(BEAT);
    loop {
        drop(figures.front.begin());
        every.tick().await;
    }
}

fn step_of(state: &berth_kubelet::Registration) -> Step {
    match state {
        berth_kubelet::Registration::Registered => Step::Done,
        berth_kubelet::Registration::Waiting { obstacle } => {
            Step::Waiting(obstacle.clone().unwrap_or_else(|| "no kubelet is there yet".into()))
        }
        berth_kubelet::Registration::Registering { trouble: None } => Step::Waiting("registering".into()),
        berth_kubelet::Registration::Registering { trouble: Some(why) } => Step::Waiting(why.clone()),
        berth_kubelet::Registration::Contested => Step::Waiting(
            "another device plugin registers the same resource: remove it from this node".into(),
        ),
    }
}
