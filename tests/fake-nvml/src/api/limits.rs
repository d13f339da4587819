//! Memory limits of cgroups, which a driver has since r615.
//!
//! The limits outlive the process that set them, and any process sees them: they lie in a folder beside the state file,
//! a file for each GPU and cgroup. As in the kernel, a cgroup is its directory and not its path: a new directory of the
//! same name has no limits.

use std::ffi::{c_char, c_uint, c_ulonglong};
use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use crate::api::bytes;
use crate::code::{Answer, Code};
use crate::gpu::Gpu;
use crate::runtime::call::{self, Device};
use crate::runtime::handle::Handle;
use crate::runtime::library;
use crate::runtime::pointer::{InText, Out};
use crate::state::LimitBackend;

/// `NVML_DEVICE_MEMORY_LIMIT_MAX`: no limit.
const NO_LIMIT: c_ulonglong = c_ulonglong::MAX;
/// The driver accounts in pages of 2 MiB.
const PAGE_BYTES: c_ulonglong = 2 << 20;

/// `nvmlSetMemoryLimits_v1_t`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct NewLimits {
    cgroup: *const c_char,
    soft: c_ulonglong,
    hard: c_ulonglong,
}

/// `nvmlGetMemoryLimits_v1_t`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct Limits {
    cgroup: *const c_char,
    soft: c_ulonglong,
    hard: c_ulonglong,
    used: c_ulonglong,
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceSetMemoryLimits_v1(device: Handle, limits: Out<NewLimits>) -> c_uint {
    call::gpu("nvmlDeviceSetMemoryLimits_v1", device, |device| {
        let limits = limits.get()?;
        backend(device)?;
        let cgroup = cgroup(limits.cgroup)?;
        let total = device.gpu.memory_total_mib.map_or(NO_LIMIT, bytes);
        let exceeds = |limit| limit > total && limit != NO_LIMIT;
        if limits.soft > limits.hard || exceeds(limits.soft) || exceeds(limits.hard) {
            return Err(Code::InvalidArgument);
        }
        let file = kept(&cgroup, device.gpu)?;
        if (limits.soft, limits.hard) == (0, NO_LIMIT) {
            return match fs::remove_file(file) {
                Err(error) if error.kind() != ErrorKind::NotFound => Err(Code::Unknown),
                _ => Ok(()),
            };
        }
        let text = format!("{} {}", in_pages(limits.soft), in_pages(limits.hard));
        fs::create_dir_all(file.parent().ok_or(Code::Unknown)?).map_err(|_| Code::Unknown)?;
        // Another process reads the limits while this one sets them.
        let beside = file.with_extension(std::process::id().to_string());
        fs::write(&beside, text).and_then(|()| fs::rename(beside, file)).map_err(|_| Code::Unknown)
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetMemoryLimits_v1(device: Handle, limits: Out<Limits>) -> c_uint {
    call::gpu("nvmlDeviceGetMemoryLimits_v1", device, |device| {
        let asked = limits.get()?;
        let backend = backend(device)?;
        let cgroup = cgroup(asked.cgroup)?;
        let none = match backend {
            LimitBackend::Dmem => Code::NotFound,
            LimitBackend::Misc => Code::NotSupported,
        };
        let text = fs::read_to_string(kept(&cgroup, device.gpu)?).map_err(|_| none)?;
        let (soft, hard) = text.split_once(' ').ok_or(Code::Unknown)?;
        let number = |text: &str| text.parse().map_err(|_| Code::Unknown);
        limits.put(Limits {
            soft: number(soft)?,
            hard: number(hard)?,
            used: used(&cgroup, device.gpu),
            ..asked
        })
    })
}

/// What enforces limits; a driver before r615 has nothing.
fn backend(device: &Device) -> Answer<LimitBackend> {
    device.state.memory_limits.ok_or(Code::NotSupported)
}

fn cgroup(path: *const c_char) -> Answer<PathBuf> {
    let path = PathBuf::from(InText::from(path).get()?);
    if path.is_dir() { Ok(path) } else { Err(Code::OperatingSystem) }
}

fn in_pages(limit: c_ulonglong) -> c_ulonglong {
    if limit == NO_LIMIT { limit } else { limit / PAGE_BYTES * PAGE_BYTES }
}

/// The file that has the limits of a cgroup on a GPU.
fn kept(cgroup: &Path, gpu: &Gpu) -> Answer<PathBuf> {
    let directory = fs::metadata(cgroup).map_err(|_| Code::OperatingSystem)?;
    let state = library::state_file().ok_or(Code::Unknown)?;
    let name = format!("{}-{}-{}", gpu.uuid, directory.dev(), directory.ino());
    Ok(state.with_extension("limits").join(name))
}

/// The memory of the GPU's processes that are in the cgroup.
fn used(cgroup: &Path, gpu: &Gpu) -> c_ulonglong {
    let pids = fs::read_to_string(cgroup.join("cgroup.procs")).unwrap_or_default();
    let inside = |pid: u32| pids.lines().any(|line| line.parse() == Ok(pid));
    bytes(gpu.processes.iter().filter(|one| inside(one.pid)).map(|one| one.memory_mib).sum())
}
