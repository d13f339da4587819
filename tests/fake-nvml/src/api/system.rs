//! Initialising, versions, error texts, process names.

use std::ffi::{c_char, c_int, c_uint};

use crate::code::{Answer, Code, SUCCESS_TEXT};
use crate::runtime::call;
use crate::runtime::pointer::{Out, OutText};
use crate::state::State;

#[unsafe(no_mangle)]
extern "C" fn nvmlInit() -> c_uint {
    call::init("nvmlInit")
}

#[unsafe(no_mangle)]
extern "C" fn nvmlInit_v2() -> c_uint {
    call::init("nvmlInit_v2")
}

/// The flags (no GPUs, no attaching) change nothing here: nothing is attached anyway.
#[unsafe(no_mangle)]
extern "C" fn nvmlInitWithFlags(_flags: c_uint) -> c_uint {
    call::init("nvmlInitWithFlags")
}

#[unsafe(no_mangle)]
extern "C" fn nvmlShutdown() -> c_uint {
    call::shutdown("nvmlShutdown")
}

/// Needs no initialised library, as in NVML.
#[unsafe(no_mangle)]
extern "C" fn nvmlErrorString(result: c_uint) -> *const c_char {
    match result {
        0 => SUCCESS_TEXT.as_ptr(),
        number => Code::from_number(number).unwrap_or(Code::Unknown).text().as_ptr(),
    }
}

#[unsafe(no_mangle)]
extern "C" fn nvmlSystemGetDriverVersion(version: OutText, length: c_uint) -> c_uint {
    call::system("nvmlSystemGetDriverVersion", |state| version.put(&state.driver_version, length))
}

/// NVML's own version is that of CUDA and the driver, joined.
#[unsafe(no_mangle)]
extern "C" fn nvmlSystemGetNVMLVersion(version: OutText, length: c_uint) -> c_uint {
    call::system("nvmlSystemGetNVMLVersion", |state| {
        version.put(&format!("{}.{}", state.cuda_version / 1000, state.driver_version), length)
    })
}

fn cuda_version(state: &State, version: Out<c_int>) -> Answer {
    version.put(c_int::try_from(state.cuda_version).map_err(|_| Code::Unknown)?)
}

#[unsafe(no_mangle)]
extern "C" fn nvmlSystemGetCudaDriverVersion(version: Out<c_int>) -> c_uint {
    call::system("nvmlSystemGetCudaDriverVersion", |state| cuda_version(state, version))
}

#[unsafe(no_mangle)]
extern "C" fn nvmlSystemGetCudaDriverVersion_v2(version: Out<c_int>) -> c_uint {
    call::system("nvmlSystemGetCudaDriverVersion_v2", |state| cuda_version(state, version))
}

#[unsafe(no_mangle)]
extern "C" fn nvmlSystemGetProcessName(pid: c_uint, name: OutText, length: c_uint) -> c_uint {
    call::system("nvmlSystemGetProcessName", |state| {
        let known = state.gpus.iter().flat_map(|gpu| &gpu.processes).find(|process| process.pid == pid);
        let text = known.and_then(|process| process.name.as_deref()).ok_or(Code::NotFound)?;
        name.put_cut(text, length)
    })
}

/// There are no S-class units.
#[unsafe(no_mangle)]
extern "C" fn nvmlUnitGetCount(count: Out<c_uint>) -> c_uint {
    call::system("nvmlUnitGetCount", |_| count.put(0))
}

/// No GPU is hidden by the driver.
#[unsafe(no_mangle)]
extern "C" fn nvmlGetExcludedDeviceCount(count: Out<c_uint>) -> c_uint {
    call::system("nvmlGetExcludedDeviceCount", |_| count.put(0))
}
