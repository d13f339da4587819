//! What C programs get wrong: NULL, small buffers, foreign handles, calls before `nvmlInit`.

use std::ffi::{CStr, c_char};
use std::ptr;

use fake_nvml::{Code, Fault, Installed, State};
use nvml_wrapper_sys::bindings::*;

fn library(state: &State) -> (NvmlLib, Installed, tempfile::TempDir) {
    let folder = tempfile::tempdir().unwrap();
    let installed = Installed::new(folder.path(), state).unwrap();
    // SAFETY: the library is ours; loading it runs no code of its own.
    let library = unsafe { NvmlLib::new(installed.library()) }.unwrap();
    (library, installed, folder)
}

fn is(answer: nvmlReturn_t, code: Code) {
    assert_eq!(Code::from_number(answer), Some(code));
}

#[test]
fn before_init_and_after_shutdown_every_call_fails() {
    let (nvml, _installed, _folder) = library(&State::t4(1));
    let mut count = 0;
    // SAFETY: every pointer is to a local of the type that the header asks for, or NULL, which is the question.
    unsafe {
        is(nvml.nvmlDeviceGetCount_v2(&mut count), Code::Uninitialized);
        is(nvml.nvmlDeviceGetIndex(ptr::null_mut(), &mut count), Code::Uninitialized);
        is(nvml.nvmlShutdown(), Code::Uninitialized);
        assert_eq!(nvml.nvmlInit_v2(), 0);
        assert_eq!(nvml.nvmlInitWithFlags(0), 0);
        assert_eq!(nvml.nvmlShutdown(), 0);
        assert_eq!(nvml.nvmlDeviceGetCount_v2(&mut count), 0, "one user is left");
        assert_eq!(nvml.nvmlShutdown(), 0);
        is(nvml.nvmlDeviceGetCount_v2(&mut count), Code::Uninitialized);
        assert_eq!(CStr::from_ptr(nvml.nvmlErrorString(15)).to_str(), Ok("GPU is lost"), "needs no init");
    }
}

#[test]
fn null_short_and_foreign_pointers_are_refused() {
    let (nvml, _installed, _folder) = library(&State::h100(1));
    let mut device = ptr::null_mut();
    let mut text: [c_char; 96] = [0; 96];
    let mut number = 0;
    // SAFETY: as above; wild handles are the question, and the library follows none.
    unsafe {
        assert_eq!(nvml.nvmlInit_v2(), 0);
        is(nvml.nvmlDeviceGetCount_v2(ptr::null_mut()), Code::InvalidArgument);
        is(nvml.nvmlDeviceGetHandleByIndex_v2(0, ptr::null_mut()), Code::InvalidArgument);
        is(nvml.nvmlDeviceGetHandleByUUID(ptr::null(), &mut device), Code::InvalidArgument);
        is(nvml.nvmlDeviceGetHandleByUUID(c"GPU-x".as_ptr(), &mut device), Code::NotFound);
        assert_eq!(nvml.nvmlDeviceGetHandleByIndex_v2(0, &mut device), 0);
        is(nvml.nvmlDeviceGetUUID(device, ptr::null_mut(), 96), Code::InvalidArgument);
        is(nvml.nvmlDeviceGetUUID(device, text.as_mut_ptr(), 40), Code::InsufficientSize);
        assert_eq!(nvml.nvmlDeviceGetUUID(device, text.as_mut_ptr(), 41), 0);
        is(nvml.nvmlDeviceGetPciInfo_v3(device, ptr::null_mut()), Code::InvalidArgument);
        is(nvml.nvmlDeviceGetEccMode(device, &mut number, ptr::null_mut()), Code::InvalidArgument);
        is(nvml.nvmlDeviceGetFieldValues(device, 1, ptr::null_mut()), Code::InvalidArgument);
        is(nvml.nvmlDeviceGetFieldValues(device, -1, ptr::null_mut()), Code::InvalidArgument);
        is(nvml.nvmlEventSetWait_v2(ptr::null_mut(), ptr::null_mut(), 0), Code::InvalidArgument);
        for wild in [1_usize, 0x4e56_0001, usize::MAX] {
            is(nvml.nvmlDeviceGetIndex(wild as nvmlDevice_t, &mut number), Code::InvalidArgument);
            is(nvml.nvmlEventSetFree(wild as nvmlEventSet_t), Code::InvalidArgument);
            is(
                nvml.nvmlGpuInstanceGetInfo(wild as nvmlGpuInstance_t, ptr::null_mut()),
                Code::InvalidArgument,
            );
        }
    }
}

#[test]
fn lists_return_the_size_that_they_need() {
    let mut state = State::h100(1);
    state.gpus[0].run(1, 10);
    state.gpus[0].run(2, 20);
    let (nvml, _installed, _folder) = library(&state);
    let mut device = ptr::null_mut();
    // SAFETY: as above, and no more elements are announced than the array has.
    unsafe {
        assert_eq!(nvml.nvmlInit_v2(), 0);
        assert_eq!(nvml.nvmlDeviceGetHandleByIndex_v2(0, &mut device), 0);
        let mut count = 0;
        is(
            nvml.nvmlDeviceGetComputeRunningProcesses_v3(device, &mut count, ptr::null_mut()),
            Code::InsufficientSize,
        );
        assert_eq!(count, 2);
        let mut processes: [nvmlProcessInfo_t; 4] = std::mem::zeroed();
        count = 4;
        assert_eq!(
            nvml.nvmlDeviceGetComputeRunningProcesses_v3(device, &mut count, processes.as_mut_ptr()),
            0
        );
        assert_eq!(count, 2);
        assert_eq!((processes[1].pid, processes[1].usedGpuMemory), (2, 20 << 20));
        assert_eq!(processes[2].pid, 0, "not touched");
    }
}

#[test]
fn a_versioned_structure_must_have_its_version() {
    let (nvml, _installed, _folder) = library(&State::h100(1));
    let mut device = ptr::null_mut();
    // SAFETY: as above.
    unsafe {
        assert_eq!(nvml.nvmlInit_v2(), 0);
        assert_eq!(nvml.nvmlDeviceGetHandleByIndex_v2(0, &mut device), 0);
        let mut memory: nvmlMemory_v2_t = std::mem::zeroed();
        is(nvml.nvmlDeviceGetMemoryInfo_v2(device, &mut memory), Code::ArgumentVersionMismatch);
        memory.version = u32::try_from(size_of::<nvmlMemory_v2_t>()).unwrap() | (2 << 24);
        assert_eq!(nvml.nvmlDeviceGetMemoryInfo_v2(device, &mut memory), 0);
        assert_eq!(memory.total, 81_559 << 20);
    }
}

/// What go-nvlib does to name a MIG device, which nvml-wrapper cannot do.
#[test]
fn gpu_and_compute_instances_lead_to_their_profiles() {
    let mut state = State::h100(1);
    state.split(0, &[3, 2]);
    let (nvml, installed, _folder) = library(&state);
    let (mut device, mut gpu_instance, mut compute_instance) =
        (ptr::null_mut(), ptr::null_mut(), ptr::null_mut());
    // SAFETY: as above.
    unsafe {
        assert_eq!(nvml.nvmlInit_v2(), 0);
        assert_eq!(nvml.nvmlDeviceGetHandleByIndex_v2(0, &mut device), 0);
        assert_eq!(nvml.nvmlDeviceGetGpuInstanceById(device, 8, &mut gpu_instance), 0);
        let mut info: nvmlGpuInstanceInfo_t = std::mem::zeroed();
        assert_eq!(nvml.nvmlGpuInstanceGetInfo(gpu_instance, &mut info), 0);
        assert_eq!((info.id, info.placement.start, info.placement.size), (8, 3, 2));
        assert_eq!(info.device, device);
        let mut profile: nvmlGpuInstanceProfileInfo_t = std::mem::zeroed();
        assert_eq!(nvml.nvmlDeviceGetGpuInstanceProfileInfo(device, 1, &mut profile), 0);
        assert_eq!((profile.id, profile.sliceCount), (info.profileId, 2));
        is(nvml.nvmlDeviceGetGpuInstanceProfileInfo(device, 6, &mut profile), Code::NotSupported);
        is(nvml.nvmlDeviceGetGpuInstanceProfileInfo(device, 99, &mut profile), Code::InvalidArgument);
        assert_eq!(nvml.nvmlGpuInstanceGetComputeInstanceById(gpu_instance, 0, &mut compute_instance), 0);
        let mut compute: nvmlComputeInstanceInfo_t = std::mem::zeroed();
        assert_eq!(nvml.nvmlComputeInstanceGetInfo_v2(compute_instance, &mut compute), 0);
        assert_eq!(compute.gpuInstance, gpu_instance);
        let mut compute_profile: nvmlComputeInstanceProfileInfo_t = std::mem::zeroed();
        assert_eq!(
            nvml.nvmlGpuInstanceGetComputeInstanceProfileInfo(gpu_instance, 1, 0, &mut compute_profile),
            0
        );
        assert_eq!(compute_profile.id, compute.profileId);
        is(
            nvml.nvmlGpuInstanceGetInfo(compute_instance as nvmlGpuInstance_t, &mut info),
            Code::InvalidArgument,
        );
        installed
            .change(|state| {
                let uuid = state.gpus[0].uuid.clone();
                let fault = Fault::fail("nvmlGpuInstanceGetInfo", Code::NoPermission);
                state.faults.push(fault.of_gpu(uuid));
            })
            .unwrap();
        is(nvml.nvmlGpuInstanceGetInfo(gpu_instance, &mut info), Code::NoPermission);
    }
}
