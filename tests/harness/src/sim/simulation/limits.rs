//! Memory limits of containers: what the driver holds them to, and what the ledger may say of that (I12).

use super::violation::Violation;
use berth_kernel::evidence::limits::{
    LimitReading, LimitState, MemoryLimit, READING_AGE_MAX_MS, matches_granted,
};
use berth_kernel::evidence::part_use::{self, EnforcedBy};
use berth_kernel::evidence::runtime::RuntimeView;
use berth_kernel::grants::annotation::GrantAnnotation;
use berth_kernel::ids::names::{AllocationId, GpuId};
use berth_kernel::ids::time::Now;
use berth_kernel::node::command::Command;
use berth_kernel::node::ledger::Ledger;
use std::collections::BTreeMap;

/// The limit that the driver holds of one container on one GPU.
#[derive(Clone, Debug)]
struct Held {
    gpu: GpuId,
    granted_mib: u64,
    limit_mib: Option<u64>,
    /// What the guard read last.
    read_mib: Option<u64>,
    /// When, milliseconds since 1970.
    read_wall_ms: u64,
}

/// What the driver holds, by allocation: each has one container.
#[derive(Debug, Default)]
pub(crate) struct Driver {
    held: BTreeMap<AllocationId, Vec<Held>>,
}

impl Driver {
    /// The guard sets the limits of the annotation that a container was created with.
    pub(crate) fn start(&mut self, ledger: &Ledger, id: AllocationId, now: Now) {
        let Some(allocation) = ledger.live.get(&id).filter(|_| !self.held.contains_key(&id)) else { return };
        let parts = GrantAnnotation::of(ledger, allocation).parts.into_iter();
        let limited = parts.filter_map(|(part, limit)| {
            let granted_mib = limit.filter(|_| ledger.part(&part).is_some_and(|p| p.part.is_whole_gpu()))?;
            Some(Held {
                gpu: GpuId::of_whole(&part),
                granted_mib,
                limit_mib: Some(granted_mib),
                read_mib: Some(granted_mib),
                read_wall_ms: now.wall_ms,
            })
        });
        self.held.insert(id, limited.collect());
    }

    /// Another program changes one of the limits, or removes it.
    pub(crate) fn drift(&mut self, which: u32, to_mib: Option<u64>) {
        let count = self.held.values().flatten().count().max(1);
        let at = usize::try_from(which).unwrap_or_default() % count;
        if let Some(held) = self.held.values_mut().flatten().nth(at) {
            held.limit_mib = to_mib;
        }
    }

    /// All limits are read once more.
    pub(crate) fn read_all(&mut self, now: Now) {
        for held in self.held.values_mut().flatten() {
            (held.read_mib, held.read_wall_ms) = (held.limit_mib, now.wall_ms);
        }
    }

    /// What the guard shows of a container's limits. It does not know a change before it has read it, and shows with it that
    /// it will set the limit again.
    pub(crate) fn shown(&self, id: AllocationId) -> Vec<MemoryLimit> {
        let shown = |held: &Held| MemoryLimit {
            gpu: held.gpu.clone(),
            granted_mib: held.granted_mib,
            state: LimitState::Set,
            times_changed: 0,
            why: None,
            reading: held.read_mib.map(|limit_mib| LimitReading {
                limit_mib,
                used_mib: 0,
                wall_ms: held.read_wall_ms,
                expires_mono_ms: 0,
                is_stale: false,
            }),
        };
        self.held.get(&id).into_iter().flatten().map(shown).collect()
    }
}

/// What was reported of limits to the daemon.
#[derive(Debug, Default)]
pub(crate) struct ReportedLimits {
    /// By allocation and GPU: when it was read, when that is a minute ago, and whether it was of the granted limit.
    reported: BTreeMap<(AllocationId, GpuId), (u64, u64, bool)>,
}

impl ReportedLimits {
    /// Nothing was reported to a daemon that has just started.
    pub(crate) fn restarted(&mut self) {
        self.reported.clear();
    }

    /// After a turn: what the ledger says is enforced was read back (I12).
    pub(crate) fn turn(
        &mut self,
        after: &Ledger,
        command: &Command,
        taken_in: bool,
        now: Now,
    ) -> Result<(), Violation> {
        if let (Command::SeeContainers(view), true) = (command, taken_in) {
            self.see(view, now);
        }
        // A reading expires with a tick.
        let is_tick = taken_in && *command == Command::Tick;
        for allocation in after.live.values() {
            if part_use::limits(after, allocation, false).map(|(_, by)| by) != Some(EnforcedBy::MemoryLimits)
            {
                continue;
            }
            for (part, limit) in GrantAnnotation::of(after, allocation).parts {
                let reported = self.reported.get(&(allocation.id, GpuId::of_whole(&part)));
                let is_reported = reported.is_some_and(|(_, expires_ms, is_held)| {
                    *is_held && (!is_tick || now.mono_ms < *expires_ms)
                });
                if limit.is_some() && !is_reported {
                    let what =
                        format!("{} is said to be limited on {part}: {reported:?} was read", allocation.id);
                    return Err(Violation::new("I12", what));
                }
            }
        }
        Ok(())
    }

    fn see(&mut self, view: &RuntimeView, now: Now) {
        let before = std::mem::take(&mut self.reported);
        for (id, containers) in &view.containers {
            for limit in containers.iter().flat_map(|container| &container.limits) {
                let Some(reading) = limit.reading else { continue };
                let key = (*id, limit.gpu.clone());
                let known = before.get(&key).filter(|(read_ms, ..)| *read_ms == reading.wall_ms);
                // The wall clock jumps, so a reading can seem to be of the future.
                let age_ms = now.wall_ms.saturating_sub(reading.wall_ms).min(READING_AGE_MAX_MS);
                let arrived = now.mono_ms + READING_AGE_MAX_MS - age_ms;
                let expires_ms = known.map_or(arrived, |(_, expires_ms, _)| *expires_ms);
                let is_held = matches_granted(reading.limit_mib, limit.granted_mib);
                self.reported.insert(key, (reading.wall_ms, expires_ms, is_held));
            }
        }
    }
}
