//! An allocation's limits on each part, how they are enforced, and what its processes use.

use super::allocation::{Allocation, Limits};
use super::attribution::{Attribution, Attributions};
use super::gpu::Part;
use super::ledger::Ledger;
use super::names::{AllocationId, DeviceId, PartId};
use super::offer::Consumes;
use super::process::ProcessVisibility;
use std::collections::BTreeSet;

/// The mechanism that enforces a container's limits, weakest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum EnforcedBy {
    /// None: the limits are only stated to the container.
    None,
    /// MPS: every process of the container is its client.
    Mps,
    /// The hardware: the part is a MIG instance.
    Mig,
}

/// What enforces the limits of a container that was granted `device` on `part`. `mps`: whether
/// containers of its resource are set up for MPS. MIG limits a container to an instance, but not the
/// containers that share an instance to their shares.
#[must_use]
pub fn enforced_by(device: &DeviceId, part: &Part, mps: bool) -> EnforcedBy {
    match (&part.mig, device.share) {
        (Some(_), None) => EnforcedBy::Mig,
        _ if mps => EnforcedBy::Mps,
        _ => EnforcedBy::None,
    }
}

/// An allocation's limits and usage on one part.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PartUse {
    /// The part.
    pub part: PartId,
    /// Its limits; unset where it may use everything.
    pub limits: Limits,
    /// Memory of the processes that are certainly its own, MiB; `None` where processes are not visible
    /// or NVML does not report their memory.
    pub memory_used_mib: Option<u64>,
    /// Whether that exceeds the limit; `None` without a limit, or where it is not certain.
    pub over_limit: Option<bool>,
    /// Ids of the processes that are certainly its own.
    pub pids: Vec<u32>,
    /// Other allocations, of this pod or with unknown holders, that the shared processes may belong to.
    pub shared_with: Vec<AllocationId>,
    /// Ids of the shared processes, which may belong to this allocation or to one of [`Self::shared_with`].
    pub shared_pids: Vec<u32>,
    /// Memory of the shared processes, MiB.
    pub shared_memory_mib: u64,
}

/// An allocation's limits and usage on each of its parts, sorted by part. An ended allocation has only
/// the limits of its decision.
#[must_use]
pub fn part_uses(owners: &Attributions<'_>, allocation: &Allocation) -> Vec<PartUse> {
    let parts: BTreeSet<&PartId> = allocation.devices.iter().map(|d| &d.part).collect();
    parts.into_iter().map(|part| part_use(owners, allocation, part)).collect()
}

/// An allocation's strictest limits over all of its parts, and the weakest enforcement. `None` where it
/// may use all of every part.
#[must_use]
pub fn limits(ledger: &Ledger, allocation: &Allocation, mps: bool) -> Option<(Limits, EnforcedBy)> {
    // The container of an adopted allocation was set up by another plugin, in an unknown way.
    let mps = mps && !allocation.decision.is_adoption();
    let parts: BTreeSet<&PartId> = allocation.devices.iter().map(|d| &d.part).collect();
    let limits = parts.into_iter().map(|part| limits_of(ledger, allocation, part));
    let strictest = limits.reduce(Limits::min).unwrap_or_default();
    let enforcers = allocation.devices.iter().map(|device| {
        ledger.part(&device.part).map_or(EnforcedBy::None, |p| enforced_by(device, &p.part, mps))
    });
    let weakest = enforcers.min().unwrap_or(EnforcedBy::None);
    (strictest != Limits::default()).then_some((strictest, weakest))
}

/// The limits of the decision, which hold on each part, combined with what the devices take of this part.
fn limits_of(ledger: &Ledger, allocation: &Allocation, part: &PartId) -> Limits {
    let decided = allocation.decision.limits;
    let Some(state) = ledger.part(part).filter(|_| allocation.ended.is_none()) else {
        return decided;
    };
    let (mut memory_mib, mut compute_percent) = (0_u64, 0_u32);
    for id in allocation.devices.iter().filter(|id| id.part == *part) {
        match state.device(&allocation.resource, id.share).map(|d| d.consumes) {
            // A whole instance is a limit that the hardware enforces; a whole GPU is not a limit.
            Some(Consumes::Whole) if state.part.mig.is_some() => {
                return decided
                    .min(Limits { memory_mib: Some(state.part.memory_mib), compute_percent: None });
            }
            Some(Consumes::Whole) | None => return decided,
            Some(Consumes::Slice { memory_mib: memory, compute_percent: compute }) => {
                memory_mib = memory_mib.saturating_add(memory);
                compute_percent = compute_percent.saturating_add(compute);
            }
        }
    }
    // A slice of 0 reserves nothing and sets no limit.
    decided.min(Limits {
        memory_mib: Some(memory_mib).filter(|m| *m > 0),
        compute_percent: Some(compute_percent).filter(|c| *c > 0),
    })
}

fn part_use(owners: &Attributions<'_>, allocation: &Allocation, part: &PartId) -> PartUse {
    let ledger = owners.ledger;
    let limits = limits_of(ledger, allocation, part);
    let mut sum = UsageSum::default();
    let gpu = ledger.part(part).map_or(part, |p| p.part.gpu());
    let visible = ledger.processes.sight == ProcessVisibility::Visible && allocation.ended.is_none();
    let listed = owners.on(gpu).filter(|_| visible);
    for (seen, belongs) in listed.into_iter().flatten() {
        let process = &seen.process;
        let on_part = process.part == *part || part == gpu;
        if !on_part && process.part != *gpu {
            continue;
        }
        match belongs {
            Attribution::To(id) if *id == allocation.id && on_part => {
                sum.add_own(process.pid, process.memory_mib);
            }
            // NVML reports the GPU of the process but not its instance.
            Attribution::To(id) if *id == allocation.id => {
                sum.add_shared(process.pid, process.memory_mib, &[]);
            }
            Attribution::OneOf(ids) | Attribution::Possibly(ids) if ids.contains(&allocation.id) => {
                let others: Vec<_> = ids.iter().filter(|id| **id != allocation.id).copied().collect();
                sum.add_shared(process.pid, process.memory_mib, &others);
            }
            Attribution::To(_)
            | Attribution::OneOf(_)
            | Attribution::Possibly(_)
            | Attribution::Ignored
            | Attribution::Unexplained(_) => {}
        }
    }
    let over_limit = limits.memory_mib.filter(|_| listed.is_some()).and_then(|limit| sum.exceeds(limit));
    PartUse {
        part: part.clone(),
        limits,
        memory_used_mib: Some(sum.own_mib).filter(|_| listed.is_some() && sum.own_known),
        over_limit,
        pids: sum.own_pids.into_iter().collect(),
        shared_with: sum.shared_with.into_iter().collect(),
        shared_pids: sum.shared_pids.into_iter().collect(),
        shared_memory_mib: sum.shared_mib,
    }
}

/// Processes of one allocation on one part, with their memory.
struct UsageSum {
    own_mib: u64,
    own_known: bool,
    own_pids: BTreeSet<u32>,
    shared_mib: u64,
    shared_known: bool,
    shared_pids: BTreeSet<u32>,
    shared_with: BTreeSet<AllocationId>,
}

impl Default for UsageSum {
    fn default() -> Self {
        Self {
            own_mib: 0,
            own_known: true,
            own_pids: BTreeSet::new(),
            shared_mib: 0,
            shared_known: true,
            shared_pids: BTreeSet::new(),
            shared_with: BTreeSet::new(),
        }
    }
}

impl UsageSum {
    fn add_own(&mut self, pid: u32, memory_mib: Option<u64>) {
        self.own_pids.insert(pid);
        self.own_known &= memory_mib.is_some();
        self.own_mib = self.own_mib.saturating_add(memory_mib.unwrap_or(0));
    }

    fn add_shared(&mut self, pid: u32, memory_mib: Option<u64>, others: &[AllocationId]) {
        self.shared_pids.insert(pid);
        self.shared_known &= memory_mib.is_some();
        self.shared_mib = self.shared_mib.saturating_add(memory_mib.unwrap_or(0));
        self.shared_with.extend(others);
    }

    /// `Some(true)` if the memory of its own processes exceeds the limit; `Some(false)` if all memory is
    /// known and even with the shared processes' it does not.
    fn exceeds(&self, limit_mib: u64) -> Option<bool> {
        if self.own_mib > limit_mib {
            return Some(true);
        }
        let all_known = self.own_known && self.shared_known;
        (all_known && self.own_mib.saturating_add(self.shared_mib) <= limit_mib).then_some(false)
    }
}

#[cfg(test)]
mod tests;
