//! Rules for every route of the API's description: unknown keys of a query are refused, and `If-None-Match: *` means
//! what RFC 9110 says. The routes are those of the description, so none can be left out.

use crate::support::admin_node::{AdminNode, Answer};
use serde_json::Value;
use std::collections::BTreeSet;

/// One operation, with a path that leads to it.
pub(crate) struct Operation {
    pub(crate) method: String,
    pub(crate) path: String,
    /// The keys of its query, with an example of each.
    keys: Vec<(String, String)>,
}

/// Every operation of the description.
pub(crate) fn operations(node: &AdminNode) -> Vec<Operation> {
    let allocation = node.allocate(0).id.to_string();
    let digest = "0".repeat(64);
    let document: Value = serde_json::from_str(berth_admin::openapi_json()).unwrap();
    let mut found = Vec::new();
    for (template, item) in document["paths"].as_object().unwrap() {
        let path = template
            .replace("/gpus/{uuid}", "/gpus/GPU-0")
            .replace("/allocations/{id}", &format!("/allocations/{allocation}"))
            .replace("{digest}", &digest);
        let path: Vec<_> =
            path.split('/').map(|part| if part.starts_with('{') { "1" } else { part }).collect();
        for (method, operation) in item.as_object().unwrap() {
            let all = operation["parameters"].as_array().into_iter().flatten();
            let keys = all.filter(|p| p["in"] == "query").map(|p| {
                let example = p.get("example").or(p["schema"].get("example")).or(p["schema"]["enum"].get(0));
                let example = example.unwrap_or(&Value::Null);
                let text = example.as_str().map_or_else(|| example.to_string(), str::to_owned);
                (p["name"].as_str().unwrap().to_owned(), text)
            });
            found.push(Operation {
                method: method.to_uppercase(),
                path: path.join("/"),
                keys: keys.collect(),
            });
        }
    }
    assert!(found.len() >= 40, "{}", found.len());
    found
}

fn ask(node: &AdminNode, method: &str, path: &str, headers: &[(&str, &str)]) -> Answer {
    let mut all = vec![("content-type", "application/json")];
    all.extend(headers);
    let body: &[u8] = if matches!(method, "GET" | "HEAD" | "DELETE") { b"" } else { b"{}" };
    node.ask(method, path, &all, body)
}

#[test]
fn a_method_that_a_route_does_not_have_is_answered_as_such_with_a_query_too() {
    let node = AdminNode::new(1);
    for (method, path) in [
        ("TRACE", "/api/v1/allocations?limit=3"),
        ("PUT", "/api/v1/allocations?limit=3"),
        ("PATCH", "/api/v1/stack?x"),
        ("GET", "/api/v1/stack/override?by=me"),
        ("PUT", "/livez?verbose"),
    ] {
        ask(&node, method, path, &[]).problem(405, "method-not-allowed");
    }
}

#[test]
fn each_path_answers_the_methods_that_it_does_not_have_with_those_that_it_has() {
    let node = AdminNode::new(1);
    let operations = operations(&node);
    let (verbs, mut refused) = (["GET", "PUT", "POST", "DELETE"], 0);
    for path in operations.iter().map(|operation| &operation.path).collect::<BTreeSet<_>>() {
        let has = |verb: &str| operations.iter().any(|one| one.path == *path && one.method == verb);
        let methods = verbs.iter().filter(|verb| has(verb)).map(|verb| verb.replace("GET", "GET, HEAD"));
        let allow = methods.collect::<Vec<_>>().join(", ");
        for method in verbs.iter().chain(&["PATCH"]).filter(|method| !has(method)) {
            refused += 1;
            let answer = ask(&node, method, path, &[]);
            answer.problem(405, "method-not-allowed");
            assert_eq!(answer.headers["allow"], allow, "{method} {path}");
        }
    }
    assert!(refused > 100, "{refused}");
}

/// A path is checked as it is routed, without its escapes.
#[test]
fn a_query_and_a_condition_on_an_escaped_path_are_checked() {
    let node = AdminNode::new(1);
    node.get("/api/v1/n%6fde").expect(200);
    for path in ["/api/v1/n%6fde?x=1", "/metric%73?x=1"] {
        node.get(path).problem(400, "malformed-query");
    }
    let tag = [("if-match", "\"none\"")];
    let says = ask(&node, "PUT", "/api/v1/gpus/GPU-0/h%65alth", &tag).problem(400, "malformed-header");
    assert!(says.contains("no ETag"), "{says}");
}

#[test]
fn an_unknown_operation_is_refused_before_its_condition_is_checked() {
    let node = AdminNode::new(1);
    ask(&node, "DELETE", "/api/v1/nothing", &[("if-none-match", "*")]).problem(404, "no-such-route");
    ask(&node, "POST", "/api/v1/gpus", &[("if-match", "\"none\"")]).problem(405, "method-not-allowed");
}

#[test]
fn an_unknown_key_is_refused_on_every_route_and_the_known_ones_are_named() {
    let node = AdminNode::new(1);
    let operations = operations(&node);
    let mut with_keys = 0;
    for Operation { method, path, keys } in &operations {
        for query in ["nosuchkey=1", "nosuchkey", "%6eosuchkey=1&limit=3"] {
            let answer = ask(&node, method, &format!("{path}?{query}"), &[]);
            let says = answer.problem(400, "malformed-query");
            assert!(says.contains("nosuchkey"), "{method} {path}?{query}: {says}");
            for (key, _) in keys {
                assert!(says.contains(key.as_str()), "{method} {path} does not name {key}: {says}");
            }
        }
        for (key, example) in keys {
            with_keys += 1;
            let value = example.replace(['+', ':', ' '], "");
            let answer = ask(&node, method, &format!("{path}?{key}={value}&nosuchkey=1"), &[]);
            let says = answer.problem(400, "malformed-query");
            assert!(!says.contains("takes no query"), "{method} {path} documents {key}: {says}");
        }
        if method == "GET" {
            assert_eq!(ask(&node, "HEAD", &format!("{path}?nosuchkey=1"), &[]).status, 400, "HEAD {path}");
        }
    }
    assert!(with_keys > 20, "{with_keys}");
    // An unknown path is 404, with or without a query.
    node.get("/api/v1/nothing?x=1").problem(404, "no-such-route");
    assert_eq!(node.get("/api/v1/node?").status, 200, "an empty query has no key");
    assert_eq!(node.get("/readyz?verbose").status, 200, "as probes of Kubernetes ask");
    // A browser may add to what it opens.
    assert_eq!(node.ask_bare("GET", "/?utm=1", &[], b"").status, 200);
    let long = ask(&node, "GET", &format!("/api/v1/node?{}=1", "k".repeat(4000)), &[]);
    assert!(long.problem(400, "malformed-query").len() < 300);
}

#[test]
fn unacceptable_encodings_are_refused() {
    let node = AdminNode::new(1);
    let any = [("if-none-match", "*")];
    let mut pages: Vec<String> =
        ["/", "/page/page.js", "/swagger-ui/index.html", "/openapi.json", "/problems", "/problems/held"]
            .map(str::to_owned)
            .into();
    let operations = operations(&node);
    pages.extend(operations.iter().filter(|o| o.method == "GET").map(|o| match o.path.as_str() {
        "/api/v1/events" => "/api/v1/events?follow=false".to_owned(),
        path => path.to_owned(),
    }));
    let mut there = 0;
    for path in pages {
        let plain = node.get(&path);
        for method in ["GET", "HEAD"] {
            let answer = node.ask(method, &path, &any, b"");
            if plain.status != 200 {
                assert_eq!(answer.status, plain.status, "{method} {path}: a condition changes no refusal");
                continue;
            }
            there += 1;
            assert_eq!((answer.status, answer.body.len()), (304, 0), "{method} {path}");
            assert!(!answer.headers.contains_key("content-type"), "{method} {path}: {:?}", answer.headers);
            assert_eq!(answer.headers.get("etag"), plain.headers.get("etag"), "{method} {path}");
        }
    }
    assert!(there > 40, "{there}");
    // A change would be of what is there.
    for Operation { method, path, .. } in operations.iter().filter(|o| o.method != "GET") {
        ask(&node, method, path, &any).problem(412, "changed-meanwhile");
    }
    assert_eq!(node.get("/api/v1/allocations").expect(200)["total"], 1, "nothing changed");
}
