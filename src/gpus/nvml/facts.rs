//! Reads one GPU: the calls of one scan, which run behind the fence as one job.

use super::fence::Steps;
use super::invoke::{ReadError, invoke, invoke_optional};
use super::map;
use super::processes::{self, GpuProcess};
use super::raw::{self, RemappedRows};
use berth_kernel::hardware::gpu::{
    Load, MIG_INDEX, Mig, NVIDIA, PAGES, PAGES_PENDING, Part, RECOVERED, RECOVERY, ROWS, ROWS_FAILED,
    ROWS_PENDING, Reading, Usage,
};
use berth_kernel::hardware::process::{PROCESSES_PER_GPU_MAX, Process};
use berth_kernel::ids::names::{GpuId, PartId};
use berth_kernel::ids::pci::PciBusId;
use nvml_wrapper::enum_wrappers::device::{EccCounter, MemoryError, TemperatureSensor};
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::struct_wrappers::device::DeviceAttributes;
use nvml_wrapper::structs::device::FieldId;
use nvml_wrapper::{Device, Nvml};
use parking_lot::Mutex;
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant, SystemTime};

/// A GPU and its MIG instances. What does not change while the GPU is attached is read once.
#[derive(Clone, Debug)]
pub(super) struct GpuParts {
    pub(super) gpu: Part,
    pub(super) instances: Vec<Part>,
    /// The GPU's remapped rows; `None` if they were never read.
    rows: Option<RemappedRows>,
}

/// The result of one scan of a GPU.
pub(super) struct GpuScan {
    pub(super) parts: GpuParts,
    /// The GPU's handle as a number.
    pub(super) handle: usize,
    /// Uncorrectable ECC errors since the driver was loaded; `None` if the model does not count them.
    pub(super) uncorrectable: Option<u64>,
    /// The usage of the GPU and of its instances, where NVML lists their processes.
    pub(super) usage: Vec<(PartId, Usage)>,
    /// The processes on it and on its instances; `None` if NVML does not list them.
    pub(super) processes: Option<Vec<Process>>,
    /// The problems that the GPU itself reports, although it answers.
    pub(super) signs: Vec<Reading>,
    /// Why its NVLink fabric is not ready, if so.
    pub(super) fabric_error: Option<String>,
    /// The recovery action that the driver requires; `None` if it reports none.
    pub(super) action: Option<u32>,
}

/// What a GPU answered of its identity, which is known even if a later call fails or hangs.
#[derive(Clone, Debug, Default)]
pub(super) struct Identity {
    pub(super) uuid: Option<PartId>,
    pub(super) pci_bus: Option<PciBusId>,
    model: Option<String>,
    minor: Option<u32>,
}

impl Identity {
    /// Reads it call by call into `identity`, which keeps what was read before where a call fails.
    fn read(device: &Device, identity: &Mutex<Self>, steps: &Steps) {
        if let Ok(uuid) = read_uuid(device, steps) {
            identity.lock().uuid = Some(uuid);
        }
        if let Ok(Some(bus)) = pci_bus(device, steps) {
            identity.lock().pci_bus = Some(bus);
        }
        if let Ok(model) = invoke(steps, "nvmlDeviceGetName", || device.name()) {
            identity.lock().model = Some(model);
        }
        if let Ok(minor) = invoke(steps, "nvmlDeviceGetMinorNumber", || device.minor_number()) {
            identity.lock().minor = Some(minor);
        }
    }

    /// The part of a GPU of which nothing else is known; `None` without its UUID.
    pub(super) fn into_part(self, index: u32) -> Option<Part> {
        Some(Part {
            model: self.model.unwrap_or_default(),
            minor: self.minor,
            pci_bus: self.pci_bus,
            ..Part::whole_gpu(GpuId::of_whole(&self.uuid?), index)
        })
    }
}

fn read_uuid(device: &Device, steps: &Steps) -> Result<PartId, ReadError> {
    let uuid = invoke(steps, "nvmlDeviceGetUUID", || device.uuid())?;
    PartId::parse(&uuid).map_err(ReadError::Uuid)
}

/// Scans the GPU with this NVML index. `known`: its parts, if it answered before. The identity of one that never
/// answered is left in `identity`, whatever fails.
pub(super) fn scan_gpu(
    nvml: &Nvml,
    index: u32,
    known: Option<GpuParts>,
    identity: &Mutex<Identity>,
    sysfs: &Path,
    steps: &Steps,
) -> Result<GpuScan, ReadError> {
    let device = invoke(steps, "nvmlDeviceGetHandleByIndex_v2", || nvml.device_by_index(index))?;
    if known.is_none() {
        Identity::read(&device, identity, steps);
    }
    let id = read_uuid(&device, steps)?;
    let GpuParts { mut gpu, instances: known, rows } = match known.filter(|known| known.gpu.id == id) {
        Some(known) => known,
        None => {
            GpuParts { gpu: read_gpu(&device, id, index, sysfs, steps)?, instances: Vec::new(), rows: None }
        }
    };
    let mig_mode = invoke_optional(steps, "nvmlDeviceGetMigMode", || device.mig_mode())?;
    gpu.mig_enabled = mig_mode.is_some_and(|mode| mode.current == 1);
    if gpu.memory_mib == 0
        && let Some((total, _)) = memory_mib(&device, steps)?
    {
        // Without the right to it the memory of a GPU in MIG mode is hidden until that mode ends.
        gpu.memory_mib = total;
    }
    let found = if gpu.mig_enabled { instances(&device, &gpu, &known, steps)? } else { Vec::new() };
    let of_gpu = processes::list(&device, steps)?;
    let (mut instances, mut of_instances, mut usages) = (Vec::new(), Vec::new(), Vec::new());
    for (part, processes, usage) in found {
        of_instances.extend(map::mig_ids(&part).map(|ids| (ids, processes)));
        usages.extend(usage.map(|usage| (part.id.clone(), usage)));
        instances.push(part);
    }
    let usage_of_gpu = usage(&device, of_gpu.as_deref(), steps)?;
    usages.extend(usage_of_gpu.map(|usage| (gpu.id.clone(), usage)));
    let processes = processes::merge_instances(of_gpu, of_instances).map(|processes| {
        let processes = processes.iter().map(|one| one.to_process(&gpu.gpu, &instances));
        processes.take(PROCESSES_PER_GPU_MAX).collect()
    });
    let read_rows = invoke_optional(steps, "nvmlDeviceGetRemappedRows", || raw::remapped_rows(&device))?;
    // They cannot be read while MIG is on (nvml.h), and stay as they are: a failed remapping needs another board.
    let rows = read_rows.or_else(|| rows.filter(|_| gpu.mig_enabled));
    let pages = invoke_optional(steps, "nvmlDeviceGetRetiredPagesPendingStatus", || {
        device.are_pages_pending_retired()
    })?;
    let action = recovery_action(&device, steps)?;
    let call = "nvmlDeviceGetGpuFabricInfo";
    let fabric = invoke_optional(steps, call, || raw::fabric_registration(&device))?;
    Ok(GpuScan {
        fabric_error: fabric.and_then(map::fabric_error),
        handle: raw::handle(&device),
        usage: usages,
        processes,
        signs: reported_problems(&gpu.gpu, action, rows, pages),
        action,
        uncorrectable: invoke_optional(steps, "nvmlDeviceGetTotalEccErrors", || {
            device.total_ecc_errors(MemoryError::Uncorrected, EccCounter::Volatile)
        })?,
        parts: GpuParts { gpu, instances, rows },
    })
}

/// The load of a GPU, and the newest time of its samples by process, microseconds since 1970.
pub(super) struct LoadScan {
    pub(super) load: Load,
    pub(super) sampled_us: Option<u64>,
}

/// Reads the load of the GPU with this NVML index. Whatever fails only leaves a value out: other calls show whether the
/// GPU works. `sampled_us`: the newest time of its samples by process at the last scan.
pub(super) fn scan_load(nvml: &Nvml, index: u32, sampled_us: Option<u64>, steps: &Steps) -> LoadScan {
    /// Time for reading the load of one GPU: what a scan takes on a busy driver. Values that are not read by then are
    /// left out.
    const LOAD_READ_MAX: Duration = Duration::from_millis(500);
    let began = Instant::now();
    // If the wall clock was set back, the last time is in the future and NVML would return no newer sample: it is
    // ignored.
    let wall_us = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map(|time| time.as_micros());
    let sampled_us = sampled_us.filter(|last| wall_us.is_ok_and(|now| u128::from(*last) <= now));
    let mut scan = LoadScan { load: Load::default(), sampled_us };
    let at = |call| {
        steps.at(call);
        began.elapsed() < LOAD_READ_MAX
    };
    let Ok(device) = nvml.device_by_index(index) else { return scan };
    if at("nvmlDeviceGetUtilizationRates") {
        let rates = device.utilization_rates().ok();
        scan.load.utilization_percent = rates.map(|rates| map::percent(rates.gpu));
    }
    if at("nvmlDeviceGetTemperature") {
        scan.load.temperature_celsius = device.temperature(TemperatureSensor::Gpu).ok();
    }
    if at("nvmlDeviceGetPowerUsage") {
        scan.load.power_watts =
            device.power_usage().ok().map(|milliwatts| milliwatts.saturating_add(500) / 1000);
    }
    if at("nvmlDeviceGetProcessUtilization") {
        let samples = match device.process_utilization_stats(sampled_us) {
            // No process used the GPU since.
            Err(NvmlError::NotFound) => Ok(Vec::new()),
            samples => samples,
        };
        if let Ok(samples) = samples {
            scan.sampled_us = samples.iter().map(|sample| sample.timestamp).max().or(sampled_us);
            scan.load.processes_percent = Some(map::newest_percents(&samples));
        }
    }
    scan
}

/// The bus id; `None` if NVML writes none that can be parsed.
fn pci_bus(device: &Device, steps: &Steps) -> Result<Option<PciBusId>, ReadError> {
    let info = invoke(steps, "nvmlDeviceGetPciInfo_v3", || device.pci_info())?;
    Ok(PciBusId::parse(&info.bus_id).ok())
}

/// Reads the part of a whole GPU.
fn read_gpu(device: &Device, id: PartId, index: u32, sysfs: &Path, steps: &Steps) -> Result<Part, ReadError> {
    let pci_bus = pci_bus(device, steps)?;
    let (memory_mib, _) = memory_mib(device, steps)?.unwrap_or_default();
    let capability =
        invoke_optional(steps, "nvmlDeviceGetCudaComputeCapability", || device.cuda_compute_capability())?;
    let architecture = invoke_optional(steps, "nvmlDeviceGetArchitecture", || device.architecture())?;
    let brand = invoke_optional(steps, "nvmlDeviceGetBrand", || device.brand())?;
    let model = invoke(steps, "nvmlDeviceGetName", || device.name())?;
    let minor = invoke_optional(steps, "nvmlDeviceGetMinorNumber", || device.minor_number())?;
    let numa_node = numa_node(device, pci_bus, sysfs, steps)?;
    let mig_mode = invoke_optional(steps, "nvmlDeviceGetMigMode", || device.mig_mode())?;
    let attributes = [
        ("compute.capability", capability.map(|c| format!("{}.{}", c.major, c.minor))),
        ("architecture", architecture.map(|a| a.to_string().to_ascii_lowercase())),
        ("brand", brand.map(|b| format!("{b:?}").to_ascii_lowercase())),
        ("mig.capable", Some(mig_mode.is_some().to_string())),
        ("pci.class", read_slot_file(sysfs, pci_bus, "class")),
    ];
    let attributes = attributes.into_iter().filter_map(|(key, value)| Some((key.to_owned(), value?)));
    Ok(Part {
        gpu: GpuId::of_whole(&id),
        id,
        vendor: NVIDIA.to_owned(),
        model,
        gpu_index: index,
        minor,
        memory_mib,
        pci_bus,
        numa_node,
        mig_enabled: false,
        mig: None,
        attributes: attributes.collect(),
    })
}

/// The NUMA node of the GPU's PCI slot from sysfs, where a kernel that does not know it writes -1. Without sysfs, the
/// node in NVML's memory affinity, if that is a single one. Not from `nvmlDeviceGetNumaNodeId`: that is the node that
/// the GPU's own memory forms on some machines.
fn numa_node(
    device: &Device,
    pci_bus: Option<PciBusId>,
    sysfs: &Path,
    steps: &Steps,
) -> Result<Option<u32>, ReadError> {
    /// Length of the mask: 4 x 64 nodes, more than any machine has.
    const WORDS: usize = 4;
    const SCOPE_NODE: u32 = 0;
    if let Some(text) = read_slot_file(sysfs, pci_bus, "numa_node") {
        return Ok(text.parse().ok());
    }
    let words =
        invoke_optional(steps, "nvmlDeviceGetMemoryAffinity", || device.memory_affinity(WORDS, SCOPE_NODE))?;
    Ok(words.and_then(|words| single_bit(&words)))
}

/// The trimmed content of a file of a PCI slot in sysfs.
fn read_slot_file(sysfs: &Path, pci_bus: Option<PciBusId>, name: &str) -> Option<String> {
    let file = sysfs.join("bus/pci/devices").join(pci_bus?.sysfs_name()).join(name);
    fs::read_to_string(file).ok().map(|text| text.trim().to_owned())
}

/// The position of the set bit, if exactly one is set.
fn single_bit(words: &[std::ffi::c_ulong]) -> Option<u32> {
    let mut set = (0_u32..)
        .zip(words)
        .filter(|(_, word)| **word != 0)
        .map(|(at, word)| (at * std::ffi::c_ulong::BITS + word.trailing_zeros(), word.count_ones()));
    match (set.next(), set.next()) {
        (Some((position, 1)), None) => Some(position),
        _ => None,
    }
}

/// A MIG instance, its processes and its usage.
type Instance = (Part, Option<Vec<GpuProcess>>, Option<Usage>);

/// Scans the MIG instances of `gpu`. `known`: those that it had at its last scan.
fn instances(device: &Device, gpu: &Part, known: &[Part], steps: &Steps) -> Result<Vec<Instance>, ReadError> {
    let most = invoke(steps, "nvmlDeviceGetMaxMigDeviceCount", || device.mig_device_count())?;
    let mut found = Vec::new();
    for index in 0..most {
        let call = "nvmlDeviceGetMigDeviceHandleByIndex";
        let Some(instance) = invoke_optional(steps, call, || device.mig_device_by_index(index))? else {
            continue;
        };
        let id = read_uuid(&instance, steps)?;
        // An instance that is created again in another size may have the same UUID.
        let (memory_mib, _) = memory_mib(&instance, steps)?.unwrap_or_default();
        let same = |part: &&Part| part.id == id && part.memory_mib == memory_mib;
        let mut part = match known.iter().find(same) {
            Some(part) => part.clone(),
            None => read_instance(device, gpu, &instance, id, memory_mib, steps)?,
        };
        part.attributes.insert(MIG_INDEX.to_owned(), index.to_string());
        let processes = processes::list(&instance, steps)?;
        let usage = usage(&instance, processes.as_deref(), steps)?;
        found.push((part, processes, usage));
    }
    Ok(found)
}

/// Reads the part of a MIG instance of `gpu`, without its index.
fn read_instance(
    gpu_device: &Device,
    gpu: &Part,
    device: &Device,
    id: PartId,
    memory_mib: u64,
    steps: &Steps,
) -> Result<Part, ReadError> {
    let (gpu_instance, compute_instance) =
        invoke(steps, "nvmlDeviceGetGpuInstanceId", || raw::instance_ids(device, steps))?;
    let attributes = invoke_optional(steps, "nvmlDeviceGetAttributes_v2", || device.attributes())?;
    // Not available without the right to read it.
    let profile = invoke_optional(steps, "nvmlDeviceGetGpuInstanceById", || {
        raw::gpu_instance_profile(gpu_device, gpu_instance, steps)
    })?;
    let model = invoke(steps, "nvmlDeviceGetName", || device.name())?;
    let slices = attributes.as_ref().map(|a| (a.gpu_instance_slice_count, a.compute_instance_slice_count));
    let units = attributes.iter().flat_map(units).map(|(unit, n)| (format!("mig.{unit}"), n.to_string()));
    Ok(Part {
        attributes: gpu.attributes.clone().into_iter().chain(units).collect(),
        id,
        gpu: gpu.gpu.clone(),
        memory_mib,
        mig_enabled: false,
        mig: Some(Mig {
            profile: map::profile(&model, slices, profile.flatten(), memory_mib, gpu.memory_mib),
            gpu_instance,
            compute_instance,
        }),
        model,
        ..gpu.clone()
    })
}

/// The counts of an instance's units, by the names that NVIDIA's GPU feature discovery uses.
fn units(of: &DeviceAttributes) -> [(&'static str, u32); 8] {
    [
        ("multiprocessors", of.multiprocessor_count),
        ("slices.gi", of.gpu_instance_slice_count),
        ("slices.ci", of.compute_instance_slice_count),
        ("engines.copy", of.shared_copy_engine_count),
        ("engines.decoder", of.shared_decoder_count),
        ("engines.encoder", of.shared_encoder_count),
        ("engines.jpeg", of.shared_jpeg_count),
        ("engines.ofa", of.shared_ofa_count),
    ]
}

/// Total and used memory, MiB; `None` where it cannot be read: under MIG without the right to it, and on models that
/// share the memory of the processor, such as GB10 (nvml.h, `nvmlDeviceGetMemoryInfo`).
fn memory_mib(device: &Device, steps: &Steps) -> Result<Option<(u64, u64)>, ReadError> {
    let memory = invoke_optional(steps, "nvmlDeviceGetMemoryInfo_v2", || raw::memory(device, steps))?;
    Ok(memory.map(|(total, used)| (map::mib(total), map::mib(used))))
}

/// Memory in use and number of processes; `None` if the processes are not listed.
fn usage(
    device: &Device,
    processes: Option<&[GpuProcess]>,
    steps: &Steps,
) -> Result<Option<Usage>, ReadError> {
    let memory = memory_mib(device, steps)?;
    Ok(processes.map(|processes| Usage {
        memory_used_mib: memory.map(|(_, used)| used),
        processes: processes::count_computing(processes),
    }))
}

/// The recovery action that the driver requires (`nvmlDeviceGpuRecoveryAction_t`); `None` where it does not report one.
pub(super) fn recovery_action(device: &Device, steps: &Steps) -> Result<Option<u32>, ReadError> {
    /// `NVML_FI_DEV_GET_GPU_RECOVERY_ACTION`.
    const RECOVERY_ACTION: FieldId = FieldId(230);
    let call = "nvmlDeviceGetFieldValues";
    let fields = invoke_optional(steps, call, || device.field_values_for(&[RECOVERY_ACTION]))?;
    let values = fields.into_iter().flatten().filter_map(Result::ok);
    Ok(values.filter_map(|sample| sample.value.ok()).find_map(|value| map::to_u32(&value)))
}

/// The problems that the GPU reports: a recovery action that it requires, memory rows that need a remapping, and pages
/// whose retirement is pending.
fn reported_problems(
    gpu: &GpuId,
    action: Option<u32>,
    rows: Option<RemappedRows>,
    pages: Option<bool>,
) -> Vec<Reading> {
    let action = action.and_then(|action| recovery_reading(gpu, action));
    let rows = rows.and_then(|rows| match rows {
        RemappedRows { failed: true, .. } => {
            Some((ROWS_FAILED, "its memory could not be repaired (row remapping failed): replace it"))
        }
        RemappedRows { pending: true, .. } => {
            Some((ROWS_PENDING, "a row of its memory is repaired at the next reset (row remapping pending)"))
        }
        RemappedRows { .. } => None,
    });
    let rows = rows.map(|(code, detail)| reading(gpu, ROWS, code, detail.to_owned()));
    let text = "a page of its memory is retired at the next reset (page retirement pending)";
    let pages = (pages == Some(true)).then(|| reading(gpu, PAGES, PAGES_PENDING, text.to_owned()));
    action.into_iter().chain(rows).chain(pages).collect()
}

/// The reading of a reset or another recovery, after which the GPU needs none any more.
pub(super) fn recovered_reading(gpu: &GpuId) -> Reading {
    reading(gpu, RECOVERY, RECOVERED, "the GPU was reset or recovered".to_owned())
}

/// The reading of a recovery action; `None` if it is no action.
pub(super) fn recovery_reading(gpu: &GpuId, action: u32) -> Option<Reading> {
    Some(reading(gpu, RECOVERY, action.into(), map::recovery_text(action)?))
}

fn reading(gpu: &GpuId, source: &str, code: u64, detail: String) -> Reading {
    Reading { part: gpu.as_part().clone(), source: source.to_owned(), code, detail }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_numa_node_is_known_if_one_bit_is_set() {
        assert_eq!(single_bit(&[1, 0]), Some(0));
        assert_eq!(single_bit(&[0b1000, 0]), Some(3));
        assert_eq!(single_bit(&[0, 2]), Some(std::ffi::c_ulong::BITS + 1));
        assert_eq!(single_bit(&[3, 0]), None);
        assert_eq!(single_bit(&[1, 1]), None);
        assert_eq!(single_bit(&[0, 0]), None);
    }
}
