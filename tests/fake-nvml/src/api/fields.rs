//! Readings by field number.

use std::ffi::{c_int, c_uint};
use std::time::{SystemTime, UNIX_EPOCH};

use crate::api::flag;
use crate::api::layout::{FieldValue, Value};
use crate::api::readings::remapped_rows;
use crate::code::{Answer, Code, number};
use crate::gpu::Ecc;
use crate::runtime::call::{self, Device};
use crate::runtime::handle::Handle;
use crate::runtime::pointer::OutArray;

/// `NVML_VALUE_TYPE_UNSIGNED_INT`.
const UNSIGNED: c_uint = 1;
/// `NVML_VALUE_TYPE_UNSIGNED_LONG_LONG`.
const UNSIGNED_LONG: c_uint = 3;

/// One reading: its type in NVML, and its value.
fn read(device: &Device, field: c_uint) -> Answer<(c_uint, u64)> {
    let ecc = || device.gpu.ecc.as_ref().ok_or(Code::NotSupported);
    let errors = |count: fn(&Ecc) -> u64| Ok((UNSIGNED_LONG, count(ecc()?)));
    let rows = || remapped_rows(device);
    let unsigned = |value: u32| Ok((UNSIGNED, u64::from(value)));
    match field {
        // NVML_FI_DEV_ECC_*
        1 => unsigned(flag(ecc()?.enabled)),
        3 => errors(|ecc| ecc.corrected_volatile),
        4 => errors(|ecc| ecc.uncorrected_volatile),
        5 => errors(|ecc| ecc.corrected_aggregate),
        6 => errors(|ecc| ecc.uncorrected_aggregate),
        // NVML_FI_DEV_MEMORY_TEMP; memory runs a little warmer than the core.
        82 => unsigned(device.gpu.temperature_c + 5),
        // NVML_FI_DEV_NVLINK_LINK_COUNT
        91 => unsigned(u32::try_from(device.gpu.nvlinks.len()).map_err(|_| Code::Unknown)?),
        // NVML_FI_DEV_REMAPPED_*
        142 => unsigned(rows()?.correctable),
        143 => unsigned(rows()?.uncorrectable),
        144 => unsigned(flag(rows()?.pending)),
        145 => unsigned(flag(rows()?.failed)),
        // NVML_FI_DEV_POWER_AVERAGE, _INSTANT, _CURRENT_LIMIT
        185 | 186 => unsigned(device.gpu.power_mw),
        190 => unsigned(device.gpu.power_limit_mw),
        // NVML_FI_DEV_GET_GPU_RECOVERY_ACTION
        230 => unsigned(device.gpu.recovery_action as u32),
        _ => Err(Code::NotSupported),
    }
}

/// Each field has an answer of its own; the call succeeds if one field does.
#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetFieldValues(device: Handle, count: c_int, values: OutArray<FieldValue>) -> c_uint {
    call::gpu("nvmlDeviceGetFieldValues", device, |device| {
        let count = usize::try_from(count).map_err(|_| Code::InvalidArgument)?;
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_err(|_| Code::Unknown)?;
        let mut answers = Vec::new();
        for at in 0..count {
            let slot = values.at(at)?;
            let asked = slot.get()?;
            let reading = read(device, asked.field);
            let (value_type, value) = reading.unwrap_or((UNSIGNED, 0));
            answers.push(reading.map(drop));
            slot.put(FieldValue {
                timestamp_us: i64::try_from(now.as_micros()).map_err(|_| Code::Unknown)?,
                latency_us: 0,
                value_type,
                answer: number(reading.map(drop)),
                value: Value { unsigned_long: value },
                ..asked
            })?;
        }
        // No field at all is nothing that failed.
        let failed = answers.iter().find_map(|answer| answer.err());
        match failed {
            Some(code) if answers.iter().all(Result::is_err) => Err(code),
            _ => Ok(()),
        }
    })
}
