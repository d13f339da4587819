//! What an allocation may use of each part, who sees to it, and what its processes do use.

use super::allocation::{ADOPTED, Allocation, Limits};
use super::belongs::{Belongs, Owners};
use super::gpu::Part;
use super::ledger::Ledger;
use super::names::{AllocationId, DeviceId, PartId};
use super::offer::Consumes;
use super::process::Sight;
use std::collections::BTreeSet;

/// Who keeps a container within its limits, weakest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum EnforcedBy {
    /// Nobody: the container is told, and nothing stops it from using more.
    None,
    /// MPS, which every process of the container goes through.
    Mps,
    /// The hardware: the part is a MIG instance.
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

/// Who keeps a container that was granted `device`, which is on `part`, within its limits. `mps`:
/// whether containers of its resource are set up for MPS. MIG keeps a container within an instance,
/// not two containers that share one within their halves.
#[must_use]
pub fn enforced_by(device: &DeviceId, part: &Part, mps: bool) -> EnforcedBy {
    match (&part.mig, device.share) {
        (Some(_), None) => EnforcedBy::Mig,
        _ if mps => EnforcedBy::Mps,
        _ => EnforcedBy::None,
    }
}

/// What an allocation may use of one part, and what it does.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PartUse {
    /// The part.
    pub part: PartId,
    /// What it may use; nothing is set where it may use all.
    pub limits: Limits,
    /// Memory of the processes that are surely its own, MiB; `None` where processes cannot be seen
    /// or NVML does not say their memory.
    pub memory_used_mib: Option<u64>,
    /// Whether that is over the limit; `None` without a limit, or where it cannot be told.
    pub over_limit: Option<bool>,
    /// Ids of the processes that are surely its own.
    pub pids: Vec<u32>,
    /// Allocations, of this pod or of nobody known yet, that share further processes with it: which
    /// of them uses what cannot be told.
    pub shared_with: Vec<AllocationId>,
    /// Ids of those processes.
    pub shared_pids: Vec<u32>,
    /// Their memory, MiB.
    pub shared_memory_mib: u64,
}

/// What an allocation may use and uses of each of its parts, in their order. The parts of one that
/// has ended are no longer its own: of it only what is set down in its decision is said.
#[must_use]
pub fn part_uses(owners: &Owners<'_>, allocation: &Allocation) -> Vec<PartUse> {
    let parts: BTreeSet<&PartId> = allocation.devices.iter().map(|d| &d.part).collect();
    parts.into_iter().map(|part| part_use(owners, allocation, part)).collect()
}

/// What an allocation may use of each part, and who sees to it: the strictest limit of all its parts
/// and the weakest keeper. `None` where it may use all of every part.
#[must_use]
pub fn limits(ledger: &Ledger, allocation: &Allocation, mps: bool) -> Option<(Limits, EnforcedBy)> {
    // What was taken over was set up by another plugin, and nobody knows how.
    let mps = mps && allocation.decision.by != [ADOPTED];
    let parts: BTreeSet<&PartId> = allocation.devices.iter().map(|d| &d.part).collect();
    let all = parts.into_iter().map(|part| limits_of(ledger, allocation, part));
    let strictest = all.reduce(Limits::min).unwrap_or_default();
    let keepers = allocation.devices.iter().map(|device| {
        ledger.part(&device.part).map_or(EnforcedBy::None, |p| enforced_by(device, &p.part, mps))
    });
    let weakest = keepers.min().unwrap_or(EnforcedBy::None);
    (strictest != Limits::default()).then_some((strictest, weakest))
}

/// What the policies said of each part, and what the devices take of this one.
fn limits_of(ledger: &Ledger, allocation: &Allocation, part: &PartId) -> Limits {
    let told = allocation.decision.limits;
    let Some(state) = ledger.part(part).filter(|_| allocation.ended.is_none()) else {
        return told;
    };
    let (mut memory_mib, mut compute_percent) = (0_u64, 0_u32);
    for id in allocation.devices.iter().filter(|id| id.part == *part) {
        match state.device(&allocation.resource, id.share).map(|d| d.consumes) {
            // All of an instance is a limit that the hardware keeps; all of a GPU is none.
            Some(Consumes::Whole) if state.part.mig.is_some() => {
                return told.min(Limits { memory_mib: Some(state.part.memory_mib), compute_percent: None });
            }
            Some(Consumes::Whole) | None => return told,
            Some(Consumes::Slice { memory_mib: memory, compute_percent: compute }) => {
                memory_mib = memory_mib.saturating_add(memory);
                compute_percent = compute_percent.saturating_add(compute);
            }
        }
    }
    // A slice of 0 sets nothing aside.
    told.min(Limits {
        memory_mib: Some(memory_mib).filter(|m| *m > 0),
        compute_percent: Some(compute_percent).filter(|c| *c > 0),
    })
}

fn part_use(owners: &Owners<'_>, allocation: &Allocation, part: &PartId) -> PartUse {
    let ledger = owners.ledger;
    let limits = limits_of(ledger, allocation, part);
    let mut sum = Sum::default();
    let gpu = ledger.part(part).map_or(part, |p| p.part.gpu());
    let visible = ledger.processes.sight == Sight::Visible && allocation.ended.is_none();
    let told = owners.on(gpu).filter(|_| visible);
    for (seen, whose) in told.into_iter().flatten() {
        let process = &seen.process;
        let named = process.part == *part || part == gpu;
        if !named && process.part != *gpu {
            continue;
        }
        match whose {
            Belongs::To(id) if *id == allocation.id && named => sum.own(process.pid, process.memory_mib),
            // On the GPU, by NVML, and on which of its instances is not said.
            Belongs::To(id) if *id == allocation.id => sum.shared(process.pid, process.memory_mib, &[]),
            Belongs::Among(ids) | Belongs::Perhaps(ids) if ids.contains(&allocation.id) => {
                let others: Vec<_> = ids.iter().filter(|id| **id != allocation.id).copied().collect();
                sum.shared(process.pid, process.memory_mib, &others);
            }
            Belongs::To(_)
            | Belongs::Among(_)
            | Belongs::Perhaps(_)
            | Belongs::Ignored
            | Belongs::Nobody(_) => {}
        }
    }
    let over = limits.memory_mib.filter(|_| told.is_some()).and_then(|limit| sum.over(limit));
    PartUse {
        part: part.clone(),
        limits,
        memory_used_mib: Some(sum.own_mib).filter(|_| told.is_some() && sum.own_known),
        over_limit: over,
        pids: sum.own_pids.into_iter().collect(),
        shared_with: sum.with.into_iter().collect(),
        shared_pids: sum.shared_pids.into_iter().collect(),
        shared_memory_mib: sum.shared_mib,
    }
}

/// What was added up.
struct Sum {
    own_mib: u64,
    own_known: bool,
    own_pids: BTreeSet<u32>,
    shared_mib: u64,
    shared_known: bool,
    shared_pids: BTreeSet<u32>,
    with: BTreeSet<AllocationId>,
}

impl Default for Sum {
    fn default() -> Self {
        Self {
            own_mib: 0,
            own_known: true,
            own_pids: BTreeSet::new(),
            shared_mib: 0,
            shared_known: true,
            shared_pids: BTreeSet::new(),
            with: BTreeSet::new(),
        }
    }
}

impl Sum {
    fn own(&mut self, pid: u32, memory_mib: Option<u64>) {
        self.own_pids.insert(pid);
        self.own_known &= memory_mib.is_some();
        self.own_mib = self.own_mib.saturating_add(memory_mib.unwrap_or(0));
    }

    fn shared(&mut self, pid: u32, memory_mib: Option<u64>, with: &[AllocationId]) {
        self.shared_pids.insert(pid);
        self.shared_known &= memory_mib.is_some();
        self.shared_mib = self.shared_mib.saturating_add(memory_mib.unwrap_or(0));
        self.with.extend(with);
    }

    /// What is known suffices to say yes; to say no, all of it must be known and be its own.
    fn over(&self, limit_mib: u64) -> Option<bool> {
        if self.own_mib > limit_mib {
            return Some(true);
        }
        let all_known = self.own_known && self.shared_known;
        (all_known && self.own_mib.saturating_add(self.shared_mib) <= limit_mib).then_some(false)
    }
}

#[cfg(test)]
mod tests;
