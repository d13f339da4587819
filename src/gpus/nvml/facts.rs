//! Reads one GPU: the calls of one scan, which run behind the fence as one job.

use super::fence::Steps;
use super::map;
use super::processes::{self, GpuProcess};
use super::raw;
use berth_kernel::gpu::{RECOVERY, ROWS, ROWS_FAILED, ROWS_PENDING, Usage};
use nvml_wrapper::enum_wrappers::device::{EccCounter, MemoryError};
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::struct_wrappers::device::DeviceAttributes;
use nvml_wrapper::structs::device::FieldId;
use nvml_wrapper::{Device, Nvml};
use std::fs;
use std::path::Path;

/// The properties of a GPU that do not change while it is attached.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct GpuFacts {
    pub(super) uuid: String,
    pub(super) name: String,
    pub(super) minor: Option<u32>,
    pub(super) memory_bytes: u64,
    pub(super) pci_bus: String,
    pub(super) numa_node: Option<u32>,
    pub(super) compute_capability: Option<String>,
    pub(super) architecture: Option<String>,
    pub(super) brand: Option<String>,
    /// Whether it supports MIG, enabled or not.
    pub(super) mig_capable: bool,
    /// Its PCI class, such as `0x030200`; `None` if sysfs does not have it.
    pub(super) pci_class: Option<String>,
}

/// The properties of a MIG instance that do not change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct InstanceFacts {
    pub(super) uuid: String,
    pub(super) name: String,
    pub(super) memory_bytes: u64,
    pub(super) gpu_instance: u32,
    pub(super) compute_instance: u32,
    /// Slices of the GPU instance and of the compute instance.
    pub(super) slices: Option<(u32, u32)>,
    /// Its share of the GPU's units, by name.
    pub(super) units: Vec<(&'static str, u32)>,
    /// `NVML_GPU_INSTANCE_PROFILE_*`; `None` without the right to read it.
    pub(super) gpu_instance_profile: Option<u32>,
}

/// The result of one scan of a GPU.
#[derive(Clone, Debug)]
pub(super) struct GpuScan {
    pub(super) facts: GpuFacts,
    /// The GPU's handle as a number.
    pub(super) handle: usize,
    pub(super) mig_enabled: bool,
    /// The MIG instances, each with its present index and its usage.
    pub(super) instances: Vec<(InstanceFacts, u32, Option<Usage>)>,
    pub(super) usage: Option<Usage>,
    /// The processes on it and on its instances; `None` if NVML does not list them.
    pub(super) processes: Option<Vec<GpuProcess>>,
    /// The problems that the GPU itself reports, although it answers.
    pub(super) problems: Vec<ReportedProblem>,
    /// Uncorrectable ECC errors since the driver was loaded; `None` if the model does not count them.
    pub(super) uncorrectable: Option<u64>,
}

/// A problem that the GPU itself reports.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ReportedProblem {
    pub(super) source: &'static str,
    pub(super) code: u64,
    pub(super) detail: String,
}

/// A call that returned an error.
#[derive(Debug)]
pub(super) struct CallError {
    pub(super) call: &'static str,
    pub(super) error: NvmlError,
}

/// The facts from earlier scans, which are not read again.
#[derive(Clone, Debug, Default)]
pub(super) struct KnownFacts {
    pub(super) gpu: Option<GpuFacts>,
    pub(super) instances: Vec<InstanceFacts>,
}

/// Makes one call; its name is recorded first, so that a hang can be reported with it.
pub(super) fn invoke<T>(
    steps: &Steps,
    call: &'static str,
    make: impl FnOnce() -> Result<T, NvmlError>,
) -> Result<T, CallError> {
    steps.at(call);
    make().map_err(|error| CallError { call, error })
}

/// The same for a call that the model, the driver or the daemon's rights may not support: then `None`.
pub(super) fn invoke_optional<T>(
    steps: &Steps,
    call: &'static str,
    make: impl FnOnce() -> Result<T, NvmlError>,
) -> Result<Option<T>, CallError> {
    match invoke(steps, call, make) {
        Ok(value) => Ok(Some(value)),
        Err(failed) if is_unavailable(&failed.error) => Ok(None),
        Err(failed) => Err(failed),
    }
}

fn is_unavailable(error: &NvmlError) -> bool {
    use NvmlError as E;
    matches!(
        error,
        E::NotSupported
            | E::NoPermission
            | E::NotFound
            | E::NoData
            | E::FailedToLoadSymbol(_)
            | E::FunctionNotFound
            | E::UnexpectedVariant(_)
    )
}

/// Scans the GPU with this NVML index.
pub(super) fn scan_gpu(
    nvml: &Nvml,
    index: u32,
    known: &KnownFacts,
    sysfs: &Path,
    steps: &Steps,
) -> Result<GpuScan, CallError> {
    let device = invoke(steps, "nvmlDeviceGetHandleByIndex_v2", || nvml.device_by_index(index))?;
    let uuid = invoke(steps, "nvmlDeviceGetUUID", || device.uuid())?;
    let facts = match &known.gpu {
        Some(facts) if facts.uuid == uuid => facts.clone(),
        _ => gpu_facts(&device, uuid, sysfs, steps)?,
    };
    let mig_mode = invoke_optional(steps, "nvmlDeviceGetMigMode", || device.mig_mode())?;
    let mig_enabled = mig_mode.is_some_and(|mode| mode.current == 1);
    let found = if mig_enabled { instances(&device, known, steps)? } else { Vec::new() };
    let of_gpu = processes::list(&device, steps)?;
    let (mut instances, mut of_instances) = (Vec::new(), Vec::new());
    for (facts, index, processes, usage) in found {
        of_instances.push(((facts.gpu_instance, facts.compute_instance), processes));
        instances.push((facts, index, usage));
    }
    Ok(GpuScan {
        handle: raw::handle(&device),
        mig_enabled,
        instances,
        usage: usage(&device, of_gpu.as_deref(), steps)?,
        processes: processes::merge_instances(of_gpu, of_instances),
        problems: reported_problems(&device, steps)?,
        uncorrectable: invoke_optional(steps, "nvmlDeviceGetTotalEccErrors", || {
            device.total_ecc_errors(MemoryError::Uncorrected, EccCounter::Volatile)
        })?,
        facts,
    })
}

fn gpu_facts(device: &Device, uuid: String, sysfs: &Path, steps: &Steps) -> Result<GpuFacts, CallError> {
    let pci_bus = invoke(steps, "nvmlDeviceGetPciInfo_v3", || device.pci_info())?.bus_id;
    let memory = invoke(steps, "nvmlDeviceGetMemoryInfo_v2", || device.memory_info())?;
    let capability =
        invoke_optional(steps, "nvmlDeviceGetCudaComputeCapability", || device.cuda_compute_capability())?;
    let architecture = invoke_optional(steps, "nvmlDeviceGetArchitecture", || device.architecture())?;
    let brand = invoke_optional(steps, "nvmlDeviceGetBrand", || device.brand())?;
    Ok(GpuFacts {
        name: invoke(steps, "nvmlDeviceGetName", || device.name())?,
        minor: invoke_optional(steps, "nvmlDeviceGetMinorNumber", || device.minor_number())?,
        memory_bytes: memory.total,
        numa_node: numa_node(device, &pci_bus, sysfs, steps)?,
        compute_capability: capability.map(|c| format!("{}.{}", c.major, c.minor)),
        architecture: architecture.map(|a| a.to_string().to_ascii_lowercase()),
        brand: brand.map(|b| format!("{b:?}").to_ascii_lowercase()),
        mig_capable: invoke_optional(steps, "nvmlDeviceGetMigMode", || device.mig_mode())?.is_some(),
        pci_class: read_slot_file(sysfs, &pci_bus, "class"),
        uuid,
        pci_bus,
    })
}

/// The NUMA node of the GPU's PCI slot from sysfs, where a kernel that does not know it writes -1. Without sysfs, the
/// node in NVML's memory affinity, if that is a single one. Not from `nvmlDeviceGetNumaNodeId`: that is the node that
/// the GPU's own memory forms on some machines.
fn numa_node(device: &Device, pci_bus: &str, sysfs: &Path, steps: &Steps) -> Result<Option<u32>, CallError> {
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
fn read_slot_file(sysfs: &Path, pci_bus: &str, name: &str) -> Option<String> {
    let file = sysfs.join("bus/pci/devices").join(map::sysfs_name(pci_bus)).join(name);
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

/// A MIG instance: its facts, its index, its processes and its usage.
type Instance = (InstanceFacts, u32, Option<Vec<GpuProcess>>, Option<Usage>);

fn instances(device: &Device, known: &KnownFacts, steps: &Steps) -> Result<Vec<Instance>, CallError> {
    let most = invoke(steps, "nvmlDeviceGetMaxMigDeviceCount", || device.mig_device_count())?;
    let mut found = Vec::new();
    for index in 0..most {
        let call = "nvmlDeviceGetMigDeviceHandleByIndex";
        let Some(instance) = invoke_optional(steps, call, || device.mig_device_by_index(index))? else {
            continue;
        };
        let uuid = invoke(steps, "nvmlDeviceGetUUID", || instance.uuid())?;
        // An instance that is created again in another size may have the same UUID.
        let memory = invoke(steps, "nvmlDeviceGetMemoryInfo_v2", || instance.memory_info())?.total;
        let same = |facts: &&InstanceFacts| facts.uuid == uuid && facts.memory_bytes == memory;
        let facts = match known.instances.iter().find(same) {
            Some(facts) => facts.clone(),
            None => instance_facts(device, &instance, uuid, steps)?,
        };
        let processes = processes::list(&instance, steps)?;
        let usage = usage(&instance, processes.as_deref(), steps)?;
        found.push((facts, index, processes, usage));
    }
    Ok(found)
}

fn instance_facts(
    gpu: &Device,
    device: &Device,
    uuid: String,
    steps: &Steps,
) -> Result<InstanceFacts, CallError> {
    let memory = invoke(steps, "nvmlDeviceGetMemoryInfo_v2", || device.memory_info())?;
    let (gpu_instance, compute_instance) =
        invoke(steps, "nvmlDeviceGetGpuInstanceId", || raw::instance_ids(device))?;
    let attributes = invoke_optional(steps, "nvmlDeviceGetAttributes_v2", || device.attributes())?;
    let profile = invoke_optional(steps, "nvmlDeviceGetGpuInstanceProfileInfo", || {
        raw::gpu_instance_profile(gpu, gpu_instance)
    })?;
    Ok(InstanceFacts {
        uuid,
        name: invoke(steps, "nvmlDeviceGetName", || device.name())?,
        memory_bytes: memory.total,
        gpu_instance,
        compute_instance,
        slices: attributes.as_ref().map(|a| (a.gpu_instance_slice_count, a.compute_instance_slice_count)),
        units: attributes.as_ref().map(units).unwrap_or_default(),
        gpu_instance_profile: profile.flatten(),
    })
}

/// The counts of an instance's units, by the names that NVIDIA's GPU feature discovery uses.
fn units(of: &DeviceAttributes) -> Vec<(&'static str, u32)> {
    vec![
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

/// Memory in use and number of processes; `None` if the processes are not listed.
fn usage(
    device: &Device,
    processes: Option<&[GpuProcess]>,
    steps: &Steps,
) -> Result<Option<Usage>, CallError> {
    let memory = invoke(steps, "nvmlDeviceGetMemoryInfo_v2", || device.memory_info())?;
    Ok(processes.map(|processes| Usage {
        memory_used_mib: map::mib(memory.used),
        processes: processes::count_computing(processes),
    }))
}

/// The problems that the GPU reports: a recovery action that it requests, and memory rows that need a remapping.
fn reported_problems(device: &Device, steps: &Steps) -> Result<Vec<ReportedProblem>, CallError> {
    /// `NVML_FI_DEV_GET_GPU_RECOVERY_ACTION`.
    const RECOVERY_ACTION: FieldId = FieldId(230);
    let call = "nvmlDeviceGetFieldValues";
    let fields = invoke_optional(steps, call, || device.field_values_for(&[RECOVERY_ACTION]))?;
    let action = fields
        .into_iter()
        .flatten()
        .filter_map(Result::ok)
        .find_map(|sample| sample.value.ok())
        .and_then(|value| map::to_u32(&value));
    let action = action.and_then(|action| Some((action, map::recovery_text(action)?)));
    let rows = invoke_optional(steps, "nvmlDeviceGetRemappedRows", || raw::remapped_rows(device))?;
    let rows = rows.and_then(|rows| match rows {
        raw::RemappedRows { failed: true, .. } => Some((
            ROWS_FAILED,
            "its memory could not be repaired (row remapping failed): replace it".to_owned(),
        )),
        raw::RemappedRows { pending: true, .. } => Some((
            ROWS_PENDING,
            "a row of its memory is repaired at the next reset (row remapping pending)".to_owned(),
        )),
        raw::RemappedRows { .. } => None,
    });
    let action = action.map(|(code, detail)| ReportedProblem { source: RECOVERY, code: code.into(), detail });
    let rows = rows.map(|(code, detail)| ReportedProblem { source: ROWS, code, detail });
    Ok(action.into_iter().chain(rows).collect())
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
