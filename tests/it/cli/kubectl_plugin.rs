//! `kubectl berth`: finds the daemon's pod on a node and runs the command there.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::{Command, Output, Stdio};

/// A kubectl that writes down what it was asked, knows pods on some nodes by namespace, name, owner and
/// end, and ends with 7 in one.
const KUBECTL: &str = r#"#!/bin/sh
printf '%s\n' "$@" '--' >> "$ASKED"
case "$1 $*" in
    get*spec.nodeName=gpu-1,*)
        echo "berth berth-old DaemonSet "
        echo "berth berth-x7k2p DaemonSet "
        echo "berth berth-gone DaemonSet 2026-01-01T00:00:00Z"
        echo "berth berth-by-hand  "
        echo "berth berth-debug-7d9c ReplicaSet " ;;
    get*spec.nodeName=gpu-2,*) echo "berth berth-a DaemonSet "; echo "evil berth-b DaemonSet " ;;
    get*spec.nodeName=gpu-3,*) echo "berth berth-by-hand  "; echo "berth berth-gone DaemonSet 2026-01-01T00:00:00Z" ;;
    exec*) cat; exit 7 ;;
    *'{.status.rollout.phase}'*) case "$*" in *' halted '*) printf Halted ;; *' done '*) printf Complete ;; *) printf Soaking ;; esac ;;
    *'{.status.rollout.revision}'*) printf 3f9c01ab77de ;;
    *'{.status.rollout.attempt}'*) printf 2 ;;
    *'@.index==3'*) printf GPU-3 ;;
    create*) cat >> "$ASKED"; echo gpumaintenance.fleet.berth.dev/gpu-1-abcde ;;
esac
"#;

struct Ran {
    output: Output,
    asked: Vec<String>,
}

fn kubectl_berth(args: &[&str], stdin: &str) -> Ran {
    let dir = tempfile::tempdir().unwrap();
    let fake = dir.path().join("kubectl");
    fs::write(&fake, KUBECTL).unwrap();
    fs::set_permissions(&fake, fs::Permissions::from_mode(0o755)).unwrap();
    let (asked, input) = (dir.path().join("asked"), dir.path().join("input"));
    fs::write(&input, stdin).unwrap();
    let path = format!("{}:{}", dir.path().display(), std::env::var("PATH").unwrap());
    let script = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../..")).join("deploy/kubectl-berth");
    let mut command = Command::new("sh");
    command.arg(script).args(args).env("PATH", path).env("ASKED", &asked);
    command.env_remove("BERTH_NAMESPACE").env_remove("BERTH_SELECTOR");
    let output = command.stdin(Stdio::from(fs::File::open(&input).unwrap())).output().unwrap();
    let text = fs::read_to_string(&asked).unwrap_or_default();
    // Kept as words: the arguments hold no line breaks.
    let asked = text.lines().map(str::to_owned).collect();
    Ran { output, asked }
}

#[test]
fn it_runs_the_command_in_the_pod_of_that_node_and_hands_everything_through() {
    let Ran { output, asked } = kubectl_berth(&["gpu-1", "policy", "push", "-"], "module");
    assert_eq!(output.status.code(), Some(7), "the command's own exit code");
    assert_eq!(output.stdout, b"module", "what comes in goes through");
    let asked = asked.join(" ");
    let get = "get pods --namespace=berth --selector=app.kubernetes.io/name=berth ";
    assert!(asked.contains(get) && !asked.contains("--all-namespaces"), "{asked}");
    let exec = "exec -i --namespace=berth berth-x7k2p --container=berth -- berth policy push -";
    assert!(asked.contains(exec), "{asked}");
}

#[test]
fn only_a_pod_of_the_daemons_own_daemonset_is_chosen_and_never_guessed() {
    let ran = kubectl_berth(&["-A", "gpu-1", "gpu", "list"], "");
    let asked = ran.asked.join(" ");
    assert!(asked.contains("get pods --all-namespaces ") && asked.contains("berth berth-x7k2p"), "{asked}");
    for (args, words) in [
        (
            ["-A", "gpu-2", "gpu", "list"],
            "several namespaces are on node gpu-2: berth evil; select one with -n",
        ),
        (["-A", "gpu-3", "gpu", "list"], "no running berth pod"),
    ] {
        let Ran { output, asked } = kubectl_berth(&args, "");
        let says = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.code() == Some(1) && says.contains(words), "{says}");
        assert!(!asked.contains(&"exec".to_owned()), "{asked:?}");
    }
}

#[test]
fn the_cluster_is_the_one_that_was_named() {
    for args in [
        &["--context", "b", "--kubeconfig=/k", "-n", "gpus", "gpu-1", "gpu", "list", "--context", "c"][..],
        &["--context=b", "--kubeconfig", "/k", "--namespace=gpus", "gpu-1", "gpu", "list", "--context", "c"],
    ] {
        let asked = kubectl_berth(args, "").asked.join(" ");
        let (get, exec) = asked.split_once(" -- exec").unwrap();
        assert!(get.starts_with("get --kubeconfig=/k --context=b pods --namespace=gpus"), "{get}");
        // What follows the node is the command's own.
        let own = " --kubeconfig=/k --context=b -i --namespace=berth berth-x7k2p --container=berth -- berth gpu list --context c";
        assert!(exec.starts_with(own), "{exec}");
    }
}

#[test]
fn it_prints_advice_without_a_pod_and_its_usage() {
    let Ran { output, asked } = kubectl_berth(&["-n", "gpus", "-l", "app=b", "cpu-1", "gpu", "list"], "");
    let says = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{says}");
    assert!(
        says.contains("no running berth pod (app=b) of a DaemonSet on node cpu-1 in namespace gpus"),
        "{says}"
    );
    let asked = asked.join(" ");
    assert!(asked.contains("--namespace=gpus --selector=app=b") && !asked.contains("exec"), "{asked}");
    for args in [&[][..], &["gpu-1"], &["-h"], &["-n"], &["--context"], &["-x", "gpu-1", "gpu"]] {
        let output = kubectl_berth(args, "").output;
        assert_eq!(output.status.code(), Some(2));
        assert!(String::from_utf8(output.stderr).unwrap().starts_with("usage: kubectl berth"));
    }
}

#[test]
fn rollouts_are_paused_undone_and_retried_by_annotations() {
    for (args, annotation) in [
        (["rollout", "pause", "team"], Some("fleet.berth.dev/paused=true")),
        (["rollout", "resume", "team"], Some("fleet.berth.dev/paused-")),
        (["rollout", "undo", "team"], Some("fleet.berth.dev/undo=3f9c01ab77de/2")),
        (["rollout", "retry", "halted"], Some("fleet.berth.dev/attempt=3f9c01ab77de/3")),
        (["rollout", "retry", "team"], None),
        (["rollout", "undo", "halted"], None),
        (["rollout", "undo", "done"], None),
    ] {
        let Ran { output, asked } = kubectl_berth(&args, "");
        let set = asked.iter().find(|word| word.starts_with("fleet.berth.dev/"));
        assert_eq!(set.map(String::as_str), annotation, "{args:?}");
        let says = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(i32::from(annotation.is_none())), "{args:?}: {says}");
        assert_eq!(says.is_empty(), annotation.is_some(), "{args:?}: {says}");
    }
    for args in [&["rollout", "pause"][..], &["rollout", "stop", "team"], &["maintenance", "gpu-1"]] {
        assert_eq!(kubectl_berth(args, "").output.status.code(), Some(2), "{args:?}");
    }
}

#[test]
fn a_maintenance_is_created_for_an_index_a_uuid_or_all_gpus() {
    for (gpu, more, spec) in [
        (
            "3",
            &["--evict", "--reason", "a new fan"][..],
            r#""uuids": ["GPU-3"], "mode": "drain", "evict": true, "reason": "a new fan"}"#,
        ),
        ("GPU-8a56", &["--cordon"], r#""uuids": ["GPU-8a56"], "mode": "cordon"}"#),
        ("all", &[], r#""uuids": ["*"], "mode": "drain"}"#),
    ] {
        let args: Vec<&str> =
            ["--context", "b", "maintenance", "gpu-1", gpu].iter().chain(more).copied().collect();
        let Ran { output, asked } = kubectl_berth(&args, "");
        let asked = asked.join(" ");
        assert!(asked.contains("create --context=b --filename=-") && asked.contains(spec), "{asked}");
        let says = String::from_utf8(output.stdout).unwrap();
        assert!(says.contains("`kubectl delete gm gpu-1-abcde` puts it back"), "{says}");
    }
    for (args, words) in [
        (&["maintenance", "gpu-1", "9"][..], "no GPU with the index 9"),
        (&["maintenance", "gpu-1", "3", "--reason", "a \"fan\""], "quotation marks"),
    ] {
        let Ran { output, asked } = kubectl_berth(args, "");
        let says = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.code() == Some(1) && says.contains(words), "{says}");
        assert!(!asked.contains(&"create".to_owned()), "{asked:?}");
    }
}
