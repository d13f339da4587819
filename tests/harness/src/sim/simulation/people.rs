//! The processes on the GPUs, as looks show them: of pods that hold something, left behind by pods
//! that ended, and of the host.

use super::kubelet::{Hold, uid};
use super::violation::Violation;
use super::world::World;
use berth_kernel::drain::marks::Drain;
use berth_kernel::hardware::gpu::Inventory;
use berth_kernel::hardware::process::{Owner, PodProcess, Process, ProcessIdentity, ProcessVisibility, Uses};
use berth_kernel::ids::names::{GpuId, PartId};
use berth_kernel::ids::time::Timing;
use berth_kernel::node::ledger::Ledger;
use std::collections::{BTreeMap, BTreeSet};

/// Who is on the GPUs beside the pods that hold them.
#[derive(Debug, Default)]
pub(crate) struct People {
    /// GPUs on which a process of the host runs.
    hosts: BTreeSet<GpuId>,
    /// What pods that ended have left behind.
    leftovers: Vec<Hold>,
    /// GPUs that do not list their processes.
    silent: BTreeSet<GpuId>,
    /// When a scan last found a process on a GPU (true time).
    busy_ms: BTreeMap<PartId, u64>,
}

impl World {
    /// What a scan shows of the hardware and of the processes.
    pub(crate) fn inventory(&self) -> Inventory {
        let mut inventory = self.machine.inventory();
        if !self.sources {
            return inventory;
        }
        inventory.process_visibility = ProcessVisibility::Visible;
        let gpu_of: BTreeMap<&PartId, &GpuId> =
            self.machine.parts().iter().map(|p| (&p.id, &p.gpu)).collect();
        let there: BTreeSet<GpuId> = inventory.parts.iter().map(|p| p.gpu.clone()).collect();
        let tells =
            |gpu: &&GpuId| !self.people.silent.contains(*gpu) && !inventory.scan_errors.contains_key(*gpu);
        for gpu in there.iter().filter(tells) {
            let mut all = Vec::new();
            for hold in self.kubelet.held().chain(&self.people.leftovers) {
                let parts: BTreeSet<&PartId> = hold.devices.iter().map(|d| &d.part).collect();
                for part in parts.into_iter().filter(|part| gpu_of.get(part) == Some(&gpu)) {
                    let pod = PodProcess {
                        uid: uid(hold.pod),
                        container_id: None,
                        container: Some(hold.container.into()),
                    };
                    let pid = 1000 + hold.pod * 2 + u32::from(hold.container == "init");
                    all.push(process(pid, part, Owner::Pod(pod)));
                }
            }
            if self.people.hosts.contains(gpu) {
                all.push(process(1, gpu.as_part(), Owner::NoPod { container_id: None }));
            }
            inventory.processes.insert(gpu.clone(), all);
        }
        inventory
    }

    pub(crate) fn host_process(&mut self, part: u32, on: bool) {
        let gpu = self.machine.part(part).gpu.clone();
        if on {
            self.people.hosts.insert(gpu.clone())
        } else {
            self.people.hosts.remove(&gpu)
        };
    }

    pub(crate) fn tells(&mut self, part: u32, on: bool) {
        let gpu = self.machine.part(part).gpu.clone();
        if on {
            self.people.silent.remove(&gpu)
        } else {
            self.people.silent.insert(gpu.clone())
        };
    }

    /// A pod ends and its processes do not, or what was left behind goes at last.
    pub(crate) fn leave_behind(&mut self, which: u32) {
        match self.kubelet.some_hold(which, None).cloned() {
            Some(hold) if self.people.leftovers.is_empty() => {
                self.kubelet.end_pod(hold.pod);
                self.people.leftovers.push(hold);
            }
            _ => self.people.leftovers.clear(),
        }
    }

    /// All processes have ended.
    pub(crate) fn all_leave(&mut self) {
        self.people.hosts.clear();
        self.people.leftovers.clear();
        self.people.silent.clear();
    }
}

impl People {
    /// After a scan was recorded: no GPU with a process is drained, and no holder is reported as a
    /// stranger on what its pod holds.
    pub(crate) fn looked(
        &mut self,
        before: &Ledger,
        after: &Ledger,
        look: &Inventory,
        timing: &Timing,
        true_ms: u64,
    ) -> Result<(), Violation> {
        for gpu in look.processes.iter().filter(|(_, all)| !all.is_empty()).map(|(gpu, _)| gpu) {
            self.busy_ms.insert(gpu.as_part().clone(), true_ms);
        }
        for (gpu, state) in &after.gpus {
            let drained = |ledger: &Ledger| {
                ledger.gpus.get(gpu).is_some_and(|gpu| matches!(gpu.drain(), Drain::Drained(_)))
            };
            let lately = self.busy_ms.get(gpu.as_part()).is_some_and(|at| true_ms < at + timing.drained_ms);
            if lately && drained(after) && !drained(before) {
                let what = format!("{gpu} is {:?}, and a scan found a process on it just now", state.drain());
                return Err(Violation::new("drain", what));
            }
        }
        for (gpu, all) in &after.processes.by_gpu {
            for seen in all.iter().filter(|seen| seen.is_reported) {
                let Some(pod) = seen.process.identity.owner.pod() else { continue };
                let holds = after.live.values().any(|a| {
                    a.holder.pod_uid.as_ref() == Some(&pod.uid)
                        && a.holder.container == pod.container
                        && a.devices.iter().any(|d| d.part == seen.process.part)
                });
                if holds {
                    let what =
                        format!("pod {} holds what it uses of {gpu}, and is reported as a bypass", pod.uid);
                    return Err(Violation::new("bypass", what));
                }
            }
        }
        Ok(())
    }
}

fn process(pid: u32, part: &PartId, owner: Owner) -> Process {
    Process {
        pid,
        part: part.clone(),
        uses: Uses { compute: true, ..Uses::default() },
        memory_mib: Some(1),
        identity: ProcessIdentity { name: Some("job".into()), started_ticks: Some(1), owner, ignored: false },
    }
}
