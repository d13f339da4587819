//! Structures of `nvml.h`, field by field.

use std::ffi::{c_char, c_double, c_int, c_longlong, c_uint, c_ulonglong, c_ushort};

use crate::code::{Answer, Code};
use crate::runtime::handle::Handle;
use crate::runtime::pointer::Out;

/// A structure whose first field says which version the caller means: its size and a number in the highest byte.
pub(crate) trait Versioned: Copy {
    /// The number of the version.
    const NUMBER: u32;

    /// What the caller left in the field.
    fn version(&self) -> c_uint;

    /// `NVML_STRUCT_VERSION`.
    fn expected() -> c_uint {
        u32::try_from(size_of::<Self>()).unwrap_or(0) | (Self::NUMBER << 24)
    }

    /// The caller's structure, if its version is this one.
    fn from_caller(out: Out<Self>) -> Answer<Self> {
        let asked = out.get()?;
        if asked.version() == Self::expected() { Ok(asked) } else { Err(Code::ArgumentVersionMismatch) }
    }
}

macro_rules! versioned {
    ($($name:ident = $number:literal),*) => {
        $(impl Versioned for $name {
            const NUMBER: u32 = $number;
            fn version(&self) -> c_uint {
                self.version
            }
        })*
    };
}

versioned!(
    MemoryV2 = 2,
    PciInfoExt = 1,
    AddressingMode = 1,
    Temperature = 1,
    GpuInstanceProfileV2 = 2,
    ComputeInstanceProfileV2 = 2
);

/// `nvmlPciInfo_t`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct PciInfo {
    pub(crate) bus_id_legacy: [c_char; 16],
    pub(crate) domain: c_uint,
    pub(crate) bus: c_uint,
    pub(crate) device: c_uint,
    pub(crate) pci_device_id: c_uint,
    pub(crate) pci_subsystem_id: c_uint,
    pub(crate) bus_id: [c_char; 32],
}

/// `nvmlPciInfoExt_v1_t`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct PciInfoExt {
    pub(crate) version: c_uint,
    pub(crate) domain: c_uint,
    pub(crate) bus: c_uint,
    pub(crate) device: c_uint,
    pub(crate) pci_device_id: c_uint,
    pub(crate) pci_subsystem_id: c_uint,
    pub(crate) base_class: c_uint,
    pub(crate) sub_class: c_uint,
    pub(crate) bus_id: [c_char; 32],
}

/// `nvmlMemory_t`, in bytes.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct Memory {
    pub(crate) total: c_ulonglong,
    pub(crate) free: c_ulonglong,
    pub(crate) used: c_ulonglong,
}

/// `nvmlMemory_v2_t`, in bytes.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct MemoryV2 {
    pub(crate) version: c_uint,
    pub(crate) total: c_ulonglong,
    pub(crate) reserved: c_ulonglong,
    pub(crate) free: c_ulonglong,
    pub(crate) used: c_ulonglong,
}

/// `nvmlUtilization_t`, in percent.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct Utilization {
    pub(crate) gpu: c_uint,
    pub(crate) memory: c_uint,
}

/// `nvmlTemperature_v1_t`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct Temperature {
    pub(crate) version: c_uint,
    pub(crate) sensor: c_uint,
    pub(crate) celsius: c_int,
}

/// `nvmlGpuFabricInfo_t`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct FabricInfo {
    pub(crate) cluster_uuid: [u8; 16],
    pub(crate) status: c_uint,
    pub(crate) clique_id: c_uint,
    pub(crate) state: u8,
}

/// `nvmlDeviceAddressingMode_v1_t`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct AddressingMode {
    pub(crate) version: c_uint,
    pub(crate) value: c_uint,
}

/// `nvmlRowRemapperHistogramValues_t`: memory banks by how many spare rows they have left.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct RowHistogram {
    pub(crate) max: c_uint,
    pub(crate) high: c_uint,
    pub(crate) partial: c_uint,
    pub(crate) low: c_uint,
    pub(crate) none: c_uint,
}

/// `nvmlProcessInfo_v1_t`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct ProcessV1 {
    pub(crate) pid: c_uint,
    pub(crate) used_bytes: c_ulonglong,
}

/// `nvmlProcessInfo_t`, which the calls `_v2` and `_v3` share.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct Process {
    pub(crate) pid: c_uint,
    pub(crate) used_bytes: c_ulonglong,
    pub(crate) gpu_instance: c_uint,
    pub(crate) compute_instance: c_uint,
}

/// `nvmlProcessUtilizationSample_t`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct ProcessUtilization {
    pub(crate) pid: c_uint,
    pub(crate) timestamp_us: c_ulonglong,
    pub(crate) sm: c_uint,
    pub(crate) memory: c_uint,
    pub(crate) encoder: c_uint,
    pub(crate) decoder: c_uint,
}

/// `nvmlEventData_t`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct EventData {
    pub(crate) device: Handle,
    pub(crate) kind: c_ulonglong,
    pub(crate) data: c_ulonglong,
    pub(crate) gpu_instance: c_uint,
    pub(crate) compute_instance: c_uint,
}

/// `nvmlEventData_t` as the first `nvmlEventSetWait` knew it.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct EventDataV1 {
    pub(crate) device: Handle,
    pub(crate) kind: c_ulonglong,
    pub(crate) data: c_ulonglong,
}

/// `nvmlFieldValue_t`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct FieldValue {
    pub(crate) field: c_uint,
    pub(crate) scope: c_uint,
    pub(crate) timestamp_us: c_longlong,
    pub(crate) latency_us: c_longlong,
    pub(crate) value_type: c_uint,
    pub(crate) answer: c_uint,
    pub(crate) value: Value,
}

/// `nvmlValue_t`. Only the fields that are written; the largest fix its size.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) union Value {
    pub(crate) float: c_double,
    pub(crate) unsigned: c_uint,
    pub(crate) unsigned_long: c_ulonglong,
    pub(crate) short: c_ushort,
}

/// `nvmlDeviceAttributes_t`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct Attributes {
    pub(crate) multiprocessors: c_uint,
    pub(crate) copy_engines: c_uint,
    pub(crate) decoders: c_uint,
    pub(crate) encoders: c_uint,
    pub(crate) jpeg: c_uint,
    pub(crate) ofa: c_uint,
    pub(crate) gpu_instance_slices: c_uint,
    pub(crate) compute_instance_slices: c_uint,
    pub(crate) memory_mib: c_ulonglong,
}

/// `nvmlGpuInstancePlacement_t` and `nvmlComputeInstancePlacement_t`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct Placement {
    pub(crate) start: c_uint,
    pub(crate) size: c_uint,
}

/// `nvmlGpuInstanceInfo_t`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct GpuInstanceInfo {
    pub(crate) device: Handle,
    pub(crate) id: c_uint,
    pub(crate) profile_id: c_uint,
    pub(crate) placement: Placement,
}

/// `nvmlComputeInstanceInfo_t`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct ComputeInstanceInfo {
    pub(crate) device: Handle,
    pub(crate) gpu_instance: Handle,
    pub(crate) id: c_uint,
    pub(crate) profile_id: c_uint,
    pub(crate) placement: Placement,
}

/// `nvmlGpuInstanceProfileInfo_t`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct GpuInstanceProfile {
    pub(crate) id: c_uint,
    pub(crate) peer_to_peer: c_uint,
    pub(crate) slices: c_uint,
    pub(crate) instances: c_uint,
    pub(crate) multiprocessors: c_uint,
    pub(crate) copy_engines: c_uint,
    pub(crate) decoders: c_uint,
    pub(crate) encoders: c_uint,
    pub(crate) jpeg: c_uint,
    pub(crate) ofa: c_uint,
    pub(crate) memory_mib: c_ulonglong,
}

/// `nvmlGpuInstanceProfileInfo_v2_t`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct GpuInstanceProfileV2 {
    pub(crate) version: c_uint,
    pub(crate) id: c_uint,
    pub(crate) peer_to_peer: c_uint,
    pub(crate) slices: c_uint,
    pub(crate) instances: c_uint,
    pub(crate) multiprocessors: c_uint,
    pub(crate) copy_engines: c_uint,
    pub(crate) decoders: c_uint,
    pub(crate) encoders: c_uint,
    pub(crate) jpeg: c_uint,
    pub(crate) ofa: c_uint,
    pub(crate) memory_mib: c_ulonglong,
    pub(crate) name: [c_char; 96],
}

/// `nvmlComputeInstanceProfileInfo_t`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct ComputeInstanceProfile {
    pub(crate) id: c_uint,
    pub(crate) slices: c_uint,
    pub(crate) instances: c_uint,
    pub(crate) multiprocessors: c_uint,
    pub(crate) copy_engines: c_uint,
    pub(crate) decoders: c_uint,
    pub(crate) encoders: c_uint,
    pub(crate) jpeg: c_uint,
    pub(crate) ofa: c_uint,
}

/// `nvmlComputeInstanceProfileInfo_v2_t`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct ComputeInstanceProfileV2 {
    pub(crate) version: c_uint,
    pub(crate) id: c_uint,
    pub(crate) slices: c_uint,
    pub(crate) instances: c_uint,
    pub(crate) multiprocessors: c_uint,
    pub(crate) copy_engines: c_uint,
    pub(crate) decoders: c_uint,
    pub(crate) encoders: c_uint,
    pub(crate) jpeg: c_uint,
    pub(crate) ofa: c_uint,
    pub(crate) name: [c_char; 96],
}

#[cfg(test)]
mod tests {
    use super::*;
    use nvml_wrapper_sys::bindings as sys;

    /// Two descriptions made independently of each other, ours and bindgen's, agree.
    #[test]
    fn sizes_are_those_of_the_header() {
        macro_rules! same_size {
            ($($ours:ty = $theirs:ty),* $(,)?) => {
                $(assert_eq!(size_of::<$ours>(), size_of::<$theirs>(), stringify!($ours));
                  assert_eq!(align_of::<$ours>(), align_of::<$theirs>(), stringify!($ours));)*
            };
        }
        same_size!(
            PciInfo = sys::nvmlPciInfo_t,
            PciInfoExt = sys::nvmlPciInfoExt_v1_t,
            Memory = sys::nvmlMemory_t,
            MemoryV2 = sys::nvmlMemory_v2_t,
            Utilization = sys::nvmlUtilization_t,
            Temperature = sys::nvmlTemperature_v1_t,
            FabricInfo = sys::nvmlGpuFabricInfo_t,
            AddressingMode = sys::nvmlDeviceAddressingMode_v1_t,
            RowHistogram = sys::nvmlRowRemapperHistogramValues_t,
            ProcessV1 = sys::nvmlProcessInfo_v1_t,
            Process = sys::nvmlProcessInfo_t,
            EventData = sys::nvmlEventData_t,
            FieldValue = sys::nvmlFieldValue_t,
            Value = sys::nvmlValue_t,
            Attributes = sys::nvmlDeviceAttributes_t,
            Placement = sys::nvmlGpuInstancePlacement_t,
            GpuInstanceInfo = sys::nvmlGpuInstanceInfo_t,
            ComputeInstanceInfo = sys::nvmlComputeInstanceInfo_t,
            GpuInstanceProfile = sys::nvmlGpuInstanceProfileInfo_t,
            GpuInstanceProfileV2 = sys::nvmlGpuInstanceProfileInfo_v2_t,
            ComputeInstanceProfile = sys::nvmlComputeInstanceProfileInfo_t,
            ComputeInstanceProfileV2 = sys::nvmlComputeInstanceProfileInfo_v2_t,
        );
    }
}
