//! Settings of NVIDIA's device plugin: its files, variables and flags, given to the real binary.

use crate::cli::commands::{berth, ran};
use crate::gpus::mig::Rig;
use crate::support::gpus::WHOLE;
use crate::support::process_node::ProcessNode;
use crate::support::wait::SOON;
use berth_kernel::hardware::health::HealthState;
use fake_nvml::State;
use serde_json::Value;
use std::fs::write;
use std::time::{Duration, Instant};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_file_of_nvidias_by_config_file_and_variables_are_honoured_or_named() {
    let rig = Rig::new(&State::h100(2), "").await;
    let file = rig.node.folder.path().join("nvidia.yaml");
    write(
        &file,
        "version: v1
flags: {mpsRoot: /run/nvidia/mps, gdsEnabled: true}
resources: {gpus: [{pattern: '*', name: own}]}
sharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 3}]}}
",
    )
    .unwrap();
    let mut command = crate::support::process_node::berth();
    let at = rig.node.folder.path();
    let socket = at.join("kubelet/device-plugins/kubelet.sock");
    command
        .args(["serve", "--admin-listen", "127.0.0.1:0", "--driver-root", "/old", "--driver-root", "/"])
        .args(["--device-list-strategy", "envvar", "--device-list-strategy=volume-mounts"])
        .arg("--nvml-library")
        .arg(rig.nvml.library())
        .arg("--state-dir")
        .arg(at.join("state"))
        .envs([("CONFIG_FILE", file.as_os_str()), ("KUBELET_SOCKET", socket.as_os_str())])
        .envs([("PASS_DEVICE_SPECS", ""), ("DP_DISABLE_HEALTHCHECKS", "68,not-an-int,-67")])
        .envs([("MOFED_ENABLED", "true"), ("GFD_ONESHOT", "true"), ("CDI_FEATURE_FLAGS", "a,b")]);
    let daemon = rig.node.serve_as(&mut command);
    rig.allocatable(&[(WHOLE, 6)]).await;
    let ids: Vec<String> = rig.node.kubelet.listed(WHOLE).into_keys().take(1).collect();
    let answer = rig.node.kubelet.call_plugin_allocate(WHOLE, &ids).await.unwrap();
    assert_eq!(answer.envs["NVIDIA_GDS"], "enabled");
    assert_eq!(answer.envs["NVIDIA_MOFED"], "enabled");
    assert!(!answer.envs.contains_key("NVIDIA_GDRCOPY"));
    assert_eq!((answer.mounts.len(), answer.devices.len()), (1, 0), "a strategy given twice adds up");
    for named in [
        "set, not used: flags.mpsRoot: ",
        "set, not used: resources.gpus[0]: ",
        "set, not used: CDI_FEATURE_FLAGS=\"a,b\": ",
        "set, not used: GFD_ONESHOT=\"true\": ",
        "DP_DISABLE_HEALTHCHECKS: \"not-an-int\" is not an XID",
        "DP_DISABLE_HEALTHCHECKS: \"-67\" is not an XID",
    ] {
        assert!(daemon.line(|line| line.contains(named)).contains("WARN"));
    }
    daemon.stop();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_health_checks_nothing_makes_a_gpu_unhealthy() {
    let state = State::h100(2);
    let rig = Rig::new(&state, "").await;
    let daemon = rig.node.serve_as(rig.node.command().env("DP_DISABLE_HEALTHCHECKS", "xids,79"));
    rig.allocatable(&[(WHOLE, 2)]).await;
    let uuid = state.gpus[0].uuid.clone();
    rig.nvml
        .change(|state| {
            state.push_xid(&uuid, 79);
            state.gpus[0].lost = true;
            // Seen by the same scans as the loss: once it shows, the loss was passed over.
            state.gpus[1].memory_used_mib = 4321;
        })
        .unwrap();
    let end = Instant::now() + SOON;
    let shown = || daemon.call("GET", "/gpus", &Value::Null).to_string();
    while !shown().contains("4321") {
        assert!(Instant::now() < end, "never read again: {}", shown());
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let gpu = daemon.call("GET", &format!("/gpus/{uuid}"), &Value::Null);
    assert_eq!(gpu["health"]["state"], HealthState::Healthy.as_str(), "{gpu}");
    assert_eq!(rig.node.kubelet.allocatable(WHOLE), Some(2));
    daemon.stop();
}

#[tokio::test]
async fn gpus_that_cannot_be_read_end_a_start_that_must_not_wait() {
    let node =
        ProcessNode::new("gpus: nvml\nnvmlLibrary: /nowhere/libnvidia-ml.so.1\nfailOnInitError: true").await;
    let (code, error) = crate::support::process_node::ended(&mut node.command());
    assert_eq!(code, Some(1), "{error}");
    assert!(error.contains("failOnInitError"), "{error}");
}

#[test]
fn settings_without_an_equivalent_prevent_the_start_with_advice() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("mps.yaml");
    write(&file, "sharing: {mps: {resources: [{name: gpu, replicas: 2}]}}\n").unwrap();
    let serve = ran(berth(&["serve", "--config-file", file.to_str().unwrap()]));
    assert_eq!(serve.code, 1, "{}", serve.err);
    assert!(
        serve.err.contains("sharing.mps") && serve.err.contains("nvidia-cuda-mps-control"),
        "{}",
        serve.err
    );
    let imex = ran(berth(&["serve", "--imex-channel-ids=0", "--imex-required"]));
    assert!(imex.code == 1 && imex.err.contains("leave NVIDIA's plugin"), "{}", imex.err);
}

#[test]
fn errors_in_a_file_of_nvidias_have_its_own_keys() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("nvidia.yaml");
    for (text, says) in [
        (
            "version: v1\nflags: {migStrategy: none}\nflags: {migStrategy: mixed}\n",
            "line 3, column 1: the key \"flags\" is given twice, first in line 2",
        ),
        (
            "version: v1\nbase: &base {failOnInitError: true}\nflags: {<<: *base, migStrategy: mixed}\n",
            "flags.<<: Berth does not resolve YAML merges",
        ),
    ] {
        write(&file, text).unwrap();
        let serve = ran(berth(&["serve", "--config", file.to_str().unwrap()]));
        assert!(serve.code == 1 && serve.err.contains(says), "{text}: {}", serve.err);
        assert!(!serve.err.contains("is not known"), "{text}: {}", serve.err);
    }
}

#[test]
fn a_file_of_nvidias_is_printed_in_berths_format() {
    let folder = tempfile::tempdir().unwrap();
    let from = |text: &str| {
        let file = folder.path().join("nvidia.yaml");
        write(&file, text).unwrap();
        ran(berth(&["config", "from-nvidia", file.to_str().unwrap()]))
    };
    let made = from(
        "version: v1\nflags: {migStrategy: mixed, mpsRoot: /mps}\nsharing: {timeSlicing: {resources: [{name: gpu, replicas: 4}]}}\n",
    );
    assert_eq!((made.code, made.err.as_str()), (0, ""));
    assert!(made.out.contains("# set, not used: flags.mpsRoot: "), "{}", made.out);
    // What is printed is taken.
    let own = folder.path().join("berth.yaml");
    write(&own, format!("{}gpus: sim:1xh100\n", made.out)).unwrap();
    let checked = ran(berth(&["config", "check", own.to_str().unwrap()]));
    assert!(checked.code == 0 && checked.out.contains("timeslice"), "{}{}", checked.out, checked.err);
    let file = folder.path().join("nvidia.yaml");
    let checked = ran(berth(&["config", "check", "--without-gpus", file.to_str().unwrap()]));
    assert!(checked.out.contains("note: set, not used: flags.mpsRoot"), "{}{}", checked.out, checked.err);
    let mps = from("sharing: {mps: {resources: [{name: gpu, replicas: 2}]}}\n");
    assert!(mps.code == 1 && mps.out.contains("# not supported: sharing.mps"), "{}{}", mps.out, mps.err);
    // Without the shares it would be a valid file with whole GPUs.
    write(&own, format!("{}gpus: sim:1xh100\n", mps.out)).unwrap();
    let checked = ran(berth(&["config", "check", own.to_str().unwrap()]));
    assert!(checked.code == 1 && checked.err.contains("unsupported"), "{}{}", checked.out, checked.err);
    let replaced: String =
        mps.out.lines().filter(|line| !line.starts_with("unsupported:")).map(|l| format!("{l}\n")).collect();
    write(&own, format!("{replaced}gpus: sim:1xh100\n")).unwrap();
    assert_eq!(ran(berth(&["config", "check", own.to_str().unwrap()])).code, 0, "{replaced}");
    for (text, says) in [
        ("version: v2\n", "version: unknown version \"v2\""),
        ("gpus: nvml\n", "is not a configuration file of NVIDIA's"),
        ("[1]\n", "must be a mapping"),
    ] {
        let refused = from(text);
        assert!(refused.code == 1 && refused.err.contains(says), "{text}: {}", refused.err);
    }
}

#[test]
fn nvidias_names_are_accepted_and_hidden() {
    let help = ran(berth(&["serve", "--help"]));
    for hidden in ["CONFIG_FILE", "--mps-root", "--driver-root ", "--fail-on-init-error"] {
        assert!(!help.out.contains(hidden), "{hidden}: {}", help.out);
    }
    let folder = tempfile::tempdir().unwrap();
    let mut command =
        berth(&["node", "check", "--gpus", "sim:1xt4", "--mig-strategy", "none", "--mig-strategy", "mixed"]);
    command.args(["--state-dir", folder.path().to_str().unwrap(), "--admin-listen", "127.0.0.1:0"]);
    for flag in [
        "--fail-on-init-error=false",
        "--dev-root=/",
        "--nvidia-dev-root=/",
        "--gdrcopy-enabled",
        "--gds-enabled=true",
        "--mofed-enabled=false",
        "--nvidia-cdi-hook-path=/x",
        "--nvidia-ctk-path=/x",
        "--driver-root-ctr-path=/x",
        "--container-driver-root=/x",
        "--mps-root=/x",
        "--device-discovery-strategy=nvml",
        "--imex-channel-ids=0",
        "--imex-required=false",
        "--cdi-feature-flags=a",
        "--cdi-feature-flags=b",
        "--cdi-disable-hooks=all",
        "--cdi-annotation-prefix=cdi.nvidia.com/",
        "--shared-devices-allocation-policy=packed",
        "--kubelet-socket=/nowhere/device-plugins/kubelet.sock",
        "--driver-root=/",
    ] {
        command.arg(flag);
    }
    let checked = ran(command);
    assert_eq!(checked.code, 1, "only the kubelet's folder is missing: {}{}", checked.out, checked.err);
    assert!(checked.out.contains("strategy mixed"), "the last one counts: {}", checked.out);
}
