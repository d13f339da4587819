//! Conditional requests over HTTP: no change is lost (If-Match), and nothing is sent twice (If-None-Match).

use crate::rest::versions::{key, signature};
use crate::support::admin_fakes::module;
use crate::support::admin_node::{AdminNode, Answer};
use crate::support::wait::until;
use serde_json::Value;
use std::time::Duration;

fn if_match(node: &AdminNode, method: &str, path: &str, tag: &str) -> Answer {
    node.ask(method, path, &[("if-match", tag)], b"")
}

#[test]
fn a_version_that_is_signed_while_its_deletion_waits_stays() {
    // A deletion waits for 2 s, and is then answered with 503. If that happens on a busy machine, the test repeats.
    until("the deletion is not given up", || {
        let (own, own_key) = key("release", 1);
        let node = AdminNode::trusting(1, vec![own_key]);
        let module = module("a", "");
        let version = node.record_upload(&module, "a");
        let path = format!("/api/v1/policies/{}", version.digest);
        let tag = node.get(&path).headers["etag"].clone();
        let signed = signature(&own, &module);
        let shared = (node.address(), node.token.clone());
        let ask = |method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]| {
            let bearer = format!("Bearer {}", shared.1);
            let headers = [&[("authorization", bearer.as_str())], headers].concat();
            crate::support::admin_node::ask(shared.0, method, path, &headers, body)
        };
        node.policies.set_hold(true);
        let policies = &node.policies;
        let deleted = std::thread::scope(|scope| {
            let signing = scope.spawn(|| {
                let headers = [("content-type", "application/wasm"), ("berth-signature", &*signed)];
                ask("POST", "/api/v1/policies", &headers, &module).status
            });
            until("the upload begins", || policies.waiting());
            let deleting = scope.spawn(|| ask("DELETE", &path, &[("if-match", &tag)], b""));
            // For the deletion to be the one that waits. Were it later, it would be refused all the same.
            std::thread::sleep(Duration::from_millis(300));
            policies.set_hold(false);
            assert_eq!(signing.join().unwrap(), 200);
            deleting.join().unwrap()
        });
        if deleted.status == 503 {
            return false;
        }
        deleted.problem(412, "changed-meanwhile");
        assert_eq!(node.get(&path).expect(200)["signedBy"], "release");
        true
    });
}

#[test]
fn a_condition_without_effect_is_refused() {
    let node = AdminNode::new(1);
    let document = node.get("/openapi.json").value();
    let (mut heeded, mut refused) = (0, 0);
    for (path, item) in document["paths"].as_object().unwrap() {
        for (method, operation) in item.as_object().unwrap().iter().filter(|(method, _)| *method != "get") {
            let at = path.replace("{uuid}", "GPU-0").replace("{place}", "0");
            let at = at.replace("{digest}", &"0".repeat(64)).replace("{id}", "1");
            let method = method.to_uppercase();
            let parameters = operation["parameters"].as_array();
            let answer = if_match(&node, &method, &at, "\"none\"");
            if parameters.is_some_and(|all| all.iter().any(|p| p["name"] == "If-Match")) {
                heeded += 1;
                assert_ne!(answer.status, 400, "{method} {path}");
            } else {
                refused += 1;
                let says = answer.problem(400, "malformed-header");
                assert!(says.contains("no ETag"), "{method} {path}: {says}");
                // Whether it is there at all the route says by itself.
                let any = if_match(&node, &method, &at, "*");
                assert!(!String::from_utf8(any.body).unwrap().contains("no ETag"), "{method} {path}");
            }
        }
    }
    assert!(heeded >= 9 && refused >= 7, "{heeded} {refused}");
    assert_eq!(if_match(&node, "GET", "/api/v1/gpus", "\"none\"").status, 200);
}

#[test]
fn the_stack_accepts_conditions_like_other_resources() {
    let node = AdminNode::new(1);
    let put = |tags: &[&str]| {
        let mut headers = vec![("content-type", "application/json")];
        headers.extend(tags.iter().map(|tag| ("if-match", *tag)));
        node.ask("PUT", "/api/v1/stack", &headers, br#"{"entries": []}"#)
    };
    put(&["0"]).problem(400, "malformed-header");
    put(&["\"0"]).problem(400, "malformed-header");
    for moved in [&["\"1\""][..], &["W/\"0\""], &["\"none\"", "\"1\""], &["\"00\""]] {
        put(moved).problem(412, "changed-meanwhile");
    }
    put(&["\"7\"", "\"0\""]).expect(200);
    put(&["\"7\", \"1\""]).expect(200);
    put(&["*"]).expect(200);
    assert_eq!(node.get("/api/v1/stack").headers["etag"], "\"3\"");
}

#[test]
fn a_response_with_a_strong_etag_is_not_compressed() {
    let node = AdminNode::new(1);
    let version = node.upload(&module("a", "")).expect(201);
    let policy = format!("/api/v1/policies/{}", version["digest"].as_str().unwrap());
    for path in [&*policy, "/api/v1/stack", "/api/v1/gpus/GPU-0/drain"] {
        let answer = node.ask("GET", path, &[("accept-encoding", "gzip")], b"");
        assert!(answer.headers["etag"].starts_with('"'), "{path}");
        assert!(!answer.headers.contains_key("content-encoding"), "{path}");
        assert_eq!(answer.body, node.get(path).body);
    }
}

#[test]
fn the_document_is_not_sent_again_to_a_client_that_has_it() {
    let node = AdminNode::new(1);
    let ask = |headers: &[(&str, &str)]| node.ask_bare("GET", "/openapi.json", headers, b"");
    // The client requests gzip by default.
    let plain = ask(&[("accept-encoding", "identity")]);
    let tag = plain.headers["etag"].clone();
    assert!(tag.starts_with("W/\"") && !plain.headers.contains_key("content-encoding"), "{tag}");
    let packed = ask(&[("accept-encoding", "gzip, deflate, br")]);
    assert_eq!((&*packed.headers["content-encoding"], &packed.headers["etag"]), ("gzip", &tag));
    for answer in [&plain, &packed] {
        assert!(answer.headers["vary"].eq_ignore_ascii_case("accept-encoding"));
    }
    let mut text = Vec::new();
    std::io::Read::read_to_end(&mut flate2::read::GzDecoder::new(&packed.body[..]), &mut text).unwrap();
    assert_eq!(serde_json::from_slice::<Value>(&text).unwrap(), plain.value());
    for coding in ["gzip", "identity"] {
        let again = ask(&[("if-none-match", &tag), ("accept-encoding", coding)]);
        assert_eq!((again.status, again.body.len(), &again.headers["etag"]), (304, 0, &tag));
    }
    // Compressed again for each request, it would be cheap for clients and expensive for the daemon.
    for other in ["gzip;q=0", "deflate", "deflate, br;q=0.9", "deflate, gzip;q=0"] {
        let answer = ask(&[("accept-encoding", other)]);
        assert!(answer.body == plain.body && !answer.headers.contains_key("content-encoding"), "{other}");
        let api = node.ask("GET", "/api/v1/gpus", &[("accept-encoding", other)], b"");
        assert!(api.status == 200 && !api.headers.contains_key("content-encoding"), "{other}");
    }
    ask(&[("accept-encoding", "deflate, identity;q=0")]).problem(406, "not-acceptable");
    assert_eq!(ask(&[("accept-encoding", "identity"), ("if-none-match", "W/\"x\"")]).body, plain.body);
}
