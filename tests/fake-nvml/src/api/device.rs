//! What a GPU is: names, numbers, versions.

use std::ffi::{c_int, c_uint};

use crate::api::flag;
use crate::api::layout::{AddressingMode, PciInfo, PciInfoExt, Versioned as _};
use crate::code::{Answer, Code};
use crate::gpu::pci_address;
use crate::runtime::call;
use crate::runtime::handle::Handle;
use crate::runtime::pointer::{Out, OutText, field};

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetUUID(device: Handle, uuid: OutText, length: c_uint) -> c_uint {
    call::device("nvmlDeviceGetUUID", device, |device| {
        uuid.put(device.mig.map_or(&device.gpu.uuid, |(_, instance)| &instance.uuid), length)
    })
}

/// Of a MIG device without what its profile has beyond slices and memory: a caller that needs it reads the profile.
#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetName(device: Handle, name: OutText, length: c_uint) -> c_uint {
    call::device("nvmlDeviceGetName", device, |device| match device.mig {
        None => name.put(&device.gpu.name, length),
        Some((_, instance)) => name.put(&format!("{} MIG {}", device.gpu.name, instance.named().0), length),
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetIndex(device: Handle, index: Out<c_uint>) -> c_uint {
    call::device("nvmlDeviceGetIndex", device, |device| {
        index.put(device.mig.map_or(device.index, |(at, _)| at))
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetMinorNumber(device: Handle, minor: Out<c_uint>) -> c_uint {
    call::gpu("nvmlDeviceGetMinorNumber", device, |device| {
        minor.put(device.gpu.minor.unwrap_or(device.index))
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetSerial(device: Handle, serial: OutText, length: c_uint) -> c_uint {
    call::gpu("nvmlDeviceGetSerial", device, |device| {
        serial.put(device.gpu.serial.as_deref().ok_or(Code::NotSupported)?, length)
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetBrand(device: Handle, brand: Out<c_uint>) -> c_uint {
    call::gpu("nvmlDeviceGetBrand", device, |device| brand.put(device.gpu.brand))
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetArchitecture(device: Handle, architecture: Out<c_uint>) -> c_uint {
    call::gpu("nvmlDeviceGetArchitecture", device, |device| architecture.put(device.gpu.architecture))
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetCudaComputeCapability(
    device: Handle,
    major: Out<c_int>,
    minor: Out<c_int>,
) -> c_uint {
    call::gpu("nvmlDeviceGetCudaComputeCapability", device, |device| {
        let number = |number| c_int::try_from(number).map_err(|_| Code::Unknown);
        minor.checked()?;
        major.put(number(device.gpu.compute_capability.0)?)?;
        minor.put(number(device.gpu.compute_capability.1)?)
    })
}

/// The PCI information of a bus id, in the two forms that NVML writes it.
pub(crate) fn pci_info(bus_id: &str, device_id: u32, subsystem_id: u32) -> Answer<PciInfo> {
    let (domain, bus, device) = pci_address(bus_id).ok_or(Code::Unknown)?;
    Ok(PciInfo {
        bus_id_legacy: field(&format!("{domain:04X}:{bus:02X}:{device:02X}.0")),
        domain,
        bus,
        device,
        pci_device_id: device_id,
        pci_subsystem_id: subsystem_id,
        bus_id: field(&format!("{domain:08X}:{bus:02X}:{device:02X}.0")),
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetPciInfo_v3(device: Handle, pci: Out<PciInfo>) -> c_uint {
    call::gpu("nvmlDeviceGetPciInfo_v3", device, |device| {
        pci.put(pci_info(&device.gpu.pci_bus_id, device.gpu.pci_device_id, device.gpu.pci_subsystem_id)?)
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetPciInfoExt(device: Handle, out: Out<PciInfoExt>) -> c_uint {
    call::gpu("nvmlDeviceGetPciInfoExt", device, |device| {
        let asked = PciInfoExt::from_caller(out)?;
        let pci = pci_info(&device.gpu.pci_bus_id, device.gpu.pci_device_id, device.gpu.pci_subsystem_id)?;
        out.put(PciInfoExt {
            version: asked.version,
            domain: pci.domain,
            bus: pci.bus,
            device: pci.device,
            pci_device_id: pci.pci_device_id,
            pci_subsystem_id: pci.pci_subsystem_id,
            // PCI class 0x0302: a 3D controller, as data centre boards are.
            base_class: 0x03,
            sub_class: 0x02,
            bus_id: pci.bus_id,
        })
    })
}

/// No address translation shared with the CPU, unless the GPU's memory is a NUMA node: then ATS.
#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetAddressingMode(device: Handle, mode: Out<AddressingMode>) -> c_uint {
    const NONE: c_uint = 0;
    const ATS: c_uint = 2;
    call::gpu("nvmlDeviceGetAddressingMode", device, |device| {
        let asked = AddressingMode::from_caller(mode)?;
        let value = if device.gpu.memory_numa_node.is_some() { ATS } else { NONE };
        mode.put(AddressingMode { value, ..asked })
    })
}

/// The persistence daemon runs, as it does on nodes that serve GPUs.
#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetPersistenceMode(device: Handle, mode: Out<c_uint>) -> c_uint {
    call::gpu("nvmlDeviceGetPersistenceMode", device, |_| mode.put(flag(true)))
}

/// `NVML_COMPUTEMODE_DEFAULT`: several processes may use the GPU.
#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetComputeMode(device: Handle, mode: Out<c_uint>) -> c_uint {
    call::gpu("nvmlDeviceGetComputeMode", device, |_| mode.put(0))
}

/// `NVML_GPU_VIRTUALIZATION_MODE_NONE`.
#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetVirtualizationMode(device: Handle, mode: Out<c_uint>) -> c_uint {
    call::gpu("nvmlDeviceGetVirtualizationMode", device, |_| mode.put(0))
}

/// No screen is attached.
#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetDisplayMode(device: Handle, display: Out<c_uint>) -> c_uint {
    call::gpu("nvmlDeviceGetDisplayMode", device, |_| display.put(flag(false)))
}

/// No screen is attached.
#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetDisplayActive(device: Handle, display: Out<c_uint>) -> c_uint {
    call::gpu("nvmlDeviceGetDisplayActive", device, |_| display.put(flag(false)))
}

/// One GPU a board.
#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetMultiGpuBoard(device: Handle, several: Out<c_uint>) -> c_uint {
    call::gpu("nvmlDeviceGetMultiGpuBoard", device, |_| several.put(flag(false)))
}
