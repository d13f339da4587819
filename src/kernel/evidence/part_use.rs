//! An allocation's limits on each part, how they are enforced, and what its processes use.

use crate::evidence::attribution::{Attribution, Attributions};
use crate::grants::allocation::{Allocation, Limits};
use crate::hardware::gpu::Part;
use crate::hardware::process::{Process, ProcessVisibility};
use crate::ids::names::{AllocationId, DeviceId, PartId};
use crate::node::ledger::Ledger;
use crate::sharing::part_state::Taken;
use std::collections::BTreeSet;

/// The mechanism that enforces a container's limits, weakest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum EnforcedBy {
    /// None: the limits are only stated to the container.
    None,
    /// MPS: every process of the container is its client.
    Mps,
    /// The driver: memory limits of its cgroup, as they were read back. They limit memory only.
    MemoryLimits,
    /// The hardware: the part is a MIG instance.
    Mig,
}

/// What enforces the limits of a container that was granted `device` on `part`, by the way in which the container was
/// set up. `has_mps`: whether
/// containers of its resource are set up for MPS. MIG limits a container to an instance, but not the
/// containers that share an instance to their shares.
#[must_use]
pub fn enforced_by(device: &DeviceId, part: &Part, has_mps: bool) -> EnforcedBy {
    match (&part.mig, device.share) {
        (Some(_), None) => EnforcedBy::Mig,
        _ if has_mps => EnforcedBy::Mps,
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
    allocation.parts().into_iter().map(|part| part_use(owners, allocation, part)).collect()
}

/// An allocation's strictest limits over all of its parts, and the weakest enforcement. `None` where it
/// may use all of every part.
#[must_use]
pub fn limits(ledger: &Ledger, allocation: &Allocation, has_mps: bool) -> Option<(Limits, EnforcedBy)> {
    // The container of an adopted allocation was set up by another plugin or an earlier store, in an unknown way.
    let has_mps = has_mps && !allocation.decision.is_adoption();
    let limits = allocation.parts().into_iter().map(|part| limits_of(ledger, allocation, part));
    let strictest = limits.reduce(Limits::min).unwrap_or_default();
    let enforcers = allocation.devices.iter().map(|device| {
        let Some(state) = ledger.part(&device.part) else { return EnforcedBy::None };
        let by_setup = enforced_by(device, &state.part, has_mps);
        let has_limit = limits_of(ledger, allocation, &device.part).memory_mib.is_some();
        match has_limit && ledger.is_memory_limited(allocation, &device.part) {
            true => by_setup.max(EnforcedBy::MemoryLimits),
            false => by_setup,
        }
    });
    let weakest = enforcers.min().unwrap_or(EnforcedBy::None);
    (strictest != Limits::default()).then_some((strictest, weakest))
}

/// The limits of the decision, which hold on each part, combined with what the devices take of this part.
pub(crate) fn limits_of(ledger: &Ledger, allocation: &Allocation, part: &PartId) -> Limits {
    let decided = allocation.decision.limits;
    let Some(state) = ledger.part(part).filter(|_| allocation.ended.is_none()) else {
        return decided;
    };
    let consumed = |id: &DeviceId| state.device(&allocation.resource, id.share).map(|d| d.consumes);
    let mut on_part = allocation.devices.iter().filter(|id| id.part == *part);
    let Some(taken) = on_part.try_fold(Taken::default(), |sum, id| Some(sum.plus(consumed(id)?))) else {
        return decided;
    };
    match (taken.wholes, &state.part.mig) {
        // A slice of 0 reserves nothing and sets no limit.
        (0, _) => decided.min(Limits {
            memory_mib: Some(taken.memory_mib).filter(|m| *m > 0),
            compute_percent: Some(taken.compute_percent).filter(|c| *c > 0),
        }),
        // A whole instance is a limit that the hardware enforces; a whole GPU is not a limit.
        (_, Some(_)) => {
            decided.min(Limits { memory_mib: Some(state.part.memory_mib), compute_percent: None })
        }
        (_, None) => decided,
    }
}

fn part_use(owners: &Attributions<'_>, allocation: &Allocation, part: &PartId) -> PartUse {
    let ledger = owners.ledger;
    let limits = limits_of(ledger, allocation, part);
    let (mut own, mut shared, mut shared_with) = (UsageSum::default(), UsageSum::default(), BTreeSet::new());
    let gpu = ledger.gpu_id_of(part);
    let visible =
        ledger.processes.process_visibility == ProcessVisibility::Visible && allocation.ended.is_none();
    let listed = owners.on(&gpu).filter(|_| visible);
    for (seen, attribution) in listed.into_iter().flatten() {
        let process = &seen.process;
        let is_on_part = process.part == *part || part == gpu.as_part();
        if !is_on_part && process.part != *gpu.as_part() {
            continue;
        }
        match attribution {
            Attribution::To(id) if *id == allocation.id && is_on_part => own.add(process),
            // NVML reports the GPU of the process but not its instance.
            Attribution::To(id) if *id == allocation.id => shared.add(process),
            Attribution::OneOf(ids) | Attribution::Possibly(ids) if ids.contains(&allocation.id) => {
                shared.add(process);
                shared_with.extend(ids.iter().copied().filter(|id| *id != allocation.id));
            }
            Attribution::To(_)
            | Attribution::OneOf(_)
            | Attribution::Possibly(_)
            | Attribution::Ignored
            | Attribution::Unexplained(_) => {}
        }
    }
    let limit_mib = limits.memory_mib.filter(|_| listed.is_some());
    PartUse {
        part: part.clone(),
        limits,
        memory_used_mib: Some(own.memory_mib).filter(|_| listed.is_some() && !own.has_unknown),
        over_limit: limit_mib.and_then(|limit_mib| exceeds(&own, &shared, limit_mib)),
        pids: own.pids.into_iter().collect(),
        shared_with: shared_with.into_iter().collect(),
        shared_pids: shared.pids.into_iter().collect(),
        shared_memory_mib: shared.memory_mib,
    }
}

/// Processes on one part, with their memory.
#[derive(Default)]
struct UsageSum {
    pids: BTreeSet<u32>,
    memory_mib: u64,
    has_unknown: bool,
}

impl UsageSum {
    fn add(&mut self, process: &Process) {
        self.pids.insert(process.pid);
        self.memory_mib = self.memory_mib.saturating_add(process.memory_mib.unwrap_or(0));
        self.has_unknown |= process.memory_mib.is_none();
    }
}

/// `Some(true)` if the memory of an allocation's own processes exceeds the limit; `Some(false)` if all memory is
/// known and even with the shared processes' it does not.
fn exceeds(own: &UsageSum, shared: &UsageSum, limit_mib: u64) -> Option<bool> {
    if own.memory_mib > limit_mib {
        return Some(true);
    }
    let all_known = !own.has_unknown && !shared.has_unknown;
    (all_known && own.memory_mib.saturating_add(shared.memory_mib) <= limit_mib).then_some(false)
}

#[cfg(test)]
mod tests;
