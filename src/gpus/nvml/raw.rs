//! NVML calls that nvml-wrapper 0.13 lacks, or gets wrong. The only unsafe code of this crate.
#![allow(unsafe_code, reason = "calls through the raw symbol table")]

use super::fence::Steps;
use nvml_wrapper::error::{NvmlError, nvml_sym, nvml_try};
use nvml_wrapper::struct_wrappers::device::ProcessInfo;
use nvml_wrapper::{Device, Nvml};
use std::ffi::{CStr, c_char, c_void};

/// The registered event types: double bit ECC errors, critical XIDs and changes of the recovery action.
const EVENT_BITS: u64 = EVENT_DOUBLE_BIT_ECC | EVENT_XID | EVENT_RECOVERY_ACTION;
/// `nvmlEventTypeDoubleBitEccError`.
pub(super) const EVENT_DOUBLE_BIT_ECC: u64 = 0x2;
/// `nvmlEventTypeXidCriticalError`.
pub(super) const EVENT_XID: u64 = 0x8;
/// `nvmlEventTypeGpuRecoveryAction`, of drivers since 565.
pub(super) const EVENT_RECOVERY_ACTION: u64 = 0x8000;

/// `NVML_NVLINK_DEVICE_TYPE_GPU`.
pub(super) const REMOTE_GPU: u32 = 0;
/// `NVML_NVLINK_DEVICE_TYPE_SWITCH`.
pub(super) const REMOTE_SWITCH: u32 = 2;

/// First capacity of the buffer for processes: one call suffices for most GPUs.
const PROCESSES_CAPACITY: usize = 64;
/// Largest capacity of the buffer for processes: eight for each of 128 MPS clients.
const PROCESSES_CAPACITY_MAX: usize = 1024;

/// NVML's lists of processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ProcessList {
    /// `nvmlDeviceGetComputeRunningProcesses_v3`.
    Compute,
    /// `nvmlDeviceGetMPSComputeRunningProcesses_v3`.
    Mps,
    /// `nvmlDeviceGetGraphicsRunningProcesses_v3`.
    Graphics,
}

/// Reads one of the lists of processes. Not by nvml-wrapper: it first reads their number and fails if there are more at
/// its second call, so that a healthy GPU would have an error whenever a job starts.
pub(super) fn processes(device: &Device, list: ProcessList) -> Result<Vec<ProcessInfo>, NvmlError> {
    let symbols = device.nvml().lib();
    let call = match list {
        ProcessList::Compute => symbols.nvmlDeviceGetComputeRunningProcesses_v3.as_ref(),
        ProcessList::Mps => symbols.nvmlDeviceGetMPSComputeRunningProcesses_v3.as_ref(),
        ProcessList::Graphics => symbols.nvmlDeviceGetGraphicsRunningProcesses_v3.as_ref(),
    };
    let call = nvml_sym(call)?;
    let mut capacity = PROCESSES_CAPACITY;
    loop {
        let mut count = u32::try_from(capacity).unwrap_or(u32::MAX);
        // SAFETY: `nvmlProcessInfo_t` is plain numbers, which may be zero.
        let mut infos = vec![unsafe { std::mem::zeroed() }; capacity];
        // SAFETY: the handle is valid while `device` lives; there is room for `count` entries, and both
        // outlive the call.
        let answer = nvml_try(unsafe { call(device.handle(), &raw mut count, infos.as_mut_ptr()) });
        match answer {
            // `count` now has the present number; a moment later there may be more.
            Err(NvmlError::InsufficientSize(_)) if capacity < PROCESSES_CAPACITY_MAX => {
                let wanted = usize::try_from(count).unwrap_or(usize::MAX).saturating_mul(2);
                capacity = wanted.clamp(capacity * 2, PROCESSES_CAPACITY_MAX);
            }
            // Too many: treated like a GPU that lists no processes.
            Err(NvmlError::InsufficientSize(_)) => return Err(NvmlError::NoData),
            Err(error) => return Err(error),
            Ok(()) => {
                infos.truncate(usize::try_from(count).unwrap_or(usize::MAX));
                return Ok(infos.into_iter().map(ProcessInfo::from).collect());
            }
        }
    }
}

/// Total and used memory, bytes: from `nvmlDeviceGetMemoryInfo_v2`, or from the first form, which drivers before 510
/// have alone, and which counts the driver's own memory as used. nvml-wrapper wraps only the second one.
pub(super) fn memory(device: &Device, steps: &Steps) -> Result<(u64, u64), NvmlError> {
    match device.memory_info() {
        Err(NvmlError::FailedToLoadSymbol(_) | NvmlError::FunctionNotFound | NvmlError::NotSupported) => {}
        read => return read.map(|memory| (memory.total, memory.used)),
    }
    let call = nvml_sym(device.nvml().lib().nvmlDeviceGetMemoryInfo.as_ref())?;
    steps.at("nvmlDeviceGetMemoryInfo");
    // SAFETY: the structure is plain numbers, which may be zero; the handle is valid while `device` lives, and the
    // structure outlives the call.
    let memory = unsafe {
        let mut memory = std::mem::zeroed();
        nvml_try(call(device.handle(), &raw mut memory)).map(|()| memory)
    }?;
    Ok((memory.total, memory.used))
}

/// `nvmlSetMemoryLimits_v1_t`; bytes.
#[repr(C)]
struct NewMemoryLimits {
    cgroup: *const c_char,
    soft: u64,
    hard: u64,
}

/// `nvmlGetMemoryLimits_v1_t`; bytes.
#[repr(C)]
struct MemoryLimits {
    cgroup: *const c_char,
    soft: u64,
    hard: u64,
    used: u64,
}

/// Sets the memory, bytes, that the processes of a cgroup may allocate on a GPU; `nvmlDeviceSetMemoryLimits_v1`, of
/// drivers since 615, which nvml-wrapper does not know. `cgroup` is the path of the cgroup's folder. The soft
/// limit is 0, since a guarantee would also change the limits of the cgroup's ancestors.
pub(super) fn set_memory_limit(device: &Device, cgroup: &CStr, hard: u64) -> Result<(), NvmlError> {
    type Call = unsafe extern "C" fn(*mut c_void, *mut NewMemoryLimits) -> u32;
    let library = &device.nvml().lib().__library;
    let mut limits = NewMemoryLimits { cgroup: cgroup.as_ptr(), soft: 0, hard };
    // SAFETY: the symbol has this type (`nvml.h` of API 13.4); the handle is valid while `device` lives, and the
    // structure and the path outlive the call.
    unsafe {
        let call = library.get::<Call>(b"nvmlDeviceSetMemoryLimits_v1\0").map_err(no_symbol)?;
        nvml_try(call(device.handle().cast(), &raw mut limits))
    }
}

/// The memory, bytes, that the processes of a cgroup may allocate on a GPU, and what they have allocated. Without a limit
/// NVML answers `NOT_FOUND` or `NOT_SUPPORTED`, by the kernel's controller that enforces it.
pub(super) fn memory_limit(device: &Device, cgroup: &CStr) -> Result<(u64, u64), NvmlError> {
    type Call = unsafe extern "C" fn(*mut c_void, *mut MemoryLimits) -> u32;
    let library = &device.nvml().lib().__library;
    let mut limits = MemoryLimits { cgroup: cgroup.as_ptr(), soft: 0, hard: 0, used: 0 };
    // SAFETY: as above.
    unsafe {
        let call = library.get::<Call>(b"nvmlDeviceGetMemoryLimits_v1\0").map_err(no_symbol)?;
        nvml_try(call(device.handle().cast(), &raw mut limits))?;
    }
    Ok((limits.hard, limits.used))
}

fn no_symbol(error: impl std::fmt::Display) -> NvmlError {
    NvmlError::FailedToLoadSymbol(error.to_string())
}

/// State of the remapping of a GPU's memory rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RemappedRows {
    /// A row is remapped at the next reset.
    pub(super) pending: bool,
    /// A row could not be remapped.
    pub(super) failed: bool,
}

/// nvml-wrapper does not wrap `nvmlDeviceGetRemappedRows`.
pub(super) fn remapped_rows(device: &Device) -> Result<RemappedRows, NvmlError> {
    let call = nvml_sym(device.nvml().lib().nvmlDeviceGetRemappedRows.as_ref())?;
    let (mut correctable, mut uncorrectable, mut pending, mut failed) = (0, 0, 0, 0);
    // SAFETY: the handle is valid while `device` lives, and the four numbers outlive the call.
    nvml_try(unsafe {
        call(device.handle(), &raw mut correctable, &raw mut uncorrectable, &raw mut pending, &raw mut failed)
    })?;
    Ok(RemappedRows { pending: pending != 0, failed: failed != 0 })
}

/// The state of a GPU's registration with its NVLink fabric (`nvmlGpuFabricInfo_t`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct FabricRegistration {
    /// `NVML_GPU_FABRIC_STATE_*`.
    pub(super) state: u8,
    /// The error of a completed registration as an `nvmlReturn_t`; 0: none.
    pub(super) status: u32,
}

impl FabricRegistration {
    /// `NVML_GPU_FABRIC_STATE_NOT_SUPPORTED`: the GPU has no fabric.
    pub(super) const NOT_SUPPORTED: u8 = 0;
    /// `NVML_GPU_FABRIC_STATE_COMPLETED`.
    pub(super) const COMPLETED: u8 = 3;
}

/// nvml-wrapper does not wrap `nvmlDeviceGetGpuFabricInfo`, the first form, which every driver with a fabric has.
pub(super) fn fabric_registration(device: &Device) -> Result<FabricRegistration, NvmlError> {
    let call = nvml_sym(device.nvml().lib().nvmlDeviceGetGpuFabricInfo.as_ref())?;
    // SAFETY: the structure is plain numbers, which may be zero; the handle is valid while `device` lives, and the
    // structure outlives the call.
    let info = unsafe {
        let mut info = std::mem::zeroed();
        nvml_try(call(device.handle(), &raw mut info)).map(|()| info)
    }?;
    Ok(FabricRegistration { state: info.state, status: info.status })
}

/// The type of the device at the other end of a link, as `nvmlIntNvLinkDeviceType_t`. nvml-wrapper's
/// `remote_device_type` always returns `Unknown`, because it drops the value that NVML wrote.
pub(super) fn remote_device_type(device: &Device, link: u32) -> Result<u32, NvmlError> {
    let symbols = device.nvml().lib();
    let call = nvml_sym(symbols.nvmlDeviceGetNvLinkRemoteDeviceType.as_ref())?;
    let mut kind = 0;
    // SAFETY: the handle is valid while `device` lives, and `kind` outlives the call.
    nvml_try(unsafe { call(device.handle(), link, &raw mut kind) })?;
    Ok(kind)
}

/// GPU instance id and compute instance id of a MIG device, which nvml-wrapper does not read.
pub(super) fn instance_ids(device: &Device, steps: &Steps) -> Result<(u32, u32), NvmlError> {
    let symbols = device.nvml().lib();
    let of_gpu = nvml_sym(symbols.nvmlDeviceGetGpuInstanceId.as_ref())?;
    let of_compute = nvml_sym(symbols.nvmlDeviceGetComputeInstanceId.as_ref())?;
    let (mut gpu_instance, mut compute_instance) = (0, 0);
    // SAFETY: the handle is valid while `device` lives, and both numbers outlive the calls.
    unsafe {
        nvml_try(of_gpu(device.handle(), &raw mut gpu_instance))?;
        steps.at("nvmlDeviceGetComputeInstanceId");
        nvml_try(of_compute(device.handle(), &raw mut compute_instance))?;
    }
    Ok((gpu_instance, compute_instance))
}

/// The profile (`NVML_GPU_INSTANCE_PROFILE_*`) of a GPU instance; `None` for one that no header so far has. NVML
/// identifies the profile of an instance by an id, which has to be compared with the id of each profile.
pub(super) fn gpu_instance_profile(
    gpu: &Device,
    gpu_instance: u32,
    steps: &Steps,
) -> Result<Option<u32>, NvmlError> {
    /// Above `NVML_GPU_INSTANCE_PROFILE_COUNT` of every header so far (17).
    const PROFILES_MAX: u32 = 32;
    let symbols = gpu.nvml().lib();
    let by_id = nvml_sym(symbols.nvmlDeviceGetGpuInstanceById.as_ref())?;
    let info_of = nvml_sym(symbols.nvmlGpuInstanceGetInfo.as_ref())?;
    let profile_at = nvml_sym(symbols.nvmlDeviceGetGpuInstanceProfileInfo.as_ref())?;
    let mut instance = std::ptr::null_mut();
    // SAFETY: the GPU's handle is valid while `gpu` lives, that of the instance comes from the first
    // call, and what is written outlives the calls; both structures are plain numbers and a pointer.
    let profile_id = unsafe {
        nvml_try(by_id(gpu.handle(), gpu_instance, &raw mut instance))?;
        let mut info = std::mem::zeroed();
        steps.at("nvmlGpuInstanceGetInfo");
        nvml_try(info_of(instance, &raw mut info))?;
        info.profileId
    };
    steps.at("nvmlDeviceGetGpuInstanceProfileInfo");
    for index in 0..PROFILES_MAX {
        // SAFETY: as above.
        let (answer, profile) = unsafe {
            let mut profile = std::mem::zeroed();
            let answer = profile_at(gpu.handle(), index, &raw mut profile);
            (nvml_try(answer), profile)
        };
        match answer {
            Ok(()) if profile.id == profile_id => return Ok(Some(index)),
            // The model or the library does not have this profile.
            Ok(()) | Err(NvmlError::NotSupported | NvmlError::InvalidArg) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(None)
}

/// The device handle as a number, by which an [`Event`] identifies its GPU.
pub(super) fn handle(device: &Device) -> usize {
    // SAFETY: the handle is only converted to a number, for comparison.
    unsafe { device.handle() as usize }
}

/// An event set that does not borrow the `Nvml`, so that it can move between threads.
///
/// Not nvml-wrapper's: that one frees itself when the registration of one GPU fails, and omits the MIG instance of an
/// event.
pub(super) struct EventSet(usize);

/// An event, with NVML's numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Event {
    /// The GPU, as a number from [`handle`].
    pub(super) device: usize,
    /// One bit of `nvmlEventType*`.
    pub(super) kind: u64,
    /// The XID.
    pub(super) data: u64,
    /// The GPU instance, if the event belongs to one.
    pub(super) gpu_instance: Option<u32>,
    /// The compute instance, if the event belongs to one.
    pub(super) compute_instance: Option<u32>,
}

impl EventSet {
    /// An empty set.
    pub(super) fn new(nvml: &Nvml) -> Result<Self, NvmlError> {
        let call = nvml_sym(nvml.lib().nvmlEventSetCreate.as_ref())?;
        let mut set = std::ptr::null_mut();
        // SAFETY: `set` outlives the call.
        nvml_try(unsafe { call(&raw mut set) })?;
        Ok(Self(set as usize))
    }

    /// Registers a GPU for the wanted events that it supports.
    pub(super) fn register(&self, device: &Device) -> Result<(), NvmlError> {
        let symbols = device.nvml().lib();
        let supported = nvml_sym(symbols.nvmlDeviceGetSupportedEventTypes.as_ref())?;
        let register = nvml_sym(symbols.nvmlDeviceRegisterEvents.as_ref())?;
        let mut bits = 0;
        // SAFETY: the device's handle is valid while `device` lives, `bits` outlives the call, and
        // the set's handle is valid until `free`, which consumes the set.
        unsafe {
            nvml_try(supported(device.handle(), &raw mut bits))?;
            nvml_try(register(device.handle(), bits & EVENT_BITS, self.0 as *mut _))
        }
    }

    /// The next event, waiting at most `wait_ms`; `None` if there was none.
    pub(super) fn wait(&self, nvml: &Nvml, wait_ms: u32) -> Result<Option<Event>, NvmlError> {
        const NO_INSTANCE: u32 = u32::MAX;
        let call = nvml_sym(nvml.lib().nvmlEventSetWait_v2.as_ref())?;
        // SAFETY: the structure is plain numbers and a pointer, all of which may be zero; it
        // outlives the call; the set's handle is valid until `free`.
        let (answer, data) = unsafe {
            let mut data = std::mem::zeroed();
            let answer = call(self.0 as *mut _, &raw mut data, wait_ms);
            (nvml_try(answer), data)
        };
        match answer {
            Ok(()) => Ok(Some(Event {
                device: data.device as usize,
                kind: data.eventType,
                data: data.eventData,
                gpu_instance: Some(data.gpuInstanceId).filter(|id| *id != NO_INSTANCE),
                compute_instance: Some(data.computeInstanceId).filter(|id| *id != NO_INSTANCE),
            })),
            Err(NvmlError::Timeout) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Frees the set. Does nothing if the library lacks the function: then it could not create a set either.
    pub(super) fn free(self, nvml: &Nvml) {
        if let Ok(call) = nvml_sym(nvml.lib().nvmlEventSetFree.as_ref()) {
            // SAFETY: the handle came from `nvmlEventSetCreate` and is not used again: `self` ends.
            let _ = unsafe { call(self.0 as *mut _) };
        }
    }
}
