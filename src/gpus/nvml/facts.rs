//! What is read of one GPU, in one visit behind the fence.

use super::fence::Steps;
use super::map;
use super::raw;
use super::running::{self, Running};
use berth_kernel::gpu::{RECOVERY, ROWS, ROWS_FAILED, ROWS_PENDING, Usage};
use nvml_wrapper::enum_wrappers::device::{EccCounter, MemoryError};
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::struct_wrappers::device::DeviceAttributes;
use nvml_wrapper::structs::device::FieldId;
use nvml_wrapper::{Device, Nvml};
use std::fs;
use std::path::Path;

/// What does not change while the GPU is there.
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
    /// Whether it has a MIG mode, on or off.
    pub(super) mig_capable: bool,
    /// The class of its PCI slot, `0x030200`, where sysfs shows it.
    pub(super) pci_class: Option<String>,
}

/// The same of a MIG instance.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct InstanceFacts {
    pub(super) uuid: String,
    pub(super) name: String,
    pub(super) memory_bytes: u64,
    pub(super) gpu_instance: u32,
    pub(super) compute_instance: u32,
    /// Of the GPU instance and of the compute instance.
    pub(super) slices: Option<(u32, u32)>,
    /// Its share of the GPU's units, by name.
    pub(super) units: Vec<(&'static str, u32)>,
    /// `NVML_GPU_INSTANCE_PROFILE_*`, where the daemon may ask.
    pub(super) gpu_instance_profile: Option<u32>,
}

/// What one visit to a GPU found.
#[derive(Clone, Debug)]
pub(super) struct Visit {
    pub(super) facts: GpuFacts,
    /// The GPU's handle as a number.
    pub(super) handle: usize,
    pub(super) mig_enabled: bool,
    /// With the index that each has now.
    pub(super) instances: Vec<(InstanceFacts, u32, Option<Usage>)>,
    pub(super) usage: Option<Usage>,
    /// The processes on it and on its instances; `None` where NVML does not tell.
    pub(super) running: Option<Vec<Running>>,
    /// What the hardware says is wrong, although it answers.
    pub(super) signs: Vec<Sign>,
    /// Uncorrectable ECC errors since the driver was loaded, where the model counts them.
    pub(super) uncorrectable: Option<u64>,
}

/// Something wrong with a GPU, by its own word.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Sign {
    pub(super) source: &'static str,
    pub(super) code: u64,
    pub(super) detail: String,
}

/// A call that answered with an error.
#[derive(Debug)]
pub(super) struct Failed {
    pub(super) call: &'static str,
    pub(super) error: NvmlError,
}

/// What earlier visits found, so that it is not read again.
#[derive(Clone, Debug, Default)]
pub(super) struct Known {
    pub(super) gpu: Option<GpuFacts>,
    pub(super) instances: Vec<InstanceFacts>,
}

/// Makes one call, and says which before it.
pub(super) fn ask<T>(
    steps: &Steps,
    call: &'static str,
    make: impl FnOnce() -> Result<T, NvmlError>,
) -> Result<T, Failed> {
    steps.at(call);
    make().map_err(|error| Failed { call, error })
}

/// The same for what a model, a driver or the daemon's rights may not give: then `None`.
pub(super) fn ask_if_known<T>(
    steps: &Steps,
    call: &'static str,
    make: impl FnOnce() -> Result<T, NvmlError>,
) -> Result<Option<T>, Failed> {
    match ask(steps, call, make) {
        Ok(value) => Ok(Some(value)),
        Err(failed) if unknown(&failed.error) => Ok(None),
        Err(failed) => Err(failed),
    }
}

fn unknown(error: &NvmlError) -> bool {
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

/// Visits the GPU with this index.
pub(super) fn visit(
    nvml: &Nvml,
    index: u32,
    known: &Known,
    sysfs: &Path,
    steps: &Steps,
) -> Result<Visit, Failed> {
    let device = ask(steps, "nvmlDeviceGetHandleByIndex_v2", || nvml.device_by_index(index))?;
    let uuid = ask(steps, "nvmlDeviceGetUUID", || device.uuid())?;
    let facts = match &known.gpu {
        Some(facts) if facts.uuid == uuid => facts.clone(),
        _ => gpu_facts(&device, uuid, sysfs, steps)?,
    };
    let mig_mode = ask_if_known(steps, "nvmlDeviceGetMigMode", || device.mig_mode())?;
    let mig_enabled = mig_mode.is_some_and(|mode| mode.current == 1);
    let seen = if mig_enabled { instances(&device, known, steps)? } else { Vec::new() };
    let whole = running::on(&device, steps)?;
    let (mut instances, mut inside) = (Vec::new(), Vec::new());
    for (facts, index, running, usage) in seen {
        inside.push(((facts.gpu_instance, facts.compute_instance), running));
        instances.push((facts, index, usage));
    }
    Ok(Visit {
        handle: raw::handle(&device),
        mig_enabled,
        instances,
        usage: usage(&device, whole.as_deref(), steps)?,
        running: running::merged(whole, inside),
        signs: signs(&device, steps)?,
        uncorrectable: ask_if_known(steps, "nvmlDeviceGetTotalEccErrors", || {
            device.total_ecc_errors(MemoryError::Uncorrected, EccCounter::Volatile)
        })?,
        facts,
    })
}

fn gpu_facts(device: &Device, uuid: String, sysfs: &Path, steps: &Steps) -> Result<GpuFacts, Failed> {
    let pci_bus = ask(steps, "nvmlDeviceGetPciInfo_v3", || device.pci_info())?.bus_id;
    let memory = ask(steps, "nvmlDeviceGetMemoryInfo_v2", || device.memory_info())?;
    let capability =
        ask_if_known(steps, "nvmlDeviceGetCudaComputeCapability", || device.cuda_compute_capability())?;
    let architecture = ask_if_known(steps, "nvmlDeviceGetArchitecture", || device.architecture())?;
    let brand = ask_if_known(steps, "nvmlDeviceGetBrand", || device.brand())?;
    Ok(GpuFacts {
        name: ask(steps, "nvmlDeviceGetName", || device.name())?,
        minor: ask_if_known(steps, "nvmlDeviceGetMinorNumber", || device.minor_number())?,
        memory_bytes: memory.total,
        numa_node: numa_node(device, &pci_bus, sysfs, steps)?,
        compute_capability: capability.map(|c| format!("{}.{}", c.major, c.minor)),
        architecture: architecture.map(|a| a.to_string().to_ascii_lowercase()),
        brand: brand.map(|b| format!("{b:?}").to_ascii_lowercase()),
        mig_capable: ask_if_known(steps, "nvmlDeviceGetMigMode", || device.mig_mode())?.is_some(),
        pci_class: slot_file(sysfs, &pci_bus, "class"),
        uuid,
        pci_bus,
    })
}

/// The NUMA node of the GPU's PCI slot, as sysfs has it; a kernel that does not know it writes -1.
/// Without sysfs it is the one node that NVML calls near. `nvmlDeviceGetNumaNodeId` is something
/// else: the node that a GPU's own memory is, on machines that have such.
fn numa_node(device: &Device, pci_bus: &str, sysfs: &Path, steps: &Steps) -> Result<Option<u32>, Failed> {
    /// 4 x 64 nodes: more than any machine has.
    const WORDS: usize = 4;
    const SCOPE_NODE: u32 = 0;
    if let Some(text) = slot_file(sysfs, pci_bus, "numa_node") {
        return Ok(text.parse().ok());
    }
    let words =
        ask_if_known(steps, "nvmlDeviceGetMemoryAffinity", || device.memory_affinity(WORDS, SCOPE_NODE))?;
    Ok(words.and_then(|words| only_bit(&words)))
}

/// What sysfs says of a PCI slot.
fn slot_file(sysfs: &Path, pci_bus: &str, name: &str) -> Option<String> {
    let file = sysfs.join("bus/pci/devices").join(map::sysfs_name(pci_bus)).join(name);
    fs::read_to_string(file).ok().map(|text| text.trim().to_owned())
}

/// The position of the one bit that is set.
fn only_bit(words: &[std::ffi::c_ulong]) -> Option<u32> {
    let mut set = (0_u32..)
        .zip(words)
        .filter(|(_, word)| **word != 0)
        .map(|(at, word)| (at * std::ffi::c_ulong::BITS + word.trailing_zeros(), word.count_ones()));
    match (set.next(), set.next()) {
        (Some((position, 1)), None) => Some(position),
        _ => None,
    }
}

/// A MIG instance: what it is, its index, who runs on it, and what they use.
type Instance = (InstanceFacts, u32, Option<Vec<Running>>, Option<Usage>);

fn instances(device: &Device, known: &Known, steps: &Steps) -> Result<Vec<Instance>, Failed> {
    let most = ask(steps, "nvmlDeviceGetMaxMigDeviceCount", || device.mig_device_count())?;
    let mut found = Vec::new();
    for index in 0..most {
        let call = "nvmlDeviceGetMigDeviceHandleByIndex";
        let Some(instance) = ask_if_known(steps, call, || device.mig_device_by_index(index))? else {
            continue;
        };
        let uuid = ask(steps, "nvmlDeviceGetUUID", || instance.uuid())?;
        // Made anew in another size, an instance may be called as before.
        let memory = ask(steps, "nvmlDeviceGetMemoryInfo_v2", || instance.memory_info())?.total;
        let same = |facts: &&InstanceFacts| facts.uuid == uuid && facts.memory_bytes == memory;
        let facts = match known.instances.iter().find(same) {
            Some(facts) => facts.clone(),
            None => instance_facts(device, &instance, uuid, steps)?,
        };
        let running = running::on(&instance, steps)?;
        let usage = usage(&instance, running.as_deref(), steps)?;
        found.push((facts, index, running, usage));
    }
    Ok(found)
}

fn instance_facts(
    gpu: &Device,
    device: &Device,
    uuid: String,
    steps: &Steps,
) -> Result<InstanceFacts, Failed> {
    let memory = ask(steps, "nvmlDeviceGetMemoryInfo_v2", || device.memory_info())?;
    let (gpu_instance, compute_instance) =
        ask(steps, "nvmlDeviceGetGpuInstanceId", || raw::instance_ids(device))?;
    let attributes = ask_if_known(steps, "nvmlDeviceGetAttributes_v2", || device.attributes())?;
    let profile = ask_if_known(steps, "nvmlDeviceGetGpuInstanceProfileInfo", || {
        raw::gpu_instance_profile(gpu, gpu_instance)
    })?;
    Ok(InstanceFacts {
        uuid,
        name: ask(steps, "nvmlDeviceGetName", || device.name())?,
        memory_bytes: memory.total,
        gpu_instance,
        compute_instance,
        slices: attributes.as_ref().map(|a| (a.gpu_instance_slice_count, a.compute_instance_slice_count)),
        units: attributes.as_ref().map(units).unwrap_or_default(),
        gpu_instance_profile: profile.flatten(),
    })
}

/// By the names that NVIDIA's feature discovery gives them.
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

/// Memory in use and processes; `None` where the processes cannot be seen.
fn usage(device: &Device, running: Option<&[Running]>, steps: &Steps) -> Result<Option<Usage>, Failed> {
    let memory = ask(steps, "nvmlDeviceGetMemoryInfo_v2", || device.memory_info())?;
    Ok(running.map(|running| Usage {
        memory_used_mib: map::mib(memory.used),
        processes: running::computing(running),
    }))
}

/// What the hardware itself says is wrong: an action that it asks for, and memory that needs repair.
fn signs(device: &Device, steps: &Steps) -> Result<Vec<Sign>, Failed> {
    /// `NVML_FI_DEV_GET_GPU_RECOVERY_ACTION`.
    const RECOVERY_ACTION: FieldId = FieldId(230);
    let call = "nvmlDeviceGetFieldValues";
    let fields = ask_if_known(steps, call, || device.field_values_for(&[RECOVERY_ACTION]))?;
    let action = fields
        .into_iter()
        .flatten()
        .filter_map(Result::ok)
        .find_map(|sample| sample.value.ok())
        .and_then(|value| map::number(&value));
    let action = action.and_then(|action| Some((action, map::recovery(action)?)));
    let rows = ask_if_known(steps, "nvmlDeviceGetRemappedRows", || raw::remapped_rows(device))?;
    let rows = rows.and_then(|rows| match rows {
        raw::Rows { failed: true, .. } => Some((
            ROWS_FAILED,
            "its memory could not be repaired (row remapping failed): replace it".to_owned(),
        )),
        raw::Rows { pending: true, .. } => Some((
            ROWS_PENDING,
            "a row of its memory is repaired at the next reset (row remapping pending)".to_owned(),
        )),
        raw::Rows { .. } => None,
    });
    let action = action.map(|(code, detail)| Sign { source: RECOVERY, code: code.into(), detail });
    let rows = rows.map(|(code, detail)| Sign { source: ROWS, code, detail });
    Ok(action.into_iter().chain(rows).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_numa_node_is_known_if_one_bit_is_set() {
        assert_eq!(only_bit(&[1, 0]), Some(0));
        assert_eq!(only_bit(&[0b1000, 0]), Some(3));
        assert_eq!(only_bit(&[0, 2]), Some(std::ffi::c_ulong::BITS + 1));
        assert_eq!(only_bit(&[3, 0]), None);
        assert_eq!(only_bit(&[1, 1]), None);
        assert_eq!(only_bit(&[0, 0]), None);
    }
}
