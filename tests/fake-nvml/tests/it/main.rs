//! The built library, opened as any program opens NVML.

#![allow(unsafe_code, reason = "some questions can only be asked through the raw bindings")]
#![allow(clippy::unwrap_used, reason = "clippy.toml allows it in tests, but not in their helpers")]

mod arguments;
mod events;
mod faults;
mod limits;
mod links;
mod mig;
mod show;
mod symbols;

use std::time::{Duration, Instant};

use fake_nvml::{Installed, State};
use nvml_wrapper::Nvml;
use tempfile::TempDir;

/// No test waits longer than this for anything that must happen.
const PATIENCE: Duration = Duration::from_secs(300);

/// A library file of its own with a state, opened.
struct Bench {
    nvml: Nvml,
    installed: Installed,
    _folder: TempDir,
}

impl Bench {
    fn new(state: &State) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let installed = Installed::new(folder.path(), state).unwrap();
        let nvml = open(&installed).unwrap();
        Self { nvml, installed, _folder: folder }
    }

    fn change(&self, change: impl FnOnce(&mut State)) {
        self.installed.change(change).unwrap();
    }
}

fn open(installed: &Installed) -> Result<Nvml, nvml_wrapper::error::NvmlError> {
    Nvml::builder().lib_path(installed.library().as_os_str()).init()
}

/// Waits until it is so, and fails if it never is.
fn eventually(what: &str, so: impl Fn() -> bool) {
    let began = Instant::now();
    while !so() {
        assert!(began.elapsed() < PATIENCE, "never: {what}");
        std::thread::yield_now();
    }
}
