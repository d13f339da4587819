//! What the API shows beside the ledger: facts that other rooms hold and the daemon gathers.

use berth_kernel::names::Resource;
use berth_kernel::stack::StackEntry;
use std::collections::BTreeSet;
use std::sync::Arc;

/// What the daemon tells of itself when a request asks; it must not wait for anything.
pub type Facts = Arc<dyn Fn() -> NodeFacts + Send + Sync>;

/// One look at what the daemon knows of itself. Made anew for each request that shows it, so it
/// must not wait for anything.
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
    /// Whether the GPUs were looked at.
    pub gpus: Step,
    /// Whether what running pods hold was taken over.
    pub adoption: Step,
    /// The kubelet as a whole, and what it waits for.
    pub kubelet: Step,
    /// The state of every resource at the kubelet.
    pub registrations: Vec<Registration>,
    /// Resources whose containers are set up for MPS.
    pub mps: BTreeSet<Resource>,
    /// How it stands with the API server; `None` where it is not used.
    pub api_server: Option<Step>,
    /// Why a policy of the active stack cannot be called, if so. The daemon goes on trying.
    pub uncallable: Option<String>,
    /// Whether the node's labels stand, and why not; `None` where none are wanted.
    pub labels: Option<Step>,
    /// The stack of the configuration file, in force or not.
    pub file_stack: FileStack,
}

/// A step of the start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Taken.
    Done,
    /// Not yet, and why or on what it waits; says what to do where an operator must.
    Waiting(String),
}

impl Default for Step {
    fn default() -> Self {
        Self::Waiting("not begun".into())
    }
}

/// One resource at the kubelet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Registration {
    /// The resource.
    pub resource: Resource,
    /// Whether the kubelet knows it and watches its list.
    pub state: Step,
}

/// The stack of the configuration file.
#[derive(Clone, Debug, Default)]
pub struct FileStack {
    /// Its entries with their versions resolved; what `berth policy reset` goes back to.
    pub entries: Vec<StackEntry>,
    /// Why it cannot be used, if it cannot.
    pub trouble: Option<String>,
}
