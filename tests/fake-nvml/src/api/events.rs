//! Event sets: who waits for which events of which GPUs.

use std::collections::HashMap;
use std::ffi::{c_uint, c_ulonglong};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::api::layout::{EventData, EventDataV1};
use crate::api::processes::NO_INSTANCE;
use crate::code::{Answer, Code};
use crate::event::{Event, EventKind};
use crate::runtime::call;
use crate::runtime::changes::Changes;
use crate::runtime::handle::Handle;
use crate::runtime::library;
use crate::runtime::pointer::Out;
use crate::state::State;

/// An `nvmlEventSet_t`: a number in a pointer's place, as with [`Handle`].
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
#[repr(transparent)]
struct SetHandle(usize);

/// A GPU registered with a set.
struct Watch {
    /// Bits of the events wanted.
    kinds: u64,
    /// The newest event delivered, or at first the newest one before the set.
    delivered: u64,
}

struct Set {
    /// Those since the set was created.
    changes: Arc<Changes>,
    /// The newest event in the file when the set was created.
    created_at: u64,
    /// By UUID.
    watched: HashMap<String, Watch>,
}

struct Sets {
    next: usize,
    open: Option<HashMap<SetHandle, Set>>,
}

/// Locked to read one set, never while a call waits.
static SETS: Mutex<Sets> = Mutex::new(Sets { next: 0x4e57_0000, open: None });

fn sets() -> MutexGuard<'static, Sets> {
    SETS.lock().unwrap_or_else(PoisonError::into_inner)
}

fn with_set<T>(handle: SetHandle, work: impl FnOnce(&mut Set) -> T) -> Answer<T> {
    let mut sets = sets();
    let set = sets.open.as_mut().and_then(|open| open.get_mut(&handle));
    set.map(work).ok_or(Code::InvalidArgument)
}

#[unsafe(no_mangle)]
extern "C" fn nvmlEventSetCreate(out: Out<SetHandle>) -> c_uint {
    call::system("nvmlEventSetCreate", |state| {
        out.checked()?;
        let mut sets = sets();
        let handle = SetHandle(sets.next);
        sets.next += 16;
        let changes = Arc::new(Changes::of(library::state_file().as_deref()));
        let set = Set { changes, created_at: state.newest_event(), watched: HashMap::new() };
        sets.open.get_or_insert_default().insert(handle, set);
        out.put(handle)
    })
}

/// A call that waits on the set ends with "invalid argument".
#[unsafe(no_mangle)]
extern "C" fn nvmlEventSetFree(set: SetHandle) -> c_uint {
    call::system("nvmlEventSetFree", |_| {
        let freed = sets().open.as_mut().and_then(|open| open.remove(&set));
        freed.map(|set| set.changes.end_waits()).ok_or(Code::InvalidArgument)
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetSupportedEventTypes(device: Handle, kinds: Out<c_ulonglong>) -> c_uint {
    call::gpu("nvmlDeviceGetSupportedEventTypes", device, |device| {
        kinds.put(device.state.supported_events.unwrap_or(EventKind::ALL))
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceRegisterEvents(device: Handle, kinds: c_ulonglong, set: SetHandle) -> c_uint {
    call::gpu("nvmlDeviceRegisterEvents", device, |device| {
        if kinds & !EventKind::ALL != 0 {
            return Err(Code::NotSupported);
        }
        with_set(set, |set| {
            let watch = set
                .watched
                .entry(device.gpu.uuid.clone())
                .or_insert(Watch { kinds: 0, delivered: set.created_at });
            watch.kinds |= kinds;
        })
    })
}

impl Set {
    /// The oldest event that is wanted and was not delivered yet; it now counts as delivered.
    fn next(&mut self, state: &State) -> Option<Event> {
        let wanted = |event: &&Event| {
            let watch = self.watched.get(&event.gpu);
            watch.is_some_and(|watch| event.seq > watch.delivered && watch.kinds & event.kind.bit() != 0)
        };
        let event = state.events.iter().filter(wanted).min_by_key(|event| event.seq)?.clone();
        if let Some(watch) = self.watched.get_mut(&event.gpu) {
            watch.delivered = event.seq;
        }
        Some(event)
    }

    /// Whether a watched GPU fell off the bus or left the file.
    fn lost(&self, state: &State) -> bool {
        self.watched.keys().any(|uuid| state.gpu(uuid).is_none_or(|gpu| gpu.lost))
    }
}

/// Waits for an event. As NVML: an event that is there goes first, then the loss of a watched GPU answers at once.
fn wait(set: SetHandle, timeout_ms: c_uint) -> Answer<Event> {
    let began = Instant::now();
    let timeout = Duration::from_millis(timeout_ms.into());
    // A thread that waits sleeps, as in NVML.
    let changes = with_set(set, |set| Arc::clone(&set.changes))?;
    loop {
        let state = library::state()?;
        let (event, lost) = with_set(set, |set| (set.next(&state), set.lost(&state)))?;
        if let Some(event) = event {
            return Ok(event);
        }
        if lost {
            return Err(Code::GpuIsLost);
        }
        let left = timeout.saturating_sub(began.elapsed());
        if left.is_zero() || state.empty_wait_at_once {
            return Err(Code::Timeout);
        }
        changes.wait(left);
    }
}

#[unsafe(no_mangle)]
extern "C" fn nvmlEventSetWait(set: SetHandle, data: Out<EventDataV1>, timeout_ms: c_uint) -> c_uint {
    call::system("nvmlEventSetWait", |_| {
        data.checked()?;
        let event = wait(set, timeout_ms)?;
        data.put(EventDataV1 {
            device: Handle::of_device(&event.gpu),
            kind: event.kind.bit(),
            data: event.data,
        })
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlEventSetWait_v2(set: SetHandle, data: Out<EventData>, timeout_ms: c_uint) -> c_uint {
    call::system("nvmlEventSetWait_v2", |_| {
        data.checked()?;
        let event = wait(set, timeout_ms)?;
        data.put(EventData {
            device: Handle::of_device(&event.gpu),
            kind: event.kind.bit(),
            data: event.data,
            gpu_instance: event.gpu_instance.unwrap_or(NO_INSTANCE),
            compute_instance: event.compute_instance.unwrap_or(NO_INSTANCE),
        })
    })
}
