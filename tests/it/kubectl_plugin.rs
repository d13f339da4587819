//! `kubectl berth`: finds the daemon's pod on a node and runs the command there.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::{Command, Output, Stdio};

/// A kubectl that writes down what it was asked, knows one pod on `gpu-1`, and ends with 7 in it.
const KUBECTL: &str = r#"#!/bin/sh
printf '%s\n' "$@" '--' >> "$ASKED"
case "$1 $*" in
    get*spec.nodeName=gpu-1,*) echo "gpus berth-old"; echo "gpus berth-x7k2p" ;;
    exec*) cat; exit 7 ;;
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
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("deploy/kubectl-berth");
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
    assert!(asked.contains("--all-namespaces") && asked.contains("app.kubernetes.io/name=berth"), "{asked}");
    let exec = "exec -i --namespace=gpus berth-x7k2p --container=berth -- berth policy push -";
    assert!(asked.contains(exec), "{asked}");
}

#[test]
fn it_says_what_to_do_where_there_is_no_pod_and_how_it_is_used() {
    let Ran { output, asked } = kubectl_berth(&["-n", "gpus", "-l", "app=b", "cpu-1", "gpu", "list"], "");
    let says = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{says}");
    assert!(says.contains("no running berth pod (app=b) on node cpu-1"), "{says}");
    let asked = asked.join(" ");
    assert!(asked.contains("--namespace=gpus --selector=app=b") && !asked.contains("exec"), "{asked}");
    for args in [&[][..], &["gpu-1"], &["-h"]] {
        let output = kubectl_berth(args, "").output;
        assert_eq!(output.status.code(), Some(2));
        assert!(String::from_utf8(output.stderr).unwrap().starts_with("usage: kubectl berth"));
    }
}
