//! Settings of this crate, and the channels by which it reports.

use super::node_labels::Labels;
use berth_core::{Lab, PolicyService};
use berth_fleet::gpu_node::StackPhase;
use berth_kernel::ids::names::GpuId;
use berth_kernel::node::ledger::Ledger;
use berth_kernel::policy::stack::{FleetRevision, StackOrigin, before_break_glass};
use berth_kube::{ApiServer, Connection};
use berth_oci::Puller;
use std::collections::BTreeSet;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;

/// Settings of this crate.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The connection to the API server.
    pub connection: Connection,
    /// The name of this node's object.
    pub node: String,
    /// How long pod events are collected before they are sent to the keeper as one command, and changes before they are
    /// written to the node object. The event of a pod that may be the next to get an Allocate is not delayed; see
    /// [`berth_kernel::evidence::pods`].
    pub batch_window: Duration,
    /// The longest wait after a watch that was open is lost.
    pub reconnect_wait_max: Duration,
    /// How long after a drain begins the first pod of the GPU is evicted: by then the kubelet has received the list
    /// that shows its held devices Unhealthy.
    pub eviction_delay: Duration,
    /// The labels to write to the node object, if any.
    pub labels: Option<NodeLabelTask>,
    /// Receives whether another writer labels the node object; `None`: not checked.
    pub other_writer: Option<watch::Sender<OtherWriter>>,
    /// The label of the node object to watch, if any.
    pub watched_label: Option<WatchedLabel>,
    /// The DRA driver whose ResourceSlices are published, if any.
    pub dra: Option<DraTask>,
    /// Set if the daemon writes its GPUNode and carries out GPUMaintenances.
    pub fleet: Option<FleetTask>,
}

impl Settings {
    /// Selects the objects whose `spec.nodeName` is this node.
    pub(super) fn of_node(&self) -> Option<String> {
        Some(format!("spec.nodeName={}", self.node))
    }

    /// With the waits that the daemon uses.
    #[must_use]
    pub fn new(api_server: ApiServer, node: String) -> Self {
        // A tenth of a second: the hundred pod events of a deployment become a few commands to the keeper.
        Self {
            connection: Connection::new(api_server),
            node,
            batch_window: Duration::from_millis(100),
            // When an API server restarts, the connections of all nodes are lost at one moment.
            reconnect_wait_max: Duration::from_secs(10),
            // A device list reaches the kubelet within milliseconds; a container takes longer to end.
            eviction_delay: Duration::from_millis(250),
            labels: None,
            other_writer: None,
            watched_label: None,
            dra: None,
            fleet: None,
        }
    }
}

/// The state of the connection to the API server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ApiServerStatus {
    /// Not configured.
    Off,
    /// Not connected, or the watch of pods is interrupted.
    Connecting {
        /// The last error, if any, with the remedy if retries alone do not help.
        last_error: Option<String>,
    },
    /// The pods of this node are watched.
    Watching,
}

/// The labels to write to the node object, and a channel for their state.
#[derive(Clone, Debug)]
pub struct NodeLabelTask {
    /// The labels to set; `None` until they are known.
    pub wanted: watch::Receiver<Option<Labels>>,
    /// Receives the state of the labels.
    pub state: watch::Sender<NodeLabelState>,
}

/// The state of our labels on the node object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NodeLabelState {
    /// All are set.
    Done,
    /// Not all are set, and why.
    Not(String),
}

/// The DRA driver, and the state of what is published of it.
#[derive(Clone, Debug)]
pub struct DraTask {
    /// The driver's name.
    pub driver: String,
    /// Whether the kubelet has registered the driver.
    pub registered: watch::Receiver<bool>,
    /// Receives the state of the ResourceSlices.
    pub slices: watch::Sender<SlicesState>,
    /// Receives the state of the DeviceTaintRules.
    pub taint_rules: watch::Sender<TaintRulesState>,
}

/// The ResourceSlices as the API server last showed them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SlicesState {
    /// The generation of the pool; 0 before the first was published.
    pub generation: i64,
    /// The number of devices.
    pub devices: usize,
    /// GPUs that are to be granted through the device plugin API, whose devices have a taint for that or are left out.
    pub moving: BTreeSet<GpuId>,
    /// Whether the API server drops taints, so that devices with one are left out.
    pub drops_taints: bool,
    /// Why no shares are published; `None` if they are.
    pub no_shares: Option<String>,
    /// Why GPUs that are offered both whole and in shares are published whole only; `None` if they are published both ways.
    pub no_counters: Option<String>,
    /// Why they are not up to date; `None` if they are.
    pub error: Option<String>,
}

/// The DeviceTaintRules that cordon GPUs of the node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TaintRulesState {
    /// The owner of the marks of each rule.
    pub owners: Arc<BTreeSet<String>>,
    /// Why the marks may be out of date; `None` if they are not.
    pub error: Option<String>,
}

impl Default for TaintRulesState {
    /// Before the API server was asked.
    fn default() -> Self {
        Self { owners: Arc::default(), error: not_yet() }
    }
}

fn not_yet() -> Option<String> {
    Some("the API server has not been asked yet".to_owned())
}

/// What the tasks of the GPUNode and of the GPUMaintenances need, and the channels by which they report.
#[derive(Clone)]
pub struct FleetTask {
    /// Activates stacks.
    pub policies: PolicyService,
    /// Tries the policies of a stack before the stack is activated.
    pub lab: Lab,
    /// Pulls the policies that the node does not have.
    pub puller: Puller,
    /// Whether the stack of the GPUNode may be activated: the devices of running pods were adopted.
    pub may_activate: watch::Receiver<bool>,
    /// Receives the errors.
    pub state: watch::Sender<FleetState>,
    /// Receives the state of the stack that the GPUNode names.
    pub stack: watch::Sender<NodeStackState>,
}

impl fmt::Debug for FleetTask {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FleetTask").finish_non_exhaustive()
    }
}

/// The stack that the GPUNode of the node names, and the progress of the daemon with it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeStackState {
    /// Whether the GPUNode was read.
    pub is_read: bool,
    /// The `metadata.generation` that was read last.
    pub generation: Option<i64>,
    /// The revision; `None` if the GPUNode names no stack.
    pub wanted: Option<FleetRevision>,
    /// The progress; `None` without a revision, and before the GPUNode was read.
    pub phase: Option<StackPhase>,
    /// Why the stack has not settled.
    pub why: Option<String>,
    /// Whether the policies of the stack that have a `ref` are on the node; `None` if none has one.
    pub pulled: Option<PolicyPulled>,
}

/// Whether the policies of a stack are on the node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PolicyPulled {
    /// Whether they are.
    pub is_pulled: bool,
    /// The reason in a word.
    pub reason: &'static str,
    /// What is missing, and why.
    pub message: String,
}

impl NodeStackState {
    /// The state before the GPUNode was read. The active stack of the GPUNode, or the one before a break-glass, is assumed to be still named
    /// there.
    #[must_use]
    pub fn before_reading(ledger: &Ledger) -> Self {
        let active = match ledger.stack.is_break_glass() {
            true => before_break_glass(&ledger.past_stacks).unwrap_or(&ledger.stack),
            false => &ledger.stack,
        };
        let wanted = match &active.origin {
            StackOrigin::Fleet { revision, .. } => Some(revision.clone()),
            StackOrigin::File | StackOrigin::Api | StackOrigin::BreakGlass { .. } => None,
        };
        Self { wanted, ..Self::default() }
    }
}

/// The errors of the GPUNode and the GPUMaintenances of the node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FleetState {
    /// Why changes of the stack that the GPUNode names are not seen; `None` if they are.
    pub stack_error: Option<String>,
    /// Why the GPUNode is not up to date; `None` if it is.
    pub gpu_node_error: Option<String>,
    /// Why changes of GPUMaintenances are not seen; `None` if they are.
    pub maintenances_error: Option<String>,
    /// Why the status of a GPUMaintenance is not up to date; `None` if all are.
    pub status_error: Option<String>,
    /// Why the marks of deleted GPUMaintenances are kept; `None` if there are none.
    pub removal_error: Option<String>,
    /// The owners of the marks of the GPUMaintenances that exist.
    pub maintenances: Arc<BTreeSet<String>>,
}

impl Default for FleetState {
    /// Before the API server was asked.
    fn default() -> Self {
        Self {
            stack_error: not_yet(),
            gpu_node_error: not_yet(),
            maintenances_error: not_yet(),
            status_error: None,
            removal_error: None,
            maintenances: Arc::default(),
        }
    }
}

/// Whether another writer's label is on the node object, as of the last check.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OtherWriter {
    /// The node object has not been read yet.
    Unknown,
    /// It is absent, or no check succeeded.
    Absent,
    /// It is present.
    Present,
}

/// A label of the node object to watch.
#[derive(Clone, Debug)]
pub struct WatchedLabel {
    /// Its key.
    pub key: String,
    /// Its value on the node; `None` without the label.
    pub value: watch::Sender<Option<String>>,
}
