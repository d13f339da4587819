//! Exit codes of all commands, by the one rule of `src/cli/usage.rs`: 0 done, 1 refused or failed, 2 bad usage.

use crate::support::admin_node::AdminNode;
use std::path::Path;
use std::process::{Command, Stdio};

/// Exit code, standard output and standard error of a command in a folder, against the node's daemon.
fn typed(node: &AdminNode, folder: &Path, words: &[&str]) -> (i32, String, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_berth"));
    for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("BERTH_")) {
        command.env_remove(name);
    }
    command.env("BERTH_SERVER", format!("http://{}", node.address()));
    command.env("BERTH_TOKEN_FILE", node.dir.path().join("token"));
    let output = command.args(words).current_dir(folder).stdin(Stdio::null()).output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (output.status.code().unwrap(), text(output.stdout), text(output.stderr))
}

#[test]
fn the_same_usage_error_has_the_same_exit_code_in_every_command() {
    let node = AdminNode::new(1);
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &[u8]| std::fs::write(folder.path().join(name), text).unwrap();
    let prebuilt = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."))
        .join("policies-wasm/prebuilt/timeslice.wasm");
    write("p.wasm", &std::fs::read(prebuilt).unwrap());
    write("bad.yaml", b"a: [");
    write("bad.json", b"{");
    write("story.yaml", b"about: x\nnode: []\nsteps: []\n");
    let table: [(i32, &[&str]); 5] = [
        // A file that is not there.
        (
            1,
            &[
                "policy check none.wasm",
                "policy test none.wasm story.yaml",
                "policy test p.wasm none.yaml",
                "policy push none.wasm",
                "policy push p.wasm --signature none.sig",
                "policy activate none.yaml",
                "policy check p.wasm --parameters @none.json",
                "policy try mixed --parameters @none.json",
                "policy try mixed --permissions @none.json",
                "policy replay mixed --parameters @none.json",
                "policy shadow start mixed --parameters @none.json",
                "config check none.yaml",
                "serve --config none.yaml",
                "node check --config none.yaml",
                "state verify --state-dir none",
                "state import --state-dir none none.jsonl",
                "gpu list --token-file none",
                "token rotate --token-file none/token",
                "token show --token-file none/token",
            ],
        ),
        // A file that holds something else.
        (
            1,
            &[
                "policy check bad.yaml",
                "policy test p.wasm bad.yaml",
                "policy push bad.yaml",
                "policy activate bad.yaml",
                "config check bad.yaml",
                "serve --config bad.yaml",
                "node check --config bad.yaml",
                "policy check p.wasm --parameters @bad.json",
                "policy try mixed --parameters @bad.json",
                "policy try mixed --permissions @bad.json",
            ],
        ),
        // An unknown name.
        (
            1,
            &[
                "policy show none",
                "policy delete none",
                "policy download none",
                "policy try none",
                "policy replay none",
                "policy shadow start none",
                "policy shadow show none",
                "policy unsuspend none",
                "policy test --shipped none story.yaml",
                "gpu show 7",
                "gpu cordon GPU-none",
                "decision list --gpu 7",
                "decision show 4711",
                "allocation show 5eed0001-99",
                "policy rollback 99",
                "allocation end 5eed0001-99",
                "allocation end 5eed0001-99 --force --yes",
            ],
        ),
        // What cannot be meant, whatever there is on the machine.
        (
            2,
            &[
                "policy push",
                "policy show",
                "policy list -o xml",
                "gpu dance",
                "help dance",
                "events --since someday",
                "events --since 2d",
                "gpu cordon",
                "gpu drain 0 --timeout 1h",
                "gpu list --server nowhere",
                "policy new Not_A_Name",
                "policy new a --dir none/..",
                "policy test p.wasm",
                "policy test story.yaml",
                "policy test p.wasm story.yaml --shipped",
                "policy test p.wasm story.yaml --shipped timeslice",
                "policy test --shipped scenarios/ story.yaml",
                "policy test --shipped timeslice",
                "policy check p.wasm --parameters []",
                "policy check p.wasm --parameters {",
                "policy try mixed --parameters {",
                "policy try mixed --permissions {\"deny\":4}",
                "policy try mixed --request gpu=1",
                "policy try mixed --request nvidia.com/gpu=none",
                "policy try mixed --request nvidia.com/gpu=0",
                "policy try mixed.wasm",
                "policy replay mixed --limit many",
                "policy replay mixed --since someday",
                "policy replay mixed --limit 0",
                "decision show some",
                "decision list --since someday",
                "allocation list --after some",
                "allocation show some",
                "allocation end some",
                "allocation end 5eed0001-99 --yes",
                "serve --gpus amd",
                "node check --gpus sim:8xb900",
            ],
        ),
        (
            0,
            &[
                "policy list",
                "policy check p.wasm",
                "gpu list",
                "help",
                "help gpu cordon",
                "config check --without-gpus story.json",
                "--help",
            ],
        ),
    ];
    // A file of JSON is YAML, too.
    write("story.json", b"{}");
    let mut wrong = String::new();
    for (code, commands) in table {
        for command in commands {
            let words: Vec<&str> = command.split(' ').collect();
            let (ended, out, err) = typed(&node, folder.path(), &words);
            if ended != code {
                wrong += &format!("{command}: {ended}, not {code}: {err}{out}\n");
            }
            // An empty list says so in one line.
            let has_reason = err.starts_with("error: ") || err.starts_with("No ") || !out.is_empty();
            assert!(has_reason, "{command} says nothing of why: {err}");
        }
    }
    assert!(wrong.is_empty(), "{wrong}");
}

#[test]
fn with_two_policies_the_error_names_the_one_to_remove() {
    let node = AdminNode::new(1);
    let folder = tempfile::tempdir().unwrap();
    for (command, says) in [
        (
            "policy test a.wasm s.yaml --shipped timeslice",
            "a.wasm and --shipped timeslice each name a policy",
        ),
        ("policy test --shipped scenarios/ s.yaml", "\"scenarios/\" is a path"),
        ("policy test s.yaml", "s.yaml is a scenario: name the policy's file before it"),
    ] {
        let words: Vec<&str> = command.split(' ').collect();
        let (code, _, err) = typed(&node, folder.path(), &words);
        assert!(code == 2 && err.contains(says), "{command}: {err}");
    }
}

#[test]
fn arguments_from_the_environment_are_not_shown_as_required() {
    let node = AdminNode::new(1);
    let folder = tempfile::tempdir().unwrap();
    let (_, _, err) = typed(&node, folder.path(), &["policy", "push"]);
    assert!(err.contains("Usage: berth policy push [OPTIONS] <FILE>\n"), "{err}");
}

#[test]
fn checks_and_new_folders_have_json_output() {
    let node = AdminNode::new(1);
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("good.yaml"), "gpus: sim:1xt4\nstack: [{policy: mixed}]\n").unwrap();
    std::fs::write(folder.path().join("bad.yaml"), "gpuss: nvml\n").unwrap();
    let json = |words: &[&str], wanted: i32| -> serde_json::Value {
        let (code, out, err) = typed(&node, folder.path(), words);
        assert_eq!(code, wanted, "{words:?}: {err}");
        serde_json::from_str(&out).unwrap()
    };
    let good = json(&["config", "check", "good.yaml", "-o", "json"], 0);
    assert_eq!((&good["ok"], &good["settings"]["stack"][0]), (&true.into(), &"mixed".into()), "{good}");
    assert_eq!(good["settings"]["gpus"], "simulated: 1xt4");
    let bad = json(&["config", "check", "bad.yaml", "-o", "json"], 1);
    assert_eq!(bad["ok"], false);
    assert!(bad["problem"].as_str().unwrap().contains("gpuss"), "{bad}");
    let made = json(&["policy", "new", "fill-first", "-o", "json"], 0);
    assert_eq!((&made["lang"], &made["folder"]), (&"rust".into(), &"fill-first".into()), "{made}");
    for key in ["files", "steps"] {
        assert!(made[key].as_array().unwrap().len() >= 3, "{made}");
    }
    let (_, yaml, _) = typed(&node, folder.path(), &["policy", "new", "b", "--lang", "c", "-o", "yaml"]);
    assert!(yaml.contains("lang: c\n"), "{yaml}");
}
