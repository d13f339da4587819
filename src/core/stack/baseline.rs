//! The baseline, which answers if all policies pass: whole GPUs, and MIG instances by strategy.

use berth_kernel::hardware::mig::{self, MigStrategy};
use berth_kernel::hardware::triage::XidRules;
use berth_kernel::ids::names::{PartId, Resource};
use berth_kernel::node::command::StackAnswer;
use berth_kernel::node::ledger::Ledger;
use std::collections::BTreeMap;
use std::os::unix::fs::FileTypeExt as _;
use std::path::PathBuf;

/// Settings of the baseline.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Baseline {
    /// The resource of whole GPUs.
    pub resource: Resource,
    /// How MIG instances are offered.
    pub mig: MigStrategy,
    /// Socket of the MPS control daemon for the containers of each resource.
    pub mps_sockets: BTreeMap<Resource, PathBuf>,
    /// Judgements of XIDs that replace those of the table.
    pub xids: XidRules,
    /// How long a bad reading keeps a GPU unhealthy, milliseconds.
    pub quiet_ms: u64,
}

impl Baseline {
    /// The denial of a resource whose MPS control daemon is missing. CUDA would silently run without MPS, so
    /// the containers would not have the limits that they were promised.
    pub(crate) fn mps_denial(&self, resource: &Resource) -> Option<StackAnswer> {
        let socket = self.mps_sockets.get(resource)?;
        let exists = std::fs::metadata(socket)
            .is_ok_and(|file| file.file_type().is_socket() || file.file_type().is_fifo());
        let folder = socket.parent().unwrap_or(socket).display();
        (!exists).then(|| StackAnswer::Deny {
            policy: "mps".into(),
            reason: format!(
                "{resource} is limited by MPS, and there is no control daemon at {}: start it \
                 (CUDA_MPS_PIPE_DIRECTORY={folder} nvidia-cuda-mps-control -d), and if berth runs in a pod, \
                 mount {folder} into it",
                socket.display()
            ),
        })
    }

    pub(super) fn plan(&self, node: &Ledger, open: impl Fn(&PartId) -> bool) -> mig::Plan {
        let parts = node.parts.values().filter(|p| p.present).map(|p| &p.part);
        mig::plan(self.mig, &self.resource, parts, open)
    }
}
