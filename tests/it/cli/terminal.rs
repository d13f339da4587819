//! Commands on a terminal of 80 columns: tables and messages with long names, and questions. `script` (of util-linux)
//! provides the terminal.

use crate::cli::commands::{Ran, berth, ran};
use crate::support::admin_fakes::module;
use crate::support::admin_node::AdminNode;
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Command, Stdio};
use std::sync::LazyLock;

/// The document of the API, whose examples are the answers of a daemon here.
static DOCUMENT: LazyLock<Value> =
    LazyLock::new(|| serde_json::from_str(include_str!("../../../openapi/berth.json")).unwrap());

const COLUMNS: usize = 80;
/// A right-to-left override, which would reverse the rest of a line.
const OVERRIDE: char = '\u{202e}';
const POD: &str = "a-deployment-with-a-rather-long-name-7d9c8b6f5-x2x4q";

/// What a command prints on a terminal, both streams together, and its exit code. `typed` is what a person types.
fn on_terminal(command: &Command, typed: &str) -> (i32, String) {
    let quoted = |word: &std::ffi::OsStr| format!("'{}'", word.to_str().unwrap().replace('\'', r"'\''"));
    let words: Vec<_> = [command.get_program()].into_iter().chain(command.get_args()).map(quoted).collect();
    let line = format!("stty cols {COLUMNS} rows 60; exec {}", words.join(" "));
    let mut script = Command::new("timeout");
    script.args(["--foreground", "60", "script", "-qec", &line, "/dev/null"]);
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => script.env(name, value),
            None => script.env_remove(name),
        };
    }
    script.env("TERM", "xterm").env("SHELL", "/bin/sh").env_remove("NO_COLOR");
    let mut child = script
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("`script` starts: apt-get install bsdutils");
    let mut keys = child.stdin.take().unwrap();
    let mut output = child.stdout.take().unwrap();
    let (mut shown, mut part) = (Vec::new(), [0; 4096]);
    loop {
        let count = output.read(&mut part).unwrap();
        shown.extend(&part[..count]);
        if count == 0 {
            break;
        }
        // A key before the question would be lost to the shell's modes.
        if !typed.is_empty() && String::from_utf8_lossy(&shown).ends_with("[y/N] ") {
            keys.write_all(typed.as_bytes()).unwrap();
        }
    }
    let text = String::from_utf8(shown).unwrap().replace("\r\n", "\n");
    (child.wait().unwrap().code().unwrap(), without_colours(&text))
}

fn without_colours(text: &str) -> String {
    let mut parts = text.split('\u{1b}');
    let mut plain = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        plain += part.split_once('m').map_or(part, |(_, rest)| rest);
    }
    plain
}

/// A daemon that answers everything by the examples of the document, with long names and texts.
struct Talkative {
    address: String,
}

impl Talkative {
    fn new() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        std::thread::spawn(move || listener.incoming().flatten().for_each(|stream| answer(&stream)));
        Self { address }
    }

    fn command(&self, args: &[&str], folder: &std::path::Path) -> Command {
        let token = folder.join("token");
        std::fs::write(&token, "secret").unwrap();
        let mut command = berth(args);
        command.env("BERTH_SERVER", format!("http://{}", self.address)).env("BERTH_TOKEN_FILE", token);
        command
    }
}

fn answer(mut stream: &TcpStream) {
    let mut reader = BufReader::new(stream);
    let mut first = String::new();
    reader.read_line(&mut first).unwrap();
    let mut length = 0;
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).unwrap();
        if let Some((_, value)) = line.to_lowercase().split_once("content-length: ") {
            length = value.trim().parse().unwrap();
        }
        if line.trim().is_empty() {
            break;
        }
    }
    reader.read_exact(&mut vec![0; length]).unwrap();
    let mut words = first.split(' ');
    let (method, path) = (words.next().unwrap().to_lowercase(), words.next().unwrap_or_default());
    let path = path.split('?').next().unwrap();
    let (status, kind, body) = match (method.as_str(), path) {
        ("get", "/api/v1/events") => {
            let event = example("get", "/api/v1/events/history").unwrap()["items"][0].clone();
            let mut event = lengthened("", &event);
            event["kind"] = "gpuDrained".into();
            ("200 OK", "text/event-stream", format!("id: a-1\ndata: {event}\n\n"))
        }
        ("delete", path) if path.contains("/policies/") => {
            let long = lengthened("detail", &"it is in use".into());
            let problem = json!({
                "type": "/problems/in-use", "title": "In use", "status": 409, "detail": long,
                "hint": "activate a stack without it", "action": {"operation": "activateStack"},
            });
            ("409 Conflict", "application/problem+json", problem.to_string())
        }
        (method, path) => match example(method, path) {
            Some(example) => ("200 OK", "application/json", lengthened("", &example).to_string()),
            None => ("204 No Content", "application/json", String::new()),
        },
    };
    let head = format!(
        "HTTP/1.1 {status}\r\ncontent-type: {kind}\r\ncontent-length: {}\r\nconnection: close\r\n\r\n",
        body.len()
    );
    // The client may be gone.
    let _ = stream.write_all((head + &body).as_bytes());
}

/// The example of an operation's answer.
fn example(method: &str, path: &str) -> Option<Value> {
    let is_path = |template: &&String| {
        let (mut there, mut here) = (template.split('/'), path.split('/'));
        let same = there.by_ref().zip(here.by_ref()).all(|(a, b)| a == b || a.starts_with('{'));
        same && template.split('/').count() == path.split('/').count()
    };
    let paths = DOCUMENT["paths"].as_object().unwrap();
    let template = paths.keys().filter(is_path).min_by_key(|template| template.matches('{').count())?;
    let content = &paths[template][method]["responses"]["200"]["content"]["application/json"];
    let named = || content["examples"].as_object()?.values().next()?.get("value");
    content.get("example").or_else(named).cloned()
}

/// The answer with long names and texts, by the keys of its values.
fn lengthened(key: &str, value: &Value) -> Value {
    let text = |text: &str| {
        format!("{text}, and{OVERRIDE} {}", "there is quite a lot more to be read about it here ".repeat(4))
    };
    match value {
        Value::Array(items) => items.iter().map(|item| lengthened(key, item)).collect(),
        Value::Object(map) if key == "parameters" && map.is_empty() => {
            json!({"replicas": 4, "only": vec!["GPU-8a56a4bc-e184-a047-2620-be19fdf913d5"; 3]})
        }
        Value::Object(map) if key == "pod" => {
            let mut pod = Value::Object(map.clone());
            pod["name"] = POD.into();
            lengthened("", &pod)
        }
        Value::Object(map) => map.iter().map(|(key, value)| (key.clone(), lengthened(key, value))).collect(),
        Value::String(given) => match key {
            "pod" => POD.into(),
            "namespace" => "a-team-with-a-long-name".into(),
            "container" => "a-container-with-a-long-name".into(),
            "resource" => "nvidia.com/mig-1g.10gb.shared-by-several-teams".into(),
            "policy" if given.contains('@') => "a-policy-with-a-long-name-of-its-own@0123456789ab".into(),
            "policy" => "a-policy-with-a-long-name-of-its-own".into(),
            "by" | "placedBy" | "owner" if given.contains('@') => {
                "a-policy-with-a-long-name-of-its-own@0123456789ab".into()
            }
            "by" | "owner" => text(given).chars().take(60).collect::<String>().into(),
            "reason" | "why" | "detail" | "words" | "summary" | "message" | "sentences" | "warnings"
            | "log" | "waiting" | "breaker" | "refused" | "fault" | "last" | "placedBecause" | "hold"
            | "fix"
                if !is_listed(given) =>
            {
                text(given).into()
            }
            _ => given.clone().into(),
        },
        other => other.clone(),
    }
}

/// Whether a text is one of a list of values, such as the reason of an end.
fn is_listed(text: &str) -> bool {
    !text.contains(' ') && !text.contains(':')
}

/// The commands that print what a daemon answers.
fn printing(stack: &str) -> Vec<Vec<&str>> {
    let lines = [
        "gpu list",
        "gpu show 0",
        "gpu history 0",
        "gpu cordon 0",
        "gpu uncordon 0",
        "gpu drain 0",
        "gpu mark-healthy 0",
        "allocation list",
        "allocation list --state ended",
        "allocation show 5eed0001-17",
        "allocation explain 5eed0001-17",
        "allocation end 5eed0001-17 --force --yes",
        "process list",
        "process bypass",
        "decision list",
        "decision show 4710",
        "policy list",
        "policy show 9f86",
        "policy stack",
        "policy history",
        "policy try timeslice --request nvidia.com/gpu=1",
        "policy replay timeslice",
        "policy shadow list",
        "policy shadow show 1",
        "policy shadow stop 1",
        "policy unsuspend 0",
        "policy delete 9f86",
        "policy rollback --yes",
        "policy reset --dry-run",
        "node show",
        "top --once",
        "events --no-follow",
        "events --since 1h --no-follow",
        "nvml release --yes",
    ];
    let mut commands: Vec<Vec<&str>> = lines.iter().map(|line| line.split(' ').collect()).collect();
    commands.push(vec!["policy", "activate", stack, "--yes"]);
    commands.push(vec!["policy", "activate", stack, "--dry-run"]);
    commands
}

#[test]
fn tables_and_messages_fit_80_columns() {
    let daemon = Talkative::new();
    let folder = tempfile::tempdir().unwrap();
    let stack = folder.path().join("stack.yaml");
    std::fs::write(&stack, "- policy: timeslice\n").unwrap();
    let mut wrong = String::new();
    for args in printing(stack.to_str().unwrap()) {
        let (code, shown) = on_terminal(&daemon.command(&args, folder.path()), "");
        assert!(code == 0 || code == 1, "{args:?}: {code}: {shown}");
        assert!(!shown.contains("unexpected form"), "{args:?}: {shown}");
        for line in shown.lines().filter(|line| line.chars().count() > COLUMNS) {
            wrong += &format!("{args:?}: {} columns: {line}\n", line.chars().count());
        }
        let pod_rows = shown.lines().filter(|line| line.contains("a-team") && line.contains("..."));
        for row in pod_rows {
            assert!(
                row.contains("x2x4q") || row.contains("...long-name"),
                "its end tells replicas apart: {row}"
            );
        }
    }
    assert!(wrong.is_empty(), "{wrong}");
    // Names are cut in the middle, and never the number of the other pods.
    let (_, list) = on_terminal(&daemon.command(&["gpu", "list"], folder.path()), "");
    let row = list.lines().nth(1).unwrap();
    assert!(row.ends_with("  a-...g-name/a-...-x2x4q +2"), "{row}");
    // In a pipe a name is whole.
    let ran = ran(daemon.command(&["gpu", "list"], folder.path()));
    assert!(ran.out.contains(&format!("a-team-with-a-long-name/{POD} +2")), "{}", ran.out);
}

#[test]
fn nothing_that_is_printed_reorders_text() {
    let daemon = Talkative::new();
    let folder = tempfile::tempdir().unwrap();
    let stack = folder.path().join("stack.yaml");
    std::fs::write(&stack, "- policy: timeslice\n").unwrap();
    let mut escaped = 0;
    for args in printing(stack.to_str().unwrap()) {
        for more in [&[][..], &["-o", "wide"]] {
            let Ran { out, err, .. } = ran(daemon.command(&[&args[..], more].concat(), folder.path()));
            assert!(!out.contains(OVERRIDE) && !err.contains(OVERRIDE), "{args:?}: {out}{err}");
            escaped += usize::from(out.contains(r"\u{202e}") || err.contains(r"\u{202e}"));
        }
    }
    assert!(escaped > 40, "only {escaped} commands had such a text");
    // JSON is the API's answer, as it is.
    let json = ran(daemon.command(&["gpu", "list", "-o", "json"], folder.path())).out;
    let json: Value = serde_json::from_str(&json).unwrap();
    assert!(json["items"][0]["health"]["reason"].as_str().unwrap().contains(OVERRIDE), "{json}");
}

/// A stack file of shares.
fn shares(node: &AdminNode, count: u32) -> String {
    let file = node.dir.path().join(format!("{count}.yaml"));
    std::fs::write(&file, format!("- policy: share\n  parameters: {{shares: {count}}}\n")).unwrap();
    file.to_str().unwrap().to_owned()
}

fn revision(node: &AdminNode) -> u64 {
    node.get("/api/v1/stack").expect(200)["revision"].as_u64().unwrap()
}

#[test]
fn a_change_that_withdraws_devices_says_how_many_and_asks_on_a_terminal() {
    let node = AdminNode::new(2);
    node.upload(&module("share", "1")).expect(201);
    let (four, two) = (shares(&node, 4), shares(&node, 2));
    // More devices: no question.
    let (code, shown) = on_terminal(&node.command(&["policy", "activate", &two, "--yes"]), "");
    assert_eq!(code, 0, "{shown}");
    let (code, shown) = on_terminal(&node.command(&["policy", "activate", &four]), "");
    assert!(code == 0 && !shown.contains("[y/N]") && revision(&node) == 2, "{shown}");
    let says = "this withdraws 4 devices (4 of 8 nvidia.com/gpu.shared)";
    for (args, effect) in [
        (&["policy", "activate", two.as_str()][..], says),
        (&["policy", "rollback"], says),
        (&["policy", "reset"], "this withdraws 8 devices (8 of 8 nvidia.com/gpu.shared)"),
        (&["nvml", "release"], "this withdraws all 8 free devices of the node"),
    ] {
        for answer in ["n\n", "\n"] {
            let (code, shown) = on_terminal(&node.command(args), answer);
            assert_eq!(code, 1, "{args:?}: {shown}");
            let text = shown.replace("\n  ", " ");
            assert!(text.contains(effect) && text.contains("nothing was changed"), "{args:?}: {shown}");
        }
    }
    assert_eq!(revision(&node), 2);
    let (code, shown) = on_terminal(&node.command(&["policy", "rollback"]), "y\n");
    assert!(code == 0 && shown.contains("revision 3"), "{shown}");
    // A script has decided already: it is warned, and not asked.
    let back = node.berth(&["policy", "reset"]);
    assert_eq!(back.code, 0, "{}", back.err);
    assert!(back.err.starts_with("warning: this withdraws 4 devices"), "{}", back.err);
    // --yes skips both.
    node.berth(&["policy", "activate", &four, "--yes"]);
    let (code, shown) = on_terminal(&node.command(&["policy", "activate", &two, "--yes"]), "");
    assert!(code == 0 && !shown.contains("warning"), "{shown}");
}

#[test]
fn a_dry_run_prints_what_would_change() {
    let node = AdminNode::new(2);
    node.upload(&module("share", "1")).expect(201);
    node.berth(&["policy", "activate", &shares(&node, 4), "--yes"]);
    let shown = node.done(&["policy", "activate", &shares(&node, 2), "--dry-run"]);
    for part in [
        "the activation would be accepted",
        "removed: share@",
        r#"{"shares":4}"#,
        "added: share@",
        "GPU 0-1  nvidia.com/gpu.shared  2        4",
        "this withdraws 4 devices (4 of 8 nvidia.com/gpu.shared)",
        "nothing was changed",
    ] {
        assert!(shown.contains(part), "{part}: {shown}");
    }
    let json: Value =
        serde_json::from_str(&node.done(&["policy", "rollback", "--dry-run", "-o", "json"])).unwrap();
    assert_eq!((&json["revision"], &json["preview"]["source"]), (&1.into(), &"file".into()));
    assert!(node.done(&["policy", "reset", "--dry-run"]).contains("the configuration file decides again"));
    let says = node.berth(&["policy", "activate", &shares(&node, 2), "--dry-run", "--if-revision", "7"]);
    assert!(says.code == 1 && says.err.contains("berth policy stack"), "{}", says.err);
    assert_eq!(revision(&node), 1);
}

#[test]
fn a_rollback_without_anything_before_changes_nothing() {
    let node = AdminNode::new(1);
    let says = node.berth(&["policy", "rollback"]);
    assert!(says.code == 1 && says.err.contains("nothing to roll back to"), "{}", says.err);
    assert_eq!(revision(&node), 0);
}
