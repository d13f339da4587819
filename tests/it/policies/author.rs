//! Commands for authors of policies, without a daemon: `berth policy new`, `check` and `test`.
// Clippy does not see that helpers of tests are tests, too.
#![allow(clippy::unwrap_used)]

use std::os::unix::fs::DirEntryExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use berth_scenario::PolicyTester;

use crate::support::guests::{guest, module};
use crate::support::kept_compiler::{self, kept_compiler};

fn root() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."))
}

fn berth(folder: &Path, arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_berth"));
    // Nothing is kept from one test to the next, nor for the user who runs them.
    command.env("XDG_CACHE_HOME", folder.join("cache")).env(kept_compiler::VARIABLE, kept_compiler());
    command.current_dir(folder).args(arguments).output().unwrap()
}

fn combined_output(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
}

fn tester() -> PolicyTester {
    PolicyTester::with_compiler(kept_compiler().to_owned()).unwrap()
}

/// Scenario files by shipped policy: they lie with its sources.
fn scenarios() -> Vec<(String, PathBuf)> {
    let mut found = Vec::new();
    for entry in root().join("policies-wasm").read_dir().unwrap() {
        let policy = entry.unwrap().path();
        let Ok(files) = policy.join("scenarios").read_dir() else { continue };
        let name = policy.file_name().unwrap().to_str().unwrap().to_owned();
        let files = files.map(|file| file.unwrap().path());
        let yaml = files.filter(|file| file.extension().is_some_and(|end| end == "yaml"));
        found.extend(yaml.map(|file| (name.clone(), file)));
    }
    found.sort();
    found
}

#[test]
fn the_shipped_policies_pass_their_scenarios() {
    let tester = tester();
    let found = scenarios();
    assert!(found.len() >= 20, "the scenarios were not found");
    let mut failed = String::new();
    for (policy, file) in found {
        let version = tester.shipped(&policy).unwrap();
        let text = std::fs::read_to_string(&file).unwrap();
        let name = file.strip_prefix(root()).unwrap().display().to_string();
        let report = tester.run(&version, &name, &text);
        if !report.passed {
            failed += &report.text();
        }
    }
    assert!(failed.is_empty(), "{failed}");
}

const HEAD: &str = "about: A test.\nnode: [{model: l4, count: 2}]\n";

/// Runs a story against a policy and answers the report's text.
fn story(tester: &PolicyTester, module: &[u8], text: &str) -> String {
    let version = tester.install(module).unwrap();
    tester.run(&version, "story.yaml", &format!("{HEAD}{text}")).text()
}

#[test]
fn a_failed_expectation_is_shown_with_its_line_and_the_result() {
    let tester = tester();
    let version = tester.shipped("timeslice").unwrap();
    let text = format!(
        "{HEAD}steps:\n  - offer: {{}}\n    expect: {{free: {{nvidia.com/gpu.shared: 9}}}}\n  \
         - allocate: {{resource: nvidia.com/gpu.shared, count: 1}}\n    expect: {{gpus: [1]}}\n  \
         - allocate: {{resource: nvidia.com/gpu.shared, count: 1}}\n    expect: {{refused: never}}\n"
    );
    let report = tester.run(&version, "story.yaml", &text);
    let shown = report.text();
    for words in [
        "FAILED story.yaml: A test.\n  step 1, line 4: offer\n",
        "free.nvidia.com/gpu.shared  expected 9\n",
        "got 8\n",
        "step 2, line 6: allocate\n    gpus  expected [1]\n               got [0]\n",
        "place: GPU 0 share 0 (the least-held GPUs first)\n",
        "step 3, line 8: allocate\n    refused  expected ...never...\n",
        "got granted or placed on GPUs [1]",
    ] {
        assert!(shown.contains(words), "{words}\n{shown}");
    }
    assert_eq!(report.failures.len(), 3);
}

#[test]
fn a_fault_fails_its_step_unless_it_is_expected() {
    let tester = tester();
    let allocate = "steps:\n  - allocate: {resource: nvidia.com/gpu, count: 1}\n";
    let words =
        story(&tester, &guest("trap-with-words"), &format!("{allocate}    expect: {{fault: no such}}\n"));
    assert!(words.contains("fault  expected ...no such..."), "{words}");

    // A guest that runs for ever in one hook: `offer`, which keeps the stack from being activated.
    let looping = guest("loop-in-hook");
    let unexpected = story(&tester, &looping, allocate);
    // On a machine that is very busy the clock ends it first.
    let ended = ["units of fuel", "ran longer than"].iter().any(|words| unexpected.contains(words));
    assert!(unexpected.contains("FAILED") && ended, "{unexpected}");
}

#[test]
fn an_entry_that_denies_on_fault_refuses_with_the_fault() {
    let tester = tester();
    // `admit` alone traps, so that the stack is activated.
    let fields = "(func (export \"admit\") (param i32) (result i32) unreachable)\n";
    let module = module(fields);
    for (on_fault, expect) in [
        ("skip", "{fault: aborted, gpus: [1]}"),
        ("deny", "{fault: aborted, refused: its onFault is deny}"),
        ("deny", "{fault: aborted}"),
    ] {
        let text = format!(
            "stack: [{{policy: this, onFault: {on_fault}}}]\nsteps:\n  - allocate: {{resource: nvidia.com/gpu, on: [1]}}\n    \
             expect: {expect}\n"
        );
        assert_eq!(story(&tester, &module, &text), "ok story.yaml\n", "{on_fault} {expect}");
    }
}

#[test]
fn check_and_then_test_compile_a_module_once() {
    let folder = tempfile::tempdir().unwrap();
    let shipped = std::fs::read(root().join("policies-wasm/prebuilt/binpack.wasm")).unwrap();
    let (_, scenario) = scenarios().into_iter().find(|(policy, _)| policy == "binpack").unwrap();
    std::fs::write(folder.path().join("policy.wasm"), shipped).unwrap();
    let kept = || {
        let files = folder.path().join("cache/berth/compiled").read_dir().unwrap().map(Result::unwrap);
        // A reply that is written again is another file.
        files.map(|file| (file.file_name(), file.ino())).collect::<Vec<_>>()
    };
    let check = || {
        let checked = berth(folder.path(), &["policy", "check", "policy.wasm", "-o", "json"]);
        assert!(checked.status.success(), "{}", combined_output(&checked));
        checked.stdout
    };
    let first = check();
    let compiled = kept();
    assert_eq!(compiled.len(), 1, "{compiled:?}");
    let tested = berth(folder.path(), &["policy", "test", "policy.wasm", scenario.to_str().unwrap()]);
    assert!(combined_output(&tested).contains("1 passed"), "{}", combined_output(&tested));
    // The scenario names another policy, too.
    assert!(kept().contains(&compiled[0]), "{:?}", kept());
    // What is kept gives the same answer, and a damaged one is compiled again.
    assert_eq!(check(), first);
    let file = folder.path().join("cache/berth/compiled").join(&compiled[0].0);
    std::fs::write(&file, "damaged").unwrap();
    assert_eq!(check(), first);
    assert!(file.metadata().unwrap().len() > 1000);
}

#[test]
fn check_has_the_same_result_as_the_daemon() {
    let folder = tempfile::tempdir().unwrap();
    let shipped = root().join("policies-wasm/prebuilt/timeslice.wasm");
    let shipped = shipped.to_str().unwrap();
    for (module, words) in [
        (b"hello".to_vec(), "it is not WebAssembly"),
        (guest("lie-name"), "not a DNS label"),
        (crate::support::guests::component("wasi"), "wasi"),
    ] {
        let file = folder.path().join("policy.wasm");
        std::fs::write(&file, module).unwrap();
        let output = berth(folder.path(), &["policy", "check", "policy.wasm"]);
        assert_eq!(output.status.code(), Some(1), "{}", combined_output(&output));
        assert!(
            combined_output(&output).contains("refused: policy.wasm: ")
                && combined_output(&output).contains(words),
            "{}",
            combined_output(&output)
        );
    }
    let output = berth(
        folder.path(),
        &["policy", "check", shipped, "--parameters", r#"{"replicas": 0}"#, "-o", "json"],
    );
    assert_eq!(output.status.code(), Some(1), "{}", combined_output(&output));
    let answer: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&answer["ok"], &answer["policy"]["name"]), (&false.into(), &"timeslice".into()));
    assert!(
        answer["parameters"]["problem"].as_str().unwrap().contains("replicas: 0 is out of range"),
        "{answer}"
    );
    let output = berth(folder.path(), &["policy", "check", shipped, "--parameters", r#"{"replicas": "4"}"#]);
    let words = "refused: the parameters are not accepted: parameters.replicas: invalid type: string \"4\", expected a whole";
    assert!(combined_output(&output).contains(words), "{}", combined_output(&output));
    let whole = std::fs::read(shipped).unwrap();
    std::fs::write(folder.path().join("cut.wasm"), &whole[..whole.len() / 2]).unwrap();
    let output = berth(folder.path(), &["policy", "check", "cut.wasm"]);
    let words = format!("it has {} bytes and breaks off", whole.len() / 2);
    assert!(
        output.status.code() == Some(1) && combined_output(&output).contains(&words),
        "{}",
        combined_output(&output)
    );
    let checked = berth(folder.path(), &["policy", "check", shipped]);
    let row = ["replicas", "integer,", "1", "to", "128", "4"];
    let is_row = |line: &str| line.split_whitespace().take(row.len()).eq(row);
    assert!(combined_output(&checked).lines().any(is_row), "{}", combined_output(&checked));
    assert!(
        !combined_output(&checked).lines().any(|line| line.starts_with("warning")),
        "it is the shipped one: {}",
        combined_output(&checked)
    );
    let mut other = std::fs::read(shipped).unwrap();
    // A custom section at the end: other bytes, the same policy.
    other.extend([0, 2, 1, b'x']);
    std::fs::write(folder.path().join("other.wasm"), other).unwrap();
    let checked = berth(folder.path(), &["policy", "check", "other.wasm"]);
    assert!(checked.status.success(), "{}", combined_output(&checked));
    assert!(
        combined_output(&checked).contains("warning: timeslice is also the name of a shipped"),
        "{}",
        combined_output(&checked)
    );
    std::fs::write(folder.path().join("p.json"), r#"{"replicas": 3}"#).unwrap();
    let output = berth(folder.path(), &["policy", "check", shipped, "--parameters", "@p.json"]);
    assert!(
        output.status.success() && combined_output(&output).contains("ok: the parameters are accepted"),
        "{}",
        combined_output(&output)
    );
    let output = berth(folder.path(), &["policy", "check", shipped, "--parameters", "[]"]);
    assert!(
        combined_output(&output).contains("--parameters is not a JSON object"),
        "{}",
        combined_output(&output)
    );
}

#[test]
fn check_finds_an_answer_that_no_node_can_use() {
    let folder = tempfile::tempdir().unwrap();
    for (name, module, words) in [
        // It is a valid policy, which a daemon takes at upload; each of its offers is a fault.
        ("too-many.wasm", guest("offer-too-many"), "refused: a node of eight H100s cannot use it: "),
        ("twice.wasm", guest("part-twice"), "refused: a node of eight H100s cannot use it: "),
    ] {
        std::fs::write(folder.path().join(name), module).unwrap();
        let output = berth(folder.path(), &["policy", "check", name]);
        assert_eq!(output.status.code(), Some(1), "{}", combined_output(&output));
        assert!(combined_output(&output).contains(words), "{}", combined_output(&output));
        let output = berth(folder.path(), &["policy", "check", name, "-o", "json"]);
        let answer: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!((&answer["ok"], &answer["activation"]["possible"]), (&false.into(), &false.into()));
    }
    // Every shipped one can be used with its defaults, whatever it offers.
    for policy in root().join("policies-wasm/prebuilt").read_dir().unwrap() {
        let file = policy.unwrap().path();
        if file.extension().is_some_and(|end| end == "wasm") {
            let output = berth(folder.path(), &["policy", "check", file.to_str().unwrap()]);
            assert!(output.status.success(), "{}", combined_output(&output));
            assert!(
                combined_output(&output).contains("ok: it can be activated"),
                "{}",
                combined_output(&output)
            );
        }
    }
}

/// Runs steps against `timeslice` on two L4, and returns the report's text.
fn run_steps(steps: &str) -> String {
    let tester = tester();
    let version = tester.shipped("timeslice").unwrap();
    let head = "about: x\nnode: [{model: l4, count: 2}]\nstack: [{policy: this, parameters: {replicas: 4}}]\nsteps:\n";
    tester.run(&version, "s.yaml", &format!("{head}{steps}")).text()
}

#[test]
fn a_scenario_sets_the_memory_in_use_and_the_processes_of_a_gpu() {
    let steps = "- usage: {gpu: 1, memoryUsedMiB: 4096, processes: 2}\n- usage: {gpu: 1, processes: 0}\n";
    assert_eq!(run_steps(steps), "ok s.yaml\n");
    let text = run_steps("- offer: {}\n- usage: {gpu: 0, memoryUsedMiB: 23035}\n");
    assert!(text.contains("step 2 (line 6): usage: 23035 MiB in use; GPU 0 has 23034 MiB"), "{text}");
}

#[test]
fn a_candidate_that_no_policy_would_see_is_an_error() {
    let allocate = |pod: &str| {
        format!(
            "- allocate: {{resource: nvidia.com/gpu.shared, count: 1, as: {pod}, candidates: [{{namespace: n, pod: p}}]}}\n"
        )
    };
    let text = run_steps(&(allocate("a") + &allocate("b")));
    for part in ["FAILED", "step 2 (line 6)", "n/p (container main) holds devices of nvidia.com/gpu.shared"] {
        assert!(text.contains(part), "{part} is missing in {text}");
    }
    assert_eq!(run_steps(&(allocate("a") + "- release: a\n" + &allocate("b"))), "ok s.yaml\n");
}

#[test]
fn policy_test_runs_files_and_folders_and_sets_its_exit_code() {
    let folder = tempfile::tempdir().unwrap();
    let good = root().join("policies-wasm/timeslice/scenarios");
    let good = good.to_str().unwrap();
    let output = berth(folder.path(), &["policy", "test", "--shipped", "timeslice", good]);
    assert!(output.status.success(), "{}", combined_output(&output));
    assert!(
        combined_output(&output).ends_with("scenarios: 5 passed, 0 failed\n"),
        "{}",
        combined_output(&output)
    );
    std::fs::write(folder.path().join("bad.yaml"), "about: x\nnode: []\nsteps:\n  - ofer: {}\n").unwrap();
    let prebuilt = root().join("policies-wasm/prebuilt/timeslice.wasm");
    let output =
        berth(folder.path(), &["policy", "test", prebuilt.to_str().unwrap(), good, ".", "-o", "json"]);
    assert_eq!(output.status.code(), Some(1), "{}", combined_output(&output));
    let answer: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&answer["passed"], &answer["failed"]), (&5.into(), &1.into()));
    let trouble = answer["scenarios"][5]["trouble"].as_str().unwrap();
    assert!(trouble.contains("did you mean `offer`?") && trouble.contains("line 4"), "{trouble}");
    assert_eq!(berth(folder.path(), &["policy", "test", "--shipped", "timeslice"]).status.code(), Some(2));
    let output = berth(folder.path(), &["policy", "test", "--shipped", "none", good]);
    assert!(
        combined_output(&output).contains("the shipped ones are exclusive"),
        "{}",
        combined_output(&output)
    );
}

#[test]
fn a_new_policy_has_all_its_sources() {
    let folder = tempfile::tempdir().unwrap();
    let output = berth(folder.path(), &["policy", "new", "fill-first"]);
    assert!(output.status.success(), "{}", combined_output(&output));
    assert!(
        combined_output(&output).contains("berth policy test target/wasm32-unknown-unknown/release/"),
        "{}",
        combined_output(&output)
    );
    for part in
        ["rustup target add", "berth policy push", "berth policy try fill-first", "berth policy activate"]
    {
        assert!(combined_output(&output).contains(part), "{part}: {}", combined_output(&output));
    }
    let made = folder.path().join("fill-first");
    // The kit and the contract are those of this repository, to the last byte.
    let mut compared = 0;
    for part in ["sdk/src", "wit"] {
        for file in root().join("policies-wasm").join(part).read_dir().unwrap() {
            let file = file.unwrap().path();
            if file.is_file() {
                let copy = made.join(part).join(file.file_name().unwrap());
                assert_eq!(
                    std::fs::read(&copy).unwrap(),
                    std::fs::read(&file).unwrap(),
                    "{}",
                    copy.display()
                );
                compared += 1;
            }
        }
    }
    assert!(compared > 6, "{compared}");
    let manifest = std::fs::read_to_string(made.join("Cargo.toml")).unwrap();
    assert!(
        manifest.contains("berth-policy-fill-first") && manifest.contains("path = \"sdk\""),
        "{manifest}"
    );
    assert!(std::fs::read_to_string(made.join("src/lib.rs")).unwrap().contains("struct FillFirst"));
    assert!(made.join(".gitignore").is_file() && made.join("scenarios/fill.yaml").is_file());

    let again = berth(folder.path(), &["policy", "new", "fill-first", "--lang", "python"]);
    assert_eq!(again.status.code(), Some(1), "{}", combined_output(&again));
    assert!(combined_output(&again).contains("exists already"), "{}", combined_output(&again));
    let named = berth(folder.path(), &["policy", "new", "Fill_First"]);
    assert_eq!(named.status.code(), Some(2), "{}", combined_output(&named));
    let taken = berth(folder.path(), &["policy", "new", "timeslice"]);
    assert_eq!(taken.status.code(), Some(2), "{}", combined_output(&taken));
    assert!(
        combined_output(&taken).contains("is the name of a shipped policy"),
        "{}",
        combined_output(&taken)
    );
    assert_eq!(folder.path().read_dir().unwrap().count(), 1, "no draft is left");
}
