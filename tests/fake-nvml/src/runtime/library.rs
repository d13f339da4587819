//! The one library of a process: initialised or not, and its state file.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use crate::code::{Answer, Code};
use crate::gpu::Gpu;
use crate::runtime::source::{self, Source};
use crate::state::State;

struct Library {
    /// `nvmlInit` less `nvmlShutdown`.
    users: u32,
    source: Source,
    /// The GPUs that the first `nvmlInit` found.
    counted: Vec<String>,
    /// The GPUs that were started: by the first handle after `nvmlInit`.
    started: Vec<String>,
    /// The files that are open from the first handle to `nvmlShutdown`, like a real library's `/dev/nvidia*`.
    held_files: Vec<File>,
}

/// Held for a `stat`, and for reading the file when it has changed; never while a call is slow or hangs.
static LIBRARY: Mutex<Library> = Mutex::new(Library {
    users: 0,
    source: Source::new(),
    counted: Vec::new(),
    started: Vec::new(),
    held_files: Vec::new(),
});

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
            if state.stale_library.is_some() && state.stale_library == source::own_inode() {
                return Err(Code::LibRmVersionMismatch);
            }
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
        if library.users == 0 {
            library.started.clear();
            library.held_files.clear();
        }
        Ok(())
    })
}

/// Starts a GPU, which takes its `cold_start_ms`, unless it was started since `nvmlInit`.
pub(crate) fn start(gpu: &Gpu) -> Answer {
    if with(|library| library.started.contains(&gpu.uuid)) {
        return Ok(());
    }
    // No lock is held here: GPUs may be started at the same time.
    thread::sleep(Duration::from_millis(gpu.cold_start_ms));
    with(|library| {
        if let Some(path) = &gpu.held_file {
            library.held_files.push(File::open(path).map_err(|_| Code::NoPermission)?);
        }
        library.started.push(gpu.uuid.clone());
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

/// The path of the state file, once it was searched for.
pub(crate) fn state_file() -> Option<PathBuf> {
    with(|library| library.source.path().map(Path::to_owned))
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
