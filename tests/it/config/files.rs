//! `berth config check` reads the files that a configuration names, as a start does, and shows the callers that are
//! accepted.

use crate::cli::commands::{Ran, berth, ran};
use crate::rest::tls::Ca;
use serde_json::Value;
use std::fs::{Permissions, remove_file, set_permissions, write};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use tempfile::TempDir;

/// A configuration with all settings of the admin API.
struct AdminConfig(TempDir);

impl AdminConfig {
    fn new() -> Self {
        let node = Self(tempfile::tempdir().unwrap());
        let (server, clients) = (Ca::new(), Ca::new());
        server.server().write(node.folder(), "server");
        write(node.folder().join("clients.crt"), clients.pem).unwrap();
        node.secret("grafana", &"g".repeat(40));
        let at = node.folder().display();
        let text = format!(
            "
gpus: sim:1xt4
stateDir: {at}/state
adminListen: 127.0.0.1:0
admin:
  socket: {at}/admin.sock
  tokens:
    - {{ name: grafana, file: {at}/grafana, right: read }}
    - {{ name: ci, sha256: {}, right: change }}
  tls:
    certFile: {at}/server.crt
    keyFile: {at}/server.key
    clientCaFile: {at}/clients.crt
    clients: [{{ name: ops, right: change }}]
    othersMay: read
  limits: {{ changesPerSecond: 7 }}
  kubernetes: {{}}
",
            "0f".repeat(32)
        );
        write(node.folder().join("config.yaml"), text).unwrap();
        node
    }

    fn folder(&self) -> &Path {
        self.0.path()
    }

    fn secret(&self, name: &str, text: &str) {
        write(self.folder().join(name), text).unwrap();
        set_permissions(self.folder().join(name), Permissions::from_mode(0o600)).unwrap();
    }

    fn check(&self, flags: &[&str]) -> Ran {
        let file = self.folder().join("config.yaml");
        ran(berth(&[&["config", "check", file.to_str().unwrap()], flags].concat()))
    }
}

#[test]
fn the_configured_access_is_shown() {
    let node = AdminConfig::new();
    let checked = node.check(&[]);
    assert_eq!((checked.code, checked.err.as_str()), (0, ""), "{}", checked.out);
    let at = node.folder().display().to_string();
    for says in [
        format!("https://127.0.0.1:0, TLS by {at}/server.crt and {at}/server.key"),
        format!("the token in {at}/state/token (change); token grafana in {at}/grafana (read)"),
        "token ci by its SHA-256 (change)".into(),
        format!("client certificates of {at}/clients.crt (ops: change, others: read)"),
        format!("root at {at}/admin.sock (change)"),
        "users of the cluster, by their rights there".into(),
        "6000 reads and 7 changes a second".into(),
        format!("note: the daemon creates {at}/state/token when it first starts"),
    ] {
        assert!(checked.out.contains(&says), "{says}: {}", checked.out);
    }
    assert!(!checked.out.contains("0f0f"), "{}", checked.out);
    assert!(!node.folder().join("state").exists(), "a check makes nothing");
    let json: Value = serde_json::from_str(&node.check(&["-o", "json"]).out).unwrap();
    let admin = &json["settings"]["admin"];
    assert_eq!(admin["tls"]["keyFile"], format!("{at}/server.key"));
    assert_eq!(
        (&admin["tokens"][0]["name"], &admin["tokens"][0]["right"]),
        (&"grafana".into(), &"read".into())
    );
    assert_eq!(admin["tls"]["clients"][0]["name"], "ops");
}

#[test]
fn unusable_files_fail_the_check_and_can_be_skipped() {
    let node = AdminConfig::new();
    let file = |name: &str| node.folder().join(name);
    std::fs::create_dir(file("state")).unwrap();
    // Each in turn, with what is there before and after.
    let broken: [(&str, Option<&str>, &str); 7] = [
        ("state/token", Some(""), "as `openssl rand -hex 32` writes it"),
        ("grafana", Some("short"), "it holds no token"),
        ("grafana", None, "it cannot be read"),
        ("server.crt", Some("no PEM"), "holds no certificate in PEM"),
        ("server.key", Some("no PEM"), "holds no private key in PEM"),
        ("server.key", None, "cannot be read (admin.tls in the configuration)"),
        ("clients.crt", Some(""), "holds no certificate in PEM"),
    ];
    for (name, text, says) in broken {
        let before = std::fs::read_to_string(file(name)).ok();
        match text {
            Some(text) => node.secret(name, text),
            None => remove_file(file(name)).unwrap(),
        }
        let checked = node.check(&[]);
        assert_eq!((checked.code, checked.out.as_str()), (1, ""), "{name}: {}", checked.err);
        assert!(checked.err.contains(name) && checked.err.contains(says), "{name}: {}", checked.err);
        assert!(checked.err.contains("--without-files"), "{name}: {}", checked.err);
        let without = node.check(&["--without-files"]);
        assert_eq!(without.code, 0, "{name}: {}", without.err);
        assert!(without.out.contains("note: the token and TLS files were not read"));
        match before {
            Some(text) => node.secret(name, &text),
            None => remove_file(file(name)).unwrap(),
        }
    }
    // A certificate and key that do not match are reported as by a start.
    Ca::new().server().write(node.folder(), "other");
    std::fs::copy(file("other.key"), file("server.key")).unwrap();
    let checked = node.check(&[]);
    assert!(checked.code == 1 && checked.err.contains("does not match the certificate"), "{}", checked.err);
    let mut serve = berth(&["serve", "--kubelet-dir"]);
    serve.arg(file("kubelet")).arg("--config").arg(file("config.yaml"));
    let started = ran(serve);
    assert!(started.code == 1 && started.err.contains("does not match the certificate"), "{}", started.err);
}

/// The answer of a check of this text.
fn checked(text: &str, flags: &[&str]) -> Ran {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("config.yaml");
    write(&file, text).unwrap();
    ran(berth(&[&["config", "check", file.to_str().unwrap()], flags].concat()))
}

#[test]
fn what_the_guard_enforces_is_shown_with_a_note_if_it_needs_the_guard() {
    let note = "`berth guard` must run on the node, too";
    for (text, limits, action, needs_guard) in [
        ("gpus: sim:1xt4", "auto", "report", false),
        ("{gpus: sim:1xt4, enforce: {memory: require}}", "require", "report", true),
        ("{gpus: sim:1xt4, enforce: {memory: off}, bypass: {action: deny}}", "off", "deny", true),
    ] {
        let shown = checked(text, &[]);
        let row = |name: &str, value: &str| {
            let mut rows = shown.out.lines().map(str::split_whitespace);
            rows.any(|words| words.collect::<Vec<_>>().join(" ") == format!("{name} {value}"))
        };
        assert!(row("memory limits", limits) && row("bypass action", action), "{}", shown.out);
        assert_eq!(shown.out.contains(note), needs_guard, "{}", shown.out);
    }
}

#[test]
fn all_errors_of_a_file_are_named_in_one_run_by_check_and_all_but_the_stacks_by_serve() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("config.yaml");
    let text = "gpus: sim:1xt4
gpuss: nvml
memoryOvercommit: 0.5
migStrategy: mixd
admin:
  tokens:
  - { name: root, file: /t, right: read }
  - { name: ci, right: read }
containerEdits:
  deviceListStrategy: [envar]
  resources:
    nvidia.com/gpu:
      mounts: [{ hostPath: \"/a\\0b\", containerPath: /b }, { hostPath: b, containerPath: \"/a\\nb\" }]
      mounts: []
health: { pollSeconds: fast }
stack:
- policy: timeslize
- policy: memory
- policy: timeslice
  parameters: { replicas: 4, replicas: 5 }
  onFault: skipp
";
    write(&file, text).unwrap();
    let name = file.to_str().unwrap();
    let lines = [
        "line 2, column 1: the key \"gpuss\" is not known; did you mean `gpus`?",
        "line 3, column 19: memoryOvercommit: \"0.5\" is not allowed; expected 1.0 to 16.0",
        "line 4, column 14: migStrategy: \"mixd\" is not allowed; expected none, single or mixed; did you mean `mixed`?",
        "line 7, column 13: admin.tokens[0].name: \"root\" is not allowed; expected a name that is not reserved",
        "line 8, column 5: admin.tokens[1]: token \"ci\" needs exactly one of file and sha256",
        "line 10, column 23: containerEdits.deviceListStrategy: \"envar\" is not allowed; expected ",
        "line 13, column 28: containerEdits.resources[\"nvidia.com/gpu\"].mounts[0].hostPath: the text holds the \
         control character",
        "line 13, column 88: containerEdits.resources[\"nvidia.com/gpu\"].mounts[1].containerPath: \"/a\\nb\" is not allowed",
        "line 13, column 70: containerEdits.resources[\"nvidia.com/gpu\"].mounts[1].hostPath: \"b\" is not allowed",
        "line 14, column 7: containerEdits.resources[\"nvidia.com/gpu\"]: the key \"mounts\" is given twice",
        "line 15, column 24: health.pollSeconds: found \"fast\"; expected a number",
        "line 20, column 30: stack[2].parameters: the key \"replicas\" is given twice, first in line 20",
        "line 21, column 12: stack[2].onFault: \"skipp\" is not known; did you mean `skip`?",
    ];
    let check = ran(berth(&["config", "check", name]));
    let mut serve = berth(&["serve", "--config", name, "--kubelet-dir"]);
    serve.arg(folder.path()).arg("--state-dir").arg(folder.path().join("state"));
    let serve = ran(serve);
    for checked in [&check, &serve] {
        assert_eq!((checked.code, checked.out.as_str()), (1, ""), "{}", checked.err);
        for line in &lines {
            assert!(checked.err.contains(line), "{line}: {}", checked.err);
        }
    }
    // A start would have to compile policies for that, again and again until the file is right.
    for line in [
        "line 17, column 11: stack[0].policy: stack entry timeslize: this node has no policy \"timeslize\"",
        "line 18, column 3: stack[1]: policy memory@",
    ] {
        assert!(check.err.contains(line) && !serve.err.contains(line), "{line}: {}{}", check.err, serve.err);
    }
    assert!(check.err.contains("did you mean `timeslice`?"), "{}", check.err);
    assert!(
        check.err.contains("may not name nvidia.com/gpu.mem-4g (permissions.resources)"),
        "{}",
        check.err
    );
    let json = ran(berth(&["config", "check", name, "-o", "json"]));
    let json: Value = serde_json::from_str(&json.out).unwrap();
    let first = &json["problems"][0];
    assert_eq!((&json["ok"], &first["line"], &first["column"]), (&false.into(), &2.into(), &1.into()));
}

#[test]
fn a_stack_that_cannot_be_called_hides_no_errors_of_the_file() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("config.yaml");
    let stack = "gpus: sim:1xt4\nstack: [{ policy: timeslice }]\n";
    write(&file, format!("{stack}memoryOvercommit: 0.5\n")).unwrap();
    let run = |command: &[&str]| {
        let mut command = berth(command);
        command.arg(&file).env("TMPDIR", "/nonexistent");
        ran(command)
    };
    let wrong = "line 3, column 19: memoryOvercommit: \"0.5\" is not allowed";
    let unasked = "cannot create a temporary folder for the stack's policies";
    let check = run(&["config", "check"]);
    assert!(check.code == 1 && check.err.contains(wrong), "{}", check.err);
    assert!(check.err.contains(&format!("stack: was not checked: {unasked}")), "{}", check.err);
    let serve = run(&["serve", "--config"]);
    assert!(serve.code == 1 && serve.err.contains(wrong) && !serve.err.contains(unasked), "{}", serve.err);
    write(&file, stack).unwrap();
    let check = run(&["config", "check"]);
    assert!(
        check.code == 1 && check.err.contains(unasked) && !check.err.contains("is invalid"),
        "{}",
        check.err
    );
}

#[test]
fn unreadable_gpus_fail_the_check_and_can_be_skipped() {
    for (gpus, says) in [
        ("sim:/nonexistent", "sim:/nonexistent cannot be simulated"),
        ("sim:-1xh100", "is not a profile"),
        ("sim:8xb900", "known are t4"),
        ("nvml", "libnvidia-ml"),
    ] {
        let text = format!("gpus: {gpus}\nnvmlLibrary: /nonexistent/libnvidia-ml.so.1\n");
        let refused = checked(&text, &[]);
        assert_eq!((refused.code, refused.out.as_str()), (1, ""), "{gpus}: {}", refused.err);
        assert!(refused.err.contains("line 1, column 7: gpus: "), "{gpus}: {}", refused.err);
        assert!(
            refused.err.contains(says) && refused.err.contains("--without-gpus"),
            "{gpus}: {}",
            refused.err
        );
        let without = checked(&text, &["--without-gpus"]);
        // A profile that is not known is wrong everywhere.
        let profile = gpus.contains('x') && !gpus.contains('/');
        assert_eq!(without.code, i32::from(profile), "{gpus}: {}", without.err);
        assert!(profile || without.out.contains("note: the GPUs were not read"), "{}", without.out);
    }
}

#[test]
fn what_the_check_advises_is_taken_by_it() {
    let without_driver = checked("gpus: nvml\n", &[]);
    // On a machine with GPUs there is no such error.
    if without_driver.code != 0 {
        let advised = without_driver.err.contains("on a machine without GPUs, use --without-gpus");
        assert!(advised, "{}", without_driver.err);
        let mut commands = without_driver.err.split('`').skip(1).step_by(2);
        assert!(commands.any(|command| command.starts_with("berth serve --gpus sim:8xh100 --kubelet-dir ")));
        let rest: String = without_driver.err.split('`').step_by(2).collect();
        assert!(!rest.contains("--gpus "), "a flag that the check does not have: {rest}");
    }
    let followed = checked("gpus: nvml\n", &["--without-gpus", "--without-files"]);
    assert_eq!(followed.code, 0, "{}", followed.err);
}

#[test]
fn a_stack_that_fails_on_every_node_fails_the_check_without_gpus() {
    let without = |stack: &str| checked(&format!("gpus: nvml\nstack:\n- {stack}\n"), &["--without-gpus"]);
    for (stack, says) in [
        ("policy: timeslize", "did you mean `timeslice`?"),
        ("policy: memory", "may not name nvidia.com/gpu.mem-4g (permissions.resources)"),
        (
            "{policy: timeslice, parameters: {replicas: 9}, permissions: {shareMax: 4}}",
            "permissions.shareMax",
        ),
        (
            "{policy: mixed, parameters: {replica: 2}}",
            "line 3, column 31: stack[0].parameters: policy mixed@",
        ),
    ] {
        let refused = without(stack);
        assert!(refused.code == 1 && refused.err.contains(says), "{stack}: {}", refused.err);
    }
    assert_eq!(without("policy: timeslice").code, 0);
}

#[test]
fn parameters_that_match_no_gpu_are_a_note() {
    let stack = "stack: [{policy: timeslice, parameters: {only: [{model: '*A100*'}]}}]\n";
    let words = "only[0]: no GPU of this node matches {model: *A100*}";
    let ran = checked(&format!("gpus: sim:1xl4\n{stack}"), &[]);
    assert_eq!(ran.code, 0, "{}", ran.err);
    assert!(ran.out.contains(words), "{}", ran.out);
    // Nothing is reported about GPUs of other nodes.
    let elsewhere = checked(&format!("gpus: nvml\n{stack}"), &["--without-gpus"]);
    assert!(elsewhere.code == 0 && !elsewhere.out.contains(words), "{}", elsewhere.out);
    let fits = checked(&format!("gpus: sim:1xl4\n{}", stack.replace("A100", "L4")), &[]);
    assert!(fits.code == 0 && !fits.out.contains("fits {"), "{}", fits.out);
}

#[test]
fn fewer_devices_than_would_fit_are_a_note() {
    let stack = "stack: [{policy: memory, parameters: {sizes: [{resource: nvidia.com/gpu.shared, memoryMiB: 512}]}}]\n";
    let ran = checked(&format!("gpus: sim:2xh100\n{stack}"), &[]);
    let cut = "slices of nvidia.com/gpu.shared would fit, 128 are offered on GPU 0, 1";
    assert!(ran.code == 0 && ran.out.contains(cut), "{}{}", ran.out, ran.err);
    let accepted = stack.replace("512}", "512, maxPerGpu: 128}");
    let ran = checked(&format!("gpus: sim:2xh100\n{accepted}"), &[]);
    assert!(ran.code == 0 && !ran.out.contains("would fit"), "{}{}", ran.out, ran.err);
}

#[test]
fn huge_values_are_cut_and_no_type_of_the_program_is_named() {
    let long = "x".repeat(5000);
    for text in [
        format!("nodeName: n\nadminListen: {long}\n"),
        format!("{long}: 1\n"),
        format!("memoryOvercommit: {long}\n"),
        format!("log: {long}\n"),
        format!("gpus: {long}\n"),
        format!("stack: [{{policy: {long}}}]\n"),
        format!("containerEdits: {{resources: {{{long}: {{}}}}}}\n"),
        format!("processes: {{ignore: [{long}]}}\n"),
        format!("stateDir: {long}\n"),
        format!("stack: [{{policy: mixed, digest: {long}}}]\n"),
    ] {
        let refused = checked(&text, &["--without-gpus"]);
        assert!(refused.code == 1 && refused.err.len() < 1500, "{}: {}", refused.err.len(), refused.err);
        assert!(refused.err.contains("line "), "{}", refused.err);
        for word in ["f64", "u32", "struct", "enum", "serde", "xxxxxxxxxx".repeat(10).as_str()] {
            assert!(!refused.err.contains(word), "{word}: {}", refused.err);
        }
    }
}

/// The configurations among the YAML of the documents: those of which most keys are known.
fn documented() -> Vec<(String, String)> {
    let root = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."));
    let folders = [root.to_owned(), root.join("docs"), root.join("policies-wasm")];
    let shipped = std::fs::read_dir(root.join("policies-wasm")).unwrap().map(|entry| entry.unwrap().path());
    let folders = folders.into_iter().chain(shipped).filter_map(|folder| std::fs::read_dir(folder).ok());
    let files = folders.flatten().map(|entry| entry.unwrap().path());
    let refused = berth_config::FileConfig::parse("noSuchKey: 1").unwrap_err().to_string();
    let known: Vec<&str> =
        refused.split_once("expected one of").unwrap().1.split('`').skip(1).step_by(2).collect();
    let mut found = Vec::new();
    for file in files.filter(|file| file.extension().is_some_and(|e| e == "md")) {
        let text = std::fs::read_to_string(&file).unwrap();
        for block in text.split("```yaml\n").skip(1) {
            let block = block.split("```").next().unwrap();
            let indent = block.len() - block.trim_start_matches(' ').len();
            let lines = block.lines().map(|line| line.get(indent..).unwrap_or_default());
            let block = lines.collect::<Vec<_>>().join("\n");
            let Ok(Value::Object(keys)) = serde_saphyr::from_str(&block) else { continue };
            let ours = keys.keys().filter(|key| known.contains(&key.as_str())).count();
            if ours * 2 > keys.len() {
                found.push((file.display().to_string(), block));
            }
        }
    }
    found
}

#[test]
fn the_configurations_in_the_documents_are_accepted() {
    let documented = documented();
    assert!(documented.len() >= 10, "{} found", documented.len());
    for (file, text) in documented {
        let ran = checked(&text, &["--without-files", "--without-gpus"]);
        assert_eq!(ran.code, 0, "{file}:\n{text}\n{}", ran.err);
    }
}
