//! The processes on a GPU or on one of its MIG instances, as NVML lists them.

use super::fence::Steps;
use super::invoke::{ReadError, invoke_optional};
use super::map;
use super::raw::{self, ProcessList};
use berth_kernel::hardware::gpu::Part;
use berth_kernel::hardware::process::{Process, ProcessIdentity, Uses};
use berth_kernel::ids::names::GpuId;
use nvml_wrapper::Device;
use nvml_wrapper::enums::device::UsedGpuMemory;
use nvml_wrapper::struct_wrappers::device::ProcessInfo;
use std::collections::BTreeMap;

/// GPU instance and compute instance.
type Instance = (u32, u32);

/// One process on a GPU or on one of its instances.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct GpuProcess {
    pid: u32,
    uses: Uses,
    memory_mib: Option<u64>,
    /// The MIG instance, if NVML names one.
    instance: Option<Instance>,
}

/// The processes of one device, each once, in the order of their ids; `None` if NVML does not list compute processes. A
/// model or driver that does not support the lists of MPS or graphics counts as having no such processes.
pub(super) fn list(device: &Device, steps: &Steps) -> Result<Option<Vec<GpuProcess>>, ReadError> {
    let read = |call, list| invoke_optional(steps, call, || raw::processes(device, list));
    let Some(compute) = read("nvmlDeviceGetComputeRunningProcesses_v3", ProcessList::Compute)? else {
        return Ok(None);
    };
    let mps = read("nvmlDeviceGetMPSComputeRunningProcesses_v3", ProcessList::Mps)?;
    let graphics = read("nvmlDeviceGetGraphicsRunningProcesses_v3", ProcessList::Graphics)?;
    let with_uses =
        |list: Vec<ProcessInfo>, uses: Uses| list.into_iter().map(move |info| GpuProcess::new(&info, uses));
    let compute = with_uses(compute, Uses { compute: true, ..Uses::default() });
    let mps = with_uses(mps.unwrap_or_default(), Uses { mps: true, ..Uses::default() });
    let graphics = with_uses(graphics.unwrap_or_default(), Uses { graphics: true, ..Uses::default() });
    Ok(Some(merge_duplicates(compute.chain(mps).chain(graphics))))
}

/// The number of processes that compute. Those with graphics only are left out, since a display server is not a job.
pub(super) fn count_computing(processes: &[GpuProcess]) -> u32 {
    let computing = processes.iter().filter(|one| one.uses.compute || one.uses.mps);
    let pids: std::collections::BTreeSet<u32> = computing.map(|one| one.pid).collect();
    u32::try_from(pids.len()).unwrap_or(u32::MAX)
}

/// Merges the processes of a GPU with those of its instances. For a GPU in MIG mode, NVML lists the processes of all
/// instances only to privileged users (`nvml.h` on `nvmlDeviceGetComputeRunningProcesses_v3`), and not every driver
/// names the instance. `None` if neither the list of the GPU nor those of all its instances are available.
pub(super) fn merge_instances(
    of_gpu: Option<Vec<GpuProcess>>,
    of_instances: Vec<(Instance, Option<Vec<GpuProcess>>)>,
) -> Option<Vec<GpuProcess>> {
    if of_gpu.is_none()
        && (of_instances.is_empty() || of_instances.iter().any(|(_, processes)| processes.is_none()))
    {
        return None;
    }
    let mut all: Vec<GpuProcess> = Vec::new();
    for (instance, processes) in of_instances {
        all.extend(processes.into_iter().flatten().map(|one| GpuProcess { instance: Some(instance), ..one }));
    }
    let placed: Vec<u32> = all.iter().map(|one| one.pid).collect();
    let of_gpu = of_gpu.into_iter().flatten();
    all.extend(of_gpu.filter(|one| one.instance.is_some() || !placed.contains(&one.pid)));
    Some(merge_duplicates(all.into_iter()))
}

/// Merges the entries of one process on one instance. Each list has all the memory that the process uses there, so the
/// largest value counts.
fn merge_duplicates(entries: impl Iterator<Item = GpuProcess>) -> Vec<GpuProcess> {
    let mut all: BTreeMap<(Option<Instance>, u32), GpuProcess> = BTreeMap::new();
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

impl GpuProcess {
    fn new(info: &ProcessInfo, uses: Uses) -> Self {
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

    /// Converts to the kernel's type. A process on an instance that the GPU no longer has is on the GPU.
    pub(super) fn to_process(&self, gpu: &GpuId, instances: &[Part]) -> Process {
        let instance =
            self.instance.and_then(|ids| instances.iter().find(|part| map::mig_ids(part) == Some(ids)));
        Process {
            pid: self.pid,
            part: instance.map_or(gpu.as_part(), |part| &part.id).clone(),
            uses: self.uses,
            memory_mib: self.memory_mib,
            identity: ProcessIdentity::default(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one(pid: u32, memory_mib: impl Into<Option<u64>>, instance: Option<Instance>) -> GpuProcess {
        let uses = Uses { compute: true, ..Uses::default() };
        GpuProcess { pid, uses, memory_mib: memory_mib.into(), instance }
    }

    #[test]
    fn a_process_in_several_lists_is_one_process() {
        let draws = GpuProcess { uses: Uses { graphics: true, ..Uses::default() }, ..one(7, 30, None) };
        let unknown = GpuProcess { memory_mib: None, ..draws };
        let all = merge_duplicates([one(7, 20, None), draws, one(8, None, None), unknown].into_iter());
        assert_eq!(all.len(), 2);
        assert_eq!(all[0].memory_mib, Some(30));
        assert!(all[0].uses.compute && all[0].uses.graphics);
        assert_eq!(all[1].memory_mib, None);
        assert_eq!(count_computing(&all), 2);
    }

    #[test]
    fn a_process_with_graphics_only_does_not_compute() {
        let draws = GpuProcess { uses: Uses { graphics: true, ..Uses::default() }, ..one(7, 30, None) };
        assert_eq!(count_computing(&[draws]), 0);
    }

    #[test]
    fn the_lists_of_a_gpu_and_its_instances_are_merged_without_duplicates() {
        let (a, b) = ((1, 0), (2, 0));
        let of_instances =
            |b_lists: bool| vec![(a, Some(vec![one(7, 10, None)])), (b, b_lists.then(Vec::new))];
        // The list of the GPU names no instance.
        let merged =
            merge_instances(Some(vec![one(7, 10, None), one(9, 5, None)]), of_instances(true)).unwrap();
        assert_eq!(merged, [one(9, 5, None), one(7, 10, Some(a))]);
        // The list of the GPU names the instances.
        let named =
            merge_instances(Some(vec![one(7, 10, Some(a)), one(7, 3, Some(b))]), of_instances(true)).unwrap();
        assert_eq!(named, [one(7, 10, Some(a)), one(7, 3, Some(b))]);
        // Without a list of the GPU, those of its instances suffice if all are available.
        assert_eq!(merge_instances(None, of_instances(true)).unwrap(), [one(7, 10, Some(a))]);
        assert_eq!(merge_instances(None, of_instances(false)), None);
        assert_eq!(merge_instances(None, Vec::new()), None);
        assert_eq!(merge_instances(Some(Vec::new()), Vec::new()), Some(Vec::new()));
    }
}
