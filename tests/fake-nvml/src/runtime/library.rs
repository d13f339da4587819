//! The one library of a process: initialised or not, and its state file.

use std::sync::{Arc, Mutex, PoisonError};

use crate::code::{Answer, Code};
use crate::gpu::Gpu;
use crate::runtime::source::Source;
use crate::state::State;

struct Library {
    /// `nvmlInit` less `nvmlShutdown`.
    users: u32,
    source: Source,
    /// The GPUs that the first `nvmlInit` found.
    counted: Vec<String>,
}

/// Held for a `stat`, and for reading the file when it has changed; never while a call is slow or hangs.
static LIBRARY: Mutex<Library> = Mutex::new(Library { users: 0, source: Source::new(), counted: Vec::new() });

fn with<T>(work: impl FnOnce(&mut Library) -> T) -> T {
    // A panic while the lock was held leaves nothing incomplete that matters: the next call reads the file again.
    work(&mut LIBRARY.lock().unwrap_or_else(PoisonError::into_inner))
}

/// Counts one more user; the first one searches for the state file.
pub(crate) fn init() -> Answer {
    with(|library| {
        if library.users == 0 {
            library.source.open()?;
            let state = library.source.state()?;
            library.counted = state.gpus.iter().map(|gpu| gpu.uuid.clone()).collect();
        }
        library.users += 1;
        Ok(())
    })
}

/// Counts one user less.
pub(crate) fn shutdown() -> Answer {
    with(|library| {
        library.users = library.users.checked_sub(1).ok_or(Code::Uninitialized)?;
        Ok(())
    })
}

/// The newest state, if the library is initialised.
pub(crate) fn state() -> Answer<Arc<State>> {
    with(|library| {
        if library.users == 0 {
            return Err(Code::Uninitialized);
        }
        let state = library.source.state()?;
        let counted = |gpu: &Gpu| library.counted.contains(&gpu.uuid);
        if !state.counts_at_init || state.gpus.iter().all(counted) {
            return Ok(state);
        }
        let mut seen = State::clone(&state);
        seen.gpus.retain(counted);
        Ok(Arc::new(seen))
    })
}

/// The newest state, whether initialised or not: `nvmlInit` itself may be slow, hang or fail.
pub(crate) fn state_before_init() -> Answer<Arc<State>> {
    with(|library| {
        if library.users == 0 {
            library.source.open()?;
        }
        library.source.state()
    })
}
