//! Facts about the daemon that the API shows besides the ledger. Other crates have them, and the daemon collects
//! them.

use berth_kernel::names::Resource;
use berth_kernel::stack::StackEntry;
use std::collections::BTreeSet;
use std::sync::Arc;

/// Collects the facts for a request; must not block.
pub type Facts = Arc<dyn Fn() -> NodeFacts + Send + Sync>;

/// The facts about the daemon at one moment.
#[derive(Clone, Debug, Default)]
pub struct NodeFacts {
    /// The node's name.
    pub name: String,
    /// Where GPUs come from: `NVML at /usr/lib/...`, `8 simulated H100`.
    pub gpu_source: String,
    /// Driver version, where the backend has one.
    pub driver_version: Option<String>,
    /// CUDA version of the driver, where the backend has one.
    pub cuda_version: Option<String>,
    /// Whether the GPUs were scanned.
    pub gpus: Step,
    /// Whether the devices of running pods were adopted.
    pub adoption: Step,
    /// The connection to the kubelet.
    pub kubelet: Step,
    /// The registration of each resource at the kubelet.
    pub registrations: Vec<Registration>,
    /// Resources whose containers are set up for MPS.
    pub mps: BTreeSet<Resource>,
    /// The connection to the API server; `None` if it is not used.
    pub api_server: Option<Step>,
    /// Why a policy of the active stack cannot be called, if so. The daemon retries.
    pub uncallable: Option<String>,
    /// Whether the node's labels are up to date; `None` if labels are not configured.
    pub labels: Option<Step>,
    /// The stack of the configuration file.
    pub file_stack: FileStack,
}

/// A step of the start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// It is done.
    Done,
    /// It is not, with the reason, and with what to do if an operator has to act.
    Waiting(String),
}

impl Default for Step {
    fn default() -> Self {
        Self::Waiting("not begun".into())
    }
}

/// The registration of one resource.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Registration {
    /// The resource.
    pub resource: Resource,
    /// Whether the kubelet accepted it and watches its devices.
    pub state: Step,
}

/// The stack of the configuration file.
#[derive(Clone, Debug, Default)]
pub struct FileStack {
    /// Its entries with resolved versions; `berth policy reset` activates them.
    pub entries: Vec<StackEntry>,
    /// Why it cannot be used, if so.
    pub trouble: Option<String>,
}
