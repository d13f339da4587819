//! The profiles that GPU instances and compute instances come in.

use std::ffi::c_uint;

use crate::api::instances::{instance, profile};
use crate::api::layout::{
    ComputeInstanceProfile, ComputeInstanceProfileV2, GpuInstanceProfile, GpuInstanceProfileV2,
    Versioned as _,
};
use crate::api::mig::mig;
use crate::code::{Answer, Code};
use crate::instance::{Instance, PROFILE_INDEX_LIMIT, Profile, memory_eighths};
use crate::runtime::call::{self, Device};
use crate::runtime::handle::Handle;
use crate::runtime::pointer::{Out, field};

/// The profile at an index: out of range is a mistake, a profile that the model does not have is not supported.
fn profile_at(index: c_uint) -> Answer<Profile> {
    if index >= PROFILE_INDEX_LIMIT {
        return Err(Code::InvalidArgument);
    }
    Profile::at(index).ok_or(Code::NotSupported)
}

fn gpu_instance_profile(device: &Device, index: c_uint) -> Answer<GpuInstanceProfile> {
    mig(device)?;
    let profile = profile_at(index)?;
    Ok(GpuInstanceProfile {
        id: profile.id,
        peer_to_peer: 0,
        slices: profile.slices,
        instances: profile.instances(),
        multiprocessors: 14 * profile.slices,
        copy_engines: profile.slices,
        decoders: profile.slices / 2,
        encoders: 0,
        jpeg: 0,
        ofa: 0,
        memory_mib: device.gpu.memory_total_mib.unwrap_or(0) * memory_eighths(profile.slices) / 8,
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetGpuInstanceProfileInfo(
    device: Handle,
    index: c_uint,
    out: Out<GpuInstanceProfile>,
) -> c_uint {
    call::gpu("nvmlDeviceGetGpuInstanceProfileInfo", device, |device| {
        out.put(gpu_instance_profile(device, index)?)
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetGpuInstanceProfileInfoV(
    device: Handle,
    index: c_uint,
    out: Out<GpuInstanceProfileV2>,
) -> c_uint {
    call::gpu("nvmlDeviceGetGpuInstanceProfileInfoV", device, |device| {
        let version = GpuInstanceProfileV2::from_caller(out)?.version;
        let first = gpu_instance_profile(device, index)?;
        out.put(GpuInstanceProfileV2 {
            version,
            id: first.id,
            peer_to_peer: first.peer_to_peer,
            slices: first.slices,
            instances: first.instances,
            multiprocessors: first.multiprocessors,
            copy_engines: first.copy_engines,
            decoders: first.decoders,
            encoders: first.encoders,
            jpeg: first.jpeg,
            ofa: first.ofa,
            memory_mib: first.memory_mib,
            name: field(&format!(
                "{}{}",
                crate::preset::profile_name(first.slices, device.gpu.memory_total_mib.unwrap_or(0)),
                profile_at(index)?.extras
            )),
        })
    })
}

/// The one compute profile of a GPU instance: all of it. The one engine profile is 0, shared.
fn compute_instance_profile(
    instance: &Instance,
    index: c_uint,
    engine: c_uint,
) -> Answer<ComputeInstanceProfile> {
    let wanted = profile_at(index)?;
    let own = profile(instance)?;
    if engine != 0 {
        return Err(Code::InvalidArgument);
    }
    if wanted != own {
        return Err(Code::NotSupported);
    }
    Ok(ComputeInstanceProfile {
        id: own.compute_id(),
        slices: own.slices,
        instances: 1,
        multiprocessors: instance.multiprocessors,
        copy_engines: own.slices,
        decoders: own.slices / 2,
        encoders: 0,
        jpeg: 0,
        ofa: 0,
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlGpuInstanceGetComputeInstanceProfileInfo(
    gpu_instance: Handle,
    index: c_uint,
    engine: c_uint,
    out: Out<ComputeInstanceProfile>,
) -> c_uint {
    instance("nvmlGpuInstanceGetComputeInstanceProfileInfo", gpu_instance, false, |_, instance| {
        out.put(compute_instance_profile(instance, index, engine)?)
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlGpuInstanceGetComputeInstanceProfileInfoV(
    gpu_instance: Handle,
    index: c_uint,
    engine: c_uint,
    out: Out<ComputeInstanceProfileV2>,
) -> c_uint {
    instance("nvmlGpuInstanceGetComputeInstanceProfileInfoV", gpu_instance, false, |_, instance| {
        let version = ComputeInstanceProfileV2::from_caller(out)?.version;
        let first = compute_instance_profile(instance, index, engine)?;
        out.put(ComputeInstanceProfileV2 {
            version,
            id: first.id,
            slices: first.slices,
            instances: first.instances,
            multiprocessors: first.multiprocessors,
            copy_engines: first.copy_engines,
            decoders: first.decoders,
            encoders: first.encoders,
            jpeg: first.jpeg,
            ofa: first.ofa,
            name: field(&instance.profile),
        })
    })
}
