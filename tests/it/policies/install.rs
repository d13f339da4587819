//! Which modules are accepted as policies, the limits of compiling, and which files are kept.
// Clippy does not see that helpers of tests are tests, too.
#![allow(clippy::unwrap_used)]

use crate::support::gpus::SHARED;
use crate::support::ledger_node::shared_node;
use crate::support::wait::SOON;
use std::os::fd::AsRawFd as _;
use std::time::{Duration, Instant};

use berth_kernel::node::ports::{InstallError, PolicyFiles as _, PolicyRuntime as _};
use berth_kernel::policy::hooks::{FaultKind, Hook, Question};
use berth_kernel::policy::version::PolicyVersion;
use berth_wasm::limits::MODULE_BYTES_MAX;
use berth_wasm::{CompileLimits, Settings, WasmPolicies};

use crate::support::guests::{NOW, bomb, component, guest, installed, module, policies, refused, settings};

fn assert_refused(module: &[u8], words: &str) {
    let error = refused(module);
    assert!(matches!(error, InstallError::NotAPolicy { .. }), "{error:?}");
    let text = error.to_string();
    assert!(text.contains(words), "{text}");
    assert!(!text.contains('\n'), "{text}");
}

pub(crate) fn room(change: impl FnOnce(&mut Settings)) -> (WasmPolicies, tempfile::TempDir) {
    let state = tempfile::tempdir().unwrap();
    let mut settings = settings(state.path());
    change(&mut settings);
    (WasmPolicies::new(settings).unwrap(), state)
}

#[test]
fn a_core_module_becomes_a_component_and_is_known_by_it() {
    let version = installed("pass");
    assert_eq!((version.name.as_str(), version.version.as_str()), ("hostile", "0.1.0"));
    assert_eq!(version.hooks, [Hook::Offer, Hook::Place, Hook::Admit, Hook::Triage]);
    assert!(!version.shipped);
    assert_eq!(version.since_wall_ms, NOW.wall_ms);
    let component = policies().read_all(&version.digest).unwrap();
    assert!(component.starts_with(b"\0asm\x0d\0\x01\0"));
    assert_eq!(component.len() as u64, version.bytes);
    // The component itself is the same version, and installing twice is harmless.
    assert_eq!(policies().install(&component, NOW).unwrap(), version);
    assert_eq!(policies().install(&guest("pass"), NOW).unwrap(), version);
}

#[test]
fn invalid_policies_are_refused_with_the_reason() {
    assert_refused(b"", "the file is empty");
    assert_refused(
        &policies().read_all(&installed("pass").digest).unwrap()[..3000],
        "it has 3000 bytes and breaks off",
    );
    assert_refused(b"MZ\x90\0 not at all", "not WebAssembly");
    let plain = wat::parse_str("(module (func (export \"offer\")))").unwrap();
    assert_refused(&plain, "a core module without a world");
    assert_refused(&component("wasi"), "wasi:clocks");
    assert_refused(&component("other-world"), "no export");
    assert_refused(&wat::parse_str("(component)").unwrap(), "no export");
    assert_refused(&module(&text("memory64")), "memory64 must be enabled");
    assert_refused(&module(&text("threads")), "threads");
    let many = "(core instance (instantiate $module))".repeat(100);
    let many = format!("(component (core module $module (memory 1) (table 1 funcref)) {many})");
    assert_refused(&wat::parse_str(&many).unwrap(), "100");
}

fn text(name: &str) -> String {
    let path = format!("{}/tests/guests/{name}.wat", concat!(env!("CARGO_MANIFEST_DIR"), "/../.."));
    std::fs::read_to_string(path).unwrap()
}

#[test]
fn a_description_that_breaks_a_rule_is_refused() {
    assert_refused(&guest("lie-name"), "the name \"../../x\" is not a DNS label");
    assert_refused(&guest("lie-schema"), "the schema has 60000 bytes; at most 6144");
}

#[test]
fn truncated_or_flipped_bytes_do_no_harm() {
    let good = policies().read_all(&installed("pass").digest).unwrap();
    for end in [1, 8, 9, good.len() / 2, good.len() - 1] {
        refused(&good[..end]);
    }
    // A few bits at places that a generator without a seed of its own chooses.
    let mut at = 12_345_usize;
    for _ in 0..12 {
        at = at.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let mut flipped = good.clone();
        let place = at % flipped.len();
        flipped[place] ^= 1 << (at >> 32 & 7);
        // A flipped letter in a text is still a policy; anything else is an error of a kind that
        // blames the module.
        match policies().install(&flipped, NOW) {
            Ok(_) | Err(InstallError::NotAPolicy { .. }) => {}
            Err(error) => panic!("byte {place}: {error:?}"),
        }
    }
    let random: Vec<u8> = (0..10_000_u64).map(|n| (n * n * 31 % 251) as u8).collect();
    assert_refused(&random, "not WebAssembly");
    assert_refused(&[b"\0asm\x0d\0\x01\0".as_slice(), &random].concat(), "");
    assert_refused(&[b"\0asm\x01\0\0\0".as_slice(), &random].concat(), "");
}

#[test]
fn a_module_that_is_too_large_is_not_parsed() {
    let error = policies().install(&vec![0; MODULE_BYTES_MAX + 1], NOW).unwrap_err();
    let limit = MODULE_BYTES_MAX;
    let bytes = limit + 1;
    assert_eq!(error, InstallError::TooLarge { bytes, limit });
}

#[test]
fn a_compile_bomb_is_stopped_by_processor_time() {
    let (policies, _state) = room(|settings| settings.compile.cpu_s = 1);
    let error = policies.install(&bomb(20_000), NOW).unwrap_err();
    let what = "it took longer than 1 s of processor time".to_owned();
    assert_eq!(error, InstallError::TooCostly { what });
    // The next one compiles, given the usual time.
    let (policies, _state) = room(|_| {});
    policies.install(&guest("pass"), NOW).unwrap();
}

#[test]
fn a_compile_bomb_is_stopped_by_memory_and_by_wall_time() {
    let (policies, _state) = room(|settings| settings.compile.memory_bytes = Some(224 << 20));
    policies.install(&guest("pass"), NOW).unwrap();
    let error = policies.install(&bomb(20_000), NOW).unwrap_err();
    assert!(matches!(error, InstallError::TooCostly { .. }), "{error:?}");
    assert!(error.to_string().contains("memory") || error.to_string().contains("MiB"), "{error}");

    let (policies, _state) = room(|settings| settings.compile.wall = Duration::from_millis(50));
    let error = policies.install(&bomb(20_000), NOW).unwrap_err();
    let what = "it took longer than 0.05 s".to_owned();
    assert_eq!(error, InstallError::TooCostly { what });
}

#[test]
fn a_second_upload_waits_and_then_gets_a_retry_after() {
    let (policies, _state) = room(|settings| {
        settings.compile = CompileLimits { cpu_s: 2, wait: Duration::ZERO, ..CompileLimits::default() }
    });
    let bomb = bomb(20_000);
    std::thread::scope(|scope| {
        let first = scope.spawn(|| {
            loop {
                match policies.install(&bomb, NOW) {
                    Err(InstallError::Busy) => std::thread::yield_now(),
                    other => return other,
                }
            }
        });
        // Until the bomb has the compiler, this has.
        let deadline = Instant::now() + SOON;
        while policies.install(b"", NOW) != Err(InstallError::Busy) {
            assert!(Instant::now() < deadline, "it was never busy");
        }
        let error = first.join().unwrap().unwrap_err();
        assert!(matches!(error, InstallError::TooCostly { .. }), "{error:?}");
    });
}

/// The compiler that this process runs at the moment, by its argument.
fn compiler_of_this_process() -> Option<String> {
    let me = std::process::id().to_string();
    let processes = std::fs::read_dir("/proc").unwrap().flatten().map(|entry| entry.path());
    processes
        .filter(|path| {
            let read = |name| std::fs::read_to_string(path.join(name)).unwrap_or_default();
            let parent = read("status")
                .lines()
                .any(|line| line.strip_prefix("PPid:").is_some_and(|parent| parent.trim() == me));
            // The bomb's, and not that of a test beside this one.
            parent && read("cmdline").contains("__compile-policy\x0013\0")
        })
        .map(|path| path.display().to_string())
        .next()
}

#[test]
fn the_compiler_runs_with_nothing_but_its_pipes() {
    // A file that some library of the daemon left open for children.
    let (_read_end, write_end) = std::io::pipe().unwrap();
    rustix::io::fcntl_setfd(&write_end, rustix::io::FdFlags::empty()).unwrap();
    let left_open = std::fs::read_link(format!("/proc/self/fd/{}", write_end.as_raw_fd())).unwrap();
    let (policies, _state) = room(|settings| settings.compile.cpu_s = 13);
    let bomb = bomb(20_000);
    std::thread::scope(|scope| {
        let compiling = scope.spawn(|| policies.install(&bomb, NOW));
        let deadline = Instant::now() + SOON;
        let process = loop {
            if let Some(process) = compiler_of_this_process() {
                break process;
            }
            assert!(Instant::now() < deadline && !compiling.is_finished());
        };
        let has_it = || {
            let files = std::fs::read_dir(format!("{process}/fd")).unwrap();
            files.flatten().any(|file| std::fs::read_link(file.path()).is_ok_and(|at| at == left_open))
        };
        while has_it() {
            assert!(Instant::now() < deadline && !compiling.is_finished());
        }
        // Limits are set before the module is read, so wait for the last of them.
        let has = |file: &str, words: &[&str]| {
            let text = std::fs::read_to_string(format!("{process}/{file}")).unwrap_or_default();
            let mut lines = text.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
            lines.any(|line| line.starts_with(words))
        };
        let limit = |file, words: &[&str]| {
            while !has(file, words) {
                assert!(Instant::now() < deadline && !compiling.is_finished(), "{words:?}");
            }
        };
        limit("limits", &["Max", "open", "files", "3", "3"]);
        limit("limits", &["Max", "cpu", "time", "13", "14"]);
        limit("limits", &["Max", "address", "space", "805306368", "805306368"]);
        limit("limits", &["Max", "file", "size", "0", "0"]);
        limit("limits", &["Max", "core", "file", "size", "0", "0"]);
        limit("limits", &["Max", "processes", "0", "0"]);
        limit("status", &["NoNewPrivs:", "1"]);
        // The test is over; it does not wait for the bomb.
        let pid = process.trim_start_matches("/proc/").parse().unwrap();
        let pid = rustix::process::Pid::from_raw(pid).unwrap();
        rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
        let error = compiling.join().unwrap().unwrap_err();
        assert!(error.to_string().contains("killed"), "{error}");
    });
}

#[test]
fn a_missing_compiler_is_an_internal_error() {
    let (policies, _state) = room(|settings| settings.compiler = "/nonexistent/berth".into());
    let error = policies.install(&guest("pass"), NOW).unwrap_err();
    assert!(matches!(error, InstallError::Failed { .. }), "{error:?}");
    let (policies, _state) = room(|settings| settings.compiler = "/bin/false".into());
    let error = policies.install(&guest("pass"), NOW).unwrap_err();
    assert!(matches!(error, InstallError::Failed { .. }), "{error:?}");
    let (policies, _state) = room(|settings| settings.compile.memory_bytes = Some(1 << 20));
    assert!(policies.install(&guest("pass"), NOW).is_err());
}

#[test]
fn a_version_in_the_store_is_loaded_and_not_compiled_again() {
    let state = tempfile::tempdir().unwrap();
    let first = WasmPolicies::new(settings(state.path())).unwrap();
    let version = first.install(&guest("pass"), NOW).unwrap();
    let shipped = first.restore_shipped(NOW).unwrap();
    drop(first);

    let mut settings = settings(state.path());
    settings.compiler = "/nonexistent/berth".into();
    let second = WasmPolicies::new(settings).unwrap();
    assert_eq!(second.load(&version).unwrap(), version);
    for version in &shipped {
        assert_eq!(second.load(version).unwrap(), *version);
    }
    assert_eq!(second.restore_shipped(NOW).unwrap(), shipped);
    let node = shared_node(1, 1);
    assert_eq!(second.call(node.call(&version, "{}", Question::Offer)).answer, Ok(None));
}

#[test]
fn unloaded_code_is_read_again_by_the_next_call() {
    let (policies, state) = room(|_| {});
    let shipped = policies.shipped(NOW).into_iter().find(|v| v.name == "spread").unwrap();
    let node = shared_node(1, 1);
    let place = node.place(SHARED, 1);
    let ask =
        |version: &PolicyVersion| policies.call(node.call(version, "{}", Question::Place(&place))).answer;
    // Known and never compiled: a call must not wait for that.
    assert!(policies.register(&shipped));
    assert_eq!(ask(&shipped).unwrap_err().kind, FaultKind::Missing);
    let version = policies.load(&shipped).unwrap();
    assert_ne!(version.artifact, shipped.artifact);
    let answer = ask(&version).unwrap();

    policies.unload(&version.digest);
    assert_eq!(ask(&version), Ok(answer.clone()));
    // It did rest: without its file it cannot come back.
    policies.unload(&version.digest);
    let folder = state.path().join("policies");
    let mut files = std::fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path());
    let artifact = files.find(|path| path.extension().is_some_and(|end| end == "cwasm")).unwrap();
    let aside = state.path().join("aside");
    std::fs::rename(&artifact, &aside).unwrap();
    assert_eq!(ask(&version).unwrap_err().kind, FaultKind::Missing);
    std::fs::rename(&aside, &artifact).unwrap();
    assert_eq!(ask(&version), Ok(answer.clone()));
    // What has no file keeps its code.
    std::fs::remove_file(&artifact).unwrap();
    policies.unload(&version.digest);
    assert_eq!(ask(&version), Ok(answer));
}

#[test]
fn a_changed_artifact_is_never_loaded_but_compiled_again() {
    let state = tempfile::tempdir().unwrap();
    let first = WasmPolicies::new(settings(state.path())).unwrap();
    let version = first.install(&guest("pass"), NOW).unwrap();
    drop(first);
    let folder = state.path().join("policies");
    let file = |end: &str| {
        let mut entries = std::fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path());
        entries.find(|path| path.to_str().unwrap().ends_with(end)).unwrap()
    };
    let mut bytes = std::fs::read(file(".cwasm")).unwrap();
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    std::fs::write(file(".cwasm"), &bytes).unwrap();

    let second = WasmPolicies::new(settings(state.path())).unwrap();
    let restored = second.load(&version).unwrap();
    assert_eq!(restored, version, "the same component makes the same artifact");
    drop(second);
    // Without the component there is nothing to make it of.
    std::fs::write(file(".cwasm"), &bytes).unwrap();
    std::fs::write(file(".wasm"), b"other").unwrap();
    let third = WasmPolicies::new(settings(state.path())).unwrap();
    let digest = version.digest.clone();
    assert_eq!(third.load(&version), Err(InstallError::Lost { digest: digest.clone() }));
    assert_eq!(third.read_all(&digest), Err(InstallError::Lost { digest }));
}

#[test]
fn a_removed_version_is_deleted() {
    let (policies, state) = room(|_| {});
    let version = policies.install(&guest("pass"), NOW).unwrap();
    policies.remove(&version.digest);
    let node = shared_node(1, 1);
    assert!(policies.call(node.call(&version, "{}", Question::Offer)).answer.is_err());
    assert!(policies.read_all(&version.digest).is_err());
    assert_eq!(std::fs::read_dir(state.path().join("policies")).unwrap().count(), 0);
}
