//! Trusted keys that change between starts of the daemon: stored versions are checked again.

use crate::rest::versions::{key, signature};
use crate::support::gpus::WHOLE;
use crate::support::process_node::{DaemonProcess, ProcessNode};
use crate::support::wait::SOON;
use base64::Engine;
use base64::engine::general_purpose::STANDARD as BASE64;
use serde_json::{Value, json};

const EXCLUSIVE: &[u8] = include_bytes!("../../../policies-wasm/prebuilt/exclusive.wasm");

/// A policy of other bytes that does the same: a custom section more.
fn policy(letter: u8) -> Vec<u8> {
    [EXCLUSIVE, &[0, 3, 1, b'x', letter]].concat()
}

fn ask(
    daemon: &DaemonProcess,
    method: &str,
    path: &str,
    headers: &[(&str, &str)],
    body: &[u8],
) -> (u16, Value) {
    let bearer = format!("Bearer {}", daemon.token);
    let mut all = vec![("authorization", bearer.as_str())];
    all.extend(headers);
    let (address, base) = daemon.base.strip_prefix("http://").unwrap().split_once('/').unwrap();
    let path = format!("/{base}{path}");
    let answer = crate::support::admin_node::ask(address.parse().unwrap(), method, &path, &all, body);
    (answer.status, answer.value())
}

fn push(daemon: &DaemonProcess, module: &[u8], signature: Option<&str>) -> (u16, Value) {
    let mut headers = vec![("content-type", "application/wasm")];
    headers.extend(signature.map(|text| ("berth-signature", text)));
    ask(daemon, "POST", "/policies", &headers, module)
}

fn put(daemon: &DaemonProcess, digest: &str) -> (u16, Value) {
    let stack = json!({ "entries": [{ "policy": "exclusive", "digest": digest }] }).to_string();
    ask(daemon, "PUT", "/stack", &[("content-type", "application/json")], stack.as_bytes())
}

fn signed_by(daemon: &DaemonProcess, digest: &str) -> Value {
    daemon.call("GET", &format!("/policies/{digest}"), &Value::Null)["signedBy"].clone()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn changed_keys_apply_to_stored_policies() {
    let ((own, own_key), (_, other_key)) = (key("own", 1), key("other", 2));
    let mut node = ProcessNode::new("gpus: sim:2xt4").await;
    let plain = node.settings.clone();
    let with = |keys: &[(&str, &[u8; 32])]| {
        let keys = keys.iter().map(|(name, key)| json!({ "name": name, "key": BASE64.encode(key) }));
        format!("{plain}\ntrustedKeys: {}\n", Value::from_iter(keys))
    };
    let (signed, unsigned) = (policy(b's'), policy(b'u'));
    let daemon = node.serve();
    let made = signature(&own, &signed);
    let (status, first) = push(&daemon, &signed, Some(&made));
    assert_eq!((status, first.get("signedBy")), (201, None), "no key is trusted yet: {first}");
    let signed = first["digest"].as_str().unwrap().to_owned();
    let (_, second) = push(&daemon, &unsigned, None);
    let digest = second["digest"].as_str().unwrap().to_owned();
    assert_eq!(put(&daemon, &signed).0, 200);
    assert_eq!(put(&daemon, &digest).0, 200);
    daemon.stop();

    // With the key, its versions may be activated, and unsigned ones are not even called.
    node.settings = with(&[("ours", &own_key.key)]);
    let daemon = node.serve();
    node.kubelet.wait_allocatable(WHOLE, 2, SOON).await.unwrap();
    assert_eq!(signed_by(&daemon, &signed), "ours");
    assert_eq!(signed_by(&daemon, &digest), Value::Null);
    let line = daemon.line(|l| l.contains("no trusted key signed it"));
    assert!(line.contains(&digest[..12]) && line.contains("the active stack runs without it"), "{line}");
    node.start("a", WHOLE, 1).await.unwrap();
    let stack = daemon.call("GET", "/stack", &Value::Null);
    assert!(stack["entries"][0]["record"]["faults"]["byKind"]["missing"].as_u64().unwrap() > 0, "{stack}");
    let (status, refused) = put(&daemon, &digest);
    assert_eq!((status, refused["type"].as_str()), (403, Some("/problems/untrusted")), "{refused}");
    assert_eq!(push(&daemon, &policy(b'n'), None).0, 403);
    // The history from before the restart is there, and leads back to what is signed.
    let back = ask(&daemon, "POST", "/stack/rollback", &[], b"");
    assert_eq!((back.0, &back.1["entries"][0]["digest"]), (200, &json!(signed)), "{}", back.1);
    daemon.stop();

    // Another key takes its place: nothing that is kept is signed by it.
    node.settings = with(&[("ours", &other_key.key)]);
    let daemon = node.serve();
    node.kubelet.wait_allocatable(WHOLE, 2, SOON).await.unwrap();
    assert_eq!(signed_by(&daemon, &signed), Value::Null);
    assert_eq!(put(&daemon, &signed).0, 403);
    daemon.call("PUT", "/stack", &json!({ "entries": [{ "policy": "exclusive" }] }));
    daemon.stop();

    // Without keys it is as it was.
    node.settings = plain.clone();
    let daemon = node.serve();
    node.kubelet.wait_allocatable(WHOLE, 2, SOON).await.unwrap();
    assert_eq!(put(&daemon, &digest).0, 200);
}
