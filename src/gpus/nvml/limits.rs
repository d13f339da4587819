//! Limits of the memory that the processes of a cgroup may allocate on a GPU. The Linux kernel enforces them
//! since NVIDIA's driver 615; NVML sets and reads them (`nvml.h` of API 13.4, `nvmlDeviceSetMemoryLimits_v1`).

use super::fence::{CallFailure, Fence, Lane, Steps};
use super::library::{self, OpenNvml};
use super::{map, raw};
use berth_kernel::ids::names::GpuId;
use berth_kernel::node::ports::GpusError;
use crossbeam_channel::{Receiver, RecvTimeoutError};
use nvml_wrapper::Device;
use nvml_wrapper::error::NvmlError;
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::ffi::{CStr, CString};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// How long all calls on one GPU may take: less than the interval at which limits are read.
const CALLS_MAX: Duration = Duration::from_secs(10);
/// How long the first calls may take, which start the GPUs.
const FIRST_CALLS_MAX: Duration = Duration::from_secs(60);
/// How long NVML may take to close.
const CLOSE_MAX: Duration = Duration::from_secs(10);
/// Bytes of a MiB.
const MIB: u64 = 1 << 20;

/// What the driver holds for a cgroup on a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReportedLimit {
    /// MiB that its processes may allocate. The driver rounds to pages of 2 MiB.
    pub limit_mib: u64,
    /// MiB that they have allocated.
    pub used_mib: u64,
}

/// Why a limit could not be set or read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LimitError {
    /// NVML is not open.
    #[error("NVML is not open: {0}")]
    NotOpen(String),
    /// The GPU was not there when NVML was opened.
    #[error("NVML does not list the GPU {0}")]
    UnknownGpu(GpuId),
    /// The driver or the kernel has no such limits.
    #[error(
        "the driver cannot limit memory ({call}: {answer}): this needs NVIDIA's driver 615 or later, cgroup v2, and a GPU \
         that is not in MIG mode"
    )]
    Unsupported {
        /// The call of NVML.
        call: &'static str,
        /// NVML's words.
        answer: String,
    },
    /// A call failed.
    #[error("{call} failed: {answer}")]
    Failed {
        /// The call of NVML.
        call: &'static str,
        /// NVML's words.
        answer: String,
    },
    /// A call does not return.
    #[error("{0}")]
    NoAnswer(String),
    /// NVML takes no path with a NUL.
    #[error("the path of the cgroup has a NUL")]
    BadPath,
}

impl LimitError {
    fn of(call: &'static str, error: &NvmlError) -> Self {
        let answer = error.to_string();
        match error {
            NvmlError::NotSupported | NvmlError::FunctionNotFound | NvmlError::FailedToLoadSymbol(_) => {
                Self::Unsupported { call, answer }
            }
            _ => Self::Failed { call, answer },
        }
    }
}

/// NVML, opened only to set and read limits.
pub struct NvmlLimits {
    library: Option<PathBuf>,
    driver_root: PathBuf,
    calls_max: Duration,
    fence: Fence,
    state: Mutex<State>,
}

enum State {
    Open(Arc<OpenLibrary>),
    Closed {
        why: String,
        /// Disconnected once the library is closed; NVML counts its users and keeps its GPUs until the last one is gone.
        closing: Option<Receiver<()>>,
    },
}

struct OpenLibrary {
    nvml: Arc<OpenNvml>,
    closing: Receiver<()>,
    /// NVML's indices, which do not change while the driver is loaded.
    gpus: BTreeMap<GpuId, u32>,
}

impl NvmlLimits {
    /// NVML in this library, or else in the usual folders and those below the root of the driver's files. It is not open.
    #[must_use]
    pub fn new(library: Option<PathBuf>, driver_root: PathBuf) -> Self {
        let state = State::Closed { why: "the guard has not opened it yet".into(), closing: None };
        Self { library, driver_root, calls_max: CALLS_MAX, fence: Fence::default(), state: Mutex::new(state) }
    }

    /// Sets how long all calls on one GPU may take.
    #[must_use]
    pub fn with_calls_max(self, calls_max: Duration) -> Self {
        Self { calls_max, ..self }
    }

    /// Whether NVML is open.
    #[must_use]
    pub fn is_open(&self) -> bool {
        matches!(*self.state.lock(), State::Open(_))
    }

    /// Opens NVML, if it is not open, and returns the GPUs. Blocks for up to minutes: the first handle starts a GPU.
    ///
    /// # Errors
    /// If it cannot be opened, with the remedy.
    pub fn open(&self) -> Result<Vec<GpuId>, GpusError> {
        if let State::Open(open) = &*self.state.lock() {
            return Ok(open.gpus.keys().cloned().collect());
        }
        self.wait_until_closed(CLOSE_MAX);
        let opened = self.open_library().inspect_err(|error| {
            let why = error.to_string();
            if let State::Closed { why: known, .. } = &mut *self.state.lock() {
                *known = why;
            }
        })?;
        let gpus = opened.gpus.keys().cloned().collect();
        *self.state.lock() = State::Open(Arc::new(opened));
        Ok(gpus)
    }

    fn open_library(&self) -> Result<OpenLibrary, GpusError> {
        let (library, ()) = library::open(&self.fence, self.library.as_deref(), &self.driver_root, |_| ())?;
        let (nvml, closing) = (library.nvml, library.closing);
        let error = |what: String| GpusError { what, source: None };
        let listing = Arc::clone(&nvml);
        let listed = self.fence.run(Lane::Node, FIRST_CALLS_MAX, move |steps| {
            steps.at("nvmlDeviceGetCount_v2");
            let count = listing.device_count()?;
            let uuid = |index| {
                steps.at("nvmlDeviceGetUUID");
                // A GPU that does not answer has no limits; its owner reports it.
                let uuid = listing.device_by_index(index).and_then(|gpu| gpu.uuid()).ok()?;
                Some((GpuId::parse(&uuid).ok()?, index))
            };
            Ok((0..count).filter_map(uuid).collect())
        });
        let gpus = listed
            .map_err(|failure| error(failure.to_string()))?
            .map_err(|cause: NvmlError| error(format!("NVML cannot count the GPUs: {cause}")))?;
        Ok(OpenLibrary { nvml, closing, gpus })
    }

    /// Closes NVML, so that the driver can be unloaded; `why` is the cause of the failure of calls until it is opened
    /// again. Returns whether it was closed in time.
    pub fn close(&self, why: &str) -> bool {
        self.mark_closed(why);
        self.wait_until_closed(CLOSE_MAX)
    }

    fn mark_closed(&self, why: &str) {
        let mut state = self.state.lock();
        let closing = match &mut *state {
            State::Open(open) => Some(open.closing.clone()),
            State::Closed { closing, .. } => closing.take(),
        };
        *state = State::Closed { why: why.into(), closing };
    }

    fn wait_until_closed(&self, max: Duration) -> bool {
        let closing = match &*self.state.lock() {
            State::Open(_) => return true,
            State::Closed { closing, .. } => closing.clone(),
        };
        closing.is_none_or(|closing| closing.recv_timeout(max) == Err(RecvTimeoutError::Disconnected))
    }

    /// Limits the memory that the processes of the cgroup in this folder may allocate on a GPU, and reads the limit back.
    /// Blocks for up to 10 s.
    ///
    /// # Errors
    /// If it cannot be set, or not be read back.
    pub fn set(
        &self,
        gpu: &GpuId,
        cgroup: &Path,
        limit_mib: u64,
    ) -> Result<Option<ReportedLimit>, LimitError> {
        let path = CString::new(cgroup.as_os_str().as_bytes()).map_err(|_| LimitError::BadPath)?;
        self.call(gpu, move |device, steps| {
            steps.at("nvmlDeviceSetMemoryLimits_v1");
            raw::set_memory_limit(device, &path, limit_mib.saturating_mul(MIB))?;
            read_limit(device, &path, steps)
        })
    }

    /// The limit of the cgroup in this folder on a GPU; `None`: it has none. Blocks for up to 10 s.
    ///
    /// # Errors
    /// If it cannot be read.
    pub fn get(&self, gpu: &GpuId, cgroup: &Path) -> Result<Option<ReportedLimit>, LimitError> {
        let path = CString::new(cgroup.as_os_str().as_bytes()).map_err(|_| LimitError::BadPath)?;
        self.call(gpu, move |device, steps| read_limit(device, &path, steps))
    }

    fn call<T: Send + 'static>(
        &self,
        gpu: &GpuId,
        make: impl FnOnce(&Device<'_>, &Steps) -> Result<T, NvmlError> + Send + 'static,
    ) -> Result<T, LimitError> {
        let open = match &*self.state.lock() {
            State::Open(open) => Arc::clone(open),
            State::Closed { why, .. } => return Err(LimitError::NotOpen(why.clone())),
        };
        let index = *open.gpus.get(gpu).ok_or_else(|| LimitError::UnknownGpu(gpu.clone()))?;
        let nvml = Arc::clone(&open.nvml);
        let answer = self.fence.run(Lane::Gpu(index), self.calls_max, move |steps| {
            steps.at("nvmlDeviceGetHandleByIndex_v2");
            let made = nvml.device_by_index(index).and_then(|device| make(&device, steps));
            made.map_err(|error| (steps.now(), error))
        });
        drop(open);
        match answer {
            Ok(Ok(value)) => Ok(value),
            Ok(Err((call, error))) => {
                if map::is_driver_error(&error) {
                    self.mark_closed(&format!("{call}: {error}"));
                }
                Err(LimitError::of(call, &error))
            }
            Err(failure @ (CallFailure::Hung { .. } | CallFailure::NotMade(_))) => {
                Err(LimitError::NoAnswer(failure.to_string()))
            }
        }
    }
}

/// Reads the limit of a cgroup on a GPU; `None`: it has none.
fn read_limit(device: &Device<'_>, cgroup: &CStr, steps: &Steps) -> Result<Option<ReportedLimit>, NvmlError> {
    steps.at("nvmlDeviceGetMemoryLimits_v1");
    match raw::memory_limit(device, cgroup) {
        Ok((u64::MAX, _)) | Err(NvmlError::NotFound | NvmlError::NotSupported) => Ok(None),
        Ok((hard, used)) => Ok(Some(ReportedLimit { limit_mib: map::mib(hard), used_mib: map::mib(used) })),
        Err(error) => Err(error),
    }
}
