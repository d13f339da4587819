//! What every call does before its own work: is the library initialised, does a fault befall it, is its GPU there.

use std::collections::HashMap;
use std::ffi::c_uint;
use std::fs::OpenOptions;
use std::io::Write as _;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::{Arc, LazyLock, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use crate::code::{Answer, Code, number};
use crate::fault::Fault;
use crate::gpu::Gpu;
use crate::instance::{Instance, Mig};
use crate::runtime::handle::Handle;
use crate::runtime::library;
use crate::state::State;

/// How often a slow or hanging call reads the file again.
pub(crate) const LOOK_AGAIN: Duration = Duration::from_millis(2);

/// How many calls each fault with `times` befell.
static SPENT: LazyLock<Mutex<HashMap<Fault, u32>>> = LazyLock::new(Mutex::default);

/// A device handle resolved: a GPU, or a MIG device of it.
pub(crate) struct Device<'a> {
    pub(crate) state: &'a State,
    /// Position of the GPU.
    pub(crate) index: c_uint,
    pub(crate) gpu: &'a Gpu,
    /// The MIG device and its position, if the handle names one.
    pub(crate) mig: Option<(c_uint, &'a Instance)>,
}

impl Device<'_> {
    /// The answer to calls that need the right to see all of a GPU in MIG mode.
    pub(crate) fn privileged(&self) -> Answer {
        let is_hidden = |mig: &Mig| mig.enabled && !mig.privileged;
        match (self.mig, &self.gpu.mig) {
            (None, Some(mig)) if is_hidden(mig) => Err(Code::NoPermission),
            _ => Ok(()),
        }
    }
}

/// A call that names no GPU.
pub(crate) fn system(symbol: &str, work: impl FnOnce(&State) -> Answer) -> c_uint {
    guarded(|| work(&*ready(symbol, None, library::state)?))
}

/// `nvmlInit`: befallen by faults although nothing is initialised yet.
pub(crate) fn init(symbol: &str) -> c_uint {
    guarded(|| {
        ready(symbol, None, library::state_before_init)?;
        library::init()
    })
}

/// `nvmlShutdown`.
pub(crate) fn shutdown(symbol: &str) -> c_uint {
    guarded(|| {
        ready(symbol, None, library::state)?;
        library::shutdown()
    })
}

/// A call on a device handle, GPU or MIG.
pub(crate) fn device(symbol: &str, handle: Handle, work: impl FnOnce(&Device) -> Answer) -> c_uint {
    guarded(|| {
        // Before the handle: NVML answers "uninitialised" whatever the arguments are.
        library::state()?;
        let uuid = handle.device()?;
        let state = ready(symbol, Some(&uuid), library::state)?;
        work(&resolve(&state, &uuid)?)
    })
}

/// A call that looks a GPU or MIG device up: faults befall it by the GPU that `choose` finds.
pub(crate) fn lookup(
    symbol: &str,
    choose: impl Fn(&State) -> Answer<String>,
    work: impl FnOnce(&Device) -> Answer,
) -> c_uint {
    guarded(|| {
        let uuid = choose(&*library::state()?);
        let state = ready(symbol, uuid.as_deref().ok(), library::state)?;
        // Chosen again: the file may have changed while the call was slow.
        let chosen = choose(&state)?;
        let device = resolve(&state, &chosen)?;
        library::start(device.gpu)?;
        work(&device)
    })
}

/// A call on a GPU; a MIG device is an invalid argument.
pub(crate) fn gpu(symbol: &str, handle: Handle, work: impl FnOnce(&Device) -> Answer) -> c_uint {
    device(symbol, handle, |device| match device.mig {
        None => work(device),
        Some(_) => Err(Code::InvalidArgument),
    })
}

/// The GPU that a UUID (its own, or that of a MIG device of it) stands for. One that left the file is lost.
pub(crate) fn resolve<'a>(state: &'a State, uuid: &str) -> Answer<Device<'a>> {
    let found = find(state, uuid).ok_or(Code::GpuIsLost)?;
    if found.gpu.lost { Err(Code::GpuIsLost) } else { Ok(found) }
}

/// The same, lost or not.
pub(crate) fn find<'a>(state: &'a State, uuid: &str) -> Option<Device<'a>> {
    for (index, gpu) in (0..).zip(&state.gpus) {
        if gpu.uuid == uuid {
            return Some(Device { state, index, gpu, mig: None });
        }
        let instances = gpu.mig.iter().filter(|mig| mig.enabled).flat_map(|mig| &mig.instances);
        if let Some(mig) = (0..).zip(instances).find(|(_, instance)| instance.uuid == uuid) {
            return Some(Device { state, index, gpu, mig: Some(mig) });
        }
    }
    None
}

/// Waits and fails as the file's faults say, and answers the state that holds after that.
fn ready(symbol: &str, uuid: Option<&str>, state: impl Fn() -> Answer<Arc<State>>) -> Answer<Arc<State>> {
    let began = Instant::now();
    if let Ok(State { call_log: Some(file), .. }) = state().as_deref() {
        log_call(file, symbol, uuid);
    }
    loop {
        let now = state()?;
        use_stack(now.stack_kib);
        let Some(fault) = fault_of(&now, symbol, uuid) else {
            return Ok(now);
        };
        if !fault.hang && began.elapsed() >= Duration::from_millis(fault.delay_ms) {
            if fault.times.is_some() {
                *SPENT.lock().unwrap_or_else(PoisonError::into_inner).entry(fault.clone()).or_default() += 1;
            }
            return match fault.answer {
                Some(code) => Err(code),
                None => Ok(now),
            };
        }
        // No lock is held here, so that other calls go on.
        thread::sleep(LOOK_AGAIN);
    }
}

fn log_call(file: &Path, symbol: &str, uuid: Option<&str>) {
    let opened = OpenOptions::new().create(true).append(true).open(file);
    // One write a line, so that lines of several threads do not mix.
    let line = format!("{symbol} {}\n", uuid.unwrap_or("-"));
    // A test that reads the log notices that a line is missing.
    let _ = opened.and_then(|mut file| file.write_all(line.as_bytes()));
}

/// Uses so much of the thread's stack: a thread whose stack is smaller ends the program.
#[inline(never)]
fn use_stack(kib: u32) {
    if let Some(less) = kib.checked_sub(1) {
        let mut used = [0_u8; 1024];
        std::hint::black_box(&mut used);
        use_stack(less);
        std::hint::black_box(&mut used);
    }
}

fn fault_of<'a>(state: &'a State, symbol: &str, uuid: Option<&str>) -> Option<&'a Fault> {
    let mut gpus = Vec::new();
    if let Some(uuid) = uuid {
        gpus.push(uuid);
        gpus.extend(find(state, uuid).map(|device| device.gpu.uuid.as_str()));
    }
    let spent = SPENT.lock().unwrap_or_else(PoisonError::into_inner);
    let is_left = |fault: &Fault| fault.times.is_none_or(|times| spent.get(fault).is_none_or(|n| *n < times));
    state.faults.iter().find(|fault| fault.matches(symbol, &gpus) && is_left(fault))
}

/// A panic must not cross into C: it becomes an unknown error.
pub(crate) fn guarded(work: impl FnOnce() -> Answer) -> c_uint {
    // Nothing of ours is left half changed by a panic: the state is read only and the locks are taken for whole steps.
    let answer = catch_unwind(AssertUnwindSafe(work));
    number(answer.unwrap_or(Err(Code::Unknown)))
}
