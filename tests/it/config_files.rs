//! `berth config check` reads the files that a configuration names as a start does, and shows who is let in.

use crate::admin_tls::Ca;
use crate::cli::{Ran, berth, ran};
use serde_json::Value;
use std::fs::{Permissions, remove_file, set_permissions, write};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use tempfile::TempDir;

/// A configuration with everything that the admin API can be told.
struct Node(TempDir);

impl Node {
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
fn who_is_let_in_and_how_is_shown() {
    let node = Node::new();
    let checked = node.check(&[]);
    assert_eq!((checked.code, checked.err.as_str()), (0, ""), "{}", checked.out);
    let at = node.folder().display().to_string();
    for says in [
        format!("https://127.0.0.1:0, TLS by {at}/server.crt and {at}/server.key"),
        format!("the token in {at}/state/token (change); token grafana in {at}/grafana (read)"),
        "token ci by its SHA-256 (change)".into(),
        format!("client certificates of {at}/clients.crt (ops: change, others: read)"),
        format!("root at {at}/admin.sock (change)"),
        "whom the API server knows".into(),
        "6000 reads and 7 changes a second".into(),
        format!("note: the daemon makes {at}/state/token when it first starts"),
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
fn a_file_that_a_start_could_not_use_fails_the_check_and_may_be_left_out() {
    let node = Node::new();
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
        assert!(without.out.contains("note: the token and TLS files that it names were not read"));
        match before {
            Some(text) => node.secret(name, &text),
            None => remove_file(file(name)).unwrap(),
        }
    }
    // A pair that does not go together is told as a start tells it.
    Ca::new().server().write(node.folder(), "other");
    std::fs::copy(file("other.key"), file("server.key")).unwrap();
    let checked = node.check(&[]);
    assert!(checked.code == 1 && checked.err.contains("does not go with the certificate"), "{}", checked.err);
    let mut serve = berth(&["serve", "--kubelet-dir"]);
    serve.arg(file("kubelet")).arg("--config").arg(file("config.yaml"));
    let started = ran(serve);
    assert!(started.code == 1 && started.err.contains("does not go with the certificate"), "{}", started.err);
}
