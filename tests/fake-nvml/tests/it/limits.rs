//! Memory limits of cgroups, called as a C program does. A directory stands for a cgroup.

use std::ffi::{CString, c_char, c_void};
use std::fs;
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;

use fake_nvml::{Code, LimitBackend, State};

use crate::Bench;

const MIB: u64 = 1 << 20;
const NO_LIMIT: u64 = u64::MAX;

#[repr(C)]
struct NewLimits(*const c_char, u64, u64);
#[repr(C)]
struct Limits(*const c_char, u64, u64, u64);

impl Bench {
    fn set(&self, gpu: u32, cgroup: &Path, soft: u64, hard: u64) -> Option<Code> {
        type Set = unsafe extern "C" fn(*mut c_void, *mut NewLimits) -> u32;
        let path = CString::new(cgroup.as_os_str().as_bytes()).unwrap();
        let device = self.nvml.device_by_index(gpu).unwrap();
        let mut limits = NewLimits(path.as_ptr(), soft, hard);
        // SAFETY: the symbol has this type, and all that it is given lives until it returns.
        let answer = unsafe {
            let set = self.nvml.lib().__library.get::<Set>(b"nvmlDeviceSetMemoryLimits_v1\0").unwrap();
            set(device.handle().cast(), &raw mut limits)
        };
        Code::from_number(answer)
    }

    /// Soft limit, hard limit and usage.
    fn get(&self, gpu: u32, cgroup: &Path) -> Result<(u64, u64, u64), Code> {
        type Get = unsafe extern "C" fn(*mut c_void, *mut Limits) -> u32;
        let path = CString::new(cgroup.as_os_str().as_bytes()).unwrap();
        let device = self.nvml.device_by_index(gpu).unwrap();
        let mut limits = Limits(path.as_ptr(), 0, 0, 0);
        // SAFETY: as above.
        let answer = unsafe {
            let get = self.nvml.lib().__library.get::<Get>(b"nvmlDeviceGetMemoryLimits_v1\0").unwrap();
            get(device.handle().cast(), &raw mut limits)
        };
        Code::from_number(answer).map_or(Ok((limits.1, limits.2, limits.3)), Err)
    }
}

fn state(backend: LimitBackend) -> State {
    State { memory_limits: Some(backend), ..State::h100(2) }
}

#[test]
fn a_limit_is_of_one_gpu_and_one_directory_and_is_rounded_to_pages_of_the_driver() {
    let bench = Bench::new(&state(LimitBackend::Dmem));
    let cgroup = tempfile::tempdir().unwrap();
    assert_eq!(bench.set(0, cgroup.path(), 0, 4097 * MIB), None);
    assert_eq!(bench.get(0, cgroup.path()), Ok((0, 4096 * MIB, 0)));
    assert_eq!(bench.get(1, cgroup.path()), Err(Code::NotFound));
    fs::write(cgroup.path().join("cgroup.procs"), "7\n8\n").unwrap();
    bench.change(|state| [(7, 100), (9, 50)].into_iter().for_each(|(pid, mib)| state.gpus[0].run(pid, mib)));
    assert_eq!(bench.get(0, cgroup.path()), Ok((0, 4096 * MIB, 100 * MIB)));
    assert_eq!(bench.set(0, cgroup.path(), 0, NO_LIMIT), None);
    assert_eq!(bench.set(0, cgroup.path(), 0, NO_LIMIT), None, "there is none any more");
    assert_eq!(bench.get(0, cgroup.path()), Err(Code::NotFound));
}

#[test]
fn each_controller_and_an_older_driver_have_their_own_answers() {
    let bench = Bench::new(&state(LimitBackend::Misc));
    let cgroup = tempfile::tempdir().unwrap();
    assert_eq!(bench.get(0, cgroup.path()), Err(Code::NotSupported));
    assert_eq!(bench.set(0, cgroup.path(), 0, NO_LIMIT - 1), Some(Code::InvalidArgument), "over the total");
    assert_eq!(bench.set(0, cgroup.path(), 2 * MIB, MIB), Some(Code::InvalidArgument), "soft over hard");
    assert_eq!(bench.set(0, Path::new("/no/such/cgroup"), 0, MIB), Some(Code::OperatingSystem));
    assert_eq!(bench.set(0, cgroup.path(), 0, 10 * MIB), None);
    assert_eq!(bench.get(0, cgroup.path()), Ok((0, 10 * MIB, 0)));
    bench.change(|state| state.memory_limits = None);
    assert_eq!(bench.set(0, cgroup.path(), 0, 10 * MIB), Some(Code::NotSupported));
    assert_eq!(bench.get(0, cgroup.path()), Err(Code::NotSupported));
}
