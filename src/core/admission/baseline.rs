//! Who answers if all policies pass: whole GPUs, and MIG by its strategy.

use berth_kernel::command::StackAnswer;
use berth_kernel::ledger::Ledger;
use berth_kernel::mig::{self, MigStrategy};
use berth_kernel::names::{PartId, Resource};
use std::collections::BTreeMap;
use std::os::unix::fs::FileTypeExt as _;
use std::path::PathBuf;

/// Who made an offer that no policy made.
pub(super) const BASELINE: &str = "baseline";

/// Settings of the baseline.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Baseline {
    /// The resource of whole GPUs.
    pub resource: Resource,
    /// What becomes of MIG.
    pub mig: MigStrategy,
    /// By resource the socket of the MPS control daemon that its containers are sent to.
    pub mps_sockets: BTreeMap<Resource, PathBuf>,
    /// XIDs that say nothing of the GPU.
    pub ignored_xids: Vec<u64>,
    /// How long a bad reading keeps a GPU unhealthy, milliseconds.
    pub quiet_ms: u64,
}

impl Baseline {
    /// The denial of a resource whose MPS control daemon is not there. CUDA then runs without MPS and
    /// without a word, so its containers would have none of the limits that they were promised.
    pub(super) fn mps_denial(&self, resource: &Resource) -> Option<StackAnswer> {
        let socket = self.mps_sockets.get(resource)?;
        let there = std::fs::metadata(socket)
            .is_ok_and(|file| file.file_type().is_socket() || file.file_type().is_fifo());
        let folder = socket.parent().unwrap_or(socket).display();
        (!there).then(|| StackAnswer::Deny {
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
