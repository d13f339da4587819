use super::*;
use crate::{Config, FileConfig, ServeArgs};

fn merged(yaml: &str) -> Result<Config, String> {
    let file = FileConfig::parse(yaml).map_err(|e| e.to_string())?;
    Config::merge(&ServeArgs::default(), file).map_err(|e| e.to_string())
}

#[test]
fn access_settings_are_read_from_the_file() {
    let digest = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08";
    let config = merged(&format!(
        "adminListen: 0.0.0.0:9470\n\
         admin:\n  socket: /run/berth/admin.sock\n  tokens:\n  - {{name: grafana, file: /etc/g, right: read}}\n  \
         - {{name: ci, sha256: {digest}, right: change}}\n  \
         tls: {{certFile: /c, keyFile: /k, clientCaFile: /ca, clients: [{{name: alice, right: read}}], othersMay: read}}\n  \
         limits: {{changesPerSecond: 5}}\n  kubernetes: {{}}\n"
    ))
    .unwrap();
    let AdminAccess { tokens, tls, socket, limits, kubernetes } = config.admin.access;
    assert_eq!(tokens[0].source, TokenSource::File("/etc/g".into()));
    assert!(matches!(tokens[1].source, TokenSource::Sha256(h) if h[..2] == [0x9f, 0x86]));
    assert_eq!((tokens[0].right, tokens[1].right), (Right::Read, Right::Change));
    let tls = tls.unwrap();
    assert_eq!((tls.clients.unwrap()["alice"], tls.others_may), (Right::Read, Some(Right::Read)));
    assert_eq!(socket.unwrap(), PathBuf::from("/run/berth/admin.sock"));
    assert_eq!(
        (limits.reads_per_second, limits.changes_per_second),
        (RateLimits::default().reads_per_second, 5)
    );
    assert!(kubernetes.unwrap().audiences.is_empty());
    let none = merged("").unwrap().admin.access;
    assert!(none.tokens.is_empty() && none.tls.is_none() && none.socket.is_none());
    assert!(none.kubernetes.is_none(), "off unless it is configured");
}

#[test]
fn unsafe_or_invalid_access_settings_are_refused() {
    for (yaml, expected) in [
        ("adminListen: 0.0.0.0:9470", "admin.tls"),
        ("admin: {tokens: [{name: a, right: read}]}", "exactly one of file and sha256"),
        ("admin: {tokens: [{name: a, file: /x, sha256: y, right: read}]}", "exactly one of file and sha256"),
        ("admin: {tokens: [{name: a, file: /x}]}", "right"),
        ("admin: {tokens: [{name: a, file: /x, right: write}]}", "write"),
        ("admin: {tokens: [{name: '', file: /x, right: read}]}", "1 to 64"),
        (
            "admin: {tokens: [{name: a, file: /x, right: read}, {name: a, file: /y, right: change}]}",
            "a name that is used only once",
        ),
        ("admin: {tokens: [{name: Root, file: /x, right: read}]}", "a name that is not reserved"),
        ("admin: {tokens: [{name: 'certificate:a', file: /x, right: read}]}", "a name that is not reserved"),
        ("admin: {tls: {certFile: /c, keyFile: /k, othersMay: read}}", "clientCaFile"),
        ("admin: {tls: {certFile: /c}}", "keyFile"),
        ("admin: {tls: {certFile: /c, keyFile: /k, requireClientCert: true}}", "clientCaFile"),
        ("admin: {tls: {certFile: /c, keyFile: /k, clients: []}}", "clientCaFile"),
        ("admin: {limits: {readsPerSecond: 0}}", "1 to 1000000"),
        ("admin: {kubernetes: {audiences: ['']}}", "such as berth"),
        ("admin: {token: x}", "token"),
    ] {
        let error = merged(yaml).unwrap_err();
        assert!(error.contains(expected), "{yaml}: {error}");
    }
    let error = merged("admin: {tokens: [{name: a, sha256: s3cret, right: read}]}").unwrap_err();
    assert!(error.contains("sha256sum") && !error.contains("s3cret"), "{error}");
}
