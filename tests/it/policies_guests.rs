//! The room under test, and the guests that it is given.
// Clippy does not see that helpers of tests are tests, too.
#![allow(clippy::unwrap_used)]

use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::Duration;

use berth::kernel::policy::PolicyVersion;
use berth::kernel::time::Now;
use berth::ports::{InstallError, Policies};
use berth::wasm::{CompileLimits, Settings, WasmPolicies};
use wit_component::StringEncoding;

/// A moment.
pub(crate) const NOW: Now = Now { wall_ms: 1_800_000_000_000, mono_ms: 3_600_000 };

/// What every policy must export, by the text that a guest has if it brings its own.
const DEFAULTS: [(&str, &str); 7] = [
    ("(export \"memory\")", "memory"),
    ("(export \"cabi_realloc\")", "cabi_realloc"),
    ("(export \"describe\")", "describe"),
    ("(export \"offer\")", "offer"),
    ("(export \"place\")", "place"),
    ("(export \"admit\")", "admit"),
    ("(export \"triage\")", "triage"),
];

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn text(name: &str) -> String {
    let path = root().join("tests/guests").join(name);
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// A core module of the world `policy`: the guest's fields, and those of `default/` that it does
/// not bring itself.
pub(crate) fn guest(name: &str) -> Vec<u8> {
    module(&text(&format!("{name}.wat")))
}

/// As [`guest`], from text.
pub(crate) fn module(fields: &str) -> Vec<u8> {
    // Imports come first in a module.
    let (imports, rest): (Vec<&str>, Vec<&str>) =
        fields.lines().partition(|line| line.starts_with("(import"));
    let mut all = imports.join("\n") + "\n";
    for (export, name) in DEFAULTS {
        if !fields.contains(export) {
            all += &text(&format!("default/{name}.wat"));
        }
    }
    all += &rest.join("\n");
    let mut module = wat::parse_str(&all).unwrap_or_else(|error| panic!("{error}"));
    let mut resolve = wit_parser::Resolve::default();
    let (package, _) = resolve.push_path(root().join("policies-wasm/wit")).unwrap();
    let world = resolve.select_world(&[package], Some("policy")).unwrap();
    let utf8 = StringEncoding::UTF8;
    wit_component::embed_component_metadata(&mut module, &resolve, world, utf8).unwrap();
    module
}

/// A component, written out.
pub(crate) fn component(name: &str) -> Vec<u8> {
    let text = text(&format!("{name}.component.wat"));
    wat::parse_str(&text).unwrap_or_else(|error| panic!("{error}"))
}

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

/// One room for all tests that do not change its settings.
pub(crate) fn policies() -> &'static WasmPolicies {
    static ROOM: OnceLock<(WasmPolicies, tempfile::TempDir)> = OnceLock::new();
    let (policies, _) = ROOM.get_or_init(|| {
        let state = tempfile::tempdir().unwrap();
        (WasmPolicies::new(settings(state.path())).unwrap(), state)
    });
    policies
}

/// Installs a guest that can be installed.
pub(crate) fn installed(name: &str) -> PolicyVersion {
    let version = policies().install(&guest(name), NOW);
    version.unwrap_or_else(|error| panic!("{name}: {error}"))
}

/// Why a module is refused.
pub(crate) fn refused(module: &[u8]) -> InstallError {
    match policies().install(module, NOW) {
        Ok(version) => panic!("{} was taken", version.label()),
        Err(error) => error,
    }
}
