//! The GPU instances and compute instances that MIG devices are made of.

use std::ffi::c_uint;

use crate::api::layout::{ComputeInstanceInfo, GpuInstanceInfo, Placement};
use crate::api::mig::instances;
use crate::code::{Answer, Code};
use crate::instance::{Instance, Profile};
use crate::runtime::call::{self, Device};
use crate::runtime::handle::{Handle, Meaning};
use crate::runtime::pointer::{Out, OutArray};

fn gpu_instance_handle(device: &Device, instance: &Instance) -> Handle {
    Handle::of(Meaning::GpuInstance(device.gpu.uuid.clone(), instance.gpu_instance))
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetGpuInstanceById(device: Handle, id: c_uint, out: Out<Handle>) -> c_uint {
    call::gpu("nvmlDeviceGetGpuInstanceById", device, |device| {
        device.privileged()?;
        let found = instances(device)?.iter().find(|instance| instance.gpu_instance == id);
        out.put(gpu_instance_handle(device, found.ok_or(Code::NotFound)?))
    })
}

/// GPU instances of one profile; the array has room for all that fit on a GPU, by NVML's rule.
#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetGpuInstances(
    device: Handle,
    profile_id: c_uint,
    array: OutArray<Handle>,
    count: Out<c_uint>,
) -> c_uint {
    call::gpu("nvmlDeviceGetGpuInstances", device, |device| {
        device.privileged()?;
        let same =
            |instance: &&Instance| Profile::of(instance).is_some_and(|profile| profile.id == profile_id);
        let found: Vec<_> = instances(device)?
            .iter()
            .filter(same)
            .map(|instance| gpu_instance_handle(device, instance))
            .collect();
        count.checked()?;
        array.fill(&found)?;
        count.put(c_uint::try_from(found.len()).map_err(|_| Code::Unknown)?)
    })
}

/// A call on a GPU instance or a compute instance.
pub(crate) fn instance(
    symbol: &str,
    handle: Handle,
    compute: bool,
    work: impl FnOnce(&Device, &Instance) -> Answer,
) -> c_uint {
    let meaning = handle.meaning();
    let (uuid, id) = match &meaning {
        Ok(Meaning::GpuInstance(uuid, id)) if !compute => (uuid, *id),
        Ok(Meaning::ComputeInstance(uuid, id, _)) if compute => (uuid, *id),
        // Reported through a call of no GPU, so that "uninitialised" goes before "invalid".
        _ => return call::system(symbol, |_| Err(Code::InvalidArgument)),
    };
    call::gpu(symbol, Handle::of_device(uuid), |device| {
        let found = instances(device)?.iter().find(|instance| instance.gpu_instance == id);
        work(device, found.ok_or(Code::NotFound)?)
    })
}

/// The profile of its one compute instance: the plain one.
pub(crate) fn profile(instance: &Instance) -> Answer<Profile> {
    Profile::of_slices(instance.slices).ok_or(Code::Unknown)
}

#[unsafe(no_mangle)]
extern "C" fn nvmlGpuInstanceGetInfo(gpu_instance: Handle, out: Out<GpuInstanceInfo>) -> c_uint {
    instance("nvmlGpuInstanceGetInfo", gpu_instance, false, |device, instance| {
        // Instances lie one behind the other, in the order of the file.
        let before =
            instances(device)?.iter().take_while(|other| other.gpu_instance != instance.gpu_instance);
        out.put(GpuInstanceInfo {
            device: Handle::of_device(&device.gpu.uuid),
            id: instance.gpu_instance,
            profile_id: Profile::of(instance).ok_or(Code::Unknown)?.id,
            placement: Placement { start: before.map(|other| other.slices).sum(), size: instance.slices },
        })
    })
}

fn compute_instance_handle(device: &Device, instance: &Instance) -> Handle {
    Handle::of(Meaning::ComputeInstance(
        device.gpu.uuid.clone(),
        instance.gpu_instance,
        instance.compute_instance,
    ))
}

#[unsafe(no_mangle)]
extern "C" fn nvmlGpuInstanceGetComputeInstanceById(
    gpu_instance: Handle,
    id: c_uint,
    out: Out<Handle>,
) -> c_uint {
    instance("nvmlGpuInstanceGetComputeInstanceById", gpu_instance, false, |device, instance| {
        if instance.compute_instance == id {
            out.put(compute_instance_handle(device, instance))
        } else {
            Err(Code::NotFound)
        }
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlGpuInstanceGetComputeInstances(
    gpu_instance: Handle,
    profile_id: c_uint,
    array: OutArray<Handle>,
    count: Out<c_uint>,
) -> c_uint {
    instance("nvmlGpuInstanceGetComputeInstances", gpu_instance, false, |device, instance| {
        let found = if profile(instance)?.compute_id() == profile_id {
            vec![compute_instance_handle(device, instance)]
        } else {
            Vec::new()
        };
        count.checked()?;
        array.fill(&found)?;
        count.put(c_uint::from(!found.is_empty()))
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlComputeInstanceGetInfo_v2(
    compute_instance: Handle,
    out: Out<ComputeInstanceInfo>,
) -> c_uint {
    instance("nvmlComputeInstanceGetInfo_v2", compute_instance, true, |device, instance| {
        out.put(ComputeInstanceInfo {
            device: Handle::of_device(&device.gpu.uuid),
            gpu_instance: gpu_instance_handle(device, instance),
            id: instance.compute_instance,
            profile_id: profile(instance)?.compute_id(),
            placement: Placement { start: 0, size: instance.slices },
        })
    })
}
