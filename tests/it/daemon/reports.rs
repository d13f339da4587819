//! Situations of public reports that are of no other module's subject: the program as its users run it, with files,
//! simulated GPUs and the stand-in kubelet. `just reports` runs all tests with a `Report:` (tests/reports/README.md).

use crate::support::client::agent;
use crate::support::gpus::WHOLE;
use crate::support::process_node::{BRISK, DaemonProcess, ProcessNode, berth, without_override};
use crate::support::wait::{SOON, until};
use kubelet_standin::{Kubelet, Options};
use serde_json::Value;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Stdio};

/// The line of `berth node check` for one check.
fn node_check(config: &Path, args: &[&Path], check: &str) -> String {
    let mut command = berth();
    command.args(["node", "check", "--admin-listen", "127.0.0.1:0", "--config"]).arg(config);
    let output = command.args(args).stdout(Stdio::piped()).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    text.lines().find(|line| line.contains(check)).unwrap_or_else(|| panic!("{check}: {text}")).to_owned()
}

/// Whether the daemon is ready, and the message of one of its checks.
fn readiness(daemon: &DaemonProcess, check: &str) -> (bool, String) {
    let url = daemon.base.replace("/api/v1", "/readyz");
    let mut answer = agent(SOON).get(url).call().unwrap();
    let body: Value = serde_json::from_str(&answer.body_mut().read_to_string().unwrap()).unwrap();
    let check = body["checks"].as_array().unwrap().iter().find(|one| one["name"] == check).unwrap().clone();
    (answer.status() == 200, check["detail"].as_str().unwrap_or_default().to_owned())
}

/// A kubelet with another `--root-dir` has its pod-resources there, and device-plugins in /var/lib/kubelet
/// nevertheless. Report: https://github.com/kubernetes/kubernetes/issues/120626 Report:
/// https://github.com/k0sproject/k0s/issues/7585
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_kubelet_with_another_root_folder_is_found_and_its_pods_end() {
    let folder = tempfile::tempdir().unwrap();
    let (kubelet_dir, root) = (folder.path().join("kubelet"), folder.path().join("k0s"));
    let kubelet = Kubelet::new(Options { root_dir: root.clone(), ..Options::new(&kubelet_dir) });
    kubelet.start().await.unwrap();
    // The kubelet binds the socket under another name, which is the one that the kernel shows.
    let proc = folder.path().join("proc");
    std::fs::create_dir_all(proc.join("net")).unwrap();
    let table = format!(
        "Num       RefCount Protocol Flags    Type St Inode Path\n\
         0000: 00000002 00000000 00010000 0001 01 77 {0}/device-plugins/kubelet.sock\n\
         0000: 00000003 00000000 00000000 0001 03 78 /elsewhere/pod-resources/client.sock\n\
         0000: 00000002 00000000 00010000 0001 01 79 {1}/pod-resources/3712\n",
        kubelet_dir.display(),
        root.display()
    );
    std::fs::write(proc.join("net/unix"), table).unwrap();
    let settings = format!("gpus: sim:2xt4\nprocesses: {{ procRoot: {} }}\n", proc.display());
    let node = ProcessNode { folder, kubelet, settings: format!("{}\n{settings}", BRISK) };
    let config = node.folder.path().join("check.yaml");
    std::fs::write(&config, &node.settings).unwrap();
    let check = |setting: &str, path: &Path, line: &str| {
        let state = node.folder.path().join("state");
        node_check(&config, &[Path::new("--state-dir"), &state, Path::new(setting), path], line)
    };
    let line = check("--kubelet-dir", &kubelet_dir, "pod-resources socket");
    let expected = format!("set kubeletRootDir: {}", root.display());
    assert!(line.starts_with("FAIL") && line.contains(&expected), "{line}");
    assert!(line.contains("without this socket no allocation ends"), "{line}");
    let line = check("--kubelet-dir", &root, "kubelet socket");
    let expected = format!("set devicePluginsDir: {}/device-plugins", kubelet_dir.display());
    assert!(line.starts_with("WARN") && line.contains(&expected), "{line}");

    // Pods get GPUs, and none can be known to have ended: not ready, with the path.
    let daemon = node.serve();
    node.kubelet.wait_allocatable(WHOLE, 2, SOON).await.unwrap();
    let missing = format!("{}/pod-resources/kubelet.sock does not exist", kubelet_dir.display());
    until("the missing source", || readiness(&daemon, "evidence").1.contains(&missing));
    assert!(!readiness(&daemon, "evidence").0);
    assert!(readiness(&daemon, "evidence").1.contains("no allocation can end"));
    let shown = daemon.run_client(&["node", "show"]).1;
    assert!(shown.contains("not ready") && shown.contains(&missing), "{shown}");
    daemon.stop();

    let settings = format!("{}kubeletRootDir: {}\n", node.settings, root.display());
    let node = ProcessNode { settings, ..node };
    std::fs::write(&config, &node.settings).unwrap();
    let line = node_check(&config, &[Path::new("--kubelet-dir"), &kubelet_dir], "pod-resources socket");
    let path = root.join("pod-resources/kubelet.sock");
    assert!(line.starts_with("ok") && line.contains(path.to_str().unwrap()), "{line}");
    let daemon = node.serve();
    node.kubelet.wait_allocatable(WHOLE, 2, SOON).await.unwrap();
    until("it is ready", || readiness(&daemon, "evidence").0);
    let uid = node.start("train", WHOLE, 1).await.unwrap();
    daemon.until("its name", |live| live.len() == 1 && live[0]["holder"]["pod"] == "train");
    node.kubelet.delete(&uid);
    daemon.until("its end", <[Value]>::is_empty);
}

/// The system denies the plugin the kubelet's socket: another user, a missing capability, or SELinux.
/// Report: https://github.com/NVIDIA/k8s-device-plugin/issues/167
/// Report: https://github.com/kubernetes/kubernetes/issues/73240
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_denied_kubelet_socket_is_named_with_the_user_by_every_status() {
    let node = ProcessNode::new("gpus: sim:2xt4").await;
    let socket = node.folder.path().join("kubelet/device-plugins/kubelet.sock");
    let mode = |mode| std::fs::set_permissions(&socket, std::fs::Permissions::from_mode(mode)).unwrap();
    mode(0o000);
    let uid = rustix::process::geteuid();
    let cause = format!(
        "refuses this process: Permission denied (os error 13); it has mode 0000 and owner uid {}",
        uid.as_raw()
    );
    let fix = if uid.is_root() {
        "berth runs as root, so SELinux, AppArmor or a missing capability"
    } else {
        "run it as root"
    };
    let (daemon, line) = without_override(|| {
        let config = node.folder.path().join("check.yaml");
        std::fs::write(&config, &node.settings).unwrap();
        let kubelet = node.folder.path().join("kubelet");
        let line = node_check(&config, &[Path::new("--kubelet-dir"), &kubelet], "kubelet socket");
        (node.serve(), line)
    });
    assert!(line.starts_with("FAIL") && line.contains(&cause) && line.contains(fix), "{line}");
    let has_both = |text: &str| text.contains(&cause) && text.contains(fix);
    until("the cause in readyz", || has_both(&readiness(&daemon, "kubelet").1));
    assert!(!readiness(&daemon, "kubelet").0);
    assert!(has_both(&daemon.call("GET", "/node", &Value::Null)["resources"][0]["registration"].to_string()));
    assert!(
        daemon.run_client(&["node", "show"]).1.replace(['\n', ' '], "").contains(&cause.replace(' ', ""))
    );
    let log = daemon.line(|line| line.contains("WARN") && line.contains("refuses this process"));
    assert!(has_both(&log), "{log}");
    let url = daemon.base.replace("/api/v1", "/metrics");
    let metrics = agent(SOON).get(url).call().unwrap().body_mut().read_to_string().unwrap();
    assert!(metrics.contains("berth_kubelet_registrations_total{outcome=\"denied\"} 1\n"), "{metrics}");
    mode(0o700);
    node.kubelet.wait_allocatable(WHOLE, 2, SOON).await.unwrap();
    until("it is ready", || readiness(&daemon, "kubelet") == (true, String::new()));
}

/// The ConfigMap of a report, pasted whole where the file in it belongs, with a setting at a wrong place.
/// Report: https://github.com/NVIDIA/k8s-device-plugin/issues/1433
#[test]
fn a_configmap_that_was_pasted_whole_is_recognised_by_every_command_that_reads_a_file() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("map.yaml");
    std::fs::write(
        &file,
        "apiVersion: v1\nkind: ConfigMap\nmetadata:\n  name: time-slicing-config\n  namespace: kube-system\ndata:\n  \
         any: |-\n    version: v1\n    flags:\n      migStrategy: none\n      renameByDefault: true\n    sharing:\n      \
         timeSlicing:\n        resources:\n          - name: nvidia.com/gpu\n            replicas: 4\n",
    )
    .unwrap();
    let run = |command: &mut Command| {
        let output = command.stdout(Stdio::piped()).stderr(Stdio::piped()).output().unwrap();
        let text = String::from_utf8(output.stdout).unwrap() + &String::from_utf8(output.stderr).unwrap();
        (output.status.code(), text)
    };
    let (state, token) = (folder.path().join("state"), folder.path().join("token"));
    std::fs::write(&token, "0".repeat(40)).unwrap();
    std::fs::set_permissions(&token, std::fs::Permissions::from_mode(0o600)).unwrap();
    let token = token.to_str().unwrap();
    for args in [
        &["config", "check"][..],
        &["config", "from-nvidia"],
        &["policy", "activate", "--server", "http://127.0.0.1:1", "--token-file", token],
        &["serve", "--admin-listen", "127.0.0.1:0", "--state-dir", state.to_str().unwrap(), "--config"],
    ] {
        let (code, text) = run(berth().args(args).arg(&file));
        assert_eq!(code, Some(1), "{args:?}: {text}");
        for part in [
            "line 2, column 1: kind: this is a Kubernetes ConfigMap, and its key \"any\" is the file",
            "cut line 7 and all lines above it",
            "`sed -n '8,16{s/^    //;p}' FILE`",
        ] {
            assert!(text.contains(part), "{args:?}: {part}: {text}");
        }
    }
    let cut = Command::new("sed").args(["-n", "8,16{s/^    //;p}"]).arg(&file).output().unwrap();
    std::fs::write(&file, cut.stdout).unwrap();
    let (code, text) = run(berth().args(["config", "check", "--without-gpus"]).arg(&file));
    assert!(code == Some(0) && text.contains("flags.renameByDefault: unknown key"), "{text}");
}

/// Two daemons on one node: the second one waits, and the first one's devices stay.
/// Report: https://github.com/kubernetes/kubernetes/issues/52190
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_second_daemon_is_not_ready_and_registers_once_the_first_has_ended() {
    let node = ProcessNode::new("gpus: sim:2xt4").await;
    let first = node.serve();
    node.kubelet.wait_allocatable(WHOLE, 2, SOON).await.unwrap();
    let state = node.folder.path().join("second");
    let mut command = node.command();
    command.arg("--state-dir").arg(&state).arg("--token-file").arg(node.folder.path().join("state/token"));
    let second = node.serve_as(&mut command);
    let contested = "as another berth daemon on this node does";
    until("the second names the first", || readiness(&second, "kubelet").1.contains(contested));
    let pid = format!("process {} serves", first.child.id());
    assert!(readiness(&second, "kubelet").1.contains(&pid), "{:?}", readiness(&second, "kubelet"));
    assert!(!readiness(&second, "kubelet").0 && readiness(&first, "kubelet").0);
    assert_eq!(node.kubelet.allocatable(WHOLE), Some(2));
    first.stop();
    until("the second is ready", || readiness(&second, "kubelet").0);
    node.kubelet.wait_allocatable(WHOLE, 2, SOON).await.unwrap();
    assert_eq!(node.kubelet.anomalies(), []);
}
