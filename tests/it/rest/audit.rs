//! The audit lines of the real daemon: one for each request for a change, and no secrets.

use crate::support::client::agent;
use crate::support::process_node::{DaemonProcess, ProcessNode};
use crate::support::wait::SOON;
use serde_json::{Value, json};
use std::time::Instant;

fn lines(daemon: &DaemonProcess) -> Vec<String> {
    daemon.log().lines().filter(|line| line.contains(" audit: change ")).map(str::to_owned).collect()
}

/// Waits for the line after the first `before`, and for no more than that one.
fn next(daemon: &DaemonProcess, before: usize) -> String {
    let end = Instant::now() + SOON;
    loop {
        let all = lines(daemon);
        if all.len() > before {
            assert_eq!(all.len(), before + 1, "more than one: {all:?}");
            return all[before].clone();
        }
        assert!(Instant::now() < end, "no audit line came:\n{}", daemon.log());
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
}

/// Every operation of the API's own description that changes something.
fn changing() -> Vec<(String, String)> {
    let document: Value = serde_json::from_str(berth_admin::openapi_json()).unwrap();
    let mut found = Vec::new();
    for (path, item) in document["paths"].as_object().unwrap() {
        for method in item.as_object().unwrap().keys().filter(|m| *m != "get" && *m != "head") {
            let path = path.split('/').map(|part| if part.starts_with('{') { "7" } else { part });
            found.push((method.to_uppercase(), path.collect::<Vec<_>>().join("/")));
        }
    }
    found
}

fn ask(daemon: &DaemonProcess, token: Option<&str>, method: &str, path: &str, body: &str) -> u16 {
    let base = daemon.base.strip_suffix("/api/v1").unwrap();
    let mut request = ureq::http::Request::builder().method(method).uri(format!("{base}{path}"));
    if let Some(token) = token {
        request = request.header("authorization", format!("Bearer {token}"));
    }
    let request = request.header("content-type", "application/json").body(body.to_owned()).unwrap();
    agent(SOON).run(request).unwrap().status().as_u16()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_changing_operation_writes_one_audit_line_without_secrets() {
    let reader = "reader-secret-".repeat(4);
    let digest: String = {
        use sha2::Digest;
        sha2::Sha256::digest(&reader).iter().map(|b| format!("{b:02x}")).collect()
    };
    let tokens = format!("admin: {{tokens: [{{name: dashboard, sha256: {digest}, right: read}}]}}");
    let node = ProcessNode::new(&format!("gpus: sim:1xt4\n{tokens}")).await;
    let daemon = node.serve();
    let end = Instant::now() + SOON;
    let list = loop {
        let list = daemon.call("GET", "/gpus", &json!(null));
        if !list["items"].as_array().unwrap().is_empty() {
            break list;
        }
        assert!(Instant::now() < end, "the GPUs never came");
        std::thread::sleep(std::time::Duration::from_millis(20));
    };
    let uuid = list["items"][0]["uuid"].as_str().unwrap();
    assert!(lines(&daemon).is_empty(), "reading is no change");

    let operations = changing();
    assert!(operations.len() >= 15, "{operations:?}");
    let mut count = 0;
    let token = daemon.token.clone();
    for (method, path) in &operations {
        for (who, token) in [("admin", Some(token.as_str())), ("dashboard", Some(&reader)), ("nobody", None)]
        {
            let status = ask(&daemon, token, method, path, "{}");
            let line = next(&daemon, count);
            count += 1;
            for part in [
                format!("who=\"{who}\""),
                format!("method=\"{method}\""),
                format!("path=\"{path}\""),
                format!("status={status}"),
                "from=\"127.0.0.1:".to_owned(),
            ] {
                assert!(line.contains(&part), "{part}: {line}");
            }
            match who {
                "dashboard" => assert_eq!(status, 403, "{method} {path}"),
                _ if token.is_none() => assert_eq!(status, 401, "{method} {path}"),
                _ => {}
            }
        }
    }
    let cordon = format!("/api/v1/gpus/{uuid}/cordon");
    assert_eq!(ask(&daemon, Some(&token), "PUT", &cordon, r#"{"reason": "new \"fan\""}"#), 200);
    let line = next(&daemon, count);
    for part in ["right=\"change\"", "known_by=\"token\"", "outcome=\"done\"", r#"reason="new \"fan\"""#] {
        assert!(line.contains(part), "{part}: {line}");
    }
    assert_eq!(ask(&daemon, Some(&token), "DELETE", "/api/v1/stack/override?by=ann&reason=calm", ""), 200);
    let line = next(&daemon, count + 1);
    assert!(line.contains("by=\"ann\"") && line.contains("reason=\"calm\""), "{line}");
    assert!(line.contains("path=\"/api/v1/stack/override\""), "without its query: {line}");
    // The line has `force`, whatever the outcome.
    assert_eq!(ask(&daemon, Some(&token), "DELETE", "/api/v1/allocations/0000000a-9?force=true", ""), 404);
    let forced = next(&daemon, count + 2);
    assert!(forced.contains("force=true") && !line.contains("force="), "{forced}");
    let count = count + 1;
    // Neither an endless method nor an escape hides the requested path.
    ask(&daemon, Some(&token), &"X".repeat(1000), "/api/v1/n%6fde", "");
    let line = next(&daemon, count + 2);
    assert!(line.contains(&format!("method=\"{}\"", "X".repeat(16))), "{line}");
    assert!(line.contains("path=\"/api/v1/node\""), "{line}");
    let log = daemon.log();
    assert!(!log.contains(&token) && !log.contains("reader-secret"), "a secret is in the log");
    daemon.stop();
    drop(node);
}
