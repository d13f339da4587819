//! The whole check against the fake NVML, whose state file simulates processes and errors; CUDA and a CDI spec need a
//! driver.

#![allow(clippy::unwrap_used, reason = "clippy.toml allows it in tests, but not in their helpers")]

use fake_nvml::{Installed, LimitBackend, State};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

/// The steps that can run against the fake.
const PLAYED: [&str; 11] = [
    "probe",
    "node-check",
    "facts",
    "scans",
    "kubelet",
    "allocate",
    "process",
    "xid",
    "release",
    "mig",
    "load",
];
/// Those that depend on commands of `berth`, on a driver's files, or on root and cgroup v2; they pass, or are skipped with a
/// reason.
const OTHERS: [&str; 3] = ["cdi", "limits", "close"];

struct Run {
    output: Output,
    out: PathBuf,
    _folder: tempfile::TempDir,
}

impl Run {
    /// Runs the check on a state of the fake; without one on this machine itself.
    fn new(state: Option<&State>) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let out = folder.path().join("out");
        let program = Path::new(env!("CARGO_BIN_EXE_gpu-check"));
        let berth = program.with_file_name("berth");
        assert!(berth.is_file(), "build it first: cargo build -p berth");
        let mut command = Command::new(program);
        command.arg("--out").arg(&out).args(["--load-seconds", "3"]).arg("--berth").arg(berth);
        if let Some(state) = state {
            let nvml = Installed::new(&folder.path().join("nvml"), state).unwrap();
            command.arg("--nvml").arg(nvml.library()).arg("--fake-state").arg(nvml.state_path());
        }
        let output = command.stdin(Stdio::null()).output().unwrap();
        Self { output, out, _folder: folder }
    }

    fn text(&self) -> String {
        let [out, err] =
            [&self.output.stdout, &self.output.stderr].map(|bytes| String::from_utf8_lossy(bytes));
        format!("{out}{err}")
    }

    fn last_line(&self) -> String {
        String::from_utf8_lossy(&self.output.stdout).lines().last().unwrap_or_default().to_owned()
    }

    fn step(&self, name: &str) -> Value {
        let json: Value = serde_json::from_slice(&std::fs::read(self.out.join("gpu.json")).unwrap()).unwrap();
        let steps = json["steps"].as_array().unwrap();
        steps.iter().find(|step| step["name"] == name).unwrap_or_else(|| panic!("no step {name}")).clone()
    }
}

#[test]
fn every_step_that_the_fake_can_play_passes() {
    let device_node = tempfile::NamedTempFile::new().unwrap();
    let mut state = State::h100(1);
    state.driver_version = "580.159.04".into();
    state.gpus[0].held_file = Some(device_node.path().to_owned());
    state.memory_limits = Some(LimitBackend::Dmem);
    let run = Run::new(Some(&state));
    assert!(run.output.status.success(), "{}", run.text());
    for name in PLAYED {
        assert_eq!(run.step(name)["verdict"], "passed", "{}", run.text());
    }
    let skipped = OTHERS.iter().filter(|name| run.step(name)["verdict"] != "passed").count();
    for name in OTHERS {
        let verdict = &run.step(name)["verdict"];
        assert!(*verdict == "passed" || verdict["skipped"].is_string(), "{}", run.text());
    }
    let limits = run.step("limits")["verdict"].clone();
    let why = limits["skipped"].as_str().unwrap_or_default();
    assert!(limits == "passed" || why.contains("cgroup"), "{limits}");
    let passed = PLAYED.len() + OTHERS.len() - skipped;
    assert_eq!(run.last_line(), format!("gpu: {passed} passed, 0 failed, {skipped} skipped"));
    for (step, figures) in [
        ("node-check", &["open_ms", "first_handle_ms"][..]),
        ("scans", &["scan_ms_p50", "scan_ms_p99", "fds", "pss_kib"]),
        ("kubelet", &["registered_ms"]),
        ("allocate", &["allocate_p50_us"]),
        ("process", &["seen_ms", "bypass_ms", "gone_ms"]),
        ("xid", &["xid_ms"]),
        ("load", &["starts", "pss_growth_kib"]),
    ] {
        for figure in figures {
            assert!(run.step(step)["figures"][figure].is_number(), "{step}: {figure}: {}", run.text());
        }
    }
    assert!(run.step("facts")["figures"]["calls"].as_array().unwrap().len() > 50);
    // The fixture has the machine's answers, and the fake can load it.
    let fixture = State::read(&run.out.join("fake-nvml.json")).unwrap();
    assert_eq!(fixture.driver_version, "580.159.04");
    assert_eq!(fixture.gpus[0].uuid, state.gpus[0].uuid);
    assert_eq!(fixture.gpus[0].memory_total_mib, state.gpus[0].memory_total_mib);
    assert!(run.out.join("gpu-probe.txt").is_file() && run.out.join("berth.log").is_file());
}

#[test]
fn a_failed_step_has_its_cause_and_stops_no_other() {
    let run = Run::new(Some(&State::default()));
    assert!(!run.output.status.success(), "{}", run.text());
    for name in PLAYED.iter().filter(|name| **name != "scans") {
        let verdict = run.step(name)["verdict"].clone();
        let cause = verdict["failed"].as_str().unwrap_or_else(|| panic!("{name}: {verdict}"));
        assert!(
            ["lists no GPU", "shows no GPU", "settings"].iter().any(|known| cause.contains(known)),
            "{name}: {cause}"
        );
    }
    assert!(run.last_line().contains(" failed, "), "{}", run.text());
}

#[test]
fn without_a_gpu_it_is_skipped() {
    if ["/dev/nvidiactl", "/dev/dxg", "/proc/driver/nvidia/version"]
        .iter()
        .any(|path| Path::new(path).exists())
    {
        eprintln!("skipped: this machine has a GPU");
        return;
    }
    let run = Run::new(None);
    assert!(run.output.status.success(), "{}", run.text());
    assert!(run.text().starts_with("skipped: there is no NVIDIA "), "{}", run.text());
    assert_eq!(run.last_line(), "gpu: 0 passed, 0 failed, 14 skipped");
}
