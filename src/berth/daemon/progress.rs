//! The progress of the start, for readiness and the API.

use berth_admin::{NodeFacts, StartStep};
use berth_cluster::{ApiServer, ApiServerStatus, FleetState, NodeStackState};
use berth_config::Config;
use berth_core::next_beat;
use berth_guard::GuardStatus;
use berth_kubelet::Registrations;
use berth_observe::counters::Counters;
use parking_lot::Mutex;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::sleep_until;

/// Interval of the runtime's heartbeat.
const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(10);

/// What the API shows of the DRA driver, and the owners of the marks of the DeviceTaintRules that exist.
type DraFacts = Box<dyn Fn() -> (berth_api::Dra, Arc<BTreeSet<String>>) + Send>;

/// The state of the daemon's parts, updated during the start and read by requests.
#[derive(Default)]
pub(super) struct Progress {
    facts: Mutex<NodeFacts>,
    registrations: Mutex<Option<watch::Receiver<Registrations>>>,
    cluster: Mutex<Option<watch::Receiver<ApiServerStatus>>>,
    guard: Mutex<Option<watch::Receiver<GuardStatus>>>,
    dra: Mutex<Option<DraFacts>>,
    fleet: Mutex<Option<(watch::Receiver<FleetState>, watch::Receiver<NodeStackState>)>>,
}

impl Progress {
    /// The state before the start.
    pub(super) fn new(config: &Config) -> Self {
        let facts = NodeFacts {
            name: config.node.name.clone(),
            mps: config.containers.edits.mps_sockets().into_keys().collect(),
            api_server: (config.cluster.api_server != ApiServer::Off).then(StartStep::default),
            ..NodeFacts::default()
        };
        Self { facts: Mutex::new(facts), ..Self::default() }
    }

    /// The facts that the API shows.
    pub(super) fn facts(&self) -> NodeFacts {
        let mut facts = self.facts.lock().clone();
        if let Some(registrations) = self.registrations.lock().as_ref() {
            let states = registrations.borrow();
            let states = states.iter().map(|(resource, state)| (resource.clone(), registration_step(state)));
            facts.registrations = states.collect();
            let waiting = facts.registrations.iter().find_map(|(resource, step)| match step {
                StartStep::Waiting(reason) => Some(format!("{resource}: {reason}")),
                StartStep::Done => None,
            });
            facts.kubelet = waiting.map_or(StartStep::Done, StartStep::Waiting);
        }
        if let Some(status) = self.cluster.lock().as_ref() {
            facts.api_server = match &*status.borrow() {
                ApiServerStatus::Off => None,
                ApiServerStatus::Watching => Some(StartStep::Done),
                ApiServerStatus::Connecting { last_error } => {
                    Some(StartStep::Waiting(last_error.clone().unwrap_or_else(|| "connecting".into())))
                }
            };
        }
        if let Some(status) = self.guard.lock().as_ref() {
            let GuardStatus { is_connected, version, runtime, why } = status.borrow().clone();
            let known = |text: String| Some(text).filter(|text| !text.is_empty());
            facts.guard = Some(berth_api::Guard {
                connected: is_connected,
                version: known(version),
                runtime: known(runtime),
                why: known(why),
                memory_limits: Vec::new(),
                memory_limits_error: None,
                bypass_action: None,
            });
        }
        if let Some((dra, rules)) = self.dra.lock().as_ref().map(|facts| facts()) {
            facts.dra = Some(dra);
            facts.marking_objects.push(rules);
        }
        if let Some((state, stack)) = self.fleet.lock().as_ref() {
            let FleetState {
                stack_error,
                gpu_node_error,
                maintenances_error,
                status_error,
                removal_error,
                maintenances,
            } = state.borrow().clone();
            let NodeStackState { wanted, phase, why, .. } = stack.borrow().clone();
            facts.fleet_stack = wanted.as_ref().map(|wanted| wanted.policy.clone());
            let stack = wanted.zip(phase).map(|(wanted, phase)| berth_api::FleetStack {
                policy: wanted.policy,
                revision: wanted.revision,
                phase: phase.as_str().to_owned(),
                why,
            });
            facts.fleet = Some(berth_api::Fleet {
                stack,
                stack_error,
                gpu_node_error,
                maintenances_error,
                status_error,
                removal_error,
            });
            facts.marking_objects.push(maintenances);
        }
        facts
    }

    /// Changes the facts of the daemon's own parts.
    pub(super) fn update(&self, change: impl FnOnce(&mut NodeFacts)) {
        change(&mut self.facts.lock());
    }

    /// Sets the channel with the state of the connection to the API server.
    pub(super) fn set_cluster_status(&self, status: watch::Receiver<ApiServerStatus>) {
        *self.cluster.lock() = Some(status);
    }

    /// Sets the channel with the state of the guard.
    pub(super) fn set_guard_status(&self, status: watch::Receiver<GuardStatus>) {
        *self.guard.lock() = Some(status);
    }

    /// Sets what shows the DRA driver.
    pub(super) fn set_dra(&self, facts: DraFacts) {
        *self.dra.lock() = Some(facts);
    }

    /// Sets the channels with the errors of the GPUNode and the GPUMaintenances, and with the state of the stack that the GPUNode names.
    pub(super) fn set_fleet(
        &self,
        state: watch::Receiver<FleetState>,
        stack: watch::Receiver<NodeStackState>,
    ) {
        *self.fleet.lock() = Some((state, stack));
    }

    /// Sets the channel with the state of the registrations.
    pub(super) fn set_registrations(&self, registrations: watch::Receiver<Registrations>) {
        *self.registrations.lock() = Some(registrations);
    }
}

/// Records the heartbeat of the runtime that answers the kubelet. If it stops, no worker is free to answer an Allocate
/// either.
pub(super) async fn run_heartbeat(counters: Arc<Counters>) {
    loop {
        drop(counters.front.begin());
        sleep_until(next_beat(HEARTBEAT_INTERVAL)).await;
    }
}

fn registration_step(state: &berth_kubelet::Registration) -> StartStep {
    use berth_kubelet::Registration::{Contested, Registered, Registering, Waiting};
    let reason = match state {
        Registered => return StartStep::Done,
        Waiting { obstacle } => obstacle,
        Registering { cause } => cause.as_deref().unwrap_or("registering"),
        Contested { evidence } => evidence,
    };
    StartStep::Waiting(reason.into())
}
