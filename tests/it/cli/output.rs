//! Repeated output (`--watch`), wide columns, and output for shells and pagers.

use crate::cli::commands::{berth, ran};
use crate::support::admin_node::AdminNode;
use crate::support::port::Port;
use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, Stdio};
use std::sync::{Arc, Mutex};

/// A running watch command; ended when dropped.
struct Looking {
    child: Child,
    seen: Arc<Mutex<String>>,
}

impl Looking {
    fn at(node: &AdminNode, args: &[&str]) -> Self {
        let mut command = node.command(args);
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let seen = Arc::<Mutex<String>>::default();
        let pipes: [Box<dyn std::io::Read + Send>; 2] =
            [Box::new(child.stdout.take().unwrap()), Box::new(child.stderr.take().unwrap())];
        for pipe in pipes {
            let into = Arc::clone(&seen);
            std::thread::spawn(move || {
                for line in BufReader::new(pipe).lines().map_while(Result::ok) {
                    *into.lock().unwrap() += &(line + "\n");
                }
            });
        }
        Self { child, seen }
    }

    fn until(&self, words: &str, times: usize) {
        crate::support::wait::until_some(words, || {
            (self.seen.lock().unwrap().matches(words).count() >= times).then_some(())
        });
    }
}

impl Drop for Looking {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn a_watched_command_is_repeated_and_prints_changes() {
    let mut node = AdminNode::new(1);
    let port = Port::held();
    node.start_at(&port);
    let looking = Looking::at(&node, &["gpu", "list", "--watch=100ms"]);
    looking.until("SCHEDULING", 1);
    node.done(&["gpu", "cordon", "0", "--reason", "fan"]);
    looking.until("cordoned by admin (fan)", 1);
    // A daemon that is away is reported once and waited for.
    node.api.take().unwrap().stop();
    looking.until("trying on", 1);
    node.start_at(&port);
    looking.until("cordoned by admin (fan)", 2);
    node.done(&["gpu", "uncordon", "0"]);
    looking.until("SCHEDULING", 4);
    let seen = looking.seen.lock().unwrap();
    assert_eq!((seen.matches("SCHEDULING").count(), seen.matches("trying on").count()), (4, 1), "{seen}");
    assert!(!seen.contains('\u{1b}'), "no terminal, no colours: {seen}");
}

#[test]
fn documents_of_repeated_output_are_separated() {
    let node = AdminNode::new(1);
    let looking = Looking::at(&node, &["gpu", "list", "-o", "yaml", "-w=100ms"]);
    looking.until("items:", 1);
    node.done(&["gpu", "cordon", "0"]);
    // A document may be read in several pieces.
    crate::support::wait::until("both documents", || {
        let seen = looking.seen.lock().unwrap().clone();
        let documents = seen.split("---\n").map(serde_saphyr::from_str::<serde_json::Value>);
        let Ok(documents) = documents.collect::<Result<Vec<_>, _>>() else { return false };
        let states: Vec<_> = documents.iter().map(|d| d["items"][0]["drain"]["state"].clone()).collect();
        states == ["active", "cordoned"]
    });
}

#[test]
fn only_read_commands_are_repeated_and_not_too_often() {
    let node = AdminNode::new(1);
    for args in [&["gpu", "cordon", "0", "--watch"][..], &["gpu", "list", "--watch=1ms"], &["openapi", "-w"]]
    {
        let ran = node.berth(args);
        assert_eq!((ran.code, ran.out.as_str()), (2, ""), "{args:?}: {}", ran.err);
        assert!(ran.err.contains("--watch"), "{}", ran.err);
    }
    assert!(node.done(&["gpu", "list"]).contains("open"), "nothing was cordoned");
    // A permanent error ends a watch command.
    assert_eq!(node.berth(&["gpu", "show", "7", "--watch"]).code, 1);
}

#[test]
fn top_prints_one_screen_where_there_is_no_terminal() {
    let node = AdminNode::new(2);
    node.allocate(1);
    for args in [&["top"][..], &["top", "--once"]] {
        let screen = node.done(args);
        let rows: Vec<Vec<&str>> = screen.lines().map(|line| line.split_whitespace().collect()).collect();
        assert!(screen.lines().all(|line| line.len() <= 80) && !screen.contains('\u{1b}'), "{screen}");
        assert_eq!(rows[3][0], "0", "{screen}");
        assert!(
            rows.last().unwrap().starts_with(&["1", "not", "known", "yet", "1/1", "nvidia.com/gpu"]),
            "{screen}"
        );
    }
    let json: serde_json::Value = serde_json::from_str(&node.done(&["top", "--once", "-o", "json"])).unwrap();
    assert_eq!(
        (json["gpus"][1]["uuid"].as_str(), json["pods"][0]["devices"].as_u64()),
        (Some("GPU-1"), Some(1))
    );
}

/// On a terminal, which `script` (of util-linux) provides.
#[test]
fn top_ends_with_a_key_or_ctrl_c_and_leaves_the_alternate_screen() {
    let node = AdminNode::new(1);
    for (key, code) in [(b"q", 0), (b"\x03", 130)] {
        let berth = format!("{} top --watch=100ms", env!("CARGO_BIN_EXE_berth"));
        let mut script = std::process::Command::new("timeout");
        script.args(["--foreground", "20", "script", "-qec", &berth, "/dev/null"]).env("TERM", "xterm");
        script.env("BERTH_SERVER", format!("http://{}", node.address()));
        script.env("BERTH_TOKEN_FILE", node.dir.path().join("token"));
        script.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = script.spawn().expect("`script` starts: apt-get install bsdutils");
        let mut output = child.stdout.take().unwrap();
        let mut shown = Vec::new();
        let mut part = [0; 4096];
        // A key before the first screen would be left to the shell's modes.
        while !String::from_utf8_lossy(&shown).contains("UTC") {
            let count = output.read(&mut part).unwrap();
            assert!(count > 0, "{}", String::from_utf8_lossy(&shown));
            shown.extend(&part[..count]);
        }
        // Its end would be another key.
        let mut keys = child.stdin.take().unwrap();
        keys.write_all(key).unwrap();
        output.read_to_end(&mut shown).unwrap();
        let shown = String::from_utf8_lossy(&shown).into_owned();
        assert_eq!(child.wait().unwrap().code(), Some(code), "{shown}");
        assert!(shown.contains("\u{1b}[?1049h") && shown.trim_end().ends_with("\u{1b}[?1049l"), "{shown:?}");
    }
}

#[test]
fn a_closed_pipe_ends_a_command_quietly() {
    let node = AdminNode::new(1);
    let file = node.dir.path().join("share.wasm");
    std::fs::write(&file, crate::support::admin_fakes::module("share", "1")).unwrap();
    node.done(&["policy", "push", file.to_str().unwrap()]);
    for args in [&["gpu", "list"][..], &["top"], &["openapi"], &["policy", "download", "share", "--to", "-"]]
    {
        let mut command = node.command(args);
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        drop(child.stdout.take());
        let ended = child.wait_with_output().unwrap();
        let output = String::from_utf8(ended.stderr).unwrap();
        assert_eq!((ended.status.code(), output.as_str()), (Some(0), ""), "{args:?}");
    }
}

#[test]
fn a_node_is_shown_with_devices_that_add_up() {
    let node = AdminNode::new(2);
    node.allocate(1);
    let shown = node.done(&["node", "show"]);
    let row = shown.lines().find(|line| line.starts_with("nvidia.com/gpu")).unwrap();
    let numbers: Vec<u32> = row.split_whitespace().skip(1).filter_map(|number| number.parse().ok()).collect();
    assert_eq!(numbers[0], numbers[1..].iter().sum::<u32>(), "{shown}");
    assert_eq!(numbers[..3], [2, 1, 1], "{shown}");
    let json: serde_json::Value = serde_json::from_str(&node.done(&["node", "show", "-o", "json"])).unwrap();
    assert_eq!(json, node.get("/api/v1/node").expect(200));
}

#[test]
fn a_span_is_taken_in_place_of_a_time() {
    let node = AdminNode::new(1);
    for args in
        [&["decision", "list", "--since", "10m"][..], &["decision", "list", "--until", "1h", "-o", "json"]]
    {
        let ran = node.berth(args);
        // This daemon has no journal, which it says once it has taken the time.
        assert!(!ran.err.contains("a time such as"), "{}", ran.err);
    }
    let bad = node.berth(&["decision", "list", "--since", "10 bananas"]);
    assert!(bad.code == 2 && bad.err.contains("a time such as"), "{}", bad.err);
}

#[test]
fn help_and_standard_input_are_as_with_other_tools() {
    let help = |args: &[&str]| ran(berth(args));
    assert_eq!(help(&["help", "gpu", "cordon"]).out, help(&["gpu", "cordon", "--help"]).out);
    assert_eq!(help(&["help"]).out, help(&["--help"]).out);
    let unknown = help(&["help", "gpu", "dance"]);
    assert!(unknown.code == 2 && unknown.err.contains("no command `dance` in `gpu`"), "{}", unknown.err);

    let checked = |text: &str, args: &[&str]| {
        let mut command = berth(args);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        child.stdin.take().unwrap().write_all(text.as_bytes()).unwrap();
        let ended = child.wait_with_output().unwrap();
        let text = |bytes| String::from_utf8(bytes).unwrap();
        (ended.status.code().unwrap(), text(ended.stdout) + &text(ended.stderr))
    };
    let (code, output) = checked("gpus: sim:1xt4\n", &["config", "check", "-", "--without-files"]);
    assert!(code == 0 && output.contains("ok: standard input"), "{output}");
    let (code, output) = checked("gpuss: nvml\n", &["config", "check", "-"]);
    assert!(code == 1 && output.contains("standard input") && output.contains("gpuss"), "{output}");
    let (code, output) = checked("version: v1\n", &["config", "from-nvidia", "-"]);
    assert!(code == 0 && output.contains("# standard input, converted"), "{output}");
}

#[test]
fn an_interval_may_be_a_word_of_its_own() {
    let node = AdminNode::new(1);
    let looking = Looking::at(&node, &["gpu", "list", "-w", "0.1"]);
    looking.until("SCHEDULING", 1);
    node.done(&["gpu", "cordon", "0"]);
    looking.until("cordoned by admin", 1);
}

#[test]
fn a_group_of_commands_alone_prints_its_help() {
    for (args, says) in [(&[][..], "berth [OPTIONS] <COMMAND>"), (&["gpu"], "berth gpu [OPTIONS] <COMMAND>")]
    {
        let ran = ran(berth(args));
        assert_eq!((ran.code, ran.out.as_str()), (2, ""), "{}", ran.err);
        assert!(ran.err.contains(says) && ran.err.contains("Commands:"), "{}", ran.err);
    }
}

#[test]
fn a_wide_terminal_shows_more_columns() {
    let node = AdminNode::new(1);
    node.allocate(0);
    for (list, more) in [("gpu", &["PROCESSES", "HEALTH SINCE"][..]), ("allocation", &["POD UID", "REASON"])]
    {
        let (narrow, wide) = (node.done(&[list, "list"]), node.done(&[list, "list", "-o", "wide"]));
        for column in more {
            assert!(wide.contains(column) && !narrow.contains(column), "{column}: {wide}");
        }
    }
}

/// What bash is offered for the last word of a line.
fn completed(mut command: std::process::Command, line: &[&str]) -> Vec<String> {
    command.env("BERTH_COMPLETE", "bash").env("_CLAP_COMPLETE_INDEX", (line.len() - 1).to_string());
    command.arg("--").args(line);
    let ran = ran(command);
    assert_eq!((ran.code, ran.err.as_str()), (0, ""), "{line:?}");
    ran.out.split('\n').map(|word| word.trim().to_owned()).filter(|word| !word.is_empty()).collect()
}

#[test]
fn gpus_policies_and_allocations_are_completed_by_the_daemon() {
    let node = AdminNode::new(2);
    let id = node.allocate(1).id.to_string();
    node.record_shipped(b"shipped", "share", 5);
    let offered = |line: &[&str]| completed(node.command(&[]), line);
    for line in [
        &["berth", "gpu", "show", ""][..],
        &["berth", "gpu", "drain", "--evict", ""],
        &["berth", "allocation", "list", "--gpu", ""],
    ] {
        let offered = offered(line);
        assert!(offered.starts_with(&["0".into(), "1".into()]), "{line:?}: {offered:?}");
    }
    assert_eq!(offered(&["berth", "gpu", "cordon", "GPU-"]), ["GPU-0", "GPU-1"]);
    assert_eq!(offered(&["berth", "allocation", "explain", ""])[0], id);
    assert_eq!(offered(&["berth", "policy", "show", "sh"]), ["share"]);
    assert_eq!(offered(&["berth", "policy", "try", "share@"]).len(), 1);
    node.reconcile(&[(&node.allocate(0), "team", "web-0")]);
    node.json("PUT", "/api/v1/stack", r#"{"entries": []}"#).expect(200);
    node.json("POST", "/api/v1/shadows", r#"{"policy": "share"}"#).expect(201);
    for (line, wanted) in [
        (&["berth", "allocation", "list", "--namespace", ""][..], &["team"][..]),
        (&["berth", "decision", "list", "-n", ""], &["team"]),
        (&["berth", "policy", "rollback", ""], &["1", "0"]),
        (&["berth", "policy", "activate", "--if-revision", ""], &["1", "0"]),
        (&["berth", "events", "--kind", "gpuDr"], &["gpuDraining", "gpuDrained"]),
        (&["berth", "policy", "shadow", "show", ""], &["1"]),
    ] {
        let offered = offered(line);
        assert!(wanted.iter().all(|word| offered.contains(&(*word).to_owned())), "{line:?}: {offered:?}");
    }
    // A daemon that is not there adds nothing, and prints nothing.
    let mut away = node.command(&[]);
    away.env("BERTH_SERVER", format!("http://{}", Port::held().address()));
    assert!(!completed(away, &["berth", "gpu", "show", ""]).contains(&"0".to_owned()));
}

#[test]
fn completions_and_manual_pages_have_every_command() {
    let commands = [
        "gpu",
        "allocation",
        "process",
        "decision",
        "policy",
        "config",
        "node",
        "state",
        "token",
        "top",
        "options",
    ];
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let ran = ran(berth(&["completions", shell]));
        assert_eq!(ran.code, 0, "{}", ran.err);
        assert!(ran.out.contains("BERTH_COMPLETE"), "{shell}: {}", ran.out);
    }
    let offered = completed(berth(&[]), &["berth", ""]);
    for command in commands {
        assert!(offered.contains(&command.to_owned()), "{command} is not completed: {offered:?}");
    }
    assert_eq!(completed(berth(&[]), &["berth", "gpu", "mark"]), ["mark-healthy"]);
    assert_eq!(ran(berth(&["completions", "tcsh"])).code, 2);
    assert!(ran(berth(&["man"])).out.contains(".TH berth 1"));
    let dir = tempfile::tempdir().unwrap();
    let into = dir.path().join("man1");
    let ran = ran(berth(&["man", "--into", into.to_str().unwrap()]));
    assert_eq!(ran.code, 0, "{}", ran.err);
    for command in commands {
        let page = std::fs::read_to_string(into.join(format!("berth-{command}.1"))).unwrap();
        assert!(page.contains(".SH SYNOPSIS"), "{command}: {page}");
    }
    assert!(into.join("berth-gpu-drain.1").is_file());
}
