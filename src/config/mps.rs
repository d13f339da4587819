//! Limits that NVIDIA's MPS keeps. Berth runs no MPS: an operator starts a control daemon, and the
//! configuration says for which resource containers are sent to it.

use super::edits::Edits;
use crate::kernel::allocation::{Allocation, Limits};
use crate::kernel::ledger::Ledger;
use crate::kernel::names::PartId;
use crate::kernel::offer::Consumes;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// The control daemon's socket in its pipe directory.
const CONTROL_SOCKET: &str = "control";

/// The control daemon of one resource's containers.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct MpsEdits {
    /// Its pipe directory on the host: what it was started with as `CUDA_MPS_PIPE_DIRECTORY`, or where
    /// the host has that of a daemon in a container.
    pub pipe_directory: String,
    /// The same in the container, where it is not as on the host. Clients and daemon must know it by one
    /// name, so this is the daemon's own where that runs in a container.
    pub container_pipe_directory: Option<String>,
    /// The daemon's log directory on the host; mounted by the same name.
    pub log_directory: Option<String>,
    /// The shared memory that daemon and clients have in common; `/dev/shm` in the container.
    #[serde(default = "host_shm")]
    pub shm: String,
}

fn host_shm() -> String {
    "/dev/shm".into()
}

impl MpsEdits {
    /// Every path in it.
    pub(super) fn paths(&self) -> impl Iterator<Item = &String> {
        let named = [&self.pipe_directory, &self.shm].into_iter();
        named.chain(&self.container_pipe_directory).chain(&self.log_directory)
    }

    /// The pipe directory's name in the container.
    #[must_use]
    pub fn inner_pipe_directory(&self) -> &str {
        self.container_pipe_directory.as_ref().unwrap_or(&self.pipe_directory)
    }

    /// What is there as long as the daemon runs.
    #[must_use]
    pub fn control_socket(&self) -> PathBuf {
        Path::new(&self.pipe_directory).join(CONTROL_SOCKET)
    }
}

/// Who keeps a container within the memory that it was granted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EnforcedBy {
    /// Nobody: the limit is a number that the container may read.
    None,
    /// MPS, each process by itself.
    Mps,
    /// The hardware.
    Mig,
}

impl EnforcedBy {
    /// As the API writes it.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Mps => "mps",
            Self::Mig => "mig",
        }
    }
}

/// Who keeps the container of this allocation within its memory. MIG where it has whole instances and
/// was given no tighter limit: a share of an instance is no more fenced in than a share of a GPU.
#[must_use]
pub fn enforced_by(edits: &Edits, ledger: &Ledger, allocation: &Allocation) -> EnforcedBy {
    let mps = edits.resources.get(&allocation.resource).is_some_and(|own| own.mps.is_some());
    if mps && mps_limits(ledger, allocation).memory_mib.is_some() {
        return EnforcedBy::Mps;
    }
    let instance = |part: &PartId| ledger.part(part).is_some_and(|p| p.part.mig.is_some());
    let mut devices = allocation.devices.iter();
    let fenced = !allocation.devices.is_empty() && devices.all(|d| d.share.is_none() && instance(&d.part));
    if fenced && allocation.decision.limits.memory_mib.is_none() {
        return EnforcedBy::Mig;
    }
    EnforcedBy::None
}

/// What MPS is to keep a container to on each of its GPUs: what the policies said, and where they
/// said nothing, what the allocation's shares set aside. Where it has more of one GPU than of
/// another, the lesser counts: MPS knows GPUs by the order in which CUDA counts them, and that order
/// is the container's own choice.
#[must_use]
pub fn mps_limits(ledger: &Ledger, allocation: &Allocation) -> Limits {
    let mut by_part: BTreeMap<&PartId, (u64, u32)> = BTreeMap::new();
    for id in &allocation.devices {
        let sum = by_part.entry(&id.part).or_default();
        if let Some(Consumes::Slice { memory_mib, compute_percent }) =
            ledger.device(&allocation.resource, id).map(|device| device.consumes)
        {
            *sum = (sum.0.saturating_add(memory_mib), sum.1.saturating_add(compute_percent).min(100));
        }
    }
    // 0 sets nothing aside, and all of a GPU is no limit.
    let memory_mib = by_part.values().map(|(mib, _)| *mib).filter(|mib| *mib > 0).min();
    let compute_percent =
        by_part.values().map(|(_, percent)| *percent).filter(|p| (1..100).contains(p)).min();
    let said = allocation.decision.limits;
    Limits {
        memory_mib: said.memory_mib.or(memory_mib),
        compute_percent: said.compute_percent.or(compute_percent),
    }
}

#[cfg(test)]
mod tests;
