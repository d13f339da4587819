//! The policy runtime under test, and its guest modules.
// Clippy does not see that helpers of tests are tests, too.
#![allow(clippy::unwrap_used)]

use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use berth_kernel::ids::time::Now;
use berth_kernel::node::ports::{InstallError, PolicyFiles as _};
use berth_kernel::policy::version::PolicyVersion;
use berth_wasm::{CompileLimits, Settings, WasmPolicies};

pub(crate) use harness::hostile::table::guests::{bomb, component, guest, module};

/// The time at which policies are called.
pub(crate) const NOW: Now = Now { wall_ms: 1_800_000_000_000, mono_ms: 3_600_000 };

/// Settings that find the compiler.
pub(crate) fn settings(state_dir: &Path) -> Settings {
    Settings {
        compiler: PathBuf::from(env!("CARGO_BIN_EXE_berth")),
        compile: CompileLimits {
            // Tests compile side by side.
            wait: Duration::from_secs(120),
            ..CompileLimits::default()
        },
        ..Settings::new(state_dir.to_owned())
    }
}

/// The policy runtime of all tests that do not change its settings.
pub(crate) fn policies() -> &'static WasmPolicies {
    shared_policies()
}

/// The policy runtime of `policies`, as an `Arc` for threads that hold it.
pub(crate) fn shared_policies() -> &'static Arc<WasmPolicies> {
    static ROOM: OnceLock<(Arc<WasmPolicies>, tempfile::TempDir)> = OnceLock::new();
    let (policies, _) = ROOM.get_or_init(|| {
        let state = tempfile::tempdir().unwrap();
        (Arc::new(WasmPolicies::new(settings(state.path())).unwrap()), state)
    });
    policies
}

/// Installs a guest, which must be accepted.
pub(crate) fn installed(name: &str) -> PolicyVersion {
    let version = policies().install(&guest(name), NOW);
    version.unwrap_or_else(|error| panic!("{name}: {error}"))
}

/// The error with which a module is refused.
pub(crate) fn refused(module: &[u8]) -> InstallError {
    match policies().install(module, NOW) {
        Ok(version) => panic!("{} was taken", version.label()),
        Err(error) => error,
    }
}
