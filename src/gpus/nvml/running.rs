//! The processes on a GPU or on one of its MIG instances, as NVML lists them.

use super::facts::{Failed, ask_if_known};
use super::fence::Steps;
use super::map;
use super::raw::{self, ProcessList};
use berth_kernel::gpu::Part;
use berth_kernel::names::PartId;
use berth_kernel::process::{Process, Uses, Who};
use nvml_wrapper::Device;
use nvml_wrapper::enums::device::UsedGpuMemory;
use nvml_wrapper::struct_wrappers::device::ProcessInfo;
use std::collections::BTreeMap;

/// GPU instance and compute instance.
type Instance = (u32, u32);

/// One process on one device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Running {
    pid: u32,
    uses: Uses,
    memory_mib: Option<u64>,
    /// The MIG instance, where NVML names one.
    instance: Option<Instance>,
}

/// The processes of one device, each once, in the order of their ids; `None` where NVML does not list
/// those that compute. A model or a driver that does not know MPS or graphics has none of them.
pub(super) fn on(device: &Device, steps: &Steps) -> Result<Option<Vec<Running>>, Failed> {
    let list = |call, list| ask_if_known(steps, call, || raw::processes(device, list));
    let Some(compute) = list("nvmlDeviceGetComputeRunningProcesses_v3", ProcessList::Compute)? else {
        return Ok(None);
    };
    let mps = list("nvmlDeviceGetMPSComputeRunningProcesses_v3", ProcessList::Mps)?;
    let graphics = list("nvmlDeviceGetGraphicsRunningProcesses_v3", ProcessList::Graphics)?;
    let told =
        |list: Vec<ProcessInfo>, uses: Uses| list.into_iter().map(move |info| Running::of(&info, uses));
    let compute = told(compute, Uses { compute: true, ..Uses::default() });
    let mps = told(mps.unwrap_or_default(), Uses { mps: true, ..Uses::default() });
    let graphics = told(graphics.unwrap_or_default(), Uses { graphics: true, ..Uses::default() });
    Ok(Some(once(compute.chain(mps).chain(graphics))))
}

/// How many processes compute. Those that only draw are left out: a display server would look like a
/// job.
pub(super) fn computing(running: &[Running]) -> u32 {
    let computing = running.iter().filter(|one| one.uses.compute || one.uses.mps);
    let pids: std::collections::BTreeSet<u32> = computing.map(|one| one.pid).collect();
    u32::try_from(pids.len()).unwrap_or(u32::MAX)
}

/// A GPU's processes with those of its instances. Asked as a whole, a GPU in MIG mode tells of all of
/// them with rights alone (`nvml.h` on `nvmlDeviceGetComputeRunningProcesses_v3`), and not every driver
/// names the instance. `None` where neither the GPU nor all of its instances tell.
pub(super) fn merged(
    whole: Option<Vec<Running>>,
    inside: Vec<(Instance, Option<Vec<Running>>)>,
) -> Option<Vec<Running>> {
    if whole.is_none() && (inside.is_empty() || inside.iter().any(|(_, running)| running.is_none())) {
        return None;
    }
    let mut all: Vec<Running> = Vec::new();
    for (instance, running) in inside {
        all.extend(running.into_iter().flatten().map(|one| Running { instance: Some(instance), ..one }));
    }
    let placed: Vec<u32> = all.iter().map(|one| one.pid).collect();
    let whole = whole.into_iter().flatten();
    all.extend(whole.filter(|one| one.instance.is_some() || !placed.contains(&one.pid)));
    Some(once(all.into_iter()))
}

/// Entries of one process on one instance as one. Each list says all the memory that the process has
/// there, so the largest figure stands.
fn once(entries: impl Iterator<Item = Running>) -> Vec<Running> {
    let mut all: BTreeMap<(Option<Instance>, u32), Running> = BTreeMap::new();
    for one in entries {
        all.entry((one.instance, one.pid))
            .and_modify(|known| {
                known.uses = known.uses.and(one.uses);
                known.memory_mib = known.memory_mib.max(one.memory_mib);
            })
            .or_insert(one);
    }
    all.into_values().collect()
}

impl Running {
    fn of(info: &ProcessInfo, uses: Uses) -> Self {
        Self {
            pid: info.pid,
            uses,
            memory_mib: match info.used_gpu_memory {
                UsedGpuMemory::Used(bytes) => Some(map::mib(bytes)),
                UsedGpuMemory::Unavailable => None,
            },
            instance: info.gpu_instance_id.zip(info.compute_instance_id),
        }
    }

    /// As the kernel knows it. An instance that is not among the GPU's (any more) is the GPU.
    pub(super) fn process(&self, gpu: &PartId, instances: &[Part]) -> Process {
        let named = |part: &&Part| {
            part.mig.as_ref().map(|mig| (mig.gpu_instance, mig.compute_instance)) == self.instance
        };
        let instance = self.instance.and_then(|_| instances.iter().find(named));
        Process {
            pid: self.pid,
            part: instance.map_or(gpu, |part| &part.id).clone(),
            uses: self.uses,
            memory_mib: self.memory_mib,
            who: Who::default(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one(pid: u32, memory_mib: impl Into<Option<u64>>, instance: Option<Instance>) -> Running {
        let uses = Uses { compute: true, ..Uses::default() };
        Running { pid, uses, memory_mib: memory_mib.into(), instance }
    }

    #[test]
    fn a_process_in_several_lists_is_one_process() {
        let draws = Running { uses: Uses { graphics: true, ..Uses::default() }, ..one(7, 30, None) };
        let unknown = Running { memory_mib: None, ..draws };
        let all = once([one(7, 20, None), draws, one(8, None, None), unknown].into_iter());
        assert_eq!(all.len(), 2);
        assert_eq!(all[0].memory_mib, Some(30));
        assert!(all[0].uses.compute && all[0].uses.graphics);
        assert_eq!(all[1].memory_mib, None);
        assert_eq!(computing(&all), 2);
    }

    #[test]
    fn who_only_draws_does_not_compute() {
        let draws = Running { uses: Uses { graphics: true, ..Uses::default() }, ..one(7, 30, None) };
        assert_eq!(computing(&[draws]), 0);
    }

    #[test]
    fn the_gpu_and_its_instances_tell_of_each_process_once() {
        let (a, b) = ((1, 0), (2, 0));
        let inside = |b_tells: bool| vec![(a, Some(vec![one(7, 10, None)])), (b, b_tells.then(Vec::new))];
        // The GPU names no instance; the instance's own list does.
        let merged_all = merged(Some(vec![one(7, 10, None), one(9, 5, None)]), inside(true)).unwrap();
        assert_eq!(merged_all, [one(9, 5, None), one(7, 10, Some(a))]);
        // The GPU names it.
        let named = merged(Some(vec![one(7, 10, Some(a)), one(7, 3, Some(b))]), inside(true)).unwrap();
        assert_eq!(named, [one(7, 10, Some(a)), one(7, 3, Some(b))]);
        // The GPU may not tell: its instances do, if all of them do.
        assert_eq!(merged(None, inside(true)).unwrap(), [one(7, 10, Some(a))]);
        assert_eq!(merged(None, inside(false)), None);
        assert_eq!(merged(None, Vec::new()), None);
        assert_eq!(merged(Some(Vec::new()), Vec::new()), Some(Vec::new()));
    }
}
