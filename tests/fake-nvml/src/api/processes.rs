//! Processes on a GPU or a MIG device.

use std::ffi::c_uint;

use crate::api::bytes;
use crate::api::layout::{Process, ProcessV1};
use crate::gpu;
use crate::runtime::call::{self, Device};
use crate::runtime::handle::Handle;
use crate::runtime::pointer::{Out, OutArray};

/// "None", in an instance id.
pub(crate) const NO_INSTANCE: c_uint = c_uint::MAX;

/// The processes of a GPU, or of the one MIG device.
fn listed<'a>(device: &Device<'a>, mps: bool) -> impl Iterator<Item = &'a gpu::Process> {
    let instance =
        device.mig.map(|(_, instance)| (Some(instance.gpu_instance), Some(instance.compute_instance)));
    let processes = device.gpu.processes.iter().filter(move |process| process.mps == mps);
    processes.filter(move |process| {
        instance.is_none_or(|ids| ids == (process.gpu_instance, process.compute_instance))
    })
}

fn full(device: &Device, mps: bool) -> Vec<Process> {
    let process = |process: &gpu::Process| Process {
        pid: process.pid,
        used_bytes: bytes(process.memory_mib),
        gpu_instance: process.gpu_instance.unwrap_or(NO_INSTANCE),
        compute_instance: process.compute_instance.unwrap_or(NO_INSTANCE),
    };
    listed(device, mps).map(process).collect()
}

fn short(device: &Device, mps: bool) -> Vec<ProcessV1> {
    listed(device, mps)
        .map(|process| ProcessV1 { pid: process.pid, used_bytes: bytes(process.memory_mib) })
        .collect()
}

macro_rules! lists {
    ($($name:ident: $form:ty = $read:expr;)*) => {
        $(#[unsafe(no_mangle)]
        extern "C" fn $name(device: Handle, count: Out<c_uint>, array: OutArray<$form>) -> c_uint {
            call::device(stringify!($name), device, |device| array.list(count, &$read(device)))
        })*
    };
}

lists! {
    nvmlDeviceGetComputeRunningProcesses: ProcessV1 = |device| short(device, false);
    nvmlDeviceGetComputeRunningProcesses_v2: Process = |device| full(device, false);
    nvmlDeviceGetComputeRunningProcesses_v3: Process = |device| full(device, false);
    nvmlDeviceGetMPSComputeRunningProcesses: ProcessV1 = |device| short(device, true);
    nvmlDeviceGetMPSComputeRunningProcesses_v2: Process = |device| full(device, true);
    nvmlDeviceGetMPSComputeRunningProcesses_v3: Process = |device| full(device, true);
    // Nothing draws on these GPUs.
    nvmlDeviceGetGraphicsRunningProcesses: ProcessV1 = |_: &Device| [];
    nvmlDeviceGetGraphicsRunningProcesses_v2: Process = |_: &Device| [];
    nvmlDeviceGetGraphicsRunningProcesses_v3: Process = |_: &Device| [];
}
