//! Where a GPU is: NUMA node, common ancestors, peers.

use std::ffi::{c_int, c_uint, c_ulong};

use crate::api::flag;
use crate::code::{Answer, Code};
use crate::link::{Level, Remote};
use crate::runtime::call::{self, Device};
use crate::runtime::handle::Handle;
use crate::runtime::pointer::{Out, OutArray};

/// Only where the GPU's memory is a NUMA node; the node of its CPU is its memory affinity.
#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetNumaNodeId(device: Handle, node: Out<c_uint>) -> c_uint {
    call::gpu("nvmlDeviceGetNumaNodeId", device, |device| {
        node.put(device.gpu.memory_numa_node.ok_or(Code::NotSupported)?)
    })
}

/// A bit for the GPU's NUMA node in an array of words; no NUMA node: not supported.
#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetMemoryAffinity(
    device: Handle,
    words: c_uint,
    set: OutArray<c_ulong>,
    scope: c_uint,
) -> c_uint {
    /// `NVML_AFFINITY_SCOPE_SOCKET`, the larger of the two.
    const SCOPE_MAX: c_uint = 1;
    call::gpu("nvmlDeviceGetMemoryAffinity", device, |device| {
        if words == 0 || scope > SCOPE_MAX {
            return Err(Code::InvalidArgument);
        }
        let node = device.gpu.numa_node.ok_or(Code::NotSupported)?;
        for word in 0..words {
            let bit = if node / c_ulong::BITS == word { 1 << (node % c_ulong::BITS) } else { 0 };
            set.at(word as usize)?.put(bit)?;
        }
        Ok(())
    })
}

/// Works on two GPUs: the loss of either counts, and the faults of the first.
fn pair(symbol: &str, a: Handle, b: Handle, work: impl FnOnce(&Device, &Device) -> Answer) -> c_uint {
    call::gpu(symbol, a, |first| {
        let uuid = b.device()?;
        let second = call::resolve(first.state, &uuid)?;
        if second.mig.is_some() { Err(Code::InvalidArgument) } else { work(first, &second) }
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetTopologyCommonAncestor(a: Handle, b: Handle, level: Out<c_uint>) -> c_uint {
    pair("nvmlDeviceGetTopologyCommonAncestor", a, b, |a, b| level.put(a.state.level(a.gpu, b.gpu) as c_uint))
}

/// The GPUs at exactly this level; with a count of 0, how many there are.
#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetTopologyNearestGpus(
    device: Handle,
    level: c_uint,
    count: Out<c_uint>,
    array: OutArray<Handle>,
) -> c_uint {
    call::gpu("nvmlDeviceGetTopologyNearestGpus", device, |device| {
        let room = count.get()? as usize;
        let others = device.state.gpus.iter().filter(|gpu| gpu.uuid != device.gpu.uuid);
        let near: Vec<Handle> = others
            .filter(|gpu| device.state.level(device.gpu, gpu) as c_uint == level)
            .map(|gpu| Handle::of_device(&gpu.uuid))
            .collect();
        if room > 0 {
            array.fill(&near[..near.len().min(room)])?;
        }
        count.put(c_uint::try_from(near.len()).map_err(|_| Code::Unknown)?)
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceOnSameBoard(a: Handle, b: Handle, same: Out<c_int>) -> c_uint {
    pair("nvmlDeviceOnSameBoard", a, b, |a, b| {
        same.put(c_int::from(a.state.level(a.gpu, b.gpu) == Level::Internal))
    })
}

/// Reading, writing and atomics work between all GPUs; the NVLink question only between those that links join.
#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetP2PStatus(
    a: Handle,
    b: Handle,
    capability: c_uint,
    status: Out<c_uint>,
) -> c_uint {
    const NVLINK: c_uint = 2;
    const CAPABILITY_MAX: c_uint = 4;
    const NOT_SUPPORTED: c_uint = 5;
    pair("nvmlDeviceGetP2PStatus", a, b, |a, b| match capability {
        NVLINK => status.put(NOT_SUPPORTED * flag(!joined(a, b))),
        0..=CAPABILITY_MAX => status.put(0),
        _ => Err(Code::InvalidArgument),
    })
}

/// Whether an active link leads from one to the other, or both have one to a switch.
fn joined(a: &Device, b: &Device) -> bool {
    let switched = |device: &Device| {
        device
            .gpu
            .nvlinks
            .iter()
            .flatten()
            .any(|link| link.active && matches!(link.remote, Remote::Switch(_)))
    };
    let direct = a
        .gpu
        .nvlinks
        .iter()
        .flatten()
        .any(|link| link.active && link.remote == Remote::Gpu(b.gpu.uuid.clone()));
    direct || (switched(a) && switched(b))
}
