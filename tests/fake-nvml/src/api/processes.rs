//! Processes on a GPU or a MIG device.

use std::ffi::{c_uint, c_ulonglong};
use std::time::{SystemTime, UNIX_EPOCH};

use crate::api::bytes;
use crate::api::layout::{Process, ProcessUtilization, ProcessV1};
use crate::code::Code;
use crate::gpu;
use crate::runtime::call::{self, Device};
use crate::runtime::handle::Handle;
use crate::runtime::pointer::{Out, OutArray};

/// "None", in an instance id.
pub(crate) const NO_INSTANCE: c_uint = c_uint::MAX;

/// `NVML_VALUE_NOT_AVAILABLE`, in a 64 bit field.
const NOT_AVAILABLE: c_ulonglong = c_ulonglong::MAX;

/// NVML's three lists.
#[derive(Clone, Copy, PartialEq, Eq)]
enum List {
    Compute,
    Mps,
    Graphics,
}

impl List {
    fn of(process: &gpu::Process) -> Self {
        match (process.mps, process.graphics) {
            (true, _) => Self::Mps,
            (false, true) => Self::Graphics,
            (false, false) => Self::Compute,
        }
    }
}

/// The processes of a GPU, or of the one MIG device.
fn listed<'a>(device: &Device<'a>, list: List) -> impl Iterator<Item = &'a gpu::Process> {
    let instance =
        device.mig.map(|(_, instance)| (Some(instance.gpu_instance), Some(instance.compute_instance)));
    let processes = device.gpu.processes.iter().filter(move |process| List::of(process) == list);
    processes.filter(move |process| {
        instance.is_none_or(|ids| ids == (process.gpu_instance, process.compute_instance))
    })
}

fn used_bytes(process: &gpu::Process) -> c_ulonglong {
    if process.memory_hidden { NOT_AVAILABLE } else { bytes(process.memory_mib) }
}

fn full(device: &Device, list: List) -> Vec<Process> {
    let process = |process: &gpu::Process| Process {
        pid: process.pid,
        used_bytes: used_bytes(process),
        gpu_instance: process.gpu_instance.unwrap_or(NO_INSTANCE),
        compute_instance: process.compute_instance.unwrap_or(NO_INSTANCE),
    };
    listed(device, list).map(process).collect()
}

fn short(device: &Device, list: List) -> Vec<ProcessV1> {
    listed(device, list)
        .map(|process| ProcessV1 { pid: process.pid, used_bytes: used_bytes(process) })
        .collect()
}

macro_rules! lists {
    ($($name:ident: $form:ty = $read:expr;)*) => {
        $(#[unsafe(no_mangle)]
        extern "C" fn $name(device: Handle, count: Out<c_uint>, array: OutArray<$form>) -> c_uint {
            call::device(stringify!($name), device, |device| {
                device.privileged()?;
                array.list(count, &$read(device))
            })
        })*
    };
}

lists! {
    nvmlDeviceGetComputeRunningProcesses: ProcessV1 = |device| short(device, List::Compute);
    nvmlDeviceGetComputeRunningProcesses_v2: Process = |device| full(device, List::Compute);
    nvmlDeviceGetComputeRunningProcesses_v3: Process = |device| full(device, List::Compute);
    nvmlDeviceGetMPSComputeRunningProcesses: ProcessV1 = |device| short(device, List::Mps);
    nvmlDeviceGetMPSComputeRunningProcesses_v2: Process = |device| full(device, List::Mps);
    nvmlDeviceGetMPSComputeRunningProcesses_v3: Process = |device| full(device, List::Mps);
    nvmlDeviceGetGraphicsRunningProcesses: ProcessV1 = |device| short(device, List::Graphics);
    nvmlDeviceGetGraphicsRunningProcesses_v2: Process = |device| full(device, List::Graphics);
    nvmlDeviceGetGraphicsRunningProcesses_v3: Process = |device| full(device, List::Graphics);
}

/// Samples of now. `NOT_FOUND` if no process has one, or if the last one that the caller has seen is as new; not
/// supported while MIG is on, as in NVML.
#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetProcessUtilization(
    device: Handle,
    array: OutArray<ProcessUtilization>,
    count: Out<c_uint>,
    last_seen_us: c_ulonglong,
) -> c_uint {
    call::gpu("nvmlDeviceGetProcessUtilization", device, |device| {
        if device.gpu.mig.as_ref().is_some_and(|mig| mig.enabled) {
            return Err(Code::NotSupported);
        }
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let timestamp_us = c_ulonglong::try_from(now.as_micros()).map_err(|_| Code::Unknown)?;
        let sample = |process: &gpu::Process| {
            let sm = process.utilization?;
            Some(ProcessUtilization { pid: process.pid, timestamp_us, sm, memory: 0, encoder: 0, decoder: 0 })
        };
        let samples: Vec<_> = device.gpu.processes.iter().filter_map(sample).collect();
        if samples.is_empty() || last_seen_us >= timestamp_us {
            return Err(Code::NotFound);
        }
        array.list(count, &samples)
    })
}
