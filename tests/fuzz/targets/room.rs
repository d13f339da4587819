//! The room of policies of a target that needs one.

use berth_wasm::{Settings, WasmPolicies, compiler_process};
use std::sync::OnceLock;

/// Policies are compiled by a child process, which is this very program: libFuzzer calls this before it
/// looks at any argument.
pub(crate) fn compiler() {
    if let Some(code) = compiler_process() {
        // There is no `main` here that could return it.
        std::process::exit(i32::from(code != std::process::ExitCode::SUCCESS));
    }
}

pub(crate) fn policies() -> &'static WasmPolicies {
    static ROOM: OnceLock<(WasmPolicies, tempfile::TempDir)> = OnceLock::new();
    let (policies, _) = ROOM.get_or_init(|| {
        let state = tempfile::tempdir().expect("a folder for files of policies");
        (WasmPolicies::new(Settings::new(state.path().to_owned())).expect("a room for policies"), state)
    });
    policies
}
