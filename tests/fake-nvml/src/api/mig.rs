//! MIG devices.

use std::ffi::c_uint;

use crate::api::flag;
use crate::api::layout::Attributes;
use crate::code::{Answer, Code};
use crate::instance::{Instance, Mig};
use crate::runtime::call::{self, Device};
use crate::runtime::handle::Handle;
use crate::runtime::pointer::Out;

/// MIG of a model that has it.
pub(crate) fn mig<'a>(device: &Device<'a>) -> Answer<&'a Mig> {
    device.gpu.mig.as_ref().ok_or(Code::NotSupported)
}

/// MIG devices; none while MIG is off.
pub(crate) fn instances<'a>(device: &Device<'a>) -> Answer<&'a [Instance]> {
    let mig = mig(device)?;
    Ok(if mig.enabled { &mig.instances } else { &[] })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetMigMode(device: Handle, current: Out<c_uint>, pending: Out<c_uint>) -> c_uint {
    call::gpu("nvmlDeviceGetMigMode", device, |device| {
        let mig = mig(device)?;
        pending.checked()?;
        current.put(flag(mig.enabled))?;
        pending.put(flag(mig.pending.unwrap_or(mig.enabled)))
    })
}

/// 0 without MIG, or while it is off.
#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetMaxMigDeviceCount(device: Handle, count: Out<c_uint>) -> c_uint {
    call::gpu("nvmlDeviceGetMaxMigDeviceCount", device, |device| {
        count.put(device.gpu.mig.as_ref().filter(|mig| mig.enabled).map_or(0, |mig| mig.max_devices))
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetMigDeviceHandleByIndex(device: Handle, index: c_uint, out: Out<Handle>) -> c_uint {
    call::gpu("nvmlDeviceGetMigDeviceHandleByIndex", device, |device| {
        if index >= mig(device)?.max_devices {
            return Err(Code::InvalidArgument);
        }
        let instance = instances(device)?.get(index as usize).ok_or(Code::NotFound)?;
        out.put(Handle::of_device(&instance.uuid))
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceIsMigDeviceHandle(device: Handle, is_mig: Out<c_uint>) -> c_uint {
    call::device("nvmlDeviceIsMigDeviceHandle", device, |device| is_mig.put(flag(device.mig.is_some())))
}

/// A call on a MIG device; a GPU is an invalid argument.
fn mig_device(symbol: &str, handle: Handle, work: impl FnOnce(&Device, &Instance) -> Answer) -> c_uint {
    call::device(symbol, handle, |device| match device.mig {
        Some((_, instance)) => work(device, instance),
        None => Err(Code::InvalidArgument),
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetDeviceHandleFromMigDeviceHandle(device: Handle, parent: Out<Handle>) -> c_uint {
    mig_device("nvmlDeviceGetDeviceHandleFromMigDeviceHandle", device, |device, _| {
        parent.put(Handle::of_device(&device.gpu.uuid))
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetGpuInstanceId(device: Handle, id: Out<c_uint>) -> c_uint {
    mig_device("nvmlDeviceGetGpuInstanceId", device, |_, instance| id.put(instance.gpu_instance))
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetComputeInstanceId(device: Handle, id: Out<c_uint>) -> c_uint {
    mig_device("nvmlDeviceGetComputeInstanceId", device, |_, instance| id.put(instance.compute_instance))
}

fn attributes(symbol: &str, device: Handle, out: Out<Attributes>) -> c_uint {
    mig_device(symbol, device, |_, instance| {
        out.put(Attributes {
            multiprocessors: instance.multiprocessors,
            copy_engines: instance.slices,
            decoders: instance.slices / 2,
            encoders: 0,
            jpeg: 0,
            ofa: 0,
            gpu_instance_slices: instance.slices,
            compute_instance_slices: instance.slices,
            memory_mib: instance.memory_mib,
        })
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetAttributes(device: Handle, out: Out<Attributes>) -> c_uint {
    attributes("nvmlDeviceGetAttributes", device, out)
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetAttributes_v2(device: Handle, out: Out<Attributes>) -> c_uint {
    attributes("nvmlDeviceGetAttributes_v2", device, out)
}
