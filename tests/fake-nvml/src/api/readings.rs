//! What a GPU measures: memory, load, heat, power, errors.

use std::ffi::{c_int, c_uint, c_ulonglong};

use crate::api::layout::{Memory, MemoryV2, RowHistogram, Temperature, Utilization, Versioned as _};
use crate::api::{bytes, flag};
use crate::code::{Answer, Code};
use crate::gpu::{Ecc, RemappedRows};
use crate::runtime::call::{self, Device};
use crate::runtime::handle::Handle;
use crate::runtime::pointer::Out;

/// Total, reserved and used MiB of the GPU or the MIG device.
fn memory(device: &Device) -> Answer<(u64, u64, u64)> {
    device.privileged()?;
    let total = device.gpu.memory_total_mib.ok_or(Code::NotSupported)?;
    Ok(match device.mig {
        None => (total, device.gpu.memory_reserved_mib, device.gpu.memory_used_mib),
        Some((_, instance)) => (instance.memory_mib, 0, instance.memory_used_mib),
    })
}

/// In the first form, what the driver keeps for itself counts as used.
#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetMemoryInfo(device: Handle, out: Out<Memory>) -> c_uint {
    call::device("nvmlDeviceGetMemoryInfo", device, |device| {
        let (total, reserved, used) = memory(device)?;
        let used = reserved + used;
        out.put(Memory { total: bytes(total), free: bytes(total.saturating_sub(used)), used: bytes(used) })
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetMemoryInfo_v2(device: Handle, out: Out<MemoryV2>) -> c_uint {
    call::device("nvmlDeviceGetMemoryInfo_v2", device, |device| {
        let version = MemoryV2::from_caller(out)?.version;
        let (total, reserved, used) = memory(device)?;
        let free = total.saturating_sub(reserved + used);
        out.put(MemoryV2 {
            version,
            total: bytes(total),
            reserved: bytes(reserved),
            free: bytes(free),
            used: bytes(used),
        })
    })
}

/// Not supported while MIG is on, as in NVML.
#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetUtilizationRates(device: Handle, out: Out<Utilization>) -> c_uint {
    call::gpu("nvmlDeviceGetUtilizationRates", device, |device| {
        if device.gpu.mig.as_ref().is_some_and(|mig| mig.enabled) {
            return Err(Code::NotSupported);
        }
        out.put(Utilization { gpu: device.gpu.utilization_gpu, memory: device.gpu.utilization_memory })
    })
}

/// `NVML_TEMPERATURE_GPU`, the one sensor.
const SENSOR_GPU: c_uint = 0;

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetTemperature(device: Handle, sensor: c_uint, celsius: Out<c_uint>) -> c_uint {
    call::gpu("nvmlDeviceGetTemperature", device, |device| match sensor {
        SENSOR_GPU => celsius.put(device.gpu.temperature_c),
        _ => Err(Code::InvalidArgument),
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetTemperatureV(device: Handle, out: Out<Temperature>) -> c_uint {
    call::gpu("nvmlDeviceGetTemperatureV", device, |device| {
        let asked = Temperature::from_caller(out)?;
        if asked.sensor != SENSOR_GPU {
            return Err(Code::InvalidArgument);
        }
        let celsius = c_int::try_from(device.gpu.temperature_c).map_err(|_| Code::Unknown)?;
        out.put(Temperature { celsius, ..asked })
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetPowerUsage(device: Handle, milliwatts: Out<c_uint>) -> c_uint {
    call::gpu("nvmlDeviceGetPowerUsage", device, |device| milliwatts.put(device.gpu.power_mw))
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetPowerManagementLimit(device: Handle, milliwatts: Out<c_uint>) -> c_uint {
    call::gpu("nvmlDeviceGetPowerManagementLimit", device, |device| milliwatts.put(device.gpu.power_limit_mw))
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetEnforcedPowerLimit(device: Handle, milliwatts: Out<c_uint>) -> c_uint {
    call::gpu("nvmlDeviceGetEnforcedPowerLimit", device, |device| milliwatts.put(device.gpu.power_limit_mw))
}

/// `NVML_PSTATE_0`, the fastest.
#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetPerformanceState(device: Handle, state: Out<c_uint>) -> c_uint {
    call::gpu("nvmlDeviceGetPerformanceState", device, |_| state.put(0))
}

fn ecc<'a>(device: &Device<'a>) -> Answer<&'a Ecc> {
    device.gpu.ecc.as_ref().ok_or(Code::NotSupported)
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetEccMode(device: Handle, current: Out<c_uint>, pending: Out<c_uint>) -> c_uint {
    call::gpu("nvmlDeviceGetEccMode", device, |device| {
        let enabled = flag(ecc(device)?.enabled);
        pending.checked()?;
        current.put(enabled)?;
        pending.put(enabled)
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetTotalEccErrors(
    device: Handle,
    kind: c_uint,
    counter: c_uint,
    count: Out<c_ulonglong>,
) -> c_uint {
    call::gpu("nvmlDeviceGetTotalEccErrors", device, |device| {
        let ecc = ecc(device)?;
        if !ecc.enabled {
            return Err(Code::NotSupported);
        }
        count.put(match (kind, counter) {
            (0, 0) => ecc.corrected_volatile,
            (0, 1) => ecc.corrected_aggregate,
            (1, 0) => ecc.uncorrected_volatile,
            (1, 1) => ecc.uncorrected_aggregate,
            _ => return Err(Code::InvalidArgument),
        })
    })
}

/// Not supported before Ampere and while MIG is on, as in NVML.
pub(crate) fn remapped_rows<'a>(device: &Device<'a>) -> Answer<&'a RemappedRows> {
    if device.gpu.mig.as_ref().is_some_and(|mig| mig.enabled && !mig.instances.is_empty()) {
        return Err(Code::NotSupported);
    }
    device.gpu.remapped_rows.as_ref().ok_or(Code::NotSupported)
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetRemappedRows(
    device: Handle,
    correctable: Out<c_uint>,
    uncorrectable: Out<c_uint>,
    pending: Out<c_uint>,
    failed: Out<c_uint>,
) -> c_uint {
    call::gpu("nvmlDeviceGetRemappedRows", device, |device| {
        let rows = remapped_rows(device)?;
        for out in [correctable, uncorrectable, pending, failed] {
            out.checked()?;
        }
        correctable.put(rows.correctable)?;
        uncorrectable.put(rows.uncorrectable)?;
        pending.put(flag(rows.pending))?;
        failed.put(flag(rows.failed))
    })
}

/// Not supported on models with row remapping.
#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetRetiredPagesPendingStatus(device: Handle, pending: Out<c_uint>) -> c_uint {
    call::gpu("nvmlDeviceGetRetiredPagesPendingStatus", device, |device| {
        pending.put(flag(device.gpu.retired_pages_pending.ok_or(Code::NotSupported)?))
    })
}

/// Banks of a board's memory; the exact number differs between models, and no caller depends on it.
const BANKS: c_uint = 2560;

/// Every remapped row is taken from a bank of its own.
#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetRowRemapperHistogram(device: Handle, out: Out<RowHistogram>) -> c_uint {
    call::gpu("nvmlDeviceGetRowRemapperHistogram", device, |device| {
        let rows = remapped_rows(device)?;
        let none = flag(rows.failed);
        let high = (rows.correctable + rows.uncorrectable).min(BANKS - none);
        out.put(RowHistogram { max: BANKS - high - none, high, partial: 0, low: 0, none })
    })
}
