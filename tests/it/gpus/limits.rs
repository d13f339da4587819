//! Memory limits of cgroups, set and read through NVML. A directory stands for a cgroup.

use berth_gpus::nvml::{LimitError, NvmlLimits, ReportedLimit};
use berth_kernel::ids::names::GpuId;
use fake_nvml::{Code, Fault, Installed, LimitBackend, State};
use std::path::Path;
use tempfile::TempDir;

struct Node {
    limits: NvmlLimits,
    installed: Installed,
    folder: TempDir,
}

impl Node {
    fn new(backend: Option<LimitBackend>) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let state = State { memory_limits: backend, ..State::h100(2) };
        let installed = Installed::new(folder.path(), &state).unwrap();
        let limits = NvmlLimits::new(Some(installed.library().to_owned()), "/".into());
        Self { limits, installed, folder }
    }

    fn change(&self, change: impl FnOnce(&mut State)) {
        self.installed.change(change).unwrap();
    }

    fn cgroup(&self) -> &Path {
        self.folder.path()
    }
}

#[test]
fn a_limit_that_was_set_is_read_back_by_either_backend() {
    for backend in [LimitBackend::Dmem, LimitBackend::Misc] {
        let node = Node::new(Some(backend));
        let gpus = node.limits.open().unwrap();
        assert_eq!(gpus.len(), 2);
        assert_eq!(node.limits.get(&gpus[0], node.cgroup()), Ok(None), "{backend:?}");
        let limit = Ok(Some(ReportedLimit { limit_mib: 4096, used_mib: 0 }));
        assert_eq!(node.limits.set(&gpus[0], node.cgroup(), 4097), limit, "{backend:?}");
        assert_eq!(node.limits.get(&gpus[0], node.cgroup()), limit, "{backend:?}");
        assert_eq!(node.limits.get(&gpus[1], node.cgroup()), Ok(None), "{backend:?}");
    }
}

#[test]
fn an_older_driver_is_reported_as_unsupported_and_not_as_a_failure() {
    let node = Node::new(None);
    let gpus = node.limits.open().unwrap();
    let set = |node: &Node| node.limits.set(&gpus[0], node.cgroup(), 4096).unwrap_err();
    assert!(matches!(set(&node), LimitError::Unsupported { .. }), "{}", set(&node));
    node.change(|state| {
        state.memory_limits = Some(LimitBackend::Dmem);
        state.faults = vec![Fault::fail("nvmlDeviceSetMemoryLimits_v1", Code::FunctionNotFound)];
    });
    assert!(matches!(set(&node), LimitError::Unsupported { .. }), "{}", set(&node));
    node.change(|state| state.faults.clear());
    let too_much = node.limits.set(&gpus[0], node.cgroup(), u64::MAX / (1 << 20)).unwrap_err();
    assert!(
        matches!(too_much, LimitError::Failed { call: "nvmlDeviceSetMemoryLimits_v1", .. }),
        "{too_much}"
    );
    node.change(|state| {
        state.faults = vec![Fault::fail("nvmlDeviceGetMemoryLimits_v1", Code::Unknown)];
    });
    let unread = node.limits.set(&gpus[0], node.cgroup(), 4096).unwrap_err();
    assert!(
        matches!(unread, LimitError::Failed { call: "nvmlDeviceGetMemoryLimits_v1", .. }),
        "a limit that cannot be read back counts as not set: {unread}"
    );
    node.change(|state| state.faults.clear());
    let gone = node.limits.set(&gpus[0], Path::new("/no/such/cgroup"), 4096).unwrap_err();
    assert!(matches!(gone, LimitError::Failed { .. }), "{gone}");
}

#[test]
fn nvml_is_open_until_it_is_closed_or_the_driver_has_gone() {
    let node = Node::new(Some(LimitBackend::Dmem));
    let unknown = GpuId::parse("GPU-unknown").unwrap();
    let not_open = node.limits.get(&unknown, node.cgroup()).unwrap_err();
    assert!(matches!(not_open, LimitError::NotOpen(_)), "{not_open}");
    let gpus = node.limits.open().unwrap();
    assert!(node.limits.is_open());
    assert!(node.limits.close("the driver was released") && !node.limits.is_open());
    let closed = node.limits.get(&gpus[0], node.cgroup()).unwrap_err();
    assert!(closed.to_string().contains("the driver was released"), "{closed}");
    node.limits.open().unwrap();
    node.change(|state| state.faults = vec![Fault::fail("*", Code::DriverNotLoaded)]);
    node.limits.get(&gpus[0], node.cgroup()).unwrap_err();
    assert!(!node.limits.is_open(), "it is opened again once the driver is back");
    node.limits.open().unwrap_err();
    node.change(|state| state.faults.clear());
    node.limits.open().unwrap();
    let not_listed = node.limits.get(&unknown, node.cgroup()).unwrap_err();
    assert_eq!(not_listed, LimitError::UnknownGpu(unknown));
    assert!(node.limits.is_open(), "the other GPUs are used");
}

#[test]
fn a_call_that_hangs_blocks_no_other_gpu() {
    let node = Node::new(Some(LimitBackend::Dmem));
    let gpus = node.limits.open().unwrap();
    let hang = |gpu: &GpuId| Fault::hang("nvmlDeviceSetMemoryLimits_v1").of_gpu(gpu.as_str());
    node.change(|state| state.faults = vec![hang(&gpus[0])]);
    std::thread::scope(|scope| {
        let hung = scope.spawn(|| node.limits.set(&gpus[0], node.cgroup(), 4096));
        node.limits.set(&gpus[1], node.cgroup(), 4096).unwrap();
        node.change(|state| state.faults.clear());
        hung.join().unwrap().unwrap();
    });
}
