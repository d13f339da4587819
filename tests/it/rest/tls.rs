//! TLS of the admin listener: which clients are accepted, and what a renewed certificate changes.

use crate::support::admin_node::{AdminNode, Answer, agent, ask_by};
use crate::support::wait::SOON;
use berth_admin::AdminServer;
use berth_http::{AdminAccess, Right, TlsFiles};
use berth_http::{AdminError, Settings};
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    date_time_ymd,
};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};
use ureq::tls::{Certificate, ClientCert, PrivateKey, RootCerts, TlsConfig};

/// A certificate authority of a test.
pub(crate) struct Ca {
    pub(crate) pem: String,
    issuer: Issuer<'static, KeyPair>,
}

/// A certificate and its key, PEM.
pub(crate) struct Pair {
    pub(crate) cert: String,
    pub(crate) key: String,
}

impl Ca {
    pub(crate) fn new() -> Self {
        let mut params = CertificateParams::new(Vec::<String>::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().unwrap();
        let pem = params.self_signed(&key).unwrap().pem();
        Self { pem, issuer: Issuer::new(params, key) }
    }

    fn sign(&self, params: &CertificateParams) -> Pair {
        let key = KeyPair::generate().unwrap();
        Pair { cert: params.signed_by(&key, &self.issuer).unwrap().pem(), key: key.serialize_pem() }
    }

    pub(crate) fn server(&self) -> Pair {
        self.sign(&CertificateParams::new(vec!["localhost".to_owned(), "127.0.0.1".to_owned()]).unwrap())
    }

    fn client_params(name: &str) -> CertificateParams {
        let mut params = CertificateParams::new(Vec::<String>::new()).unwrap();
        params.distinguished_name.push(DnType::CommonName, name);
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        params
    }

    pub(crate) fn client(&self, name: &str) -> Pair {
        self.sign(&Self::client_params(name))
    }

    /// A client of the daemon that trusts this CA, with a certificate of its own or without.
    pub(crate) fn agent(&self, own: Option<&Pair>) -> ureq::Agent {
        berth_cli::endpoint::use_ring();
        let roots = RootCerts::new_with_certs(&[Certificate::from_pem(self.pem.as_bytes()).unwrap()]);
        let own = own.map(|pair| {
            let certificate = Certificate::from_pem(pair.cert.as_bytes()).unwrap();
            ClientCert::new_with_certs(&[certificate], PrivateKey::from_pem(pair.key.as_bytes()).unwrap())
        });
        agent(TlsConfig::builder().root_certs(roots).client_cert(own).build())
    }
}

impl Pair {
    pub(crate) fn write(&self, folder: &Path, name: &str) -> (PathBuf, PathBuf) {
        let (cert, key) = (folder.join(format!("{name}.crt")), folder.join(format!("{name}.key")));
        std::fs::write(&cert, &self.cert).unwrap();
        std::fs::write(&key, &self.key).unwrap();
        (cert, key)
    }
}

/// A node whose admin API speaks TLS.
pub(crate) struct TlsNode {
    pub(crate) admin: AdminNode,
    pub(crate) ca: Ca,
}

impl TlsNode {
    pub(crate) fn new(change: impl FnOnce(&mut TlsFiles, &Path)) -> Self {
        let ca = Ca::new();
        let mut admin = AdminNode::new(1);
        let (cert, key) = ca.server().write(admin.dir.path(), "server");
        let mut files = TlsFiles {
            cert,
            key,
            client_ca: None,
            require_client_cert: false,
            clients: None,
            others_may: None,
        };
        change(&mut files, admin.dir.path());
        let access = AdminAccess { tls: Some(files), ..AdminAccess::default() };
        admin.start_again(Settings { access, ..admin.settings() });
        Self { admin, ca }
    }

    /// A node that accepts client certificates of this CA, with the right to read.
    pub(crate) fn with_clients(clients: &Ca, change: impl FnOnce(&mut TlsFiles)) -> Self {
        Self::new(|files, folder| {
            let path = folder.join("clients.crt");
            std::fs::write(&path, &clients.pem).unwrap();
            files.client_ca = Some(path);
            files.others_may = Some(Right::Read);
            change(files);
        })
    }

    pub(crate) fn url(&self, path: &str) -> String {
        format!("https://localhost:{}{path}", self.admin.address().port())
    }

    pub(crate) fn ask(
        &self,
        agent: &ureq::Agent,
        method: &str,
        path: &str,
        token: bool,
    ) -> Result<Answer, ureq::Error> {
        let bearer = format!("Bearer {}", self.admin.token);
        let headers = [("authorization", bearer.as_str())];
        ask_by(agent, &self.url(path), method, if token { &headers } else { &[] }, b"")
    }

    /// Sends requests until the response is as expected.
    pub(crate) fn until(&self, what: &str, holds: impl Fn() -> bool) {
        let end = Instant::now() + SOON;
        while !holds() {
            assert!(Instant::now() < end, "waited in vain for {what}");
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

const CORDON: &str = "/api/v1/gpus/GPU-0/cordon";

#[test]
fn over_tls_only_the_token_gives_access() {
    let node = TlsNode::new(|_, _| {});
    let agent = node.ca.agent(None);
    node.ask(&agent, "GET", "/api/v1/node", true).unwrap().expect(200);
    node.ask(&agent, "PUT", CORDON, true).unwrap().expect(200);
    node.ask(&agent, "GET", "/api/v1/node", false).unwrap().problem(401, "unauthorized");
    // A client that trusts another CA does not connect, and sends no token.
    assert!(node.ask(&Ca::new().agent(None), "GET", "/api/v1/node", true).is_err());
    // A name that the certificate has not: neither.
    let by_another_name = format!("https://127.0.0.2:{}/livez", node.admin.address().port());
    assert!(ask_by(&agent, &by_another_name, "GET", &[], b"").is_err());
    // The daemon may have any name that its certificate has.
    let bearer = format!("Bearer {}", node.admin.token);
    let headers = [("authorization", bearer.as_str()), ("host", "gpu-1.example:9470")];
    ask_by(&agent, &node.url("/api/v1/node"), "GET", &headers, b"").unwrap().expect(200);
    // A client certificate gives no access if none is configured.
    let with_certificate = node.ca.agent(Some(&node.ca.client("root")));
    node.ask(&with_certificate, "GET", "/api/v1/node", false).unwrap().problem(401, "unauthorized");
}

#[test]
fn plain_http_and_slow_handshakes_fail_on_the_tls_port() {
    let node = TlsNode::new(|_, _| {});
    let mut plain = TcpStream::connect(node.admin.address()).unwrap();
    plain.set_read_timeout(Some(SOON)).unwrap();
    let request = format!(
        "GET /api/v1/node HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {}\r\n\r\n",
        node.admin.token
    );
    plain.write_all(request.as_bytes()).unwrap();
    let mut answer = Vec::new();
    let _ = plain.read_to_end(&mut answer);
    assert!(!String::from_utf8_lossy(&answer).contains("HTTP"), "{}", String::from_utf8_lossy(&answer));
    node.until("an end of a slow handshake in time", || {
        let began = Instant::now();
        let mut silent = TcpStream::connect(node.admin.address()).unwrap();
        silent.set_read_timeout(Some(SOON)).unwrap();
        silent.write_all(&[0x16, 0x03, 0x01]).unwrap();
        let _ = silent.read(&mut [0; 64]);
        began.elapsed() < Duration::from_secs(10)
    });
    node.ask(&node.ca.agent(None), "GET", "/livez", false).unwrap().expect(200);
}

#[test]
fn many_unfinished_handshakes_block_no_other_client() {
    crate::rest::flood::allow_descriptors();
    let node = TlsNode::new(|_, _| {});
    for begun in [&[][..], &[0x16, 0x03, 0x01], &[0x16, 0x03, 0x01, 0x02, 0x00, 0x01]] {
        node.until("a quick answer beside the crowd", || {
            // More than there are slots.
            let _crowd: Vec<_> = (0..300)
                .map(|_| {
                    let mut stream = TcpStream::connect(node.admin.address()).unwrap();
                    let _ = stream.write_all(begun);
                    stream
                })
                .collect();
            // A handshake has 5 s: a client that had to wait for one of them to end would always be later.
            let began = Instant::now();
            node.ask(&node.ca.agent(None), "GET", "/api/v1/node", true).unwrap().expect(200);
            began.elapsed() < Duration::from_secs(3)
        });
    }
}

#[test]
fn a_client_certificate_gives_access_by_its_name_and_right() {
    let clients = Ca::new();
    let node = TlsNode::with_clients(&clients, |files| {
        files.clients = Some([("alice".to_owned(), Right::Change), ("bob".to_owned(), Right::Read)].into());
        files.others_may = None;
    });
    let alice = node.ca.agent(Some(&clients.client("alice")));
    assert_eq!(
        node.ask(&alice, "PUT", CORDON, false).unwrap().expect(200)["drain"]["by"],
        "certificate:alice"
    );
    let bob = node.ca.agent(Some(&clients.client("bob")));
    node.ask(&bob, "GET", "/api/v1/node", false).unwrap().expect(200);
    let message = node.ask(&bob, "DELETE", CORDON, false).unwrap().problem(403, "forbidden");
    assert!(message.contains("bob"), "{message}");
    let carol = node.ca.agent(Some(&clients.client("carol")));
    node.ask(&carol, "GET", "/api/v1/node", false).unwrap().problem(403, "forbidden");
    // A token that comes with it decides alone.
    node.ask(&bob, "DELETE", CORDON, true).unwrap().expect(200);
    let headers = [("authorization", "Bearer wrong")];
    ask_by(&alice, &node.url("/api/v1/node"), "GET", &headers, b"").unwrap().problem(401, "unauthorized");
    // Without a certificate there is still the token, and nothing else.
    let none = node.ca.agent(None);
    node.ask(&none, "GET", "/api/v1/node", false).unwrap().problem(401, "unauthorized");
    node.ask(&none, "GET", "/api/v1/node", true).unwrap().expect(200);
    // A browser that has one sends it for any page.
    let page = [("origin", "https://evil.example"), ("sec-fetch-site", "cross-site")];
    ask_by(&alice, &node.url(CORDON), "PUT", &page, b"").unwrap().problem(403, "forbidden");
    let own = [("origin", "https://whatever"), ("sec-fetch-site", "same-origin")];
    ask_by(&alice, &node.url(CORDON), "PUT", &own, b"").unwrap().expect(200);
}

#[test]
fn certificates_of_another_ca_expired_ones_and_those_without_a_name_give_no_access() {
    let clients = Ca::new();
    let node = TlsNode::with_clients(&clients, |_| {});
    let refused = |pair: &Pair| node.ask(&node.ca.agent(Some(pair)), "GET", "/api/v1/node", false);
    refused(&clients.client("alice")).unwrap().expect(200);
    // The handshake ends: not even the token of the same client is read.
    assert!(refused(&Ca::new().client("alice")).is_err(), "another CA");
    assert!(refused(&node.ca.client("alice")).is_err(), "the server's CA is not that of the clients");
    let mut params = Ca::client_params("alice");
    (params.not_before, params.not_after) = (date_time_ymd(2020, 1, 1), date_time_ymd(2021, 1, 1));
    assert!(refused(&clients.sign(&params)).is_err(), "expired");
    (params.not_before, params.not_after) = (date_time_ymd(2999, 1, 1), date_time_ymd(3000, 1, 1));
    assert!(refused(&clients.sign(&params)).is_err(), "not yet");
    let mut params = Ca::client_params("alice");
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
    assert!(refused(&clients.sign(&params)).is_err(), "a server's certificate");
    let mut params = Ca::client_params("alice");
    params.distinguished_name = rcgen::DistinguishedName::new();
    let message = refused(&clients.sign(&params)).unwrap().problem(401, "unauthorized");
    assert!(message.contains("common name"), "{message}");
}

#[test]
fn with_required_client_certificates_a_token_alone_is_refused_in_the_handshake() {
    let clients = Ca::new();
    let node = TlsNode::with_clients(&clients, |files| files.require_client_cert = true);
    assert!(node.ask(&node.ca.agent(None), "GET", "/api/v1/node", true).is_err());
    assert!(node.ask(&node.ca.agent(None), "GET", "/livez", false).is_err());
    let alice = node.ca.agent(Some(&clients.client("alice")));
    node.ask(&alice, "GET", "/api/v1/node", false).unwrap().expect(200);
}

#[test]
fn a_renewed_certificate_is_shown_and_a_broken_one_is_not() {
    let node = TlsNode::new(|_, _| {});
    let old = &node.ca;
    let renewed = Ca::new();
    let folder = node.admin.dir.path();
    let shows = |ca: &Ca| node.ask(&ca.agent(None), "GET", "/livez", false).is_ok();
    assert!(shows(old) && !shows(&renewed));
    let check = |ca: &Ca| {
        let value = node.ask(&ca.agent(None), "GET", "/api/v1/node", true).unwrap().expect(200);
        let checks = value["checks"].as_array().unwrap().clone();
        let tls = checks.into_iter().find(|c| c["name"] == "tls").unwrap();
        assert_eq!(tls["ok"], true, "what was in force goes on: {tls}");
        tls["detail"].as_str().map(str::to_owned)
    };
    assert_eq!(check(old), None);
    // A certificate whose key is not there yet, then garbage: the old pair stays.
    let pair = renewed.server();
    std::fs::write(folder.join("server.crt"), &pair.cert).unwrap();
    node.until("the error", || check(old).is_some_and(|why| why.contains("does not match")));
    std::fs::write(folder.join("server.key"), "-----BEGIN PRIVATE KEY-----\nc2VjcmV0\n").unwrap();
    node.until("the error", || check(old).is_some_and(|why| why.contains("no private key")));
    std::fs::remove_file(folder.join("server.key")).unwrap();
    node.until("the error", || check(old).is_some_and(|why| why.contains("cannot be read")));
    assert!(shows(old) && !shows(&renewed));
    std::fs::write(folder.join("server.key"), &pair.key).unwrap();
    node.until("the renewed one", || shows(&renewed));
    assert!(!shows(old));
    node.until("no error", || check(&renewed).is_none());
}

#[test]
fn a_removed_ca_also_closes_open_connections() {
    let (before, after) = (Ca::new(), Ca::new());
    let node = TlsNode::with_clients(&before, |_| {});
    let alice = node.ca.agent(Some(&before.client("alice")));
    node.ask(&alice, "GET", "/api/v1/node", false).unwrap().expect(200);
    std::fs::write(node.admin.dir.path().join("clients.crt"), &after.pem).unwrap();
    let new = node.ca.agent(Some(&after.client("alice")));
    node.until("the new CA", || node.ask(&new, "GET", "/api/v1/node", false).is_ok_and(|a| a.status == 200));
    // The connection is the one from before, or a new one that does not come about.
    match node.ask(&alice, "GET", "/api/v1/node", false) {
        Ok(answer) => {
            answer.problem(401, "unauthorized");
        }
        Err(error) => assert!(!matches!(error, ureq::Error::Timeout(_)), "{error}"),
    }
}

#[test]
fn mismatched_files_prevent_the_start_and_are_named() {
    let admin = AdminNode::new(1);
    let (one, other) = (Ca::new(), Ca::new());
    let (cert, key) = one.server().write(admin.dir.path(), "one");
    let (_, other_key) = other.server().write(admin.dir.path(), "other");
    let garbage = admin.dir.path().join("garbage");
    std::fs::write(&garbage, "no PEM").unwrap();
    let files = |cert: &Path, key: &Path, client_ca: Option<&Path>| TlsFiles {
        cert: cert.into(),
        key: key.into(),
        client_ca: client_ca.map(Into::into),
        require_client_cert: false,
        clients: None,
        others_may: None,
    };
    for (files, says) in [
        (files(&cert, &other_key, None), "does not match the certificate"),
        (files(&garbage, &key, None), "no certificate in PEM"),
        (files(&cert, &garbage, None), "no private key"),
        (files(&cert, &key, Some(&garbage)), "no certificate in PEM"),
        (files(&cert, &admin.dir.path().join("gone"), None), "cannot be read"),
    ] {
        let access = AdminAccess { tls: Some(files), ..AdminAccess::default() };
        let error = AdminServer::bind(Settings { access, ..admin.settings() }).err().unwrap();
        assert!(matches!(error, AdminError::Tls { .. }) && error.to_string().contains(says), "{error}");
    }
}

#[test]
fn the_command_line_uses_https_and_the_socket() {
    let clients = Ca::new();
    let mut node = TlsNode::with_clients(&clients, |_| {});
    let folder = node.admin.dir.path().to_owned();
    let path = |name: &str| folder.join(name).display().to_string();
    std::fs::write(folder.join("ca.crt"), &node.ca.pem).unwrap();
    std::fs::write(folder.join("wrong.crt"), &Ca::new().pem).unwrap();
    clients.client("alice").write(&folder, "alice");
    let server = node.url("").trim_end_matches('/').to_owned();
    let (ca, wrong, token) = (path("ca.crt"), path("wrong.crt"), path("token"));
    let (cert, key) = (path("alice.crt"), path("alice.key"));
    let berth = |args: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_berth"));
        for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("BERTH_")) {
            command.env_remove(name);
        }
        let output = command.args(args).output().unwrap();
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        (output.status.code().unwrap(), text(&output.stdout) + &text(&output.stderr))
    };
    let list = |more: &[&str]| berth(&[&["--server", &server, "gpu", "list"], more].concat());
    let (code, printed) = list(&["--ca-file", &ca, "--token-file", &token]);
    assert!(code == 0 && printed.contains("SCHEDULING"), "{printed}");
    let (code, printed) = list(&["--ca-file", &ca, "--client-cert", &cert, "--client-key", &key]);
    assert!(code == 0 && printed.contains("SCHEDULING"), "{printed}");
    let (code, printed) = list(&["--ca-file", &wrong, "--token-file", &token]);
    assert!(code == 1 && printed.contains("--ca-file"), "{printed}");
    let (code, printed) = list(&["--token-file", &token]);
    assert!(code == 1 && printed.contains("--ca-file"), "a CA that this machine does not know: {printed}");
    let (code, printed) = list(&["--ca-file", &ca, "--client-cert", &cert]);
    assert!(code == 2 && printed.contains("--client-key"), "{printed}");
    let (code, printed) = berth(&["--server", "http://127.0.0.1:1", "--ca-file", &ca, "gpu", "list"]);
    assert!(code == 2 && printed.contains("https://"), "{printed}");
    // The token is not sent in plain text over a network.
    let (code, printed) =
        berth(&["--server", "http://192.0.2.1:9470", "--token-file", &token, "gpu", "list"]);
    assert!(code == 2 && printed.contains("--allow-plain-http"), "{printed}");
    // `berth node check` finds the daemon whichever names its certificate has.
    let config = format!(
        "gpus: sim:1xt4\nstateDir: {0}\nadminListen: {1}\nadmin: {{ tls: {{ certFile: {0}/server.crt, keyFile: {0}/server.key }} }}\n",
        folder.display(),
        node.admin.address()
    );
    std::fs::write(folder.join("berth.yaml"), config).unwrap();
    let (_, printed) = berth(&["node", "check", "--config", &path("berth.yaml")]);
    assert!(printed.contains("berth answers at"), "{printed}");
    let (code, printed) = berth(&["--server", "unix://run/x", "gpu", "list"]);
    assert!(code == 2 && printed.contains("unix:///run/berth/admin.sock"), "{printed}");

    let socket = folder.join("admin.sock");
    let access = AdminAccess { socket: Some(socket.clone()), ..AdminAccess::default() };
    node.admin.start_again(Settings { access, ..node.admin.settings() });
    let server = format!("unix://{}", socket.display());
    let (code, printed) = berth(&["--server", &server, "gpu", "cordon", "0", "--reason", "fan"]);
    assert!(code == 0 && printed.contains("cordoned by"), "{printed}");
    // The token's caller is not root, who owns the mark.
    let uncordon = ["--server", &server, "--token-file", &token, "gpu", "uncordon", "0"];
    let (code, printed) = berth(&uncordon);
    assert!(code == 0 && printed.contains("a mark of api:root is left"), "{printed}");
    let (code, printed) = berth(&[&uncordon[..], &["--owner", "api:root"]].concat());
    assert!(code == 0 && printed.contains("open"), "{printed}");
    let (code, printed) = berth(&["--server", "unix:///nowhere/admin.sock", "gpu", "list"]);
    assert!(code == 1 && printed.contains("--admin-socket"), "{printed}");
}
