//! The demo runs to its end.

use std::process::{Command, Stdio};

#[test]
fn the_demo_runs_to_its_end_without_unexpected_refusals() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_demo"));
    command.arg("--once").stdin(Stdio::null()).env_remove("RUST_LOG");
    let output = command.output().unwrap();
    let (stdout, stderr) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{}\n{stdout}\n{stderr}", output.status);
    let last = stdout.lines().last().unwrap_or_default();
    let pods =
        last.strip_prefix("demo: ok pods=").and_then(|rest| rest.strip_suffix(" refused_unexpectedly=0"));
    let pods: u32 = pods.unwrap_or_else(|| panic!("{last:?} ends {stdout}")).parse().unwrap();
    assert!(pods > 0, "{stdout}");
    // A rule about pods is applied: the daemon knows which pods request devices.
    assert!(stdout.contains("namespace batch holds 2 of the 2 devices"), "{stdout}");
}
