//! NVLinks.

use std::ffi::c_uint;

use crate::api::device::pci_info;
use crate::api::flag;
use crate::api::layout::{FabricInfo, PciInfo};
use crate::code::{Answer, Code};
use crate::link::{NvLink, Remote};
use crate::runtime::call::{self, Device};
use crate::runtime::handle::Handle;
use crate::runtime::pointer::Out;

/// Vendor and device of the NVSwitch of an HGX H100 board.
const SWITCH_DEVICE_ID: u32 = 0x22A3_10DE;

/// The link with this number. A model without links does not support the question; a number beyond them is a mistake.
fn link<'a>(device: &Device<'a>, number: c_uint) -> Answer<&'a NvLink> {
    if device.gpu.nvlinks.is_empty() {
        return Err(Code::NotSupported);
    }
    let link = device.gpu.nvlinks.get(number as usize).ok_or(Code::InvalidArgument)?;
    link.as_ref().ok_or(Code::NotSupported)
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetGpuFabricInfo(device: Handle, out: Out<FabricInfo>) -> c_uint {
    call::gpu("nvmlDeviceGetGpuFabricInfo", device, |device| {
        let fabric = device.gpu.fabric.ok_or(Code::NotSupported)?;
        out.put(FabricInfo {
            cluster_uuid: [0; 16],
            status: fabric.status,
            clique_id: 0,
            state: fabric.state as u8,
        })
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetNvLinkState(device: Handle, number: c_uint, active: Out<c_uint>) -> c_uint {
    call::gpu("nvmlDeviceGetNvLinkState", device, |device| active.put(flag(link(device, number)?.active)))
}

fn remote_pci(device: &Device, number: c_uint) -> Answer<PciInfo> {
    let link = link(device, number)?;
    if !link.active {
        return Err(Code::NotSupported);
    }
    match &link.remote {
        Remote::Switch(bus_id) => pci_info(bus_id, SWITCH_DEVICE_ID, 0),
        Remote::Gpu(uuid) => {
            let gpu = device.state.gpu(uuid).ok_or(Code::Unknown)?;
            pci_info(&gpu.pci_bus_id, gpu.pci_device_id, gpu.pci_subsystem_id)
        }
    }
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetNvLinkRemotePciInfo_v2(
    device: Handle,
    number: c_uint,
    pci: Out<PciInfo>,
) -> c_uint {
    call::gpu("nvmlDeviceGetNvLinkRemotePciInfo_v2", device, |device| pci.put(remote_pci(device, number)?))
}

/// `nvmlIntNvLinkDeviceType_t`.
#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetNvLinkRemoteDeviceType(
    device: Handle,
    number: c_uint,
    kind: Out<c_uint>,
) -> c_uint {
    const GPU: c_uint = 0;
    const SWITCH: c_uint = 2;
    call::gpu("nvmlDeviceGetNvLinkRemoteDeviceType", device, |device| {
        kind.put(match link(device, number)?.remote {
            Remote::Gpu(_) => GPU,
            Remote::Switch(_) => SWITCH,
        })
    })
}

/// The generation of the links follows from the architecture: Volta and Turing 2, Ampere 3, Hopper 4, Blackwell 5.
#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetNvLinkVersion(device: Handle, number: c_uint, version: Out<c_uint>) -> c_uint {
    // nvmlNvlinkVersion_t counts generations and half generations: 2.0 is 2, 3.0 is 4, 4.0 is 6, 5.0 is 7.
    call::gpu("nvmlDeviceGetNvLinkVersion", device, |device| {
        link(device, number)?;
        version.put(match device.gpu.architecture {
            ..=6 => 2,
            7 => 4,
            8 | 9 => 6,
            _ => 7,
        })
    })
}
