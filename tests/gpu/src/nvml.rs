//! Makes the NVML calls that Berth makes, and a few more, once each, and records what each answered and how long it
//! took.
//!
//! Runs in a process of its own: an open library keeps the driver busy, and the first handle after a while without any
//! client is what starts a GPU.
#![allow(unsafe_code, reason = "calls through the raw symbol table")]

use anyhow::{Context as _, anyhow};
use fake_nvml::Code;
use nvml_wrapper_sys::bindings::{NvmlLib, nvmlDevice_t, nvmlMemory_v2_t};
use serde::{Deserialize, Serialize};
use std::ffi::{c_char, c_uint};
use std::mem::{size_of, zeroed};
use std::path::Path;
use std::time::Instant;

/// `NVML_NVLINK_MAX_LINKS`.
const LINKS_MAX: u32 = 18;
/// The last profile of MIG instances that nvml.h of CUDA 13 has (`NVML_GPU_INSTANCE_PROFILE_*`).
const PROFILE_LAST: u32 = 0x11;
/// `NVML_FI_DEV_GET_GPU_RECOVERY_ACTION`.
const RECOVERY_ACTION: u32 = 230;
/// Room for texts: more than each `NVML_DEVICE_*_BUFFER_SIZE`.
const TEXT_BYTES: usize = 128;
/// Room for processes.
const PROCESSES_MAX: usize = 256;
/// Most GPUs that are read.
const GPUS_MAX: u32 = 64;

/// What NVML answered.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Report {
    /// Opening the library and `nvmlInit_v2`, milliseconds.
    pub(crate) open_ms: f64,
    /// The first device handle, milliseconds; absent without a GPU.
    pub(crate) first_handle_ms: Option<f64>,
    pub(crate) driver_version: Option<String>,
    pub(crate) cuda_version: Option<u32>,
    pub(crate) gpus: Vec<Gpu>,
    pub(crate) calls: Vec<Call>,
}

/// One call.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Call {
    pub(crate) name: String,
    /// Index of the GPU.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) gpu: Option<u32>,
    /// Number of the link, profile or MIG device.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) argument: Option<u32>,
    /// NVML's return code (`nvmlReturn_t`); `FUNCTION_NOT_FOUND` if the library lacks the symbol.
    pub(crate) code: String,
    pub(crate) us: u64,
}

/// The name of a return code.
pub(crate) fn code_name(code: u32) -> String {
    let named = Code::from_number(code).and_then(|code| serde_json::to_value(code).ok());
    let name = named.and_then(|value| value.as_str().map(str::to_owned));
    if code == 0 { "SUCCESS".to_owned() } else { name.unwrap_or_else(|| code.to_string()) }
}

/// What is known of one GPU; what a call did not answer is absent.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Gpu {
    pub(crate) index: u32,
    pub(crate) uuid: Option<String>,
    pub(crate) name: Option<String>,
    pub(crate) has_serial: bool,
    pub(crate) minor: Option<u32>,
    pub(crate) bus: Option<String>,
    pub(crate) pci_device_id: u32,
    pub(crate) pci_subsystem_id: u32,
    /// Bytes: total, used and reserved.
    pub(crate) memory: Option<(u64, u64, u64)>,
    pub(crate) capability: Option<(u32, u32)>,
    pub(crate) brand: Option<u32>,
    pub(crate) architecture: Option<u32>,
    /// Current and pending MIG mode, and how many instances the model allows.
    pub(crate) mig: Option<(u32, u32, u32)>,
    pub(crate) instances: Vec<Instance>,
    /// The profiles of MIG instances that the model has.
    pub(crate) profiles: Vec<u32>,
    /// Uncorrected errors since the driver was loaded.
    pub(crate) uncorrected: Option<u64>,
    /// Correctable, uncorrectable, pending, failed.
    pub(crate) rows: Option<(u32, u32, u32, u32)>,
    pub(crate) recovery_action: Option<u32>,
    /// NVLinks: active, and at the other end `(type, bus id)`; `None` if the link is not supported.
    pub(crate) links: Vec<Option<Link>>,
    pub(crate) events: Option<u64>,
    pub(crate) temperature: Option<u32>,
    pub(crate) power_mw: Option<u32>,
    /// The first NUMA node of its memory affinity.
    pub(crate) numa_node: Option<u32>,
    pub(crate) settings: Settings,
}

/// One NVLink.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Link {
    pub(crate) active: bool,
    /// `nvmlIntNvLinkDeviceType_t`.
    pub(crate) remote_type: Option<u32>,
    pub(crate) remote_bus: Option<String>,
}

/// A MIG device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Instance {
    pub(crate) uuid: String,
    pub(crate) name: String,
    pub(crate) gpu_instance: u32,
    pub(crate) compute_instance: u32,
    pub(crate) slices: u32,
    pub(crate) memory_mib: u64,
}

/// What an operator sets on a GPU, and what a check must leave as it is. `None`: not supported.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Settings {
    pub(crate) persistence: Option<u32>,
    pub(crate) compute_mode: Option<u32>,
    pub(crate) mig: Option<(u32, u32)>,
    pub(crate) ecc: Option<(u32, u32)>,
    pub(crate) power_limit_mw: Option<u32>,
    /// Application clocks of graphics and memory, MHz.
    pub(crate) clocks_mhz: (Option<u32>, Option<u32>),
}

/// Makes calls and records them.
struct Recorder {
    calls: Vec<Call>,
    gpu: Option<u32>,
}

impl Recorder {
    /// Makes one call; whether it succeeded. `symbol` is an error if the library lacks it.
    fn make<F: Copy, E>(
        &mut self,
        name: &str,
        argument: Option<u32>,
        symbol: &Result<F, E>,
        call: impl FnOnce(F) -> c_uint,
    ) -> bool {
        let began = Instant::now();
        let code = symbol.as_ref().map_or(Code::FunctionNotFound.number(), |function| call(*function));
        let us = u64::try_from(began.elapsed().as_micros()).unwrap_or(u64::MAX);
        self.calls.push(Call { name: name.to_owned(), gpu: self.gpu, argument, code: code_name(code), us });
        code == 0
    }

    fn text(
        &mut self,
        name: &str,
        call: impl FnOnce(&mut Self, &str, *mut c_char, c_uint) -> bool,
    ) -> Option<String> {
        let mut buffer = [0 as c_char; TEXT_BYTES];
        let length = c_uint::try_from(TEXT_BYTES - 1).unwrap_or_default();
        call(self, name, buffer.as_mut_ptr(), length).then(|| text_of(&buffer))
    }
}

/// The text up to its NUL.
fn text_of(buffer: &[c_char]) -> String {
    let bytes: Vec<u8> = buffer.iter().take_while(|c| **c != 0).map(|c| c.cast_unsigned()).collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

/// `call!(recorder, lib, name(arguments))`: whether it succeeded. The arguments are valid for the call: handles come
/// from NVML and are used before `nvmlShutdown`, pointers lead to values of this frame.
macro_rules! call {
    ($recorder:expr, $lib:expr, $name:ident($($argument:expr),*)) => { call!($recorder, $lib, None, $name($($argument),*)) };
    ($recorder:expr, $lib:expr, $at:expr, $name:ident($($argument:expr),*)) => {
        $recorder.make(stringify!($name), $at, &$lib.$name, |function| {
            // SAFETY: see the macro's comment.
            unsafe { function($($argument),*) }
        })
    };
}

/// The same for a call that writes one value, which may be zero before: the value, if it succeeded.
macro_rules! value {
    ($recorder:expr, $lib:expr, $at:expr, $name:ident($($argument:expr),*)) => {{
        // SAFETY: NVML's structures and numbers may be zero.
        let mut value = unsafe { zeroed() };
        call!($recorder, $lib, $at, $name($($argument,)* &raw mut value)).then_some(value)
    }};
}

/// Opens the library, makes all calls, and closes it.
///
/// # Errors
/// If the library cannot be opened or initialised, with its return code.
pub(crate) fn read(library: &Path) -> anyhow::Result<Report> {
    let began = Instant::now();
    let mut recorder = Recorder { calls: Vec::new(), gpu: None };
    let lib = open(library, &mut recorder)?;
    let mut report = Report { open_ms: ms(began), ..Report::default() };
    report.driver_version = recorder.text("nvmlSystemGetDriverVersion", |recorder, name, buffer, length| {
        // SAFETY: the buffer has room for `length` bytes and outlives the call.
        recorder.make(name, None, &lib.nvmlSystemGetDriverVersion, |f| unsafe { f(buffer, length) })
    });
    let cuda = value!(recorder, lib, None, nvmlSystemGetCudaDriverVersion_v2());
    report.cuda_version = cuda.and_then(|version| u32::try_from(version).ok());
    let count: c_uint = value!(recorder, lib, None, nvmlDeviceGetCount_v2()).unwrap_or(0);
    let mut handles: Vec<(u32, nvmlDevice_t)> = Vec::new();
    for index in 0..count.min(GPUS_MAX) {
        recorder.gpu = Some(index);
        let began = Instant::now();
        let handle = value!(recorder, lib, None, nvmlDeviceGetHandleByIndex_v2(index));
        report.first_handle_ms.get_or_insert(ms(began));
        if let Some(handle) = handle {
            report.gpus.push(read_gpu(&mut recorder, &lib, index, handle));
            handles.push((index, handle));
        }
    }
    for (at, (index, handle)) in handles.iter().enumerate() {
        recorder.gpu = Some(*index);
        for (other, second) in handles.iter().skip(at + 1) {
            let _: Option<c_uint> =
                value!(recorder, lib, Some(*other), nvmlDeviceGetTopologyCommonAncestor(*handle, *second));
        }
    }
    recorder.gpu = None;
    call!(recorder, lib, nvmlShutdown());
    report.calls = recorder.calls;
    Ok(report)
}

/// Opens and initialises the library.
fn open(library: &Path, recorder: &mut Recorder) -> anyhow::Result<NvmlLib> {
    // SAFETY: the library is NVML or its fake, whose initialisers have no preconditions.
    let lib = unsafe { NvmlLib::new(library) }.map_err(|error| anyhow!("{}: {error}", library.display()))?;
    if !call!(recorder, lib, nvmlInit_v2()) {
        let code = recorder.calls.first().map(|call| call.code.clone()).unwrap_or_default();
        return Err(anyhow!("nvmlInit_v2 of {} answered {code}", library.display()));
    }
    Ok(lib)
}

/// Holds every GPU open until standard input ends, so that other processes need not start it: without a client, and
/// without persistence mode, the driver stops a GPU.
///
/// # Errors
/// If the library cannot be opened or initialised.
pub(crate) fn hold(library: &Path) -> anyhow::Result<()> {
    let mut recorder = Recorder { calls: Vec::new(), gpu: None };
    let lib = open(library, &mut recorder)?;
    let count: c_uint = value!(recorder, lib, None, nvmlDeviceGetCount_v2()).unwrap_or(0);
    for index in 0..count.min(GPUS_MAX) {
        let _ = value!(recorder, lib, None, nvmlDeviceGetHandleByIndex_v2(index));
    }
    println!("{count}");
    std::io::read_to_string(std::io::stdin())?;
    Ok(())
}

fn ms(began: Instant) -> f64 {
    began.elapsed().as_secs_f64() * 1000.0
}

/// All calls on one GPU.
fn read_gpu(r: &mut Recorder, lib: &NvmlLib, index: u32, device: nvmlDevice_t) -> Gpu {
    let mut gpu = Gpu { index, ..Gpu::default() };
    gpu.uuid = device_text(r, "nvmlDeviceGetUUID", &lib.nvmlDeviceGetUUID, device);
    gpu.name = device_text(r, "nvmlDeviceGetName", &lib.nvmlDeviceGetName, device);
    gpu.has_serial = device_text(r, "nvmlDeviceGetSerial", &lib.nvmlDeviceGetSerial, device).is_some();
    gpu.minor = value!(r, lib, None, nvmlDeviceGetMinorNumber(device));
    if let Some(pci) = value!(r, lib, None, nvmlDeviceGetPciInfo_v3(device)) {
        gpu.bus = Some(text_of(&pci.busId));
        (gpu.pci_device_id, gpu.pci_subsystem_id) = (pci.pciDeviceId, pci.pciSubSystemId);
    }
    gpu.memory = memory(r, lib, device);
    let (mut major, mut minor) = (0, 0);
    if call!(r, lib, nvmlDeviceGetCudaComputeCapability(device, &raw mut major, &raw mut minor)) {
        gpu.capability = u32::try_from(major).ok().zip(u32::try_from(minor).ok());
    }
    gpu.brand = value!(r, lib, None, nvmlDeviceGetBrand(device));
    gpu.architecture = value!(r, lib, None, nvmlDeviceGetArchitecture(device));
    let mut affinity = [0; 2];
    if call!(r, lib, nvmlDeviceGetMemoryAffinity(device, 2, affinity.as_mut_ptr(), 0)) {
        let words = affinity.iter().zip([0, 64]);
        gpu.numa_node =
            words.filter(|(word, _)| **word != 0).map(|(word, base)| base + word.trailing_zeros()).next();
    }
    read_mig(r, lib, device, &mut gpu);
    read_health(r, lib, device, &mut gpu);
    for link in 0..LINKS_MAX {
        let active: Option<c_uint> = value!(r, lib, Some(link), nvmlDeviceGetNvLinkState(device, link));
        gpu.links.push(active.map(|active| read_link(r, lib, device, link, active == 1)));
    }
    for list in [
        ("nvmlDeviceGetComputeRunningProcesses_v3", &lib.nvmlDeviceGetComputeRunningProcesses_v3),
        ("nvmlDeviceGetMPSComputeRunningProcesses_v3", &lib.nvmlDeviceGetMPSComputeRunningProcesses_v3),
        ("nvmlDeviceGetGraphicsRunningProcesses_v3", &lib.nvmlDeviceGetGraphicsRunningProcesses_v3),
    ] {
        let mut count = c_uint::try_from(PROCESSES_MAX).unwrap_or_default();
        // SAFETY: the structures are plain numbers, which may be zero.
        let mut processes = vec![unsafe { zeroed() }; PROCESSES_MAX];
        // SAFETY: there is room for `count` processes, and all outlives the call.
        r.make(list.0, None, list.1, |f| unsafe { f(device, &raw mut count, processes.as_mut_ptr()) });
    }
    gpu.temperature = value!(r, lib, None, nvmlDeviceGetTemperature(device, 0));
    gpu.power_mw = value!(r, lib, None, nvmlDeviceGetPowerUsage(device));
    let _ = value!(r, lib, None, nvmlDeviceGetGpuFabricInfo(device));
    read_settings(r, lib, device, &mut gpu);
    gpu
}

/// A text of a device.
fn device_text<E>(
    r: &mut Recorder,
    name: &str,
    symbol: &Result<unsafe extern "C" fn(nvmlDevice_t, *mut c_char, c_uint) -> c_uint, E>,
    device: nvmlDevice_t,
) -> Option<String> {
    r.text(name, |r, name, buffer, length| {
        // SAFETY: the handle comes from NVML; the buffer has room for `length` bytes and outlives the call.
        r.make(name, None, symbol, |f| unsafe { f(device, buffer, length) })
    })
}

/// Both forms of the memory's size, as Berth asks for them.
fn memory(r: &mut Recorder, lib: &NvmlLib, device: nvmlDevice_t) -> Option<(u64, u64, u64)> {
    // SAFETY: the structure is plain numbers, which may be zero.
    let mut second: nvmlMemory_v2_t = unsafe { zeroed() };
    second.version = c_uint::try_from(size_of::<nvmlMemory_v2_t>() | 2 << 24).unwrap_or_default();
    let second = call!(r, lib, nvmlDeviceGetMemoryInfo_v2(device, &raw mut second)).then_some((
        second.total,
        second.used,
        second.reserved,
    ));
    let first = value!(r, lib, None, nvmlDeviceGetMemoryInfo(device));
    second.or(first.map(|memory| (memory.total, memory.used, 0)))
}

fn read_mig(r: &mut Recorder, lib: &NvmlLib, device: nvmlDevice_t, gpu: &mut Gpu) {
    let (mut current, mut pending) = (0, 0);
    let mode = call!(r, lib, nvmlDeviceGetMigMode(device, &raw mut current, &raw mut pending));
    let most: Option<c_uint> = value!(r, lib, None, nvmlDeviceGetMaxMigDeviceCount(device));
    gpu.mig = mode.then_some((current, pending, most.unwrap_or(0)));
    for profile in 0..=PROFILE_LAST {
        let found = value!(r, lib, Some(profile), nvmlDeviceGetGpuInstanceProfileInfo(device, profile));
        gpu.profiles.extend(found.map(|_| profile));
    }
    if !mode || current == 0 {
        return;
    }
    for at in 0..most.unwrap_or(0) {
        let instance = value!(r, lib, Some(at), nvmlDeviceGetMigDeviceHandleByIndex(device, at));
        gpu.instances.extend(instance.and_then(|instance| read_instance(r, lib, at, instance)));
    }
}

fn read_instance(r: &mut Recorder, lib: &NvmlLib, at: u32, device: nvmlDevice_t) -> Option<Instance> {
    let attributes = value!(r, lib, Some(at), nvmlDeviceGetAttributes_v2(device))?;
    Some(Instance {
        uuid: device_text(r, "nvmlDeviceGetUUID", &lib.nvmlDeviceGetUUID, device)?,
        name: device_text(r, "nvmlDeviceGetName", &lib.nvmlDeviceGetName, device)?,
        gpu_instance: value!(r, lib, Some(at), nvmlDeviceGetGpuInstanceId(device))?,
        compute_instance: value!(r, lib, Some(at), nvmlDeviceGetComputeInstanceId(device))?,
        slices: attributes.gpuInstanceSliceCount,
        memory_mib: attributes.memorySizeMB,
    })
}

fn read_health(r: &mut Recorder, lib: &NvmlLib, device: nvmlDevice_t, gpu: &mut Gpu) {
    // NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC.
    gpu.uncorrected = value!(r, lib, None, nvmlDeviceGetTotalEccErrors(device, 1, 0));
    let (mut correctable, mut uncorrectable, mut pending, mut failed) = (0, 0, 0, 0);
    let rows = call!(
        r,
        lib,
        nvmlDeviceGetRemappedRows(
            device,
            &raw mut correctable,
            &raw mut uncorrectable,
            &raw mut pending,
            &raw mut failed
        )
    );
    gpu.rows = rows.then_some((correctable, uncorrectable, pending, failed));
    // SAFETY: the structure is plain numbers, which may be zero.
    let mut field: nvml_wrapper_sys::bindings::nvmlFieldValue_t = unsafe { zeroed() };
    field.fieldId = RECOVERY_ACTION;
    let answered = call!(r, lib, nvmlDeviceGetFieldValues(device, 1, &raw mut field));
    // SAFETY: every bit pattern is a number.
    gpu.recovery_action = (answered && field.nvmlReturn == 0).then_some(unsafe { field.value.uiVal });
    gpu.events = value!(r, lib, None, nvmlDeviceGetSupportedEventTypes(device));
}

fn read_link(r: &mut Recorder, lib: &NvmlLib, device: nvmlDevice_t, link: u32, active: bool) -> Link {
    let remote_type = value!(r, lib, Some(link), nvmlDeviceGetNvLinkRemoteDeviceType(device, link));
    let remote = value!(r, lib, Some(link), nvmlDeviceGetNvLinkRemotePciInfo_v2(device, link));
    Link { active, remote_type, remote_bus: remote.map(|pci| text_of(&pci.busId)) }
}

fn read_settings(r: &mut Recorder, lib: &NvmlLib, device: nvmlDevice_t, gpu: &mut Gpu) {
    let (mut current, mut pending) = (0, 0);
    let ecc = call!(r, lib, nvmlDeviceGetEccMode(device, &raw mut current, &raw mut pending));
    gpu.settings = Settings {
        persistence: value!(r, lib, None, nvmlDeviceGetPersistenceMode(device)),
        compute_mode: value!(r, lib, None, nvmlDeviceGetComputeMode(device)),
        mig: gpu.mig.map(|(current, pending, _)| (current, pending)),
        ecc: ecc.then_some((current, pending)),
        power_limit_mw: value!(r, lib, None, nvmlDeviceGetPowerManagementLimit(device)),
        // NVML_CLOCK_GRAPHICS, NVML_CLOCK_MEM.
        clocks_mhz: (
            value!(r, lib, Some(0), nvmlDeviceGetApplicationsClock(device, 0)),
            value!(r, lib, Some(2), nvmlDeviceGetApplicationsClock(device, 2)),
        ),
    };
}

/// Which settings differ: one text for each GPU that is not as it was.
pub(crate) fn changed_settings(before: &[Gpu], after: &[Gpu]) -> Vec<String> {
    let mut changes = Vec::new();
    for old in before {
        match after.iter().find(|gpu| gpu.uuid == old.uuid) {
            Some(new) if new.settings == old.settings => {}
            Some(new) => {
                changes.push(format!("GPU {}: {:?}, before: {:?}", old.index, new.settings, old.settings));
            }
            None => changes.push(format!("GPU {} is no longer there", old.index)),
        }
    }
    changes
}

/// Reads the library in a process of its own.
///
/// # Errors
/// If it cannot be read.
pub(crate) fn read_in_child(library: &Path) -> anyhow::Result<Report> {
    let output = crate::child::output("nvml", &[library.as_os_str()])?;
    serde_json::from_str(&output).context("the process that reads NVML printed no report")
}

#[cfg(test)]
mod tests {
    use super::*;
    use fake_nvml::{Fault, Installed, State};

    #[test]
    fn each_call_is_recorded_with_its_code() {
        let mut state = State::h100(2);
        let uuid = state.gpus[1].uuid.clone();
        state.faults.push(Fault::fail("nvmlDeviceGetRemappedRows", Code::NotSupported).of_gpu(&uuid));
        let folder = tempfile::tempdir().unwrap();
        let installed = Installed::new(folder.path(), &state).unwrap();
        let report = read(installed.library()).unwrap();
        assert_eq!(report.gpus.len(), 2);
        assert_eq!(report.gpus[1].uuid.as_deref(), Some(uuid.as_str()));
        assert_eq!(report.gpus[1].rows, None);
        assert!(report.gpus[0].rows.is_some() && report.gpus[0].memory.is_some());
        let codes = |name: &str| {
            let calls = report.calls.iter().filter(|call| call.name == name);
            calls.map(|call| call.code.as_str()).collect::<Vec<_>>()
        };
        assert_eq!(codes("nvmlDeviceGetRemappedRows"), ["SUCCESS", "NOT_SUPPORTED"]);
        assert_eq!(codes("nvmlShutdown"), ["SUCCESS"]);
        let asked = codes("nvmlDeviceGetGpuInstanceProfileInfo").len();
        assert_eq!(asked, 2 * (usize::try_from(PROFILE_LAST).unwrap() + 1));
    }

    #[test]
    fn a_library_that_does_not_start_is_an_error_with_its_code() {
        let mut state = State::h100(1);
        state.faults.push(Fault::fail("nvmlInit_v2", Code::LibRmVersionMismatch));
        let folder = tempfile::tempdir().unwrap();
        let installed = Installed::new(folder.path(), &state).unwrap();
        let error = read(installed.library()).unwrap_err().to_string();
        assert!(error.contains("LIB_RM_VERSION_MISMATCH"), "{error}");
    }

    #[test]
    fn a_changed_setting_is_named() {
        let gpu = |persistence| Gpu {
            uuid: Some("GPU-a".into()),
            settings: Settings { persistence: Some(persistence), ..Settings::default() },
            ..Gpu::default()
        };
        assert!(changed_settings(&[gpu(0)], &[gpu(0)]).is_empty());
        let changes = changed_settings(&[gpu(0)], &[gpu(1)]);
        assert!(changes.len() == 1 && changes[0].contains("persistence: Some(1)"), "{changes:?}");
        assert_eq!(changed_settings(&[gpu(0)], &[]).len(), 1);
    }
}
