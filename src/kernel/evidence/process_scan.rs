//! Updates the table of processes after a scan, and counts them.

use crate::evidence::attribution::{Attribution, find_attribution};
use crate::hardware::gpu::Inventory;
use crate::hardware::process::{
    PROCESSES_PER_GPU_MAX, Process, ProcessTable, ProcessVisibility, TrackedProcess,
};
use crate::ids::names::{GpuId, PartId};
use crate::ids::time::Now;
use crate::node::ledger::Ledger;
use std::collections::{BTreeMap, BTreeSet};

impl ProcessTable {
    /// The table after a scan. Known processes keep their times. A process that no allocation explains for
    /// `grace_ms` is reported as a bypass.
    #[must_use]
    pub fn after_scan(ledger: &Ledger, inventory: &Inventory, grace_ms: u64, now: Now) -> Self {
        let on = inventory.processes.iter().map(|(gpu, processes)| {
            let known = ledger.processes.by_gpu.get(gpu).map_or(&[][..], Vec::as_slice);
            let known: BTreeMap<_, _> = known.iter().map(|seen| (key(&seen.process), seen)).collect();
            let seen = processes.iter().take(PROCESSES_PER_GPU_MAX).map(|process| {
                let before = known.get(&key(process));
                let unexplained = find_attribution(ledger, gpu, process).is_none();
                let alone_since =
                    unexplained.then(|| before.and_then(|b| b.unexplained_since).unwrap_or(now));
                TrackedProcess {
                    process: process.clone(),
                    first: before.map_or(now, |b| b.first),
                    unexplained_since: alone_since,
                    is_reported: alone_since.is_some_and(|since| now.passed(since.mono_ms, grace_ms)),
                }
            });
            (gpu.clone(), seen.collect())
        });
        Self {
            process_visibility: inventory.process_visibility.clone(),
            complete: inventory.processes_complete,
            by_gpu: on.collect(),
        }
    }

    /// The number of processes that keep a part busy; `None` where they are not visible. A GPU's count
    /// includes all of its instances.
    #[must_use]
    pub fn count(&self, ledger: &Ledger, part: &PartId) -> Option<u32> {
        let gpu = ledger.gpu_id_of(part);
        let seen = self.by_gpu.get(&gpu)?;
        let is_on_part = |seen: &&TrackedProcess| part == gpu.as_part() || seen.process.part == *part;
        let busy = seen.iter().filter(is_on_part).filter(|s| keeps_busy(ledger, &gpu, &s.process));
        let pids: BTreeSet<u32> = busy.map(|s| s.process.pid).collect();
        // Unless the PID namespace is known to be the host's, NVML may omit processes.
        let may_be_hidden =
            pids.is_empty() && !self.complete && self.process_visibility != ProcessVisibility::Visible;
        (!may_be_hidden).then(|| u32::try_from(pids.len()).unwrap_or(u32::MAX))
    }
}

/// The identity of a process on a part across scans.
fn key(process: &Process) -> (u32, &PartId, Option<u64>) {
    (process.pid, &process.part, process.identity.started_ticks)
}

/// Whether a process keeps its GPU from being drained. Ignored processes do not, nor does a display
/// server of the host, which never exits. A process that an allocation explains always does, whatever
/// its name.
fn keeps_busy(ledger: &Ledger, gpu: &GpuId, process: &Process) -> bool {
    match find_attribution(ledger, gpu, process) {
        Some(Attribution::To(_) | Attribution::OneOf(_)) => true,
        Some(Attribution::Ignored) => false,
        Some(Attribution::Possibly(_) | Attribution::Unexplained(_)) | None => {
            !process.uses.is_graphics_only() || process.identity.owner.pod().is_some()
        }
    }
}

impl Ledger {
    /// Number of processes that use a part, by the newest scan; `None` where they are not visible. If the
    /// backend only counts processes, its count.
    #[must_use]
    pub fn processes_on(&self, part: &PartId) -> Option<u32> {
        if self.processes.by_gpu.contains_key(&self.gpu_id_of(part)) {
            return self.processes.count(self, part);
        }
        self.usage.get(part).map(|u| u.processes)
    }

    /// Whether the owners of processes on this node's GPUs are visible.
    #[must_use]
    pub fn process_visibility(&self) -> ProcessVisibility {
        let unlisted = self.processes.by_gpu.is_empty() && self.parts.values().any(|p| p.present);
        if unlisted && self.processes.process_visibility == ProcessVisibility::Visible {
            return ProcessVisibility::Unsupported { why: "no GPU of this node lists its processes".into() };
        }
        self.processes.process_visibility.clone()
    }
}

#[cfg(test)]
mod tests;
